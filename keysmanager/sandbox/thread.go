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

// home holds descriptors of the namespaces of a thread that starts processes. The thread enters other
// namespaces so that a process starts there, and comes back.
type home struct{ mounts, network int }

func (h home) close() { _, _ = unix.Close(h.mounts), unix.Close(h.network) } // nothing was written

// leaveNetwork takes the calling thread back to its own network namespace.
func (h home) leaveNetwork() error {
	if err := unix.Setns(h.network, unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("leave the network namespace of a process: %w", err)
	}
	return nil
}

// prepare makes the calling thread one that starts processes: it shares nothing that it changes with other threads, and the
// processes that it starts gain no rights.
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
