package autoscaler

import (
	"fmt"
	"math"
	"slices"
	"sort"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

const (
	// smoothHold is how long a function must have too many replicas before one is taken. It is also
	// the shortest time between two replicas that are taken.
	smoothHold = 3 * time.Second
	// smoothPatience is the longest hold. The hold doubles each time a replica has to be given back.
	smoothPatience = 5 * time.Minute
)

// neighbours sets each function's neighbours on the domain's pipelines: the functions right before
// and right behind it.
func neighbours(s *plan.Snapshot, d plan.Domain, all []correction) {
	if len(d.Pipelines) == 0 {
		return
	}
	const usual = 3 // one stage before, and a neighbour on either side
	places := make([]int, usual*len(all))
	for i := range all {
		at := usual * i
		all[i].before, all[i].neighbours = places[at:at:at+1], places[at+1:at+1:at+usual]
	}
	for _, name := range d.Pipelines {
		p, ok := s.Pipeline(name)
		if !ok {
			continue
		}
		for _, e := range forward(p) {
			from, ok := slices.BinarySearch(d.Functions, p.Stages[e.From])
			to, ok2 := slices.BinarySearch(d.Functions, p.Stages[e.To])
			if !ok || !ok2 || from == to || slices.Contains(all[to].before, from) {
				continue
			}
			all[to].before = append(all[to].before, from)
			all[to].neighbours = append(all[to].neighbours, from)
			all[from].neighbours = append(all[from].neighbours, to)
		}
	}
}

// recall makes the smoother and the compensator use the burstiness that was measured at the last
// decision. It records the present measurement for the next decision. The last value is the
// prediction (persistence), because no predictor of burstiness is measurably better (docs/adr/0045,
// docs/adr/0076).
func (c *correction) recall() {
	c.next.CA2 = 1
	if c.f.Demand.Known && c.f.Demand.CV > 0 {
		c.next.CA2 = c.ca2
	}
	if c.past.CA2 > 0 {
		c.ca2 = c.past.CA2
	}
}

// need returns the smallest count that keeps the function's tasks in time, with its line.
func (c *correction) need() int {
	count := c.line.Count
	if !c.known {
		return count
	}
	target := toDuration(c.target)
	n := c.least(target, count)
	return n + sort.Search(count-n, func(k int) bool { return c.sojourn(n+k) <= target })
}

// smooth takes back replicas that are not needed, one at a time, down to y' = ⌈β·y + (1−β)·mean⌉
// and never below what is needed:
//
//   - y is the count that is left so far.
//   - mean is the mean count that the neighbours would need for this stage's amount of work.
//   - β is Ca²/(1+Ca²). With arrivals by chance, a stage becomes like its neighbours. With bursty
//     arrivals, it keeps its count.
//
// Replicas that are worth their price of latency stay, although they are not needed: see plan.Line.
//
// A replica is taken only after it was not needed for a while, the hold. It is given back as soon
// as tasks take too long, and then the hold doubles. Key stages keep their replicas during a burst.
//
// QUART's Eq. 7 calls the formula Laplace smoothing, which it is not, and leaves β open. The
// equation's result is a fraction that may be more than y or too little for the load. Alg. 1
// releases replicas at once.
func smooth(all []correction, at time.Time) {
	need := make([]int, len(all))
	for i := range all {
		all[i].recall()
		need[i] = all[i].need()
	}
	for i := range all {
		c := &all[i]
		y := c.line.Count
		least, _ := c.f.Bounds()
		if y <= least || !c.known {
			c.keep(0)
			continue
		}
		least = max(need[i], least, min(c.line.Worth, y), 1)
		if c.threatened() {
			if c.past.Taken > 0 {
				c.next.Hold = min(2*max(c.past.Hold, smoothHold), smoothPatience)
			}
			c.keep(0)
			continue
		}
		if c.past.Key.bursts(at) || y > c.past.Asked+c.past.Taken { // it burst lately, or bursts now
			c.keep(0)
			continue
		}
		left := max(y-c.past.Taken, min(least, y))
		if max(c.goal(all, need, i, left), least) >= left {
			c.keep(y - left)
			continue
		}
		since := c.past.Surplus
		switch ago := at.Sub(since); {
		case since.IsZero() || ago < 0: // or the clock was set back
			since = at
		case ago >= max(c.past.Hold, smoothHold):
			left, since = left-1, at
		}
		c.keep(y - left)
		c.next.Surplus = since
	}
}

// keep sets how many replicas are taken.
func (c *correction) keep(taken int) {
	if taken == 0 && c.past.Taken > 0 && !c.threatened() {
		c.next.Hold = 0 // the count from which replicas were taken is no longer asked for
	}
	c.next.Taken, c.next.Surplus = taken, time.Time{}
}

// goal returns Eq. 7's y' for the count left.
func (c *correction) goal(all []correction, need []int, i, left int) int {
	beta := c.ca2 / (1 + c.ca2)
	sum, n := 0.0, 0
	for _, j := range c.neighbours {
		// The number of servers that the neighbour needs per server that its work keeps busy. A
		// neighbour that keeps less than one server busy is no guide.
		if work := all[j].lambda * all[j].service; all[j].known && work >= 1 {
			sum += float64(need[j]*all[j].slots) / work
			n++
		}
	}
	mean := float64(need[i])
	if n > 0 {
		mean = sum / float64(n) * c.lambda * c.service / float64(c.slots)
	}
	return int(math.Ceil(clamp(beta*float64(left)+(1-beta)*mean, 0, float64(left))))
}

// reclaim subtracts the smoother's replicas from the line, after the compensator has put some back.
func (c *correction) reclaim() {
	if c.next.Taken == 0 {
		return
	}
	c.line.Count -= c.next.Taken
	c.why += fmt.Sprintf("; smoother -%d (Ca²=%.1f, target %v)", c.next.Taken, c.ca2, c.secs(c.target))
}
