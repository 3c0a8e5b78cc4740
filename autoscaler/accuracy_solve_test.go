package autoscaler

import (
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// greedy reports whether the latest mix is a greedy one.
func (w *trafficWorld) greedy() bool { return strings.Contains(w.mix.Alloc[0].Why, "; greedy: ") }

// TestAFailureKeepsThePlan lets planning fail for a while: the plan is followed for 10 seconds, and
// planning is tried each 10 seconds.
func TestAFailureKeepsThePlan(t *testing.T) {
	t.Parallel()
	w := newTraffic(t)
	w.run(60, 120, 0, nil)
	had, switches := w.counts(), w.memory.Switches
	fail := func(rate float64) {
		w.z.work = 1
		for range 30 {
			if w.run(1, rate, 0, nil); w.memory.Failed != nil {
				return
			}
		}
		t.Fatal("no plan was due in 30 s")
	}
	fail(120)
	failed := *w.memory.Failed
	w.run(9, 120, 0, func() {
		if c := w.counts(); w.greedy() || c["read"] != had["read"] || !strings.Contains(w.mix.Alloc[0].Why, "no new plan: no good plan was found") {
			t.Errorf("%v, %s, want the plan %v", c, w.mix.Alloc[0].Why, had)
		}
		if *w.memory.Failed != failed {
			t.Errorf("planning was tried again after %v", w.memory.Failed.At.Sub(failed.At))
		}
	})
	w.z.work = planWork
	if w.run(1, 120, 0, nil); w.memory.Failed != nil || w.memory.Switches != switches || w.greedy() {
		t.Errorf("failure %v, %d switches, %s, want the same plan as before", w.memory.Failed, w.memory.Switches-switches, w.mix.Alloc[0].Why)
	}

	fail(120)
	w.run(12, 120, 0, nil)
	if !w.greedy() || w.memory.Plan == nil || w.memory.Demand["traffic"].Rate < 119 || w.memory.Failed.At.Equal(w.memory.Failed.Since) {
		t.Errorf("%s, memory %+v, want a greedy mix, and the plan remembered", w.mix.Alloc[0].Why, w.memory)
	}
}

// TestADecisionHasOneBudgetOfWork plans with little work, with one problem and with several.
func TestADecisionHasOneBudgetOfWork(t *testing.T) {
	t.Parallel()
	for _, z := range []Accuracy{NewAccuracy(Config{}), NewAccuracyWithWaits(Config{})} {
		for _, given := range []work{1e4, 1e5, planWork} {
			w := newTraffic(t)
			w.z = z
			w.z.work = given
			w.run(1, 300, 0, nil)
			d := plan.Domains(w.s)[0]
			mx, err := newMixing(&w.s, d, z.greedy.sizer.cfg.meanPart())
			if err != nil {
				t.Fatal(err)
			}
			e := &exactMix{mixing: mx, s: &w.s, d: d, b: &w.budget, left: given}
			e.next.Greedy = Memory{}
			if why := e.build(); why != "" {
				t.Fatal(why)
			}
			_, _ = w.z.decide(e) // with little work, there is no plan
			if e.left >= given || e.left < -given/5 {
				t.Errorf("waits %v: %v of %v left, want some used, and little more than there is", z.waits, e.left, given)
			}
		}
	}
}
