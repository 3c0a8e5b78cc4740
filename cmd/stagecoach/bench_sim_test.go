package main

import (
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench/running"
	simbench "github.com/stagecoach-serving/stagecoach/bench/sim"
)

// TestBenchSim measures the costs of a real `up`, and runs a short load on it and on the simulator.
// Both must count the same requests. How long a real request takes depends on the machine's other
// work, which can only make it longer. So the simulator's mean without any cost is a lower bound of
// the real mean. `make bench-sim` compares the means with costs, on an idle machine.
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
	cost, err := simbench.MeasureCosts(t.Context(), r.Client, 3*time.Second)
	if err != nil || cost == (simbench.Costs{}) {
		t.Fatalf("costs %+v, %v, want some", cost, err)
	}
	is, err := c.Load(t.Context(), r.Client, 1)
	if err != nil {
		t.Fatal(err)
	}
	simulate := func(cost simbench.Costs) running.Outcome {
		want, err := simbench.Simulate(t.Context(), &c, cost, 1)
		if err != nil {
			t.Fatal(err)
		}
		if is.Requests != want.Requests || is.Requests < 20 || is.Failed != 0 || want.Failed != 0 {
			t.Errorf("%.0f requests, of which %.0f failed; simulated %.0f, of which %.0f: want as many, and that none fails", is.Requests, is.Failed, want.Requests, want.Failed)
		}
		if is.ReplicaSeconds != 24 || want.ReplicaSeconds != 24 {
			t.Errorf("%g replica-seconds, simulated %g, want four replicas for six seconds", is.ReplicaSeconds, want.ReplicaSeconds)
		}
		return want
	}
	free, costly := simulate(simbench.Costs{}), simulate(cost)
	// Both draw the times of their calls, so the means differ by a few percent.
	if is.Mean < 0.9*free.Mean || costly.Mean <= free.Mean {
		t.Errorf("a request took %.0f ms; simulated %.0f ms, and %.0f ms without costs; want no less without costs", is.Mean*1e3, costly.Mean*1e3, free.Mean*1e3)
	}
	t.Logf("costs %+v; real %+v, simulated %+v", cost, is, costly)
}
