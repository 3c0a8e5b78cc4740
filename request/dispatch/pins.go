package dispatch

import (
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
)

// pin binds the tasks of a request with several tasks to replicas of one revision. It lasts from
// the first task until the coordinator reports that no more tasks come, or until the request's
// deadline.
type pin struct {
	revision uint64 // 0: none of its tasks has been placed
	// A replica of the revision has answered a task with OK, so the others need the same revision.
	used  bool
	left  bool      // the coordinator sends no more tasks
	tasks int       // waiting and running tasks
	until time.Time // deadline of its tasks
}

const (
	// pinLifetime is how long a pin without a deadline lasts after its latest task has ended,
	// unless its coordinator ends it earlier.
	pinLifetime = time.Minute
	// expireEvery is the shortest time between two searches for expired pins.
	expireEvery = 100 * time.Millisecond
)

// pins holds the pins of a function.
type pins struct {
	requests   map[string]*pin
	revisions  map[uint64]int // number of pins per revision
	nextExpiry time.Time      // when to search for expired pins; zero: there are none
}

func newPins() pins { return pins{requests: map[string]*pin{}, revisions: map[uint64]int{}} }

// add counts a new task and returns its request's pin. needs is the revision that its coordinator
// wants; 0: any.
func (s *pins) add(t *task.Task, needs uint64) *pin {
	p := s.requests[t.Request]
	if p == nil {
		p = &pin{}
		s.requests[t.Request] = p
	}
	p.tasks++
	p.used = p.used || needs != 0
	if t.Deadline.After(p.until) {
		p.until = t.Deadline
	}
	if p.revision == 0 {
		s.fix(p, needs)
	}
	return p
}

// fix sets the revision of a pin.
func (s *pins) fix(p *pin, revision uint64) {
	if p.revision != 0 {
		if s.revisions[p.revision]--; s.revisions[p.revision] == 0 {
			delete(s.revisions, p.revision)
		}
	}
	if p.revision = revision; revision != 0 {
		s.revisions[revision]++
	}
}

// end counts the end of a task of p, whatever its code.
func (s *pins) end(now time.Time, p *pin, t *task.Task, code task.Code) {
	p.used = p.used || code == task.OK && p.revision != 0
	if p.tasks--; p.tasks > 0 {
		return
	}
	if t.Deadline.IsZero() && !p.left {
		p.until = now.Add(pinLifetime)
	}
	if p.left || !p.until.After(now) {
		s.drop(t.Request, p)
		return
	}
	s.nextExpiry = earlier(s.nextExpiry, p.until)
}

func (s *pins) drop(request string, p *pin) {
	s.fix(p, 0)
	delete(s.requests, request)
}

// leave ends a request's pin once the tasks that it still has here have ended.
func (s *pins) leave(request string) {
	if p := s.requests[request]; p != nil {
		if p.left = true; p.tasks == 0 {
			s.drop(request, p)
		}
	}
}

// expire ends the pins whose deadline has passed. Their Leave was lost, or their coordinator died.
func (s *pins) expire(now time.Time) {
	if s.nextExpiry.IsZero() || s.nextExpiry.After(now) {
		return
	}
	s.nextExpiry = time.Time{}
	for request, p := range s.requests {
		switch {
		case p.tasks > 0: // end checks the deadline of such a pin
		case !p.until.After(now):
			s.drop(request, p)
		default:
			s.nextExpiry = earlier(s.nextExpiry, p.until)
		}
	}
	if soonest := now.Add(expireEvery); !s.nextExpiry.IsZero() && s.nextExpiry.Before(soonest) {
		s.nextExpiry = soonest
	}
}

// due returns the latest deadline of the pins of a revision, or zero if there are none.
func (s *pins) due(revision uint64) (due time.Time) {
	for _, p := range s.requests {
		if p.revision == revision && p.until.After(due) {
			due = p.until
		}
	}
	return due
}
