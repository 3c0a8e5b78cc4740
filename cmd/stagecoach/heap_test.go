package main

import (
	"runtime"
	"testing"
)

// TestTheHeapGrowsToTwiceTheFloor: the collector does not run before the heap has this size.
func TestTheHeapGrowsToTwiceTheFloor(t *testing.T) {
	release := raiseHeap()
	defer release()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	if m.NextGC < 2*heapFloor {
		t.Errorf("the next collection is at %d bytes of heap, want at least %d", m.NextGC, 2*heapFloor)
	}
}
