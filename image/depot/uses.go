package depot

import (
	"context"
	"slices"
	"sync"
)

// uses keeps Put and Collect apart, object by object. Its keys are digests without sha256:, and the
// names of objects.
type uses struct {
	mu       sync.Mutex
	now      map[string]int  // how many Puts work on a key
	since    map[string]bool // keys that Puts have used since Collect began; nil: no Collect runs
	deleting []string        // keys of the object that Collect deletes now
	deleted  chan struct{}   // closed when that object is deleted
}

// hold keeps Collect from deleting objects of these keys until release is called. It first waits
// until Collect has deleted an object of one of them, if that is under way.
func (u *uses) hold(ctx context.Context, keys []string) (release func(), err error) {
	u.mu.Lock()
	for slices.ContainsFunc(keys, func(k string) bool { return slices.Contains(u.deleting, k) }) {
		deleted := u.deleted
		u.mu.Unlock()
		select {
		case <-deleted:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
		u.mu.Lock()
	}
	defer u.mu.Unlock()
	if u.now == nil {
		u.now = map[string]int{}
	}
	for _, k := range keys {
		u.now[k]++
		if u.since != nil {
			u.since[k] = true
		}
	}
	return func() { u.release(keys) }, nil
}

func (u *uses) release(keys []string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, k := range keys {
		if u.now[k]--; u.now[k] == 0 {
			delete(u.now, k)
		}
	}
}

// collect starts to record the keys on which Puts work, until end is called.
func (u *uses) collect() (end func()) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.since = map[string]bool{}
	for k := range u.now {
		u.since[k] = true
	}
	return func() {
		u.mu.Lock()
		defer u.mu.Unlock()
		u.since = nil
	}
}

// unless calls f, which deletes an object of these keys. It does not do so if a Put works on one of
// the keys, or has done so since Collect began.
func (u *uses) unless(keys []string, f func() error) (done bool, err error) {
	u.mu.Lock()
	for _, k := range keys {
		if u.now[k] > 0 || u.since[k] {
			u.mu.Unlock()
			return false, nil
		}
	}
	u.deleting, u.deleted = keys, make(chan struct{})
	u.mu.Unlock()
	err = f()
	u.mu.Lock()
	defer u.mu.Unlock()
	close(u.deleted)
	u.deleting, u.deleted = nil, nil
	return err == nil, err
}
