package sim

import (
	"testing"
	"time"
)

// TestDisk checks that a node's disk reads parameters for one stage after another, while another
// node reads at the same time.
func TestDisk(t *testing.T) {
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
		if path, took := w.nodes[0].start(w, w.lines[i], false); path != "cold" || took != want {
			t.Errorf("start %d: %s, %v, want cold, %v", i, path, took, want)
		}
	}
	if _, took := w.nodes[1].start(w, w.lines[1], false); took != 2*time.Second {
		t.Errorf("on another node: %v, want 2s", took)
	}
	w.now = int64(time.Minute)
	if _, took := w.nodes[1].start(w, w.lines[2], false); took != 2*time.Second {
		t.Errorf("when the disk has nothing to do: %v, want 2s", took)
	}
}
