package proctest

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// OnThread runs f on a new thread that ends with f, so that f may change the thread's namespaces.
// It never uses the process's first thread: that thread cannot end, and its namespaces count as
// those of the process.
func OnThread(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		// Never unlocked, so the thread ends with this goroutine; the exception is below.
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			OnThread(f) // on another thread, because this one is locked
			runtime.UnlockOSThread()
			return
		}
		f()
	}()
	<-done
}
