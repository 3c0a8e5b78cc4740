package image

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// flights runs at most one job per key at a time. All callers that ask for a key while its job runs
// get the result of this job. A job continues until its own deadline even if its callers give up,
// so that the next caller finds it done.
type flights[T any] struct {
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

var errClosed = errors.New("image store: closed")

func newFlights[T any]() *flights[T] {
	f := &flights[T]{now: map[string]*flight[T]{}}
	f.ctx, f.cancel = context.WithCancel(context.Background())
	return f
}

func (f *flights[T]) close() {
	f.mu.Lock() // no job starts any more
	f.cancel()
	f.mu.Unlock()
	f.works.Wait()
}

func (f *flights[T]) do(ctx context.Context, key string, limit time.Duration, work func(context.Context) (T, error)) (T, error) {
	var none T
	f.mu.Lock()
	if f.ctx.Err() != nil {
		f.mu.Unlock()
		return none, errClosed
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
