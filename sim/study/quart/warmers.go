package quart

import (
	"slices"

	"github.com/stagecoach-serving/stagecoach/autoscaler/placement"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// alike is the warmer without the list of key stages. No stage's parameters are kept longer than
// those of others, or on more nodes:
//
//   - Key stages get nodes for later replicas as all stages do: in turns, where memory is
//     plentiful.
//   - All parameters are marked alike, so eviction is by age. All have children parked, as the key
//     stages have in ours, so that starts are no slower.
type alike struct{}

// Warm implements plan.Warmer.
func (alike) Warm(s plan.Snapshot, wants []plan.Want) ([]plan.Warm, error) {
	wants = slices.Clone(wants)
	for i := range wants {
		wants[i].Key = false
	}
	out, err := placement.KeyStages{}.Warm(s, wants)
	for i := range out {
		out[i].Key = true
	}
	return out, err
}

// onlyNeeded is the warmer that loads nothing ahead of need. Parameters are kept where the function
// has or gets a replica, and after that until they are evicted.
type onlyNeeded struct{}

// Warm implements plan.Warmer.
func (onlyNeeded) Warm(s plan.Snapshot, wants []plan.Want) ([]plan.Warm, error) {
	out, err := placement.KeyStages{}.Warm(s, wants)
	return slices.DeleteFunc(out, func(w plan.Warm) bool { return !needs(&s, wants, w) }), err
}

// needs reports whether a replica is, or will be, where the parameters should be warm.
func needs(s *plan.Snapshot, wants []plan.Want, w plan.Warm) bool {
	for i := range wants {
		if wants[i].Function == w.Function && slices.ContainsFunc(wants[i].Slots, func(x plan.Slot) bool { return x.Node == w.Node }) {
			return true
		}
	}
	f, ok := s.Function(w.Function)
	return ok && slices.ContainsFunc(f.Replicas, func(r plan.Replica) bool { return r.Node == w.Node })
}
