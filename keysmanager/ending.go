package keysmanager

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

// ending says how a process has ended. It is the error of whatever needed the process.
type ending struct {
	cause  string // for people, such as "killed by SIGKILL"
	end    task.End
	well   bool              // it exited with status 0
	killed bool              // SIGKILL ended it
	memory *task.MemoryError // nil: its devices had enough memory
}

// Error returns the cause.
func (e ending) Error() string { return e.cause }

// Unwrap returns the lack of device memory that ended the process, or nil.
func (e ending) Unwrap() error { return memoryError(e.memory) }

// exitedWell is the cause of an end with status 0.
const exitedWell = "exited"

// endingOf returns the end of a process, as far as its status shows it. SIGKILL and the signals that
// ask a process to end come from outside, or from the kernel when memory is short. Only the cgroup
// knows the latter; see [enclosure.explain].
func endingOf(e warden.Exit) ending {
	switch s := e.Status; {
	case e.Err != nil: // its warden has ended
		return ending{cause: e.Err.Error(), end: task.EndShared}
	case s.Signaled():
		out := ending{cause: "killed by " + unix.SignalName(s.Signal()), end: task.EndItself, killed: s.Signal() == unix.SIGKILL}
		if slices.Contains([]unix.Signal{unix.SIGKILL, unix.SIGTERM, unix.SIGINT, unix.SIGHUP}, s.Signal()) {
			out.end = task.EndUnclear
		}
		return out
	case s.ExitStatus() == 0:
		return ending{cause: exitedWell, end: task.EndItself, well: true}
	default:
		return ending{cause: "exit status " + strconv.Itoa(s.ExitStatus()), end: task.EndItself}
	}
}

// of returns the end of a process that ended because another one, called what, ended with e.
func (e ending) of(what string, end task.End) ending {
	return ending{cause: what + " ended: " + e.cause, end: end, memory: e.memory}
}

// saying adds the last line on stderr to an end that was not a wanted one.
func (e ending) saying(o *sandbox.Output) ending {
	last := o.LastError()
	if last == "" || e.well {
		return e
	}
	e.cause += ": " + last
	if short := wire.MemoryErrorIn(last); short != nil {
		e.memory = short
	}
	return e
}

// explain adds the limit of the group that ended a process in it, if one did.
func (e *enclosure) explain(how ending) ending {
	if e == nil || how.well {
		return how
	}
	u, err := e.group.Usage()
	if err != nil {
		return how
	}
	switch reason := e.outOfMemory(); {
	case u.OOMKills == 0:
	case how.killed:
		how.cause = "killed: " + reason
	default:
		how.cause += fmt.Sprintf(", %d of its processes killed: %s", u.OOMKills, reason)
	}
	if u.ForksRefused > 0 {
		how.cause += fmt.Sprintf(", %d starts of processes refused: its limit is %d processes and threads", u.ForksRefused, e.limits.PIDs)
	}
	return how
}

// printed is an error in the words of a process.
type printed string

// Error returns the words.
func (p printed) Error() string { return string(p) }

// Unwrap returns the lack of device memory that the words tell of, or nil.
func (p printed) Unwrap() error { return memoryError(wire.MemoryErrorIn(string(p))) }

// memoryError returns short as an error, which is nil if short is.
func memoryError(short *task.MemoryError) error {
	if short == nil {
		return nil
	}
	return short
}
