package sandbox

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// getPIDFrom is NS_GET_PID_FROM_PIDNS of <linux/nsfs.h>, which Linux has from 6.11 on. It returns
// the caller's number of a process that has this number in another namespace.
const getPIDFrom = 0x8004b706

// PIDSpace translates the numbers that a process has in its own namespace into those that it has in
// this process's. A process of a Spawner with an account has the same numbers in both.
type PIDSpace struct {
	of   int // a process in the namespace
	same bool
}

// PIDsOf returns the namespace of a process. The caller makes sure that it is not reaped meanwhile.
// If this process may not look at it, its namespace counts as the same, because only root can start
// processes in another one.
func PIDsOf(pid int) PIDSpace {
	own, err := os.Readlink("/proc/self/ns/pid")
	if err != nil {
		return PIDSpace{of: pid, same: true}
	}
	theirs, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", pid))
	gone := errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH) // then Outside fails, too
	return PIDSpace{of: pid, same: own == theirs || err != nil && !gone}
}

// Outside returns this process's number of a process that has the given number in the namespace. It
// returns ESRCH if there is none. The caller makes sure that the process is not reaped meanwhile.
func (s PIDSpace) Outside(inside int) (int, error) {
	if s.same {
		return inside, nil
	}
	ns, err := unix.Open(fmt.Sprintf("/proc/%d/ns/pid", s.of), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return 0, unix.ESRCH
	}
	if err != nil {
		return 0, fmt.Errorf("namespace of process %d: %w", s.of, err)
	}
	defer unix.Close(ns)
	//nolint:gosec // the kernel gives a number of a process
	pid, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(ns), getPIDFrom, uintptr(inside))
	switch e {
	case 0:
		return int(pid), nil
	case unix.ENOTTY, unix.EINVAL: // an older kernel
		return s.search(inside)
	}
	return 0, e
}

// search finds a process among all that this process sees.
func (s PIDSpace) search(inside int) (int, error) {
	var want unix.Stat_t
	if err := unix.Stat(fmt.Sprintf("/proc/%d/ns/pid", s.of), &want); err != nil {
		return 0, unix.ESRCH
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return 0, err
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || innermost(pid) != inside {
			continue
		}
		var got unix.Stat_t
		if unix.Stat(fmt.Sprintf("/proc/%d/ns/pid", pid), &got) == nil && got.Dev == want.Dev && got.Ino == want.Ino {
			return pid, nil
		}
	}
	return 0, unix.ESRCH
}

// innermost returns the number that a process has in its own namespace; 0: it has ended.
func innermost(pid int) int {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(b)) {
		if numbers, ok := strings.CutPrefix(line, "NSpid:"); ok {
			f := strings.Fields(numbers)
			n, _ := strconv.Atoi(f[len(f)-1]) // the kernel writes a number
			return n
		}
	}
	return 0
}
