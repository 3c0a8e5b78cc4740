package sandbox

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// ownProc mounts a /proc in the calling thread's mount namespace. In it, a process sees only the
// processes of its own user that have not made themselves undumpable (wire.EnvSealed). Linux before
// 5.8 refuses this mount, because hidepid applies to all mounts of /proc there.
func ownProc() error {
	if err := unix.Mount("proc", "/proc", "proc", quiet|unix.MS_RDONLY, "hidepid=invisible"); err != nil {
		return fmt.Errorf("mount /proc with hidepid=invisible: %w", err)
	}
	return nil
}

// refused reports whether the kernel or a container forbids a mount altogether.
func refused(err error) bool {
	return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES)
}

// HidesProcesses returns nil if processes with an account (Command.As) see no processes of other
// users in /proc. Otherwise they see all processes with their command lines, and the error has the
// reason.
func HidesProcesses() error {
	var err error
	onThread(func() {
		if err = unix.Unshare(unix.CLONE_NEWNS); err != nil {
			err = fmt.Errorf("mount namespace: %w", err)
			return
		}
		if err = mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err == nil {
			err = ownProc()
		}
	})
	return err
}
