package autoscaler

import (
	"math"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// watchRig feeds a Watch with a function of two replicas, one Snapshot per second.
type watchRig struct {
	t *testing.T
	s plan.Snapshot
	w Watch
}

func newWatchRig(t *testing.T) *watchRig {
	t.Helper()
	f := timed("f", 10*ms)
	f.Revision, f.Demand = 1, plan.Demand{Known: true, Rate: 100, CV: 1}
	f.Replicas = []plan.Replica{{Name: "a", Revision: 1, State: plan.Ready}, {Name: "b", Revision: 1, State: plan.Ready}}
	return &watchRig{t: t, s: plan.Snapshot{At: time.Unix(1e9, 0), Functions: []plan.Function{f}}}
}

func (r *watchRig) f() *plan.Function { return &r.s.Functions[0] }

// second passes one second in which n tasks leave the line, after a wait of so long each, and are
// served for 10 ms each.
func (r *watchRig) second(n uint64, wait time.Duration) (e ModelError, known bool, changed []ModelError) {
	r.s.Rev++
	r.s.At = r.s.At.Add(time.Second)
	f := r.f()
	f.Wait.Left.N, f.Wait.Left.Seconds = f.Wait.Left.N+n, f.Wait.Left.Seconds+float64(n)*wait.Seconds()
	f.Service.Served.N, f.Service.Served.Seconds = f.Service.Served.N+n, f.Service.Served.Seconds+float64(n)*0.01
	all, changed := r.w.Observe(&r.s)
	e, known = all["f"]
	return e, known, changed
}

// run passes seconds, and returns how many of them were judged and off, and all changes.
func (r *watchRig) run(seconds int, n uint64, wait time.Duration) (known, off int, changes []ModelError) {
	for range seconds {
		e, ok, changed := r.second(n, wait)
		if ok {
			known++
		}
		if e.Off {
			off++
		}
		changes = append(changes, changed...)
		if marks := len(r.w.functions["f"].marks); marks > watchMarks {
			r.t.Fatalf("%d sums kept, want at most %d", marks, watchMarks)
		}
	}
	return known, off, changes
}

// TestWatchComparesTheMeansOfAMinute checks both means, and when they can be compared.
func TestWatchComparesTheMeansOfAMinute(t *testing.T) {
	r := newWatchRig(t)
	if known, _, _ := r.run(60, 100, 0); known != 0 {
		t.Errorf("%d comparisons in the first minute, want none", known)
	}
	// The first Snapshot is the beginning of the minute. From here on, it slides by 5 s steps.
	e, known, _ := r.second(100, 0)
	want := NewTerms(r.f()).Stay
	if !known || e.Tasks != 6000 || e.Stayed != 10*ms || (e.Predicted-want).Abs() > time.Microsecond || want < 12*ms || e.Off {
		t.Errorf("%+v, %v; want 6000 tasks, 10 ms and %v", e, known, want)
	}
	// In half of the next minute, the load is 0.75, waits are longer, and twice as many tasks come.
	r.run(30, 100, 0)
	quiet := NewTerms(r.f()).Stay
	r.f().Demand.Rate = 150
	r.run(29, 200, 20*ms)
	e, _, _ = r.second(200, 20*ms)
	busy := NewTerms(r.f()).Stay
	predicted := (3000*quiet + 6000*busy) / 9000
	if e.Tasks != 9000 || math.Abs((e.Stayed-10*ms-20*ms*6000/9000).Seconds()) > 1e-6 || (e.Predicted-predicted).Abs() > time.Microsecond {
		t.Errorf("%+v, want 9000 tasks, 23.3 ms and %v: each task counts once", e, predicted)
	}
}

// TestWatchTellsOfAnEpisodeOnce checks that a prediction is called far off after a minute in which
// the means of a minute differ, once, until they agree again.
func TestWatchTellsOfAnEpisodeOnce(t *testing.T) {
	for name, wait := range map[string]time.Duration{"too short": 30 * ms, "too long": -9 * ms} {
		t.Run(name, func(t *testing.T) {
			r := newWatchRig(t)
			if _, off, changes := r.run(120, 100, wait); off != 0 || len(changes) != 0 {
				t.Errorf("off in %d of the first 120 s, %v; want two minutes first", off, changes)
			}
			known, off, changes := r.run(300, 100, wait)
			if known != 300 || off != 300 || len(changes) != 1 || !changes[0].Off || changes[0].Function != "f" {
				t.Errorf("off in %d of %d, %+v; want one change", off, known, changes)
			}
			r.f().Replicas = append(r.f().Replicas, plan.Replica{Name: "c", Revision: 1, State: plan.Ready})
			if known, _, changes := r.run(60, 100, wait); known != 0 || len(changes) != 0 {
				t.Errorf("%d comparisons after a change of replicas, %v", known, changes)
			}
			if known, off, changes := r.run(60, 100, wait); known != 60 || off != 60 || len(changes) != 0 {
				t.Errorf("off in %d of %d, %v; want the same episode", off, known, changes)
			}
			_, off, changes = r.run(90, 100, 0)
			if len(changes) != 1 || changes[0].Off || off == 0 || off > 60 {
				t.Errorf("off in %d of 90 s of good predictions, %+v; want one change", off, changes)
			}
		})
	}
}

// TestWatchWaitsForASteadyMinute checks what makes a Watch begin again.
func TestWatchWaitsForASteadyMinute(t *testing.T) {
	for name, change := range map[string]func(*plan.Function){
		"a replica more": func(f *plan.Function) { f.Replicas = append(f.Replicas, plan.Replica{Revision: 1, State: plan.Ready}) },
		"a replica less": func(f *plan.Function) { f.Replicas = f.Replicas[:1]; f.Demand.Rate = 50 },
		"a replica starts": func(f *plan.Function) {
			f.Replicas = append(f.Replicas, plan.Replica{Revision: 1, State: plan.Starting})
		},
		"a replica drains": func(f *plan.Function) {
			f.Replicas = append(f.Replicas, plan.Replica{Revision: 1, State: plan.Draining})
		},
		"another revision": func(f *plan.Function) { f.Revision++ },
		"a mix of revisions": func(f *plan.Function) {
			f.Replicas, f.Demand.Rate = []plan.Replica{f.Replicas[0], {Name: "b", Revision: 2, State: plan.Ready}}, 50
		},
		"more CPU":            func(f *plan.Function) { f.CPUNow = 2000 },
		"a larger batch":      func(f *plan.Function) { f.Batch = 8 },
		"an overload":         func(f *plan.Function) { f.Demand.Rate = 199 },
		"waits begin anew":    func(f *plan.Function) { f.Wait.Left = plan.Tally{} },
		"services begin anew": func(f *plan.Function) { f.Service.Served = plan.Tally{} },
		"unknown service":     func(f *plan.Function) { f.Service.Known = false },
	} {
		t.Run(name, func(t *testing.T) {
			r := newWatchRig(t)
			if known, _, _ := r.run(90, 100, 0); known != 30 {
				t.Fatalf("%d comparisons before the change, want 30", known)
			}
			before := *r.f()
			change(r.f())
			if known, _, _ := r.run(1, 100, 0); known != 0 {
				t.Error("compared in the second of the change")
			}
			left, served := r.f().Wait.Left, r.f().Service.Served
			*r.f() = before
			r.f().Wait.Left, r.f().Service.Served = left, served
			if known, _, _ := r.run(59, 100, 0); known != 0 {
				t.Errorf("%d comparisons in the minute after the change", known)
			}
			if known, _, _ := r.run(3, 100, 0); known == 0 {
				t.Error("no comparison after a steady minute")
			}
		})
	}
}

// TestWatchNeedsTasks checks the number of tasks that a comparison needs.
func TestWatchNeedsTasks(t *testing.T) {
	for name, tc := range map[string]struct {
		n     uint64  // tasks in the minute
		cv    float64 // of the gaps
		known bool
	}{
		"nothing":                     {0, 1, false},
		"too few":                     {19, 1, false},
		"enough":                      {20, 1, true},
		"enough at an unknown CV":     {20, 0, true},
		"enough at equal gaps":        {20, 0.2, true},
		"too few for bursts of CV 4":  {319, 4, false},
		"enough for bursts of CV 4":   {320, 4, true},
		"the bound of a measured CV²": {2000, 1e3, true},
	} {
		t.Run(name, func(t *testing.T) {
			r := newWatchRig(t)
			r.f().Demand.CV = tc.cv
			r.run(60, 0, 0)
			if _, known, _ := r.second(tc.n, 0); known != tc.known {
				t.Errorf("compared by %d tasks: %t, want %t", tc.n, known, tc.known)
			}
		})
	}
}

// TestWatchForgetsRemovedFunctions checks that nothing of a removed function is kept.
func TestWatchForgetsRemovedFunctions(t *testing.T) {
	r := newWatchRig(t)
	r.run(90, 100, 0)
	kept := r.s.Functions
	r.s.Rev, r.s.Functions = r.s.Rev+1, nil
	if all, _ := r.w.Observe(&r.s); len(all) != 0 || len(r.w.functions) != 0 {
		t.Errorf("%v and %v of a removed function", all, r.w.functions)
	}
	r.s.Functions = kept
	if known, _, _ := r.run(60, 100, 0); known != 0 {
		t.Errorf("%d comparisons of a function that came back, want a minute first", known)
	}
}

// TestWatchTakesEarlyTicks checks that Snapshots in quick succession change neither the memory nor
// the result.
func TestWatchTakesEarlyTicks(t *testing.T) {
	r := newWatchRig(t)
	for range 61 {
		r.run(1, 100, 5*ms)
		for range 50 {
			r.s.Rev++
			r.s.At = r.s.At.Add(ms)
			r.w.Observe(&r.s)
		}
	}
	if e, known, _ := r.second(100, 5*ms); !known || (e.Stayed-15*ms).Abs() > time.Microsecond || len(r.w.functions["f"].marks) > watchMarks {
		t.Errorf("%+v, %v, %d sums", e, known, len(r.w.functions["f"].marks))
	}
}
