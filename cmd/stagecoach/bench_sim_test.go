package main

import (
	"math"
	"slices"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// TestBenchSim runs a short load on a real `up` and simulates it: as many requests, and about the same mean. What `up` costs on this
// machine now is measured before. The bound is wide, because machines that test do other things meanwhile; `make bench-sim` has the real one.
func TestBenchSim(t *testing.T) {
	r := start(t)
	cost, err := measureCosts(t.Context(), r.Client, 3*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	c := simCase{name: "short", rate: "8:6s", items: 6, cv: 1, slo: time.Second, stages: link([]simStage{
		{name: "short-1", mean: 30 * time.Millisecond, cv: 0.1, each: true, replicas: 2},
		{name: "short-2", mean: 60 * time.Millisecond, cv: 0.1, replicas: 1},
		{name: "short-3", mean: 60 * time.Millisecond, cv: 0.1, replicas: 1},
	})}
	if err := deployAll(t.Context(), r.Client, c.deployments()); err != nil {
		t.Fatal(err)
	}
	const tries = 3 // a machine that stands still for a second spoils one
	for seed := uint64(1); ; seed++ {
		is, err := c.load(t.Context(), r.Client, seed)
		if err != nil {
			t.Fatal(err)
		}
		want, err := c.simulate(t.Context(), cost, seed)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("costs %+v; real %+v, simulated %+v", cost, is, want)
		if is.requests != want.requests || is.requests < 20 || is.failed != 0 || want.failed != 0 {
			t.Errorf("%.0f requests, of which %.0f failed; simulated %.0f, of which %.0f: want as many, and that none fails", is.requests, is.failed, want.requests, want.failed)
		}
		if is.replicaSeconds != 24 || want.replicaSeconds != 24 {
			t.Errorf("%g replica-seconds, simulated %g, want four replicas for six seconds", is.replicaSeconds, want.replicaSeconds)
		}
		if math.Abs(want.mean/is.mean-1) <= 0.25 {
			return
		}
		if seed == tries {
			t.Fatalf("%d times a request took another time than in the simulator, now %.0f ms and not %.0f ms; want them within 25 %%", tries, is.mean*1e3, want.mean*1e3)
		}
	}
}

// TestSimCases: each case is one that the simulator takes.
func TestSimCases(t *testing.T) {
	for _, c := range simCases(6 * time.Second) {
		got, err := c.simulate(t.Context(), costs{time.Millisecond, time.Millisecond, 20 * time.Millisecond}, 1)
		if err != nil || got.requests < 20 || got.failed > 0 || got.mean <= 0 {
			t.Errorf("%s: %+v, %v", c.name, got, err)
		}
	}
}

// TestReplicaSeconds counts replicas from their orders to their ends, within the window.
func TestReplicaSeconds(t *testing.T) {
	zero := time.Unix(1000, 0)
	at := func(s int, replica, kind string) schema.Event {
		return schema.Event{At: zero.Add(time.Duration(s) * time.Second), Replica: replica, Kind: kind}
	}
	events := []schema.Event{
		at(-9, "before", "ordered"), at(-8, "before", "ready"), at(-9, "past", "ordered"), at(-2, "past", "stopped"),
		at(4, "step", "ordered"), at(5, "step", "ready"), at(6, "step", "first answer"), at(7, "step", "draining"), at(8, "step", "stopped"),
		at(8, "broken", "ordered"), at(9, "broken", "failed"), at(9, "late", "ordered"), at(11, "late", "ready"), at(12, "late", "first answer"),
		at(12, "later", "ordered"),
	}
	if got := replicaSeconds(events, zero, zero.Add(10*time.Second)); got != 10+4+1+1 {
		t.Errorf("%g replica-seconds, want 10 of one that was there before, 4, 1 of one that failed, 1 of one that starts", got)
	}
	forgotten := []schema.Event{at(3, "old", "stopped")} // its order is no longer in the timeline
	if got := replicaSeconds(forgotten, zero, zero.Add(10*time.Second)); got != 3 {
		t.Errorf("%g replica-seconds, want 3", got)
	}
	for _, tc := range []struct{ from, to, want int }{{0, 10, 6}, {5, 10, 12}, {10, 20, 0}, {-10, 3, 0}} {
		got := firstAnswer(events, zero.Add(time.Duration(tc.from)*time.Second), zero.Add(time.Duration(tc.to)*time.Second))
		if tc.want == 0 && !got.IsZero() || tc.want > 0 && !got.Equal(at(tc.want, "", "").At) {
			t.Errorf("of those ordered from %d to %d the first answered at %v, want %d", tc.from, tc.to, got, tc.want)
		}
	}
}

// TestReportPairs: medians, differences round by round, verdicts.
func TestReportPairs(t *testing.T) {
	is := func(mean, p99 float64) outcome { return outcome{requests: 9, mean: mean, p50: math.NaN(), p99: p99} }
	var r bench.Report
	reportPairs(&r, "x", [][2]outcome{{is(1, 1), is(1.04, 1)}, {is(2, 1), is(1.8, 1.2)}, {is(4, 1), is(4.24, 1.2)}})
	of := func(name, metric string) float64 {
		i := slices.IndexFunc(r.Results, func(f bench.Result) bool { return f.Case == name && f.Metric == metric })
		if i < 0 {
			return math.NaN()
		}
		return math.Round(r.Results[i].Value*1e6) / 1e6
	}
	if of("x mean_ms", "real") != 2000 || of("x mean_ms", "simulated") != 1800 || of("x mean_ms", "difference_percent") != 4 {
		t.Errorf("mean: %+v", r.Results)
	}
	if !math.IsNaN(of("x p50_ms", "real")) || of("x requests", "difference_percent") != 0 || of("x failed", "real") != 0 {
		t.Errorf("%+v", r.Results)
	}
	if len(r.Goals) != 2 || !r.Goals[0].Met || r.Goals[1].Met {
		t.Errorf("goals %+v, want that of the mean met at 4 %%, and that of p99 missed at 20 %%", r.Goals)
	}
}
