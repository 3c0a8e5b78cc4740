package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

func (w *world) observe() plan.Snapshot {
	w.t.Helper()
	s, err := w.l.Observe(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	return s
}

// TestObserveHasWhatIsMeasured checks that the Snapshot has the lines' measurements, and marks
// missing ones as unknown.
func TestObserveHasWhatIsMeasured(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, _ *Local) {
		if f := w.observe().Functions[0]; f.Demand.Known || f.Service.Known || f.Wait.Known || f.Busy.Known || f.Starts != nil || f.CPUNow != 0 || f.Target.Type != "" {
			t.Errorf("%+v of a function that was never asked, want nothing known", f)
		}
		is := plan.Signals{
			Demand:  plan.Demand{Known: true, Rate: 12, CV: 3},
			Service: plan.Service{Known: true, Mean: time.Second, CV: 0.5, Batches: []plan.Batched{{Size: 4, Mean: 4 * time.Second, N: 7}}},
			Wait:    plan.Wait{Known: true, Mean: 1, P50: 2, P95: 3, P99: 4, Oldest: 5},
			Busy:    plan.Busy{Known: true, Share: 0.75}, Waiting: 8, Running: 9, Survived: 3,
		}
		w.set(func() { w.signals = map[string]plan.Signals{"f.ns": is}; w.last["f.ns"] = time.Now() })
		is.Demand.Last = time.Now().UTC().Round(0)
		f := w.observe().Functions[0]
		if got := (plan.Signals{Demand: f.Demand, Service: f.Service, Wait: f.Wait, Busy: f.Busy, Waiting: f.Waiting, Running: f.Running, Survived: f.Survived}); !reflect.DeepEqual(got, is) {
			t.Errorf("%+v, want %+v", got, is)
		}
	})
}

// TestObserveHasWhatIsExpected checks that only idle functions have expected requests, including
// one that was scaled to 0 by hand, and that Expected is not called if no function is idle.
func TestObserveHasWhatIsExpected(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		if got := w.observe().Functions[0].Expected; got != 0 {
			t.Errorf("%d expected, want 0 where nobody knows", got)
		}
		asked := 0
		l.cfg.Expected = func() map[string]int { asked++; return map[string]int{"f.ns": 7, "other.ns": 1} }
		if got := w.observe().Functions[0].Expected; got != 7 || asked != 1 {
			t.Errorf("%d expected, asked %d times, want 7, once", got, asked)
		}
		if err := l.Scale(t.Context(), pipeline.ParseKey("f.ns"), 0); err != nil {
			t.Fatal(err)
		}
		if f := w.observe().Functions[0]; !f.Ahead() || asked != 2 {
			t.Errorf("scaled to 0 by hand: %+v, asked %d times, want it to be woken ahead of need", f, asked)
		}
		for _, is := range []plan.Signals{{Waiting: 1}, {Running: 1}} {
			w.set(func() { w.signals = map[string]plan.Signals{"f.ns": is} })
			if got := w.observe().Functions[0].Expected; got != 0 || asked != 2 {
				t.Errorf("%+v: %d expected, asked %d times, want 0, and nobody asked again", is, got, asked)
			}
		}
	})
}

// TestASnapshotIsJSON checks that a Snapshot can be recorded, whatever was measured, and is read
// back unchanged.
func TestASnapshotIsJSON(t *testing.T) {
	for _, bad := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
		bubble(t, func(t *testing.T, w *world, _ *Local) {
			w.specs = nil
			for i, kind := range []string{"", "rps", "capacity", "cpu"} {
				f := spec(fmt.Sprint("f", i), 1)
				f.declare(pipeline.Scale{Type: kind, Target: 10, Proportion: 0.5})
				w.specs = append(w.specs, f)
			}
			is := plan.Signals{
				Demand: plan.Demand{Known: true, Rate: bad, CV: 1}, Service: plan.Service{Known: true, Mean: 1, CV: bad}, Busy: plan.Busy{Known: true, Share: bad},
			}
			w.signals = map[string]plan.Signals{"f0.ns": is, "f1.ns": is, "f2.ns": {Demand: plan.Demand{Known: true, Rate: 1, CV: bad}}}
			w.usage = map[string]float64{"f3.ns": bad}
			w.last["f1.ns"] = time.Now()
			s := w.observe()
			for _, f := range s.Functions {
				if f.Demand.Known || f.Service.Known || f.Busy.Known || f.Target.Known != (f.Target.Type == "capacity") {
					t.Errorf("%+v, want what is no number to be unknown", f)
				}
			}
			b, err := json.Marshal(s)
			if err != nil {
				t.Fatal(err)
			}
			var back plan.Snapshot
			if err := json.Unmarshal(b, &back); err != nil || !reflect.DeepEqual(s, back) {
				t.Errorf("came back as %+v (%v), want %+v", back, err, s)
			}
		})
	}
}

