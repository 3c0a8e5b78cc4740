package sandbox

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// Reach lets a running process with an account (Command.As) read one more folder, at the folder's
// absolute path. It does nothing if the process can read the folder already. The caller does not
// reap the process before Reach returns.
func Reach(pid int, as *Account, path string) error {
	return reachBy(pid, as, path, func() (view, error) { return newView(path, false) })
}

// ReachSecrets is [Reach] for a folder of secrets (Command.Secrets). It takes some microseconds if
// the process can already read the folder.
func ReachSecrets(pid int, as *Account, folder string) error {
	want, err := os.Stat(folder)
	if err != nil {
		return err
	}
	if got, err := os.Stat(fmt.Sprintf("/proc/%d/root%s", pid, folder)); err == nil && os.SameFile(got, want) {
		return nil
	}
	return reachBy(pid, as, folder, func() (view, error) { return newSecrets(folder, as) })
}

// reachBy lets a process read the view that open returns, at path.
func reachBy(pid int, as *Account, path string, open func() (view, error)) error {
	done, begun := make(chan error), make(chan struct{})
	var enter func()
	enter = func() {
		// The thread is never unlocked, so it ends with this goroutine: it is in the process's namespace.
		runtime.LockOSThread()
		// The first thread cannot end, and /proc/self shows it. Run on another thread.
		if unix.Gettid() == os.Getpid() {
			defer runtime.UnlockOSThread()
			go enter() // on another thread, because this one is occupied until then
			<-begun
			return
		}
		close(begun)
		done <- reach(pid, as, open)
	}
	go enter()
	if err := <-done; err != nil {
		return fmt.Errorf("have process %d read %s: %w", pid, path, err)
	}
	return nil
}

// reach does the work of reachBy on the calling thread. The thread is of no use to other goroutines
// afterwards.
func reach(pid int, as *Account, open func() (view, error)) error {
	v, err := open()
	if err != nil {
		return err
	}
	defer unix.Close(v.tree)
	var want, got unix.Stat_t
	if err := unix.Stat(v.path, &want); err != nil {
		return err
	}
	ns, err := unix.Open(fmt.Sprintf("/proc/%d/ns/mnt", pid), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(ns)
	if err := unix.Stat(fmt.Sprintf("/proc/%d", pid), &got); err != nil {
		return err
	}
	if int(got.Uid) != as.UID { // another process has got its number
		return fmt.Errorf("it is of user %d, want %d", got.Uid, as.UID)
	}
	var machines, its unix.Stat_t
	if err := unix.Stat("/", &machines); err != nil {
		return err
	}
	// Else the namespace would change for other threads, too.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return err
	}
	if err := unix.Setns(ns, unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("its mount namespace: %w", err)
	}
	at, err := closed(v.path, as)
	switch {
	case errors.Is(err, unix.ENOENT): // in a folder that covers another one
	case err != nil:
		return err
	case at != "":
		if err := cover(at); err != nil {
			return err
		}
		defer func() { _ = finish(at, true) }() // nothing but the new mount appears in it
	case unix.Stat(v.path, &got) == nil && got.Dev == want.Dev && got.Ino == want.Ino:
		return nil
	}
	err = v.put()
	if errors.Is(err, unix.ENOENT) { // the mount's folder has been removed since
		if err = unix.Unmount(v.path, unix.MNT_DETACH); err == nil {
			err = v.put()
		}
	}
	if !errors.Is(err, unix.EROFS) {
		return err
	}
	within, err := mountOf(v.path)
	// A container has a root of its own, in which folders may be made.
	if errors.Is(err, os.ErrNotExist) && unix.Stat("/", &its) == nil && (its.Dev != machines.Dev || its.Ino != machines.Ino) {
		within, err = "/", nil
	}
	if err != nil {
		return err
	}
	if err := finish(within, false); err != nil {
		return err
	}
	return errors.Join(v.put(), finish(within, true))
}

// mountOf returns the mount point of the file system that contains the existing part of a path.
func mountOf(path string) (string, error) {
	var at, up unix.Stat_t
	for strings.Contains(path, "/") && unix.Stat(path, &at) != nil {
		path = filepath.Dir(path)
	}
	for path != "/" {
		if err := unix.Stat(filepath.Dir(path), &up); err != nil {
			return "", err
		}
		if up.Dev != at.Dev {
			return path, nil
		}
		path = filepath.Dir(path)
	}
	return "", fmt.Errorf("%w: it is in no folder of its own", os.ErrNotExist)
}
