package sandbox

import (
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
)

// onThread runs f on a thread that ends with it, so that f may change what belongs to the thread. It is never the process's
// first one, which cannot end, and whose user is the process's to the rest of the machine.
func onThread(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked, but below
		if unix.Gettid() == unix.Getpid() {
			onThread(f) // on another, because this one is not free
			runtime.UnlockOSThread()
			return
		}
		f()
	}()
	<-done
}

// prepare makes the calling thread one that starts processes: nothing that it changes is another thread's, and what it starts
// gains no rights. Home is a descriptor of its mount namespace.
func prepare() (home int, err error) {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return -1, fmt.Errorf("no_new_privs: %w", err)
	}
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return -1, fmt.Errorf("a working directory of its own: %w", err)
	}
	home, err = unix.Open("/proc/thread-self/ns/mnt", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("mount namespace: %w", err)
	}
	return home, nil
}