func TestTargetsHaveTheMeasuredLoad(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, _ *Local) {
		is := plan.Signals{Demand: plan.Demand{Known: true, Rate: 70}, Waiting: 5, Running: 3}
		for name, tc := range map[string]struct {
			scale  pipeline.Scale
			is     plan.Signals
			usage  map[string]float64
			want   plan.Target
			metric float64 // the load
		}{
			"none is asked for": {is: is},
			"rps":               {pipeline.Scale{Type: "rps", Target: 50, Proportion: 0.7}, is, nil, plan.Target{Type: "rps", Value: 35, Load: 70, Known: true}, 70},
			"rps, never asked":  {pipeline.Scale{Type: "rps", Target: 50, Proportion: 0.7}, plan.Signals{}, nil, plan.Target{Type: "rps", Value: 35}, 0},
			"capacity":          {pipeline.Scale{Type: "capacity", Target: 10, Proportion: 1}, is, nil, plan.Target{Type: "capacity", Value: 10, Load: 8, Known: true}, 8},
			"cpu":               {pipeline.Scale{Type: "cpu", Target: 500, Proportion: 0.5}, is, map[string]float64{"f.ns": 1200}, plan.Target{Type: "cpu", Value: 250, Load: 1200, Known: true}, 1200},
			"cpu, not measured": {pipeline.Scale{Type: "cpu", Target: 500, Proportion: 0.5}, is, map[string]float64{"g.ns": 1200}, plan.Target{Type: "cpu", Value: 250}, 0},
		} {
			w.set(func() {
				w.specs[0].declare(tc.scale)
				w.signals, w.usage, w.measured = map[string]plan.Signals{"f.ns": tc.is}, tc.usage, nil
			})
			if got := w.observe().Functions[0].Target; got != tc.want {
				t.Errorf("%s: %+v, want %+v", name, got, tc.want)
			}
			if asked := len(w.measured) > 0; asked != (tc.scale.Type == "cpu") {
				t.Errorf("%s: CPU was measured for %v", name, w.measured)
			}
			for series, want := range map[string]float64{"stagecoach_cluster_target_load": tc.metric, "stagecoach_cluster_target": tc.want.Value} {
				if got := w.metric(series); got != want {
					t.Errorf("%s: %s is %v, want %v", name, series, got, want)
				}
			}
		}
	})
}

// metric returns the only series of a metric; 0: there is none.
func (w *world) metric(name string) float64 {
	w.t.Helper()
	families, err := w.registry.Gather()
	if err != nil {
		w.t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == name {
			if len(f.GetMetric()) != 1 {
				w.t.Fatalf("%d series of %s, want one", len(f.GetMetric()), name)
			}
			return f.GetMetric()[0].GetGauge().GetValue()
		}
	}
	return 0
}

