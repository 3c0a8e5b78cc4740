package resources

import (
	"fmt"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/warden"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// Ending says how a process has ended. It is the error of whatever needed the process.
type Ending struct {
	Cause  string // for people, such as "killed by SIGKILL"
	End    task.End
	Well   bool              // it exited with status 0
	Memory *task.MemoryError // nil: its devices had enough memory

	killed bool // SIGKILL ended it
}

// Error returns the cause.
func (e Ending) Error() string { return e.Cause }

// Unwrap returns the lack of device memory that ended the process, or nil.
func (e Ending) Unwrap() error { return memoryError(e.Memory) }

// ExitedWell is the cause of an end with status 0.
const ExitedWell = "exited"

// EndingOf returns how a process has ended, as far as its exit status shows that. The status does
// not show who sent SIGKILL, SIGTERM, SIGINT or SIGHUP, so End is task.EndUnclear for these
// signals. [Cgroup.Explain] finds out whether the kernel killed the process because memory was
// short.
func EndingOf(e warden.Exit) Ending {
	switch s := e.Status; {
	case e.Err != nil: // its warden has ended
		return Ending{Cause: e.Err.Error(), End: task.EndShared}
	case s.Signaled():
		out := Ending{Cause: "killed by " + unix.SignalName(s.Signal()), End: task.EndItself, killed: s.Signal() == unix.SIGKILL}
		if slices.Contains([]unix.Signal{unix.SIGKILL, unix.SIGTERM, unix.SIGINT, unix.SIGHUP}, s.Signal()) {
			out.End = task.EndUnclear
		}
		return out
	case s.ExitStatus() == 0:
		return Ending{Cause: ExitedWell, End: task.EndItself, Well: true}
	default:
		return Ending{Cause: "exit status " + strconv.Itoa(s.ExitStatus()), End: task.EndItself}
	}
}

// Of returns the end of a process that ended because another process ended with e. what names that
// other process in the cause.
func (e Ending) Of(what string, end task.End) Ending {
	return Ending{Cause: what + " ended: " + e.Cause, End: end, Memory: e.Memory}
}

// Saying adds the last line on stderr to an end that was not asked for.
func (e Ending) Saying(o *sandbox.Output) Ending {
	last := o.LastError()
	if last == "" || e.Well {
		return e
	}
	e.Cause += ": " + last
	if short := wire.MemoryErrorIn(last); short != nil {
		e.Memory = short
	}
	return e
}

// Explain adds the limit of the group that ended a process in it, if one did.
func (c *Cgroup) Explain(how Ending) Ending {
	if c == nil || how.Well {
		return how
	}
	u, err := c.group.Usage()
	if err != nil {
		return how
	}
	switch reason := c.outOfMemory(); {
	case u.OOMKills == 0:
	case how.killed:
		how.Cause = "killed: " + reason
	default:
		how.Cause += fmt.Sprintf(", %d of its processes killed: %s", u.OOMKills, reason)
	}
	if u.ForksRefused > 0 {
		how.Cause += fmt.Sprintf(", %d starts of processes refused: its limit is %d processes and threads", u.ForksRefused, c.limits.PIDs)
	}
	return how
}

// Printed is an error in the words of a process.
type Printed string

// Error returns the words.
func (p Printed) Error() string { return string(p) }

// Unwrap returns the lack of device memory that the words report, or nil.
func (p Printed) Unwrap() error { return memoryError(wire.MemoryErrorIn(string(p))) }

// memoryError returns short as an error, or a nil error if short is nil.
func memoryError(short *task.MemoryError) error {
	if short == nil {
		return nil
	}
	return short
}
