package stage

import (
	"bytes"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/tensor"
)

// TestBatchesShareGoroutines checks that a batch that comes after the end of another one runs on
// the same goroutine.
func TestBatchesShareGoroutines(t *testing.T) {
	var mu sync.Mutex
	seen := map[string]bool{}
	d := begin(t, Hooks{Slots: 4, Infer: Each(func(c *Call) (tensor.Activation, error) {
		stack := make([]byte, 64)
		id, _, _ := bytes.Cut(stack[:runtime.Stack(stack, false)], []byte(" ["))
		mu.Lock()
		seen[string(id)] = true
		mu.Unlock()
		return upper(c)
	})}, welcome)
	const batches = 200
	for id := range uint64(batches) {
		d.batch(id+1, time.Time{}, "a")
		d.result()
	}
	mu.Lock()
	defer mu.Unlock()
	if len(seen) > batches/4 { // a worker that does not wait again yet is replaced by another
		t.Errorf("%d batches ran on %d goroutines, want a few", batches, len(seen))
	}
	for id := range seen {
		if !strings.HasPrefix(id, "goroutine ") {
			t.Fatalf("a goroutine is called %q", id)
		}
	}
}

// TestEndedCallsAreCollected checks that a goroutine that waits for the next batch keeps nothing of
// the last batch in memory.
func TestEndedCallsAreCollected(t *testing.T) {
	const batches = 3
	gone := make(chan struct{}, batches)
	d := begin(t, Hooks{Slots: 4, Infer: Each(func(c *Call) (tensor.Activation, error) {
		runtime.AddCleanup(c, func(gone chan struct{}) { gone <- struct{}{} }, gone)
		return upper(c)
	})}, welcome)
	for id := range uint64(batches) {
		d.batch(id+1, time.Now().Add(time.Hour), "a")
		d.result()
	}
	deadline := time.After(time.Minute)
	for left := batches; left > 0; {
		runtime.GC()
		select {
		case <-gone:
			left--
		case <-deadline:
			t.Fatalf("%d of %d calls are still held", left, batches)
		default:
			runtime.Gosched()
		}
	}
}
