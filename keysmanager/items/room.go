package items

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/stagecoach-serving/stagecoach/tensor"
)

// room bounds the memory of items that were fetched from nodes. Items of one batch get their memory
// together, so that no two batches wait for each other. Batches get memory in the order in which
// they came.
type room struct {
	limit int64
	free  *semaphore.Weighted

	used, waiting atomic.Int64
	waited        atomic.Int64 // nanoseconds
}

// Rooms describes the memory of fetched items.
type Rooms struct {
	Used    int64         // bytes of items that were fetched, or are being fetched
	Waiting int64         // batches that wait for memory
	Waited  time.Duration // how long batches have waited, in all
}

func newRoom(limit int64) *room {
	return &room{limit: limit, free: semaphore.NewWeighted(limit)}
}

// stats returns the current counts.
func (r *room) stats() Rooms {
	return Rooms{r.used.Load(), r.waiting.Load(), time.Duration(r.waited.Load())}
}

// reserve waits for memory for items, until ctx ends. If the items together are larger than the
// limit, they get the whole limit: they wait until no other item has memory. release gives the
// memory back.
func (r *room) reserve(ctx context.Context, refs []tensor.Ref) (release func(), err error) {
	size := int64(0)
	for i := range refs {
		size += refs[i].Size
	}
	part := min(size, r.limit)
	if !r.free.TryAcquire(part) {
		since := time.Now()
		r.waiting.Add(1)
		err = r.free.Acquire(ctx, part)
		r.waiting.Add(-1)
		r.waited.Add(int64(time.Since(since)))
	}
	if err != nil {
		return nil, fmt.Errorf("no room for %d bytes, %d of %d are in use: %w", size, r.used.Load(), r.limit, context.Cause(ctx))
	}
	r.used.Add(size)
	return func() {
		r.used.Add(-size)
		r.free.Release(part)
	}, nil
}
