package autoscaler

import "slices"

// rollout returns the counts on the way to a plan. Replicas that the plan does not want stay while
// those that take their place start, as far as the budget allows. If it does not allow it, at least
// half of a stage's ready replicas stay. If that is not possible either, the plan holds at once.
func (e *exactMix) rollout(target []int) []int {
	r := rolling{e: e, target: target, counts: slices.Clone(target), ready: make([]int, len(target))}
	counts, ready := r.counts, r.ready
	for i := range e.stages {
		coming := false
		for _, lane := range e.stages[i].lanes {
			ready[lane], _ = e.lanes[lane].f.Current()
			coming = coming || target[lane] > ready[lane]
		}
		for _, lane := range e.stages[i].lanes {
			if coming && target[lane] < ready[lane] {
				counts[lane] = min(ready[lane], max(e.lanes[lane].most, target[lane]))
			}
		}
	}
	if slices.Equal(counts, target) || e.b.Exceeded(e.functions, target) != "" {
		return target
	}
	for e.b.Exceeded(e.functions, counts) != "" {
		if lane := r.shrink(); lane >= 0 {
			counts[lane]--
			continue
		}
		if lane := r.postpone(); lane >= 0 {
			counts[lane]--
			continue
		}
		return target
	}
	for i := range e.lanes {
		if counts[i] != ready[i] {
			return counts
		}
	}
	return target // nothing would ever change
}

// rolling is the way from the ready replicas to those of a plan, by lane.
type rolling struct {
	e                     *exactMix
	target, counts, ready []int
}

// shrink returns a lane with more replicas than the plan wants, of which one can stop now. It is in
// the stage
// with the largest part of ready replicas that stay; -1: none.
func (r *rolling) shrink() int {
	best, most := -1, 0.5
	for i := range r.e.stages {
		stay, all, from := 0, 0, -1
		for _, lane := range r.e.stages[i].lanes {
			stay, all = stay+min(r.counts[lane], r.ready[lane]), all+r.ready[lane]
			if r.counts[lane] > r.target[lane] && (from < 0 || r.counts[lane] > r.counts[from]) {
				from = lane
			}
		}
		if from >= 0 && all > 1 && float64(stay-1)/float64(all) >= 0.5 && float64(stay)/float64(all) > most {
			best, most = from, float64(stay)/float64(all)
		}
	}
	return best
}

// postpone returns a lane of which a new replica can start later; -1: none.
func (r *rolling) postpone() int {
	best := -1
	for i := range r.counts {
		if r.counts[i] > r.ready[i] && r.counts[i] > r.e.lanes[i].least && (best < 0 || r.counts[i]-r.ready[i] > r.counts[best]-r.ready[best]) {
			best = i
		}
	}
	return best
}
