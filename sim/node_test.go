package sim

import (
	"testing"
	"time"
)

// TestDiskReadsForOneStageAfterAnother checks that loads from one disk queue up, and that another
// node's disk is independent of them.
func TestDiskReadsForOneStageAfterAnother(t *testing.T) {
	w, err := model(t, `
nodes: [{name: n, count: 2, memory: 16Gi, cpu: 100}]
pipelines: [{name: p, arrivals: {rate: "1"}}]
stages:
- &stage {name: s, next: t, service: {mean: 10ms}, start: {cold: 2s, fork: 500ms}, parameters: 4Gi}
- {<<: *stage, name: t, next: u}
- {<<: *stage, name: u, next: []}
`).newWorld(0, 1)
	if err != nil {
		t.Fatal(err)
	}
	w.now = int64(time.Second)
	w.nodes[0].warm(w, w.lines[0], false, false)
	for i, want := range []time.Duration{2 * time.Second, 3500 * time.Millisecond, 5 * time.Second} {
		if path, took, ok := w.nodes[0].start(w, w.lines[i], false); path != "cold" || took != want || !ok {
			t.Errorf("start %d: %s, %v, want cold, %v", i, path, took, want)
		}
	}
	if _, took, _ := w.nodes[1].start(w, w.lines[1], false); took != 2*time.Second {
		t.Errorf("on another node: %v, want 2s", took)
	}
	w.now = int64(time.Minute)
	if _, took, _ := w.nodes[1].start(w, w.lines[2], false); took != 2*time.Second {
		t.Errorf("when the disk has nothing to do: %v, want 2s", took)
	}
}

// TestNoReplicaStartsWithoutRoomForItsParameters checks that no replica starts if its parameters do
// not fit below the threshold of memory.
func TestNoReplicaStartsWithoutRoomForItsParameters(t *testing.T) {
	t.Parallel()
	r := simulate(t, `
duration: 20s
seeds: 1
nodes: [{memory: 10Gi, cpu: 100}]
pipelines: [{name: p, timeout: 5s, arrivals: {rate: "0.5"}}]
stages: [{name: s, zero: true, service: {mean: 10ms}, start: {cold: 1s, fork: 10ms}, parameters: 9Gi}]
`)
	s, p := r.Policies[0].Stages[0], r.Policies[0].Pipelines[0]
	if len(s.Starts) > 0 || p.Failed.Mean != 1 || s.Short.Mean == 0 || s.ShortWhy != "no room for its parameters on node1" {
		t.Errorf("started %v, %g of requests failed, short %g times: %q; want no start, and why", s.Starts, p.Failed.Mean, s.Short.Mean, s.ShortWhy)
	}
}

// TestShortMemoryUnparksAndEvicts checks that a load unparks children, that a replica above the
// threshold of memory evicts idle parameters, and that nothing is loaded ahead of need for ten
// seconds after that.
func TestShortMemoryUnparksAndEvicts(t *testing.T) {
	t.Parallel()
	w, err := model(t, `
nodes: [{memory: 20Gi, cpu: 100, gpus: 1, gpuMemory: 80Gi}]
pipelines: [{name: p, arrivals: {rate: "1"}}]
stages:
- &stage {name: a, next: b, service: {mean: 10ms}, gpu: 1, start: {cold: 2s, fork: 500ms, parked: 100ms}, parameters: 8Gi}
- {<<: *stage, name: b, next: c, parameters: 4Gi}
- {<<: *stage, name: c, next: [], parameters: 1Gi, memory: 10Gi}
`).newWorld(0, 1)
	if err != nil {
		t.Fatal(err)
	}
	n, now := w.nodes[0], time.Duration(0)
	pass := func(d time.Duration) {
		now += d
		w.now, w.clock = int64(now), epoch.Add(now)
	}
	n.keys = []int{0}
	n.warm(w, w.lines[0], true, true)
	n.mark(w)
	pass(time.Second)
	if z := n.zygotes[0]; z == nil || !z.parked(w) {
		t.Fatalf("%+v, want a key stage's parameters and a parked child", z)
	}
	n.warm(w, w.lines[1], false, true)
	if n.warm(w, w.lines[2], false, true); n.zygotes[1] == nil || n.zygotes[2] == nil || n.used != 13<<30 {
		t.Errorf("%d bytes in use, want all three", n.used)
	}
	n.zygotes[0].users++
	n.zygotes[0].using(w)
	n.take(w, &replica{line: w.lines[2]}, 1)
	n.tidy(w)
	if n.zygotes[0] == nil || n.zygotes[0].parked(w) || n.zygotes[1] == nil {
		t.Error("a parked child is there while memory is short, or more was evicted than it")
	}
	n.tidy(w)
	if n.zygotes[0] == nil || n.zygotes[1] != nil || n.zygotes[2] == nil {
		t.Error("want the idle parameters gone, and none with replicas")
	}
	n.take(w, &replica{line: w.lines[2]}, -1)
	n.tidy(w)
	for _, d := range []time.Duration{9 * time.Second, 2 * time.Second} {
		pass(d)
		n.warm(w, w.lines[0], true, true)
		n.warm(w, w.lines[1], false, true)
		pass(0)
		later := now >= 12*time.Second
		if there := n.zygotes[1] != nil; there != later || n.zygotes[0].parking == never == later {
			t.Errorf("after %v: loaded %v, a child parked %v, want %v of both", now-time.Second, there, n.zygotes[0].parking != never, later)
		}
	}
}

// TestStagesFindNodesWithRoomForTheirParameters has as much memory as all parameters need, two
// stages per node. A node that has no room must not be chosen again and again.
func TestStagesFindNodesWithRoomForTheirParameters(t *testing.T) {
	t.Parallel()
	r := simulate(t, `
duration: 60s
seeds: 1
nodes: [{count: 4, memory: 16Gi, cpu: 100}]
pipelines: [{name: p, timeout: 20s, arrivals: {rate: "20"}}]
stages:
- &s {name: s1, next: [s2], service: {mean: 40ms}, start: {cold: 1s, fork: 10ms}, parameters: 5Gi, max: 4}
- {<<: *s, name: s2, next: [s3]}
- {<<: *s, name: s3, next: [s4]}
- {<<: *s, name: s4, next: [s5]}
- {<<: *s, name: s5, next: [s6]}
- {<<: *s, name: s6, next: [s7]}
- {<<: *s, name: s7, next: [s8]}
- {<<: *s, name: s8, next: []}
`)
	if p := r.Policies[0].Pipelines[0]; p.Failed.Mean > 0.05 {
		t.Errorf("%g of requests failed, want few", p.Failed.Mean)
		for _, s := range r.Policies[0].Stages {
			t.Logf("%s: starts %v, short %v: %s", s.Name, s.Starts, s.Short.Mean, s.ShortWhy)
		}
	}
}
