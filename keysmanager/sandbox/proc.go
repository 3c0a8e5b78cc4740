package sandbox

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// ownProc mounts a /proc in the calling thread's mount namespace that shows a process only
// processes of its own user, and of these only those that have not made themselves undumpable
// (wire.EnvSealed). Linux before 5.8 refuses this: there, hidepid is one number for all mounts of
// /proc.
func ownProc() error {
	if err := unix.Mount("proc", "/proc", "proc", quiet|unix.MS_RDONLY, "hidepid=invisible"); err != nil {
		return fmt.Errorf("mount /proc with hidepid=invisible: %w", err)
	}
	return nil
}

// refused tells whether the kernel, or what this process runs in, does not allow a mount at all.
func refused(err error) bool {
	return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES)
}

// HidesProcesses returns nil if processes that this process starts with an account (Command.As) see
// no processes of other users in /proc. Otherwise the error says why they see all of them, with
// their command lines.
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
