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

// Reach lets a process that runs as an account (Command.As) read a folder, too, under its absolute path, unless it does already. The
// process must not have ended, or be reaped before Reach returns.
func Reach(pid int, as *Account, path string) error {
	return reachBy(pid, as, path, func() (view, error) { return newView(path, false) })
}

// ReachSecrets is [Reach] for a folder of secrets (Command.Secrets). It takes some microseconds
// when the process reads the folder already.
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

// reachBy has a process read what open opens, which lies at path.
func reachBy(pid int, as *Account, path string, open func() (view, error)) error {
	done, begun := make(chan error), make(chan struct{})
	var enter func()
	enter = func() {
		runtime.LockOSThread()            // and not unlocked: the thread, which is in a namespace of the process's then, ends
		if unix.Gettid() == os.Getpid() { // but the main one, which would not, and is what /proc/self shows
			defer runtime.UnlockOSThread()
			go enter() // on another: this one is taken until it has begun
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

// reach does it with the calling thread, which is of no use to others then.
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
	if int(got.Uid) != as.UID { // another process has its number since
		return fmt.Errorf("it is of user %d, want %d", got.Uid, as.UID)
	}
	if err := unix.Unshare(unix.CLONE_FS); err != nil { // else other threads would be taken along
		return err
	}
	if err := unix.Setns(ns, unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("its mount namespace: %w", err)
	}
	at, err := closed(v.path, as)
	switch {
	case errors.Is(err, unix.ENOENT): // in a folder that covers another
	case err != nil:
		return err
	case at != "":
		if err := cover(at); err != nil {
			return err
		}
		defer func() { _ = finish(at, true) }() // nothing but what is put there now can be seen
	case unix.Stat(v.path, &got) == nil && got.Dev == want.Dev && got.Ino == want.Ino:
		return nil
	}
	err = v.put()
	if errors.Is(err, unix.ENOENT) { // there is a mount of a folder that was removed since
		if err = unix.Unmount(v.path, unix.MNT_DETACH); err == nil {
			err = v.put()
		}
	}
	if !errors.Is(err, unix.EROFS) {
		return err
	}
	within, err := mountOf(v.path)
	if err != nil {
		return err
	}
	if err := finish(within, false); err != nil {
		return err
	}
	return errors.Join(v.put(), finish(within, true))
}

// mountOf returns where the file system begins that the folders on the way to path are in, as far as there are any.
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
