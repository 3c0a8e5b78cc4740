package dispatch

import (
	"fmt"
	"math"

	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// moreThreads is the frame Threads, which the Core does not ask for.
type moreThreads struct{ total uint16 }

func (moreThreads) effect() {}

// Threads asks a replica to compute with n threads. A replica that already has as many, or cannot
// have more, changes nothing. An old replica that does not know this frame changes nothing either.
func (s *Shell) Threads(function pipeline.Key, replica string, n int) error {
	if n < 1 || n > math.MaxUint16 {
		return fmt.Errorf("threads of replica %q of %q: %d, want 1 to %d", replica, function, n, math.MaxUint16)
	}
	l := s.greeted(function, replica)
	if l == nil {
		return fmt.Errorf("threads of replica %q of %q: it is not attached", replica, function)
	}
	l.out.push(moreThreads{uint16(n)})
	l.out.flush()
	return nil
}

// greeted returns the link of a replica that has been welcomed; nil: there is none.
func (s *Shell) greeted(function pipeline.Key, replica string) *link {
	f := s.entry(function)
	if f == nil {
		return nil
	}
	o := f.lock()
	defer o.mu.Unlock()
	if l := o.links[replica]; l != nil && !l.attached.IsZero() {
		return l
	}
	return nil
}