func TestEdgesSkipUnknownStages(t *testing.T) {
	stage := func(name string, next ...string) pipeline.Stage {
		s := pipeline.Stage{Function: pipeline.Function{Name: name, Namespace: "ns"}}
		for _, to := range next {
			s.Next = append(s.Next, pipeline.Edge{To: to})
		}
		return s
	}
	for name, tc := range map[string]struct {
		stages []pipeline.Stage
		want   []plan.Edge
	}{
		"none":                {},
		"alone":               {stages: []pipeline.Stage{stage("a")}},
		"a line":              {[]pipeline.Stage{stage("a", "b"), stage("b", "c"), stage("c")}, []plan.Edge{{From: 0, To: 1}, {From: 1, To: 2}}},
		"a diamond":           {[]pipeline.Stage{stage("a", "c", "b"), stage("b", "d"), stage("c", "d"), stage("d")}, []plan.Edge{{From: 0, To: 1}, {From: 0, To: 2}, {From: 1, To: 3}, {From: 2, To: 3}}},
		"to what is not here": {[]pipeline.Stage{stage("a", "gone", "b"), stage("b")}, []plan.Edge{{From: 0, To: 1}}},
		"a faulty circle":     {[]pipeline.Stage{stage("a", "b"), stage("b", "a", "b")}, []plan.Edge{{From: 0, To: 1}}},
	} {
		if got := edges(&pipeline.Pipeline{Stages: tc.stages}); !reflect.DeepEqual(got, tc.want) {
			t.Errorf("%s: %v, want %v", name, got, tc.want)
		}
	}
}

// TestSnapshotsHaveWhatVariantsNeed observes a pipeline that asks for policies, with a stage that
// has one call per item and a variant.
func TestSnapshotsHaveWhatVariantsNeed(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		entry := pipeline.Stage{Function: pipeline.Function{Name: "f", Namespace: "ns", Policies: pipeline.Policies{Allocator: "accuracy", Rank: "fair", Route: "even"}}, Next: []pipeline.Edge{{To: "g"}}}
		each := pipeline.Stage{Function: pipeline.Function{Name: "g", Namespace: "ns", Each: true, Policies: pipeline.Policies{Rank: "fifo"}}}
		stage := plan.Demand{Known: true, Rate: 7, CV: 1}
		w.set(func() {
			w.pipelines = []pipeline.Pipeline{{Name: "p", Namespace: "ns", Entry: "f", Stages: []pipeline.Stage{entry, each}}}
			w.signals = map[string]plan.Signals{"f.ns": {Stage: stage, Items: plan.Items{Known: true, Mean: 2.5}}}
		})
		s, err := l.Observe(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		p, f := s.Pipelines[0], s.Functions[0]
		if p.Chosen != (plan.Chosen{Allocator: "accuracy", Rank: "fair", Route: "even"}) || !reflect.DeepEqual(p.Edges, []plan.Edge{{From: 0, To: 1, Each: true}}) {
			t.Errorf("pipeline %+v, want the entry's policies, and one call per item", p)
		}
		if !f.Stage.Known || f.Stage.Rate != 7 || f.Items.Mean != 2.5 {
			t.Errorf("stage %+v, items %+v, want what was measured", f.Stage, f.Items)
		}
		w.set(func() {
			w.signals["f.ns"] = plan.Signals{Stage: plan.Demand{Known: true, Rate: math.NaN()}, Items: plan.Items{Known: true, Mean: math.Inf(1)}}
		})
		if s, err = l.Observe(t.Context()); err != nil || s.Functions[0].Stage.Known || s.Functions[0].Items.Known {
			t.Errorf("stage %+v, items %+v, %v, want figures left out that JSON cannot hold", s.Functions[0].Stage, s.Functions[0].Items, err)
		}
	})
}

func TestStartsAverageRecentTimes(t *testing.T) {
	var s starts
	for i := range 100 {
		s.add("fork", 10*time.Millisecond)
		if i < 2 {
			s.add("cold", time.Duration(i+1)*time.Second)
		}
	}
	want := []plan.Start{{Path: "cold", Mean: 1500 * time.Millisecond, N: 2}, {Path: "fork", Mean: 10 * time.Millisecond, N: startsKept}}
	if got := slices.Clone([]plan.Start(s)); !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
	for range 30 {
		s.add("fork", 50*time.Millisecond)
	}
	if got := slices.Clone([]plan.Start(s))[1].Mean; got < 49*time.Millisecond || want[1].Mean != 10*time.Millisecond {
		t.Errorf("%v after 30 starts of 50ms, want about that", got)
	}
	for i := range 100 {
		s.add(fmt.Sprint("path", i), time.Second)
	}
	if len(s) > pathsKept {
		t.Errorf("%d paths, want at most %d", len(s), pathsKept)
	}
}

