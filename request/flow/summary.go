package flow

import (
	"cmp"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/demand"
)

// SummaryAge is the largest age of the figures of a [Summary].
const SummaryAge = 10 * time.Second

// Summary is what policies know about the demand that a learner has learned. Because a summary of a
// thousand applications takes some milliseconds, it is made at most once per SummaryAge. The zero
// value is ready.
type Summary struct {
	functions []demand.Function // sorted by Name
	at        time.Time
}

// Old reports whether the summary is older than SummaryAge, or of the future.
func (s *Summary) Old(now time.Time) bool {
	age := now.Sub(s.at)
	return age >= SummaryAge || age < 0
}

// Make takes the figures of a learner as of now.
func (s *Summary) Make(l *demand.Learner, now time.Time) { s.functions, s.at = l.Functions(now), now }

// Fill sets Learned of the functions of a snapshot.
func (s *Summary) Fill(snapshot *plan.Snapshot) {
	for i := range snapshot.Functions {
		f := &snapshot.Functions[i]
		k, ok := slices.BinarySearchFunc(s.functions, f.Name, func(l demand.Function, name string) int { return cmp.Compare(l.Name, name) })
		if ok {
			f.Learned = learned(&s.functions[k], snapshot.At)
		} else {
			f.Learned = plan.Learned{} // it was forgotten
		}
	}
}

// learned returns what policies know about a function's learned demand.
func learned(f *demand.Function, now time.Time) plan.Learned {
	seconds := func(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
	return plan.Learned{
		Known: true, Calls: f.Calls, Mean: seconds(f.Mean), CV: f.CV,
		P50: seconds(f.P50), P95: seconds(f.P95), P99: seconds(f.P99), Factor: f.Items, Age: max(now.Sub(f.Last), 0),
	}
}
