package proctest

import (
	"os/exec"
	"runtime"
	"syscall"

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

// Start starts cmd. The kernel kills the new process when this one ends. It would also kill it when
// the thread ends that has started it, for example one of [OnThread]. So each process has a thread
// that lives until the process ends.
func Start(cmd *exec.Cmd) error {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	result := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		result <- err
		if err == nil {
			awaitEnd(cmd.Process.Pid)
		}
	}()
	return <-result
}

// awaitEnd blocks the calling thread until a child process has ended. It leaves the status for a
// later Wait.
func awaitEnd(pid int) {
	for unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil) == unix.EINTR {
		continue
	}
}
