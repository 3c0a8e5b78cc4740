package sandbox

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Show mounts the paths of a command with an account in the mount namespace of a running process:
// Dir, Reads, Writes and Secrets, each at its own path. pidfd is a descriptor of the process. The
// first folder of each path has to be there already. If the rest is not, that folder has to be
// writable. The mounts end with the namespace.
func (c Command) Show(pidfd int) (err error) {
	onThread(func() { err = c.showIn(pidfd) })
	if err != nil {
		return fmt.Errorf("show a process its files: %w", err)
	}
	return nil
}

// Fill writes the files of c's Binds with Copy into the mount namespace of a running process, where
// each of their folders is a file system in memory. They belong to a user and a group. pidfd is a
// descriptor of the process.
func (c Command) Fill(pidfd, uid, gid int) error {
	for _, b := range c.Binds {
		if !b.Copy {
			return fmt.Errorf("bind %s to %s: want a copy", b.From, b.To)
		}
		files, err := read(b.From)
		if err == nil {
			onThread(func() { err = fillIn(pidfd, b.To, files, uid, gid) })
		}
		if err != nil {
			return fmt.Errorf("files of %s: %w", b.To, err)
		}
	}
	return nil
}

// fillIn does the work of Fill on the calling thread, as showIn does.
func fillIn(pidfd int, folder string, files map[string][]byte, uid, gid int) error {
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return err
	}
	if err := unix.Setns(pidfd, unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("mount namespace of a process: %w", err)
	}
	unix.Umask(0)
	for name, b := range files {
		at := filepath.Join(folder, name)
		if err := errors.Join(os.WriteFile(at, b, 0o400), os.Chown(at, uid, gid)); err != nil {
			return err
		}
	}
	// The program adds and removes none.
	return errors.Join(os.Chown(folder, 0, 0), os.Chmod(folder, 0o755))
}

// showIn does the work of Show on the calling thread. The thread is of no use to other goroutines
// afterwards.
func (c Command) showIn(pidfd int) error {
	views, err := c.views()
	defer func() {
		for _, v := range views {
			_ = unix.Close(v.tree)
		}
	}()
	if err != nil {
		return err
	}
	// Else the namespace would change for other threads, too.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return err
	}
	if err := unix.Setns(pidfd, unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("its mount namespace: %w", err)
	}
	unix.Umask(0)
	for _, v := range views {
		err = errors.Join(err, v.put())
	}
	return err
}
