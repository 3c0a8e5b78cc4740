package autoscaler

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"sort"
	"time"

	"github.com/stagecoach-serving/stagecoach/plan"
)

const (
	// smoothHold is how long a function has too many replicas before one is taken, and between two.
	smoothHold = 3 * time.Second
	// smoothPatience is the longest that becomes: it doubles each time that one had to be given back.
	smoothPatience = 5 * time.Minute
	// learning is the time constant with which measured burstiness corrects the predicted one.
	learning = 30 * time.Second
	// mostFactor bounds that correction, both ways.
	mostFactor = 4
)

// connect finds each function's predecessors and neighbours on the domain's pipelines.
func connect(s *plan.Snapshot, d plan.Domain, all []correction) {
	const usual = 2 // of each
	places := make([]int, 3*usual*len(all))
	for i := range all {
		own := places[3*usual*i:]
		all[i].predecessors, all[i].neighbours = own[:0:usual], own[usual:usual:3*usual]
	}
	for _, name := range d.Pipelines {
		p, ok := s.Pipeline(name)
		if !ok {
			continue
		}
		for _, e := range forward(p) {
			from, ok := slices.BinarySearch(d.Functions, p.Stages[e.From])
			to, ok2 := slices.BinarySearch(d.Functions, p.Stages[e.To])
			if !ok || !ok2 || from == to || slices.Contains(all[to].predecessors, from) {
				continue
			}
			all[to].predecessors = append(all[to].predecessors, from)
			all[to].neighbours = append(all[to].neighbours, from)
			all[from].neighbours = append(all[from].neighbours, to)
		}
	}
}

// need is the least count that keeps its tasks in time when they arrive as bursty as predicted, its line included.
func (c *correction) need() int {
	c.predicted = *c.stage
	if c.past.CA2 > 0 {
		c.predicted.ca2 = c.past.CA2
	}
	count := c.line.Count
	if !c.known {
		return count
	}
	target := toDuration(c.target)
	n := c.predicted.least(target, count)
	return n + sort.Search(count-n, func(k int) bool { return c.predicted.sojourn(n+k) <= target })
}

// smooth takes back what is left over, one replica at a time, down to y' = ⌈β·y + (1−β)·mean⌉, within what is needed and y, which is
// what earlier steps have left; the mean is of what the neighbours need for as much work. β = Ca²/(1+Ca²): arrivals that come one by one make a stage like its neighbours, bursts
// let it keep what it has.
//
// QUART's Eq. 7 calls that Laplace smoothing, which it is not, leaves β open and the result a fraction that may be more than y or too
// little for the load; and Alg. 1 releases it at once. Here what is taken was left over for a while, comes back as soon as tasks take
// too long, and then is not taken again for twice as long. Key stages keep theirs while they burst.
func smooth(all []correction, at time.Time) {
	need := make([]int, len(all))
	for i := range all {
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
		least = max(need[i], least, 1)
		if c.threatened() {
			if c.past.Taken > 0 {
				c.next.Hold = min(2*max(c.past.Hold, smoothHold), smoothPatience)
			}
			c.keep(0)
			continue
		}
		if c.past.Key.bursts(at) || y > c.past.Asked+c.past.Taken { // or bursts now
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
		c.next.Hold = 0 // what was taken is not asked for any more
	}
	c.next.Taken, c.next.Surplus = taken, time.Time{}
}

// goal is Eq. 7's y' of what is left.
func (c *correction) goal(all []correction, need []int, i, left int) int {
	ca2 := c.predicted.ca2
	beta := ca2 / (1 + ca2)
	sum, n := 0.0, 0
	for _, j := range c.neighbours {
		// A neighbour's need for each server's worth of its work; with less than that it is no guide.
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

// predict looks one decision ahead: how bursty arrivals at each function will be, and how far off the last prediction was.
func (q Quart) predict(all []correction, at time.Time) {
	n := Network{Stations: make([]Station, len(all)), Links: make([]Link, 0, len(all))}
	for i := range all {
		c := &all[i]
		st := Station{Rate: c.lambda, CS2: c.cs2, Servers: max(c.servers(c.line.Count), 1), Factor: c.past.Factor}
		if c.known {
			st.Rho = clamp(c.lambda*c.service/float64(st.Servers), 0, 1)
		}
		if cv := c.f.Demand.CV; c.f.Demand.Known && cv > 0 {
			st.CA2 = squared(cv)
		}
		n.Stations[i] = st
		for _, from := range c.predecessors {
			n.Links = append(n.Links, Link{from, i})
		}
	}
	slices.SortFunc(n.Links, func(a, b Link) int { return cmp.Or(a.From-b.From, a.To-b.To) })
	for i, ca2 := range q.cfg.Predictor.Predict(n) {
		c := &all[i]
		c.next.CA2 = clamp(ca2, leastCV2, mostCV2)
		if measured := n.Stations[i].CA2; measured > 0 && len(c.predecessors) > 0 {
			factor := c.past.Factor
			if !(factor > 0) {
				factor = 1
			}
			// The prediction has the factor in it: what is left of the error moves it, in logarithms, as it is a ratio.
			dt := clamp(at.Sub(c.past.At).Seconds(), 0, longestStep.Seconds())
			if c.past.At.IsZero() {
				dt = 0
			}
			learn := 1 - math.Exp(-dt/learning.Seconds())
			c.next.Factor = clamp(factor*math.Exp(learn*math.Log(measured/clamp(ca2, leastCV2, mostCV2))), 1.0/mostFactor, mostFactor)
		}
	}
}

// reclaim takes replicas off the line, once the compensator has had its say.
func (c *correction) reclaim() {
	if c.next.Taken == 0 {
		return
	}
	c.line.Count -= c.next.Taken
	c.why += fmt.Sprintf("; smoother -%d (Ca²=%.1f, target %v)", c.next.Taken, c.predicted.ca2, c.secs(c.target))
}
