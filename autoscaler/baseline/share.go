package baseline

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// Proportional is a plan.Sharer. If functions ask for more replicas than the budget has, each
// function gets its minimum, at least one replica, and the same part of what it asks for beyond
// that. Parts are rounded down. The replicas that are then left go to the functions that lost the
// most by rounding. Among equals, they go to the first functions of the allocation.
//
// The papers' systems run in a cloud, and do not say which function gets less. Equal parts keep the
// balance between the stages of a pipeline that its policy wants.
type Proportional struct{}

// Share implements plan.Sharer.
func (Proportional) Share(s plan.Snapshot, a plan.Alloc) (plan.Alloc, error) {
	fewest := make([]int, len(a))
	left, asked := s.Budget, 0 // beyond the minimums
	finder := s.Finder()
	for i, l := range a {
		f, ok := finder.Function(l.Function)
		if !ok {
			return nil, fmt.Errorf("line of function %q: not in snapshot %d, want lines of the same snapshot", l.Function, s.Rev)
		}
		least, _ := f.Bounds()
		fewest[i] = min(max(least, 1), l.Count)
		if l.Fixed {
			fewest[i] = l.Count
		}
		left, asked = left-fewest[i], asked+l.Count-fewest[i]
	}
	if s.Budget <= 0 || asked <= left {
		return a, nil
	}
	left = max(left, 0)
	out, lost, order := slices.Clone(a), make([]int, len(a)), make([]int, len(a))
	rest := left
	for i := range out {
		more := (a[i].Count - fewest[i]) * left
		out[i].Count, lost[i], order[i] = fewest[i]+more/asked, more%asked, i
		rest -= more / asked
	}
	slices.SortStableFunc(order, func(i, k int) int { return cmp.Compare(lost[k], lost[i]) })
	for _, i := range order[:rest] {
		out[i].Count++
	}
	for i := range out {
		if out[i].Count < a[i].Count {
			out[i].Why += fmt.Sprintf("; %d of these, its part of a budget of %d", out[i].Count, s.Budget)
		}
	}
	return out, nil
}
