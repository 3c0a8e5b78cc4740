package autoscaler

import (
	"math"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

const (
	// watchSpan is the time over which predictions are compared with measurements. Sums are kept once
	// per watchEvery.
	watchSpan  = time.Minute
	watchEvery = 5 * time.Second
	watchMarks = int(watchSpan/watchEvery) + 2
	// watchLeast is the number of tasks in watchSpan that a comparison needs if arrivals are Poisson.
	// Bursty arrivals need Ca² times as many for the same certainty, because the variance of a count
	// is that much larger (Cox, Renewal Theory, 1962, §4.2).
	watchLeast = 20
	// watchOff is the part of a prediction by which the measurement may differ from it. A mean of
	// one minute often differs by more, but rarely for a whole minute: docs/autoscaler.md has
	// figures.
	watchOff = 0.5
)

// ModelError compares how long the tasks of a function stayed with how long they should have stayed
// by the model. Both are means over the same tasks, which left the line within a minute.
type ModelError struct {
	Function          string
	Tasks             uint64
	Predicted, Stayed time.Duration
	// Off means that they differ by more than half of the prediction, and have done so for a minute.
	Off bool
}

// Ratio returns the measured time over the predicted one.
func (e ModelError) Ratio() float64 { return float64(e.Stayed) / float64(e.Predicted) }

// Watch compares the model's predictions with measurements, function by function, over the last
// minute. It judges a function only if all of these hold for a whole minute:
//
//   - The number of ready replicas, their CPU, the batch and the revision are the same. No replica
//     starts, is drained, or is of another revision.
//   - There is a prediction at each observation: see [Terms].
//   - At least watchLeast tasks left the line, or Ca² times as many if arrivals are bursty.
//
// The zero value is ready. It keeps at most watchMarks sums per function of the latest Snapshot.
type Watch struct{ functions map[string]*watched }

// watched is what a Watch knows of one function.
type watched struct {
	setting setting
	marks   []mark // sorted by time, at least watchEvery apart
	last    mark
	apart   time.Time // since when all comparisons differ by more than watchOff; zero: they do not
	off     bool      // the latest judgement
	seen    uint64
}

// setting is what must not change while a function is judged.
type setting struct {
	revision             uint64
	replicas, cpu, batch int
	changing             bool // a replica starts, is drained, or is of another revision
}

// mark has sums as of one Snapshot.
type mark struct {
	at           time.Time
	left, served plan.Tally
	// added up over the tasks in left: the predicted sojourn in seconds, and Ca², at least 1
	predicted, bursty float64
}

// Observe takes a Snapshot. It returns the judgements of all functions that can be judged, by name,
// and those that differ in Off from the function's judgement before, in the Snapshot's order.
// Functions that are not in s are forgotten.
func (w *Watch) Observe(s *plan.Snapshot) (all map[string]ModelError, changed []ModelError) {
	if w.functions == nil {
		w.functions = map[string]*watched{}
	}
	for i := range s.Functions {
		f := &s.Functions[i]
		g := w.functions[f.Name]
		if g == nil {
			g = &watched{}
			w.functions[f.Name] = g
		}
		g.seen = s.Rev
		e, ok := g.observe(f, s.At)
		if !ok {
			continue
		}
		if all == nil {
			all = map[string]ModelError{}
		}
		all[f.Name] = e
		if e.Off != g.off {
			g.off = e.Off
			changed = append(changed, e)
		}
	}
	for name, g := range w.functions {
		if g.seen != s.Rev {
			delete(w.functions, name)
		}
	}
	return all, changed
}

// observe adds an observation of f, and judges f if that is possible.
func (w *watched) observe(f *plan.Function, at time.Time) (e ModelError, ok bool) {
	now := mark{at: at, left: f.Wait.Left, served: f.Service.Served, predicted: w.last.predicted, bursty: w.last.bursty}
	is := settingOf(f)
	steady := len(w.marks) > 0 && is == w.setting && !is.changing && at.After(w.last.at) && now.left.N >= w.last.left.N && now.served.N >= w.last.served.N
	if steady && now.left.N > w.last.left.N {
		terms := NewTerms(f)
		steady = terms.NoStay == ""
		n := float64(now.left.N - w.last.left.N)
		now.predicted, now.bursty = now.predicted+n*terms.Stay.Seconds(), now.bursty+n*max(squared(f.Demand.CV), 1)
	}
	w.setting, w.last = is, now
	if !steady {
		w.last.predicted, w.last.bursty, w.apart = 0, 0, time.Time{}
		w.marks = append(w.marks[:0], w.last)
		return ModelError{}, false
	}
	if len(w.marks) > 1 && at.Sub(w.marks[1].at) >= watchSpan {
		w.marks = append(w.marks[:0], w.marks[1:]...)
	}
	if at.Sub(w.marks[len(w.marks)-1].at) >= watchEvery {
		w.marks = append(w.marks, now)
	}
	return w.judge(f.Name)
}

// settingOf returns what must not change while f is judged.
func settingOf(f *plan.Function) setting {
	out := setting{revision: f.Revision, cpu: f.CPUNow, batch: f.Batch}
	for i := range f.Replicas {
		if r := &f.Replicas[i]; r.State == plan.Ready && r.Revision == f.Revision {
			out.replicas++
		} else {
			out.changing = true
		}
	}
	return out
}

// judge compares the sums since the first mark, if that was a minute ago.
func (w *watched) judge(name string) (e ModelError, ok bool) {
	first := &w.marks[0]
	n, served := w.last.left.N-first.left.N, w.last.served.N-first.served.N
	if w.last.at.Sub(first.at) < watchSpan || n < watchLeast || served == 0 {
		return e, false
	}
	if float64(n)*float64(n) < watchLeast*(w.last.bursty-first.bursty) {
		return e, false
	}
	predicted := (w.last.predicted - first.predicted) / float64(n)
	stayed := (w.last.left.Seconds-first.left.Seconds)/float64(n) + (w.last.served.Seconds-first.served.Seconds)/float64(served)
	if !(predicted > 0) {
		return e, false
	}
	e = ModelError{Function: name, Tasks: n, Predicted: toDuration(predicted), Stayed: toDuration(stayed)}
	if math.Abs(stayed/predicted-1) <= watchOff {
		w.apart = time.Time{}
		return e, true
	}
	if w.apart.IsZero() {
		w.apart = w.last.at
	}
	e.Off = w.off || w.last.at.Sub(w.apart) >= watchSpan
	return e, true
}
