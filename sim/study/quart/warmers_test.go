package quart

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/placement"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// cluster2 returns a snapshot of two key stages and one other, each with one replica. There are
// eight nodes with one device and a given memory each. Parameters are at replicas only.
func cluster2(memory int64) (plan.Snapshot, []plan.Want) {
	s := plan.Snapshot{Rev: 1, At: time.Unix(1000, 0)}
	var wants []plan.Want
	for i := range 8 {
		n := plan.Node{Name: fmt.Sprintf("n%d", i), Memory: memory, CPUMilli: 64_000}
		n.Devices = []plan.Device{{ID: "g0", Memory: 40}}
		s.Nodes = append(s.Nodes, n)
	}
	for i, name := range []string{"a", "b", "c"} {
		s.Functions = append(s.Functions, plan.Function{
			Name: name, Revision: 1, Min: 1, Max: 8, GPU: 1, Batch: 1, Slots: 1,
			Replicas: []plan.Replica{{Name: name + "-1", Revision: 1, Node: s.Nodes[i].Name, Device: "g0", State: plan.Ready}},
		})
		z := plan.Zygote{Function: name, Digest: name, Bytes: 10}
		s.Nodes[i].Zygotes = []plan.Zygote{z}
		s.Nodes[i].MemoryUsed = 10
		wants = append(wants, plan.Want{Function: name, Revision: 1, Slots: []plan.Slot{{Replica: name + "-1", Node: s.Nodes[i].Name, Device: "g0"}}, Batch: 1, Key: name != "c"})
	}
	return s, wants
}

// where returns the nodes on which each function's parameters should be.
func where(t *testing.T, w plan.Warmer, memory int64) (nodes map[string][]string, marks map[bool]int) {
	t.Helper()
	s, wants := cluster2(memory)
	out, err := w.Warm(s, wants)
	if err != nil {
		t.Fatal(err)
	}
	if !wants[0].Key {
		t.Error("the warmer changed its arguments")
	}
	nodes, marks = map[string][]string{}, map[bool]int{}
	for _, x := range out {
		nodes[x.Function] = append(nodes[x.Function], x.Node)
		marks[x.Key]++
	}
	return nodes, marks
}

// TestWarmersOfAblations checks that the ablation of the key list keeps all stages' parameters
// alike, and that the one of loads ahead of need loads none. Ours prefers key stages where memory
// is short.
func TestWarmersOfAblations(t *testing.T) {
	const short = 18 // an empty node takes one set of parameters, which is more than half
	ours, marks := where(t, placement.KeyStages{}, short)
	if len(ours["a"]) <= len(ours["c"]) || marks[false] == 0 {
		t.Fatalf("ours: %v, want key stages on more nodes", ours)
	}
	same, marks := where(t, alike{}, short)
	if len(same["a"]) != 1 || len(same["b"]) != 1 || len(same["c"]) != 1 || marks[false] > 0 {
		t.Errorf("all alike: %v with marks %v, want all stages where their replicas are, marked alike", same, marks)
	}
	for _, memory := range []int64{short, 1000} {
		needed, _ := where(t, onlyNeeded{}, memory)
		for i, name := range []string{"a", "b", "c"} {
			if !slices.Equal(needed[name], []string{fmt.Sprintf("n%d", i)}) {
				t.Errorf("nothing ahead, memory %d: %s on %v, want it where its replica is", memory, name, needed[name])
			}
		}
	}
	if plenty, _ := where(t, alike{}, 1000); len(plenty["c"]) < 2 {
		t.Errorf("all alike, with plenty of memory: %v, want parameters on further nodes", plenty)
	}
}
