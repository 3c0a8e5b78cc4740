package provider

import (
	"context"
	"fmt"
	"sync"
)

// watched is how far a watch of the store has come. newWatched makes one.
type watched struct {
	guard   sync.Mutex
	seen    uint64          // highest revision applied
	present map[string]bool // keys in the store, as of seen
	changed chan struct{}   // closed at the next change
}

func newWatched() watched {
	return watched{present: map[string]bool{}, changed: make(chan struct{})}
}

// note records that an entry was applied.
func (w *watched) note(e Entry) {
	w.guard.Lock()
	defer w.guard.Unlock()
	w.seen = max(w.seen, e.Revision)
	if w.present[e.Key] = !e.Deleted; e.Deleted {
		delete(w.present, e.Key)
	}
	close(w.changed)
	w.changed = make(chan struct{})
}

// wait returns when revision and all earlier ones have been applied and every listener was called.
func (w *watched) wait(ctx context.Context, revision uint64) error {
	return w.until(ctx, func() bool { return w.seen >= revision })
}

// waitGone returns when key is not in the store and every listener was called.
func (w *watched) waitGone(ctx context.Context, key string) error {
	return w.until(ctx, func() bool { return !w.present[key] })
}

func (w *watched) until(ctx context.Context, ok func() bool) error {
	for {
		w.guard.Lock()
		done, changed := ok(), w.changed
		w.guard.Unlock()
		if done {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("the change is stored but not yet seen: %w", ctx.Err())
		}
	}
}
