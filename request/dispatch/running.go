package dispatch

import (
	"slices"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// Call is a call that a replica has not answered.
type Call struct {
	Request string    // id of its request
	Since   time.Time // when the replica got it
}

// Calls returns the calls that a replica has not answered, the oldest first. It looks at all calls
// of the replica, so the data path must not call it.
func (s *Shell) Calls(function pipeline.Key, replica string) []Call {
	f := s.entry(function)
	if f == nil {
		return nil
	}
	o := f.lock()
	defer o.mu.Unlock()
	l := o.core.of(replica)
	if l == nil {
		return nil
	}
	i, ok := l.find(replica)
	if !ok {
		return nil
	}
	var out []Call
	for _, b := range l.replicas[i].batches {
		for _, it := range b.items {
			if it != nil && it.state == running {
				id, _, _ := strings.Cut(it.task.Request, "~") // the coordinator numbers the runs of a request
				out = append(out, Call{id, b.sent})
			}
		}
	}
	slices.SortFunc(out, func(a, b Call) int { return a.Since.Compare(b.Since) })
	return out
}
