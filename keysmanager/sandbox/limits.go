package sandbox

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Limits of a process and of each of its descendants. A hard limit of the Runtime's process counts
// instead if it is lower.
const (
	MaxFiles    = 16 << 10 // descriptors
	MaxFileSize = 64 << 30 // bytes per file that it writes
	MaxLocked   = 8 << 20  // bytes of locked memory
	// Processes and threads per [Account], unless its Command sets another number.
	MaxProcesses = 1024
)

// setLimits sets the limits of a process that has just become its program, and lets it run.
func setLimits(pid int, c Command, traced bool) error {
	if traced { // it stops before its first instruction
		err := error(unix.EINTR)
		for errors.Is(err, unix.EINTR) {
			err = unix.Waitid(unix.P_PID, pid, nil, unix.WSTOPPED|unix.WEXITED|unix.WNOWAIT, nil)
		}
		if err != nil {
			return fmt.Errorf("wait for its start: %w", err)
		}
	}
	lowerAll := func() error {
		for resource, most := range c.limits() {
			if err := lowerLimit(pid, resource, most); err != nil {
				return fmt.Errorf("set limit %d to %d: %w", resource, most, err)
			}
		}
		return nil
	}
	if c.As != nil {
		if err := asReal(c.As, lowerAll); err != nil {
			return err
		}
	} else if err := lowerAll(); err != nil {
		return err
	}
	if traced {
		// The process may have been killed.
		if err := unix.PtraceDetach(pid); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("let it run: %w", err)
		}
	}
	return nil
}

// limits returns the most that each limited resource of a process may have.
func (c Command) limits() map[int]uint64 {
	all := map[int]uint64{unix.RLIMIT_CORE: 0, unix.RLIMIT_NOFILE: MaxFiles, unix.RLIMIT_FSIZE: MaxFileSize, unix.RLIMIT_MEMLOCK: MaxLocked}
	if c.As != nil {
		all[unix.RLIMIT_NPROC] = MaxProcesses
		if c.Processes > 0 {
			all[unix.RLIMIT_NPROC] = uint64(c.Processes)
		}
	}
	return all
}

// resources are the names of all limited resources.
var resources = map[int]string{
	unix.RLIMIT_AS: "RLIMIT_AS", unix.RLIMIT_CORE: "RLIMIT_CORE", unix.RLIMIT_CPU: "RLIMIT_CPU", unix.RLIMIT_DATA: "RLIMIT_DATA",
	unix.RLIMIT_FSIZE: "RLIMIT_FSIZE", unix.RLIMIT_LOCKS: "RLIMIT_LOCKS", unix.RLIMIT_MEMLOCK: "RLIMIT_MEMLOCK", unix.RLIMIT_MSGQUEUE: "RLIMIT_MSGQUEUE",
	unix.RLIMIT_NICE: "RLIMIT_NICE", unix.RLIMIT_NOFILE: "RLIMIT_NOFILE", unix.RLIMIT_NPROC: "RLIMIT_NPROC", unix.RLIMIT_RSS: "RLIMIT_RSS",
	unix.RLIMIT_RTPRIO: "RLIMIT_RTPRIO", unix.RLIMIT_RTTIME: "RLIMIT_RTTIME", unix.RLIMIT_SIGPENDING: "RLIMIT_SIGPENDING", unix.RLIMIT_STACK: "RLIMIT_STACK",
}

// allLimits returns the limits that a process gets, by the names of their resources: those of the
// command, and those that a child of this process inherits.
func (c Command) allLimits() (map[string]unix.Rlimit, error) {
	own, out := c.limits(), map[string]unix.Rlimit{}
	for resource, name := range resources {
		var now unix.Rlimit
		if err := unix.Getrlimit(resource, &now); err != nil {
			return nil, fmt.Errorf("limit %s: %w", name, err)
		}
		if most, ok := own[resource]; ok {
			now = lowered(now, most)
		}
		out[name] = now
	}
	return out, nil
}

// lowered returns a limit of at most this value, and of at most the hard limit that there is now:
// that may be the operator's.
func lowered(now unix.Rlimit, most uint64) unix.Rlimit {
	most = min(most, now.Max)
	return unix.Rlimit{Cur: most, Max: most}
}

// lowerLimit reduces a limit of a process to at most this value.
func lowerLimit(pid, resource int, most uint64) error {
	var now unix.Rlimit
	if err := unix.Prlimit(pid, resource, nil, &now); err != nil {
		return err
	}
	then := lowered(now, most)
	return unix.Prlimit(pid, resource, &then, nil)
}

// asReal runs f while the calling thread's real user and group are those of as. The kernel then
// lets the thread set the limits of as's processes. The rights of the thread do not change.
func asReal(as *Account, f func() error) error {
	uid, gid := unix.Getuid(), unix.Getgid()
	if err := errors.Join(setReal(unix.SYS_SETRESGID, as.GID), setReal(unix.SYS_SETRESUID, as.UID)); err != nil {
		return errors.Join(fmt.Errorf("become user %d: %w", as.UID, err), setReal(unix.SYS_SETRESUID, uid), setReal(unix.SYS_SETRESGID, gid))
	}
	return errors.Join(f(), setReal(unix.SYS_SETRESUID, uid), setReal(unix.SYS_SETRESGID, gid))
}

func setReal(call uintptr, id int) error {
	const same = ^uintptr(0)
	// The system call changes this thread only.
	if _, _, err := unix.RawSyscall(call, uintptr(id), same, same); err != 0 {
		return err
	}
	return nil
}