// TestObserveHasStartsAndCPU checks that starts are those of ready replicas, and that CPU is their
// present limit.
func TestObserveHasStartsAndCPU(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.specs[0].CPULimit = 1000
		w.attach = after(300 * time.Millisecond)
		p := w.want(2)
		if f := w.observe().Functions[0]; f.Starts != nil || f.CPULimit != 1000 || f.CPUNow != 0 {
			t.Errorf("%+v while they start, want no starts and the CPU declared", f)
		}
		time.Sleep(300 * time.Millisecond)
		synctest.Wait()
		if got, want := w.observe().Functions[0].Starts, []plan.Start{{Path: "fork", Mean: 300 * time.Millisecond, N: 2}}; !reflect.DeepEqual(got, want) {
			t.Errorf("starts %+v, want %+v", got, want)
		}
		w.set(func() { w.setCPU = func(string) error { return context.DeadlineExceeded } })
		give := func(milli int) {
			t.Helper()
			p, _ = w.plan(2)
			p.Wants[0].CPUMilli = milli
			if err := l.Apply(t.Context(), p); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		give(2000)
		if got := w.observe().Functions[0].CPUNow; got != 0 {
			t.Errorf("%dm now while the node does not do it, want as declared", got)
		}
		w.set(func() { w.setCPU = nil })
		time.Sleep(time.Minute)
		synctest.Wait()
		if got := w.observe().Functions[0].CPUNow; got != 2000 {
			t.Errorf("%dm now, want 2000m", got)
		}
		w.set(func() {
			w.setCPU = func(replica string) error {
				if replica == "f-00001" {
					return context.DeadlineExceeded
				}
				return nil
			}
		})
		give(500)
		if got := w.observe().Functions[0].CPUNow; got != 500 {
			t.Errorf("%dm now with one at 500m and one at 2000m, want the least", got)
		}
		w.set(func() { w.setCPU = nil })
		give(0)
		time.Sleep(time.Minute)
		synctest.Wait()
		if got := w.observe().Functions[0].CPUNow; got != 0 {
			t.Errorf("%dm now, want as declared", got)
		}
	})
}

func TestObserveHasTheBudget(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		if got := w.observe().Budget; got != 0 {
			t.Errorf("budget %d, want none", got)
		}
		l.cfg.Budget = 7
		if got := w.observe().Budget; got != 7 {
			t.Errorf("budget %d, want 7", got)
		}
		if n := testutil.CollectAndCount(l.metrics.aims); n != 1 {
			t.Errorf("%d series, want the budget", n)
		}
	})
}

// TestTheClockDoesNotJump checks that times in Snapshots differ by the time that has passed, even
// if the wall clock was set.
func TestTheClockDoesNotJump(t *testing.T) {
	start := time.Now()
	c := newClock(start)
	if !c.at(time.Time{}).IsZero() {
		t.Error("never is some time")
	}
	at := c.at(start.Add(time.Minute))
	if !at.Equal(start.Add(time.Minute)) || at != at.Round(0) || at.Location() != time.UTC {
		t.Errorf("%v, want a minute after %v, in UTC, without a monotonic reading", at, start)
	}
	bubble(t, func(t *testing.T, w *world, l *Local) {
		// As if the wall clock had been set forward by an hour.
		l.clock.wall = l.clock.wall.Add(-time.Hour)
		was := l.clock.wall
		w.set(func() { w.start = func(context.Context, node.Order) error { return errors.New("no") } })
		w.want(1)
		time.Sleep(time.Minute)
		w.set(func() { w.last["f.ns"] = time.Now().Add(-time.Second) })
		s := w.observe()
		if got := s.At.Sub(was); got != time.Minute {
			t.Errorf("%v since the start, want 1m", got)
		}
		if got := s.At.Sub(s.Functions[0].Demand.Last); got != time.Second {
			t.Errorf("the latest request was %v ago, want 1s", got)
		}
		if got := s.At.Sub(s.Functions[0].Failing.Until); got != time.Minute-firstBackoff {
			t.Errorf("the next start could be tried %v ago, want %v", got, time.Minute-firstBackoff)
		}
		if got := time.Since(w.told()[0].At); got != time.Minute {
			t.Errorf("people are told that it was ordered %v ago, want 1m", got)
		}
	})
}
