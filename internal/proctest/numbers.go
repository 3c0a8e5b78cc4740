package proctest

import (
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// Numbers of users for tests: parts ranges of partSize numbers each, from firstNumber on.
const (
	firstNumber = 300_000
	partSize    = 4096
	parts       = 64
)

// numbers locks a range until this process ends. The kernel takes the lock back with the file, so
// the file is kept.
var numbers = sync.OnceValues(func() (part int, kept *os.File) {
	f, err := os.OpenFile("/run/stagecoach-test-numbers", os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return 0, nil // without root, no test uses the numbers
	}
	for part := range parts {
		l := unix.Flock_t{Type: unix.F_WRLCK, Start: int64(part), Len: 1}
		if unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &l) == nil {
			return part, f
		}
	}
	panic("more test processes than ranges of users: wait until some have ended")
})

// Numbers returns a range of user and group numbers that no other test process of this machine has.
// A test that releases a user kills all processes of that user, also those of other tests.
func Numbers() (first, last int) {
	part, _ := numbers()
	first = firstNumber + part*partSize
	return first, first + partSize - 1
}
