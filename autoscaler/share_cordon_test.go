package autoscaler

import (
	"testing"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// TestShareIgnoresCoresOfClosedNodes has a full node that takes no replicas, and a node with room
// for all that is asked. What runs on the closed node takes nothing of the other node's cores.
func TestShareIgnoresCoresOfClosedNodes(t *testing.T) {
	s := plan.Snapshot{
		Nodes: []plan.Node{
			{Name: "a", Memory: 8 << 30, CPUMilli: 3000, Unavailable: "it is cordoned"},
			{Name: "b", Memory: 8 << 30, CPUMilli: 3000},
		},
		Functions: []plan.Function{
			{Name: "f", Min: 1, Max: 9, CPUMilli: 500, Slots: 1, Batch: 1},
			{Name: "g", Min: 1, Max: 9, CPUMilli: 500, Slots: 1, Batch: 1},
		},
	}
	for i := range s.Functions {
		for range 3 {
			s.Functions[i].Replicas = append(s.Functions[i].Replicas, plan.Replica{Name: s.Functions[i].Name + string(rune('0'+len(s.Functions[i].Replicas))), Node: "a", State: plan.Ready})
		}
	}
	got, err := Gain{}.Share(s, plan.Alloc{{Function: "f", Count: 5, Batch: 1}, {Function: "g", Count: 5, Batch: 1}})
	if err != nil || got[0].Count != 5 || got[1].Count != 5 {
		t.Errorf("%+v, %v, want five replicas of each", got, err)
	}
}
