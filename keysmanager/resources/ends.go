package resources

import (
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/warden"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// Ends passes each end of a process of the warden to the goroutine that awaits it. The zero value
// is ready, and adopts nothing.
type Ends struct {
	mu      sync.Mutex                    // guards what follows; nothing is called under it
	awaited map[string]chan<- warden.Exit // by name of the warden's entry
	early   map[string]warden.Exit        // ends that were told during an adoption; nil: there is none
}

// Await returns where the end of a process will be told.
func (e *Ends) Await(entry string) <-chan warden.Exit {
	ch := make(chan warden.Exit, 1)
	e.mu.Lock()
	defer e.mu.Unlock()
	if end, ok := e.early[entry]; ok {
		ch <- end
		return ch
	}
	if e.awaited == nil {
		e.awaited = map[string]chan<- warden.Exit{}
	}
	e.awaited[entry] = ch
	return ch
}

// Cancel says that the process has not started: nobody awaits its end any more.
func (e *Ends) Cancel(entry string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.awaited, entry)
}

// Tell takes the end of a process from the warden.
func (e *Ends) Tell(end warden.Exit) {
	e.mu.Lock()
	ch := e.awaited[end.Name]
	delete(e.awaited, end.Name)
	if ch == nil && e.early != nil {
		e.early[end.Name] = end
	}
	e.mu.Unlock()
	if ch != nil {
		ch <- end // has room for the only one
	}
}

// BeginAdoption keeps ends that nobody awaits yet, until EndAdoption. The caller calls it before it
// attaches to the warden, and then Left with what the warden has kept.
func (e *Ends) BeginAdoption() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.early = map[string]warden.Exit{}
}

// Left tells the ends that came before the daemon did.
func (e *Ends) Left(kept []warden.Kept) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, k := range kept {
		if k.Ended {
			e.early[k.Name] = warden.Exit{Name: k.Name, PID: k.PID, Status: k.Status}
		}
	}
}

// EndAdoption drops the ends that nobody has awaited.
func (e *Ends) EndAdoption() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.early = nil
}

// ExitedWell is the cause of an end with status 0.
const ExitedWell = "exited"

// Describe returns the cause of an end in words: "exited", "exit status 1", "killed by SIGKILL".
func Describe(e warden.Exit) string {
	switch s := e.Status; {
	case e.Err != nil:
		return e.Err.Error()
	case s.Signaled():
		return "killed by " + unix.SignalName(s.Signal())
	case s.ExitStatus() == 0:
		return ExitedWell
	default:
		return "exit status " + strconv.Itoa(s.ExitStatus())
	}
}

// LinesMoment is how long the end of a process waits for the last lines that the process has
// printed, if something still holds its output.
const LinesMoment = 100 * time.Millisecond

// Because adds the last line on stderr to the cause of an end that was not a wanted one.
func Because(cause string, o *sandbox.Output) string {
	if last := o.LastError(); last != "" && cause != ExitedWell {
		return cause + ": " + last
	}
	return cause
}

// EndOf returns how a process ended, as far as its status shows. SIGKILL and the signals that ask a
// process to end come from outside, or from the kernel when memory is short. Only the cgroup knows
// the latter.
func EndOf(e warden.Exit) task.End {
	switch {
	case e.Err != nil: // its warden has ended
		return task.EndShared
	case e.Status.Signaled() && slices.Contains([]unix.Signal{unix.SIGKILL, unix.SIGTERM, unix.SIGINT, unix.SIGHUP}, e.Status.Signal()):
		return task.EndUnclear
	default:
		return task.EndItself
	}
}
