package sandbox

import (
	"errors"
	"fmt"

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
