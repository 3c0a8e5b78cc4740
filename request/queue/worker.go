package queue

import (
	"context"
	"time"
)

// job is a record to work on.
type job struct {
	line *line
	item item
	m    *message // nil: must be read first
}

// workerIdle is how long a worker waits for the next job before it ends.
const workerIdle = time.Second

// worker runs jobs one after another. Workers are reused because their stacks have already grown.
func (j *Journal) worker(ctx context.Context, next job, jobs <-chan job, work func(context.Context, Record) End) {
	idle := time.NewTimer(workerIdle)
	defer idle.Stop()
	for {
		to := j.process(ctx, next.line, next.item, next.m, work)
		j.finish(next.line, next.item, to)
		next = job{} // frees the content, which may be large
		idle.Reset(workerIdle)
		select {
		case next = <-jobs:
		case <-idle.C:
			return
		case <-ctx.Done():
			return
		}
	}
}
