package baseline

import (
	"math"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan/plantest"
)

func TestKPAIsAnAllocator(t *testing.T) {
	t.Parallel()
	plantest.Run(t, NewKPA(KPAConfig{}))
}

// TestKPAScales runs the examples of Knative's own tests (pkg/autoscaler/scaling, TestAutoscaler…).
// A count may rise and fall tenfold per decision, unless an example sets other rates. Times are in
// seconds since the first decision.
func TestKPAScales(t *testing.T) {
	type step struct {
		at, stable, panicked float64
		ready, want          int
		panics               bool
	}
	for name, tc := range map[string]struct {
		target, up, down float64
		steps            []step
	}{
		"StableModeIncrease":                    {10, 10, 10, []step{{0, 50, 10, 1, 5, false}, {0, 100, 10, 1, 10, false}}},
		"StableModeDecrease":                    {10, 10, 10, []step{{0, 100, 100, 8, 10, false}, {0, 50, 50, 8, 5, false}}},
		"StableModeNoTrafficScaleToZero":        {10, 10, 10, []step{{0, 1, 0, 1, 1, false}, {2, 0, 0, 1, 0, false}}},
		"StableModeIncreaseWithSmallRate":       {1, 1.1, 10, []step{{0, 3, 3.1, 2, 3, true}}},
		"StableModeDecreaseWithSmallRate":       {10, 10, 1.1, []step{{0, 1, 1, 100, 90, false}}},
		"PanicModeDoublePodCount":               {10, 10, 10, []step{{0, 50, 100, 1, 10, true}}},
		"PanicModeExponentialTrackAndStabilize": {1, 10, 10, []step{{0, 6, 6, 1, 6, true}, {0, 36, 36, 6, 36, true}, {1, 216, 216, 36, 216, true}, {1, 1296, 1296, 216, 1296, true}, {2, 1296, 1296, 1296, 1296, true}}},
		"UnpanicAfterSlowIncrease":              {1, 10, 10, []step{{0, 11, 25, 10, 25, true}, {30, 30, 41, 40, 41, true}, {62, 50, 56, 55, 50, false}}},
		"ExtendPanicWindow":                     {1, 10, 10, []step{{0, 11, 25, 10, 25, true}, {30, 30, 80, 40, 80, true}, {75, 30, 30, 80, 80, true}, {91, 30, 30, 80, 30, false}}},
		"PanicThenUnPanicScaleDown":             {10, 10, 10, []step{{0, 100, 100, 1, 10, true}, {0, 100, 1000, 10, 100, true}, {30, 1, 1, 10, 100, true}, {61, 1, 1, 10, 1, false}}},
		"PanicStableLargerThanPanic":            {1, 10, 10, []step{{0, 50, 30, 5, 50, true}}},
		"RateLimitScaleUp":                      {10, 10, 10, []step{{0, 1000, 1001, 1, 10, true}, {0, 1000, 1001, 10, 100, true}}},
		"RateLimitScaleDown":                    {10, 10, 10, []step{{0, 1, 1, 100, 10, false}, {0, 1, 1, 10, 1, false}}},
		"defaults halve":                        {0.7, 0, 0, []step{{0, 1, 1, 9, 4, false}, {2, 1, 1, 4, 2, false}}},
	} {
		t.Run(name, func(t *testing.T) {
			k, past := NewKPA(KPAConfig{Up: tc.up, Down: tc.down}), KPAPast{}
			for i, s := range tc.steps {
				past = k.scale(past, began.Add(time.Duration(s.at*float64(time.Second))), s.stable, s.panicked, tc.target, s.ready)
				if past.Count != s.want || past.Panic.IsZero() == s.panics {
					t.Errorf("step %d: %d, panics since %v, want %d, panic %v", i, past.Count, past.Panic, s.want, s.panics)
				}
			}
		})
	}
}

