package resources

import (
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/warden"
)

// Ends passes each end of a process of the warden to the goroutine that awaits it. The zero value
// is ready, and adopts nothing.
type Ends struct {
	mu      sync.Mutex                    // guards the fields below; nothing is called under it
	awaited map[string]chan<- warden.Exit // by name of the warden's entry
	early   map[string]warden.Exit        // ends that came during an adoption; nil: none is under way
}

// Await returns a channel that receives the end of a process.
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

// Cancel notes that the process has not started, so nobody awaits its end any more.
func (e *Ends) Cancel(entry string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.awaited, entry)
}

// Tell passes on the end of a process. The warden calls it.
func (e *Ends) Tell(end warden.Exit) {
	e.mu.Lock()
	ch := e.awaited[end.Name]
	delete(e.awaited, end.Name)
	if ch == nil && e.early != nil {
		e.early[end.Name] = end
	}
	e.mu.Unlock()
	if ch != nil {
		ch <- end // the buffer has room for one end, and there is only one
	}
}

// BeginAdoption makes e keep the ends that nobody awaits yet, until EndAdoption. The daemon calls
// BeginAdoption before it attaches to the warden, and Left with the warden's entries afterwards.
func (e *Ends) BeginAdoption() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.early = map[string]warden.Exit{}
}

// Left passes on the ends that came before the daemon attached.
func (e *Ends) Left(kept []warden.Kept) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, k := range kept {
		if k.Ended {
			e.early[k.Name] = warden.Exit{Name: k.Name, PID: k.PID, Status: k.Status}
		}
	}
}

// EndAdoption drops the ends that nobody awaits.
func (e *Ends) EndAdoption() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.early = nil
}

// LinesMoment is how long the end of a process waits for the last lines that the process has
// printed, if something still holds its output.
const LinesMoment = 100 * time.Millisecond
