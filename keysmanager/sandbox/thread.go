package sandbox

import (
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
)

// onThread runs f on a new thread that ends after f, so that f may change attributes of the thread.
// onThread never uses the process's first thread: that thread cannot end, and the rest of the
// machine sees its user as the user of the process.
func onThread(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // unlocked only below
		if unix.Gettid() == unix.Getpid() {
			onThread(f) // on another thread, because this one is not free
			runtime.UnlockOSThread()
			return
		}
		f()
	}()
	<-done
}

// home holds descriptors of the namespaces of a thread that starts processes. The thread enters
// other namespaces to start a process there, and comes back.
type home struct{ mounts, network int }

func (h home) close() { _, _ = unix.Close(h.mounts), unix.Close(h.network) } // nothing was written

// leaveNetwork returns the calling thread to its own network namespace.
func (h home) leaveNetwork() error {
	if err := unix.Setns(h.network, unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("leave the network namespace of a process: %w", err)
	}
	return nil
}

// prepare makes the calling thread ready to start processes. The thread then shares nothing that it
// changes with other threads, and its processes cannot gain rights.
func prepare() (home, error) {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return home{-1, -1}, fmt.Errorf("no_new_privs: %w", err)
	}
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return home{-1, -1}, fmt.Errorf("a working directory of its own: %w", err)
	}
	mounts, err := unix.Open("/proc/thread-self/ns/mnt", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return home{-1, -1}, fmt.Errorf("mount namespace: %w", err)
	}
	network, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		_ = unix.Close(mounts)
		return home{-1, -1}, fmt.Errorf("network namespace: %w", err)
	}
	return home{mounts, network}, nil
}