// TestKPAAveragesOverWindows compares averages over windows with averages from the whole history.
func TestKPAAveragesOverWindows(t *testing.T) {
	k := NewKPA(KPAConfig{Panic: 0.125})
	if w := k.cfg.panicWindow(); w != 8*time.Second { // 7.5 rounded
		t.Errorf("panic window of %v", w)
	}
	var p KPAPast
	var area [200]float64 // per second
	tasks, at := 0.0, began
	for i := range 700 {
		next := float64(i % 17)
		dt := 250 * time.Millisecond
		p.look(at, next, k.cfg.Stable)
		if i > 0 {
			area[at.Sub(began)/time.Second] += (tasks + next) / 2 * dt.Seconds()
		}
		tasks = next
		second := int(at.Sub(began) / time.Second)
		for _, window := range []int{60, 8} {
			want, seconds := 0.0, at.Sub(began).Seconds()
			for s := max(second-window+1, 0); s <= second; s++ {
				want += area[s]
			}
			if second >= window {
				seconds = float64(window-1) + float64(at.Sub(began)%time.Second+dt)/1e9
			}
			if got := p.average(at, time.Duration(window)*time.Second); seconds > 0 && math.Abs(got-want/seconds) > 1e-9 {
				t.Fatalf("look %d: %g tasks over %d s, want %g", i, got, window, want/seconds)
			}
		}
		at = at.Add(dt)
	}
	if n := len(p.Buckets); n != 60 {
		t.Errorf("%d seconds are remembered, want 60", n)
	}
	p.look(began, 5, k.cfg.Stable)
	if len(p.Buckets) > 0 || p.average(began, time.Minute) != 0 {
		t.Errorf("after the clock was set back: %+v", p)
	}
}

// TestKPASleepsAfterAStableWindow checks that a function that may sleep does so after a stable
// window without tasks, and wakes at once.
func TestKPASleepsAfterAStableWindow(t *testing.T) {
	k, m := NewKPA(KPAConfig{}), KPAMemory{}
	f := plan.Function{Name: "f", Revision: 1, Zero: true, Max: 10}
	at := func(seconds float64, waiting int) int {
		t.Helper()
		f.Waiting = waiting
		a, next, err := k.Allocate(plan.Snapshot{At: began.Add(time.Duration(seconds * 1e9)), Functions: []plan.Function{f}}, plan.Domain{Functions: []string{"f"}}, m)
		if err != nil {
			t.Fatal(err)
		}
		m, f.Replicas = next, copies(a[0].Count, plan.Ready)
		return a[0].Count
	}
	for second := range 200 {
		waiting := 0
		if second == 10 {
			waiting = 1
		}
		want := 1         // initial-scale
		if second >= 72 { // the task counts in seconds 10 and 11, and every other second has a decision
			want = 0
		}
		if got := at(float64(second), waiting); got != want {
			t.Fatalf("%d s: %d, want %d", second, got, want)
		}
	}
	if got := at(199.1, 3); got == 0 {
		t.Error("it sleeps on while tasks wait")
	}
	f.ZeroAge = 90 * time.Second
	for second := 200; second < 289; second++ {
		if got := at(float64(second), 0); got == 0 {
			t.Fatalf("%d s: it sleeps, want it awake for the %v that it asks for", second, f.ZeroAge)
		}
	}
	if got := at(291, 0); got != 0 {
		t.Errorf("%d, want it to sleep", got)
	}
}

// TestKPAKeepsTheCountUntilItKnowsEnough checks that KPA starts in panic, so that the present count
// stays until enough is known.
func TestKPAKeepsTheCountUntilItKnowsEnough(t *testing.T) {
	for there, want := range map[int]int{1: 1, 6: 6} {
		k, m := NewKPA(KPAConfig{}), KPAMemory(nil)
		f := plan.Function{Name: "f", Revision: 1, Min: 1, Max: 10, Replicas: copies(there, plan.Ready)}
		for second := range 64 {
			a, next, err := k.Allocate(plan.Snapshot{At: began.Add(time.Duration(second) * time.Second), Functions: []plan.Function{f}}, plan.Domain{Functions: []string{"f"}}, m)
			if err != nil {
				t.Fatal(err)
			}
			if second >= 62 { // a stable window later; at most by half
				want = max(there/2, 1)
			}
			if m = next; a[0].Count != want {
				t.Fatalf("%d s: %d, want %d: %s", second, a[0].Count, want, a[0].Why)
			}
		}
	}
}
