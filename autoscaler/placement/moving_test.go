package placement

import (
	"testing"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// TestDrainedNodesKeepNothingWarm drains a node with a replica. The replica gets a slot elsewhere,
// and its parameters are kept there alone.
func TestDrainedNodesKeepNothingWarm(t *testing.T) {
	t.Parallel()
	zygote := []plan.Zygote{{Function: "f", Bytes: 1 << 20}}
	s := plan.Snapshot{
		Nodes: []plan.Node{
			{Name: "a", Memory: 1 << 30, Zygotes: zygote, Unavailable: "an operator drains it", Moving: true},
			{Name: "b", Memory: 1 << 30},
		},
		Functions: []plan.Function{{Name: "f", Min: 1, Max: 1, Slots: 1, Batch: 1, Replicas: []plan.Replica{{Name: "f-1", Node: "a", State: plan.Ready}}}},
	}
	wants, err := Dispersed{}.Place(s, plan.Alloc{{Function: "f", Count: 1, Batch: 1}})
	if err != nil || len(wants[0].Slots) != 1 || wants[0].Slots[0] != (plan.Slot{Node: "b"}) {
		t.Fatalf("%+v, %v, want a new replica on b", wants, err)
	}
	warm, err := KeyStages{}.Warm(s, wants)
	if err != nil || len(warm) != 1 || warm[0].Node != "b" {
		t.Errorf("%+v, %v, want f on b alone", warm, err)
	}
}
