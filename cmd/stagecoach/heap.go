package main

import "runtime"

// heapFloor is the size in bytes of an array that up allocates and never writes. The array takes
// address space but no memory, and the garbage collector counts it as live. So a heap of 4 MiB, as
// under small requests, is collected after 20 MiB of garbage, not after 4 MiB. This saves 5 to 24 %
// of the processor time of up. See docs/adr/0067-a-floor-under-the-heap.md.
const heapFloor = 16 << 20

// raiseHeap allocates the floor of the heap. The caller calls release when the process ends.
func raiseHeap() (release func()) {
	floor := make([]byte, heapFloor)
	return func() { runtime.KeepAlive(floor) }
}
