package dispatch

import (
	"sync"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// intakeLimit is how many events from this process may wait in a function's intake. Further ones go
// over the bus.
const intakeLimit = 1 << 14

// intake queues events from coordinators of this process until a goroutine of the function applies
// them. So a coordinator never waits for the function. Events in quick succession are applied
// together, so their frames can be written together.
type intake struct {
	wake chan struct{} // events are waiting, or it was closed

	mu     sync.Mutex
	queue  []Event
	closed bool
}

// put adds an event. It returns false if the intake is closed or full.
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

// close stops the intake after the events that it holds.
func (in *intake) close() {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.closed = true
	in.ring()
}

// run calls take with each event, in order, until the intake is closed. The argument more is true
// if another call follows at once.
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

// Submit queues a task from a coordinator in this process. The coordinator must not change the task
// afterwards. Submit returns false if this process does not own the function, or if the function's
// intake is full. It does not wait, and makes no callbacks.
func (s *Shell) Submit(t *task.Task) bool {
	f := s.function(pipeline.ParseKey(t.Function))
	return f != nil && f.intake.put(Submit{Task: t})
}

// Leave reports that a request sends no more tasks for a function. Like Submit, it returns false if
// this process does not own the function, or if the function's intake is full.
func (s *Shell) Leave(function, request string) bool {
	f := s.function(pipeline.ParseKey(function))
	return f != nil && f.intake.put(Leave{Request: request})
}

// Expect announces that a request will need a replica of a function. It does nothing if this
// process does not own the function.
func (s *Shell) Expect(function string) {
	if f := s.function(pipeline.ParseKey(function)); f != nil {
		f.intake.put(Expect{})
	}
}

// Cancel takes a cancel in the same way as Submit takes tasks.
func (s *Shell) Cancel(function string, k task.Key) bool {
	f := s.function(pipeline.ParseKey(function))
	return f != nil && f.intake.put(Cancel{Key: k})
}
