package resources

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/warden"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// usedGroup is a group with this usage.
type usedGroup struct {
	Group
	use GroupUsage
}

func (u usedGroup) Usage() (GroupUsage, error) { return u.use, nil }

// TestEndingExplainsStatusAndCgroup checks the cause that an exit status gives, and what the cgroup
// adds to it. The tests in ends_test.go and groups_test.go of package keysmanager have real
// processes.
func TestEndingExplainsStatusAndCgroup(t *testing.T) {
	t.Parallel()
	short := &Cgroup{group: usedGroup{use: GroupUsage{OOMKills: 2}}, replica: true, limits: Limits{Memory: 1 << 30}}
	full := &Cgroup{group: usedGroup{use: GroupUsage{ForksRefused: 3}}, limits: Limits{PIDs: 7}}
	for _, tc := range []struct {
		exit  warden.Exit
		group *Cgroup
		cause string
		end   task.End
	}{
		{warden.Exit{}, nil, "exited", task.EndItself},
		{warden.Exit{}, short, "exited", task.EndItself},
		{warden.Exit{Status: 3 << 8}, nil, "exit status 3", task.EndItself},
		{warden.Exit{Status: 3 << 8}, short, "exit status 3, 2 of its processes killed: out of memory, its limit is 1 GiB (limits.memory)", task.EndItself},
		{warden.Exit{Status: 3 << 8}, full, "exit status 3, 3 starts of processes refused: its limit is 7 processes and threads", task.EndItself},
		{warden.Exit{Status: unix.WaitStatus(unix.SIGKILL)}, nil, "killed by SIGKILL", task.EndUnclear},
		{warden.Exit{Status: unix.WaitStatus(unix.SIGKILL)}, short, "killed: out of memory, its limit is 1 GiB (limits.memory)", task.EndUnclear},
		{warden.Exit{Status: unix.WaitStatus(unix.SIGTERM)}, nil, "killed by SIGTERM", task.EndUnclear},
		{warden.Exit{Status: unix.WaitStatus(unix.SIGSEGV)}, nil, "killed by SIGSEGV", task.EndItself},
		{warden.Exit{Err: warden.ErrLost}, nil, "the node's warden has ended", task.EndShared},
	} {
		got := tc.group.Explain(EndingOf(tc.exit))
		if got.Cause != tc.cause || got.End != tc.end || got.Well != (tc.cause == ExitedWell) {
			t.Errorf("%+v: got %+v, want %q, %q", tc.exit, got, tc.cause, tc.end)
		}
	}
}

// TestEndingNamesFullDevices checks that the words of a process become a typed error, also as the
// cause of other ends and failures.
func TestEndingNamesFullDevices(t *testing.T) {
	t.Parallel()
	words := "place: " + wire.OutOfMemoryOn + "GPU-1: want 2 GiB"
	first := Ending{Cause: "exit status 1", Memory: wire.MemoryErrorIn(words)}
	for what, err := range map[string]error{
		"of itself":        first,
		"of its worker":    first.Of("its worker", task.EndUnclear),
		"its last line":    fmt.Errorf("not loaded: %w", Printed(words)),
		"an order refused": fmt.Errorf("zygote refused to fork: %w", Printed(words)),
	} {
		var short *task.MemoryError
		if !errors.As(err, &short) || !slices.Equal(short.Devices, []string{"GPU-1"}) {
			t.Errorf("%s: %v has %+v, want a lack of memory on GPU-1", what, err, short)
		}
	}
	for what, err := range map[string]error{"an end": Ending{Cause: "exited"}, "words": Printed("no such file")} {
		if short := (*task.MemoryError)(nil); errors.As(err, &short) {
			t.Errorf("%s: %v has %+v, want no lack of memory", what, err, short)
		}
	}
}
