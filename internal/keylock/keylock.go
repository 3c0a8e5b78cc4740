// Package keylock has locks that are named by keys.
package keylock

import (
	"context"
	"sync"
)

// Locks has a lock per key. Its zero value is ready for use, and its methods are safe for
// concurrent use. A key that nobody locks takes no memory.
type Locks struct {
	mu sync.Mutex
	of map[string]*lock
}

// lock is the lock of a key.
type lock struct {
	token chan struct{} // full while it is locked
	users int           // how many callers have the lock or wait for it
}

// Lock locks a key. If the key is locked, Lock waits until it is unlocked or ctx ends. The
// caller calls unlock once.
func (l *Locks) Lock(ctx context.Context, key string) (unlock func(), err error) {
	k := l.use(key)
	select {
	case k.token <- struct{}{}:
		return func() { <-k.token; l.leave(key, k) }, nil
	case <-ctx.Done():
		l.leave(key, k)
		return nil, ctx.Err()
	}
}

// TryLock locks a key, unless it is locked already. If ok is true, the caller calls unlock once.
func (l *Locks) TryLock(key string) (unlock func(), ok bool) {
	k := l.use(key)
	select {
	case k.token <- struct{}{}:
		return func() { <-k.token; l.leave(key, k) }, true
	default:
		l.leave(key, k)
		return nil, false
	}
}

// Users returns how many callers have the lock of a key or wait for it.
func (l *Locks) Users(key string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if k := l.of[key]; k != nil {
		return k.users
	}
	return 0
}

func (l *Locks) use(key string) *lock {
	l.mu.Lock()
	defer l.mu.Unlock()
	k := l.of[key]
	if k == nil {
		k = &lock{token: make(chan struct{}, 1)}
		if l.of == nil {
			l.of = map[string]*lock{}
		}
		l.of[key] = k
	}
	k.users++
	return k
}

func (l *Locks) leave(key string, k *lock) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if k.users--; k.users == 0 {
		delete(l.of, key)
	}
}
