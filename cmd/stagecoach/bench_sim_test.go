package main

import (
	"math"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench/running"
	simbench "github.com/stagecoach-serving/stagecoach/bench/sim"
)

// TestBenchSim runs a short load on a real `up` and on the simulator. Both must count the same
// requests, and their mean times must be close. Before each load it measures the costs of `up` on
// this machine, which the simulator needs. They depend on the machine's other work. So the load
// keeps the stages half full: if a stage is nearly full, a small cost becomes a long wait. The
// bound on the means is wide for the same reason. `make bench-sim` has the real bound.
func TestBenchSim(t *testing.T) {
	r := start(t)
	c := running.Case{Name: "short", Rate: "8:6s", Items: 3, CV: 1, SLO: time.Second, Stages: running.Link([]running.Stage{
		{Name: "short-1", Mean: 30 * time.Millisecond, CV: 0.1, Each: true, Replicas: 2},
		{Name: "short-2", Mean: 40 * time.Millisecond, CV: 0.1, Replicas: 1},
		{Name: "short-3", Mean: 40 * time.Millisecond, CV: 0.1, Replicas: 1},
	})}
	if err := running.DeployAll(t.Context(), r.Client, c.Deployments()); err != nil {
		t.Fatal(err)
	}
	const tries = 5 // other work that begins or ends in the course of one spoils it
	for seed := uint64(1); ; seed++ {
		cost, err := simbench.MeasureCosts(t.Context(), r.Client, 3*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		is, err := c.Load(t.Context(), r.Client, seed)
		if err != nil {
			t.Fatal(err)
		}
		want, err := simbench.Simulate(t.Context(), &c, cost, seed)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("costs %+v; real %+v, simulated %+v", cost, is, want)
		if is.Requests != want.Requests || is.Requests < 20 || is.Failed != 0 || want.Failed != 0 {
			t.Errorf("%.0f requests, of which %.0f failed; simulated %.0f, of which %.0f: want as many, and that none fails", is.Requests, is.Failed, want.Requests, want.Failed)
		}
		if is.ReplicaSeconds != 24 || want.ReplicaSeconds != 24 {
			t.Errorf("%g replica-seconds, simulated %g, want four replicas for six seconds", is.ReplicaSeconds, want.ReplicaSeconds)
		}
		if math.Abs(want.Mean/is.Mean-1) <= 0.25 {
			return
		}
		if seed == tries {
			t.Fatalf("%d times a request took another time than in the simulator, now %.0f ms and not %.0f ms; want them within 25 %%", tries, is.Mean*1e3, want.Mean*1e3)
		}
	}
}
