package dispatch

import (
	"sync"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/task"
)

// intakeLimit is how many events of neighbours may wait to be taken into a function's line; more go through the bus.
const intakeLimit = 1 << 14

// intake is where coordinators of this process leave tasks and cancels, undecoded, for a goroutine of the function to take
// into its line: who submits never waits for the line, and what comes close together is written to replicas together.
type intake struct {
	wake chan struct{} // there is something, or it was closed

	mu     sync.Mutex
	queue  []Event
	closed bool
}

// put leaves an event; false: it was closed, or too much is there.
func (in *intake) put(ev Event) bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.closed || len(in.queue) >= intakeLimit {
		return false
	}
	if in.queue = append(in.queue, ev); len(in.queue) == 1 {
		in.ring()
	}
	return true
}

func (in *intake) ring() {
	select {
	case in.wake <- struct{}{}:
	default:
	}
}

// close has what is there taken, and nothing after it.
func (in *intake) close() {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.closed = true
	in.ring()
}

// run calls take with each event, in order, until the intake is closed; more says that another call follows at once.
func (in *intake) run(take func(ev Event, more bool)) {
	var taken []Event
	for range in.wake {
		for {
			clear(taken)
			in.mu.Lock()
			taken, in.queue = in.queue, taken[:0]
			closed := in.closed
			in.mu.Unlock()
			if len(taken) == 0 && closed {
				return
			}
			if len(taken) == 0 {
				break
			}
			for i, ev := range taken {
				take(ev, i < len(taken)-1)
			}
		}
	}
}

// Submit takes a task of a coordinator in this process, which does not change it from then on; false: this process does not
// own the function's line, or the line takes no more this way. It does not wait, and calls nobody back.
func (s *Shell) Submit(t *task.Task) bool {
	f := s.function(pipeline.ParseKey(t.Function))
	return f != nil && f.intake.put(Submit{Task: t})
}

// Leave says that a request sends no more tasks for a function. It reports whether this process
// owns the function, as Submit does.
func (s *Shell) Leave(function, request string) bool {
	f := s.function(pipeline.ParseKey(function))
	return f != nil && f.intake.put(Leave{Request: request})
}

// Expect says that a request will need a replica of a function. It does nothing if this process
// does not own the function.
func (s *Shell) Expect(function string) {
	if f := s.function(pipeline.ParseKey(function)); f != nil {
		f.intake.put(Expect{})
	}
}

// Cancel takes a cancel, as Submit does tasks.
func (s *Shell) Cancel(function string, k task.Key) bool {
	f := s.function(pipeline.ParseKey(function))
	return f != nil && f.intake.put(Cancel{Key: k})
}
