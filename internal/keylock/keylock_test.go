package keylock

import (
	"context"
	"runtime"
	"testing"
)

// TestLocks checks that only one caller has the lock of a key, and that other keys stay free.
func TestLocks(t *testing.T) {
	var l Locks
	unlock, err := l.Lock(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := l.TryLock("a"); ok {
		t.Error("a locked key was locked again")
	}
	other, ok := l.TryLock("b")
	if !ok {
		t.Fatal("a key waits for another one")
	}
	other()
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := l.Lock(ended, "a"); err == nil {
		t.Error("a locked key was locked after the end of the context")
	}
	count := 0 // the lock guards it
	done := make(chan struct{})
	for i := range 10 {
		go func() {
			defer func() { done <- struct{}{} }()
			unlock, err := l.Lock(t.Context(), "a")
			if err != nil {
				t.Error(err)
				return
			}
			count++
			unlock()
		}()
		for l.Users("a") < i+2 {
			runtime.Gosched()
		}
	}
	unlock()
	for range 10 {
		<-done
	}
	if count != 10 || l.Users("a") != 0 || len(l.of) != 0 {
		t.Errorf("locked %d times, want 10; %d keys are left", count, len(l.of))
	}
}
