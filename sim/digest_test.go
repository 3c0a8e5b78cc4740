package sim

import (
	"testing"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// TestDigestIsOfDecisionsOnly checks what changes the digest of a run's decisions.
func TestDigestIsOfDecisionsOnly(t *testing.T) {
	plans := func() []*plan.Plan {
		return []*plan.Plan{
			{Wants: []plan.Want{{Function: "a", Slots: []plan.Slot{{Node: "n", Device: "g0"}}, Batch: 1}}},
			{Wants: []plan.Want{{Function: "a", Slots: []plan.Slot{{Node: "n", Device: "g0"}, {Node: "m"}}, Batch: 1}}, Warm: []plan.Warm{{Function: "a", Node: "n", Warmth: plan.Host}}},
		}
	}
	of := func(change func(p []*plan.Plan) []*plan.Plan) string {
		var d digest
		for _, p := range change(plans()) {
			d.add(p)
		}
		return d.String()
	}
	want := of(func(p []*plan.Plan) []*plan.Plan { return p })
	for name, c := range map[string]struct {
		same   bool
		change func(p []*plan.Plan) []*plan.Plan
	}{
		"a repetition": {true, func(p []*plan.Plan) []*plan.Plan { return append(p, plans()[1]) }},
		"reasons and marks": {true, func(p []*plan.Plan) []*plan.Plan {
			p[1].Wants[0].Why, p[1].Wants[0].Key, p[1].Rev, p[1].Warm[0].Key = "because", true, 7, true
			return p
		}},
		"names and order of replicas": {true, func(p []*plan.Plan) []*plan.Plan {
			p[1].Wants[0].Slots = []plan.Slot{{Node: "m", Replica: "a-2"}, {Node: "n", Device: "g0", Replica: "a-1"}}
			return p
		}},
		"one decision less": {false, func(p []*plan.Plan) []*plan.Plan { return p[1:] }},
		"back again":        {false, func(p []*plan.Plan) []*plan.Plan { return append(p, plans()[0]) }},
		"another device":    {false, func(p []*plan.Plan) []*plan.Plan { p[0].Wants[0].Slots[0].Device = "g1"; return p }},
		"CPU":               {false, func(p []*plan.Plan) []*plan.Plan { p[1].Wants[0].CPUMilli = 5000; return p }},
		"a batch":           {false, func(p []*plan.Plan) []*plan.Plan { p[1].Wants[0].Batch = 2; return p }},
		"nothing warm":      {false, func(p []*plan.Plan) []*plan.Plan { p[1].Warm = nil; return p }},
	} {
		if got := of(c.change); (got == want) != c.same {
			t.Errorf("%s: the digest is the same: %t, want %t", name, got == want, c.same)
		}
	}
}
