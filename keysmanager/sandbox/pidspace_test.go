package sandbox

import (
	"errors"
	"os"
	"slices"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// TestNumbersAreTranslated checks the numbers of processes in another namespace, as the kernel
// translates them and as an older kernel's /proc shows them.
func TestNumbersAreTranslated(t *testing.T) {
	p, o, l := start(t, newSpawner(t), Command{Chroot: root(t), Argv: []string{"/probe", "wait"}})
	proctest.Until(t, "it to wait", func() bool { return slices.Contains(l.sorted(), "stdout: waiting") })
	its := PIDsOf(p.PID())
	for name, of := range map[string]func(int) (int, error){"kernel": its.Outside, "search": its.search} {
		if pid, err := of(1); err != nil || pid != p.PID() {
			t.Errorf("%s: process 1 is %d, %v, want %d", name, pid, err, p.PID())
		}
		if pid, err := of(4_000_000); !errors.Is(err, unix.ESRCH) {
			t.Errorf("%s: a process that does not exist is %d, %v, want ESRCH", name, pid, err)
		}
	}
	if err := p.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	p.Wait()
	o.Finish(time.Second)
	if pid, err := its.Outside(1); !errors.Is(err, unix.ESRCH) {
		t.Errorf("after its end: %d, %v, want ESRCH", pid, err)
	}
	if pid, err := PIDsOf(p.PID()).Outside(1); !errors.Is(err, unix.ESRCH) {
		t.Errorf("in the namespace of a process that has gone: %d, %v, want ESRCH", pid, err)
	}
	if pid, err := PIDsOf(os.Getpid()).Outside(os.Getppid()); err != nil || pid != os.Getppid() {
		t.Errorf("in this process's own namespace: %d, %v, want %d", pid, err, os.Getppid())
	}
}
