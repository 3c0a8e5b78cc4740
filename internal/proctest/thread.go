package proctest

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// OnThread runs f on a thread that ends with it, so that f may change the thread's namespaces. It is never the process's first
// thread, which cannot end and whose namespaces are the process's own to others.
func OnThread(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked, so the thread ends with this goroutine; except below
		if unix.Gettid() == unix.Getpid() {
			OnThread(f) // on another thread, because this one is locked
			runtime.UnlockOSThread()
			return
		}
		f()
	}()
	<-done
}
