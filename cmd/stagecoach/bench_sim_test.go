package main

import (
	"math"
	"testing"
	"time"
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
		want, err := simulate(t.Context(), &c, cost, seed)
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
