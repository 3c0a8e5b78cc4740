// Package flight runs one job per key at a time, for all callers that ask for it.
package flight

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// Group runs at most one job per key at a time. All callers that ask for a key while its job runs
// get the result of this job. A job continues until its own deadline even if its callers give up,
// so that the next caller finds it done.
type Group[T any] struct {
	ctx    context.Context
	cancel context.CancelFunc
	works  sync.WaitGroup

	mu  sync.Mutex
	now map[string]*flight[T]
}

type flight[T any] struct {
	done  chan struct{}
	value T
	err   error
}

// ErrClosed means that a job was asked of a closed group.
var ErrClosed = errors.New("closed")

// New returns a group. The caller closes it.
func New[T any]() *Group[T] {
	f := &Group[T]{now: map[string]*flight[T]{}}
	f.ctx, f.cancel = context.WithCancel(context.Background())
	return f
}

// Close cancels the running jobs and waits for them.
func (f *Group[T]) Close() {
	f.mu.Lock() // no job starts any more
	f.cancel()
	f.mu.Unlock()
	f.works.Wait()
}

// Do returns the result of the job with this key. It starts work, with the deadline limit, unless
// the job already runs.
func (f *Group[T]) Do(ctx context.Context, key string, limit time.Duration, work func(context.Context) (T, error)) (T, error) {
	var none T
	f.mu.Lock()
	if f.ctx.Err() != nil {
		f.mu.Unlock()
		return none, ErrClosed
	}
	one := f.now[key]
	if one == nil {
		one = &flight[T]{done: make(chan struct{})}
		f.now[key] = one
		f.works.Go(func() {
			ctx, cancel := context.WithTimeout(f.ctx, limit)
			defer cancel()
			one.value, one.err = work(ctx)
			f.mu.Lock()
			delete(f.now, key)
			f.mu.Unlock()
			close(one.done)
		})
	}
	f.mu.Unlock()
	select {
	case <-one.done:
		return one.value, one.err
	case <-ctx.Done():
		return none, fmt.Errorf("not done in time; it continues for at most %v, so try again: %w", limit, ctx.Err())
	}
}
