package autoscaler

import (
	"cmp"
	"fmt"
	"slices"
	"sort"
	"time"

	"github.com/stagecoach-serving/stagecoach/plan"
	"github.com/stagecoach-serving/stagecoach/profile"
)

// cpuFit is a service time as a function of the CPU that a replica may use.
type cpuFit struct {
	profile.Line
	most int // the largest quota that was measured: nothing is said of larger ones
}

// fitCPU is the regression of f's service time on 1/quota; ok is false while fewer than three quotas were measured, or more CPU is of no
// use. Of several batches and lengths it takes those that were measured with the most quotas, the batch next to f's own first.
//
// QUART measures its response times offline as well and adds "a specific number of CPUs" (§5.3); what it adds them by is not printed.
func fitCPU(f *plan.Function) (fit cpuFit, ok bool) {
	points := likePoints(f)
	for _, p := range points {
		fit.most = max(fit.most, p.CPUMilli)
	}
	fit.Line, ok = profile.Fit(points)
	return fit, ok && fit.B > 0
}

// likePoints are the measured points of one batch and length.
func likePoints(f *plan.Function) []plan.Point {
	type kind struct{ batch, length int }
	groups := map[kind][]plan.Point{}
	var kinds []kind
	for _, p := range f.Profile {
		if p.CPUMilli <= 0 || p.Mean <= 0 {
			continue
		}
		k := kind{p.Batch, p.Length}
		if groups[k] == nil {
			kinds = append(kinds, k)
		}
		groups[k] = append(groups[k], p)
	}
	quotas := func(k kind) int {
		seen := map[int]bool{}
		for _, p := range groups[k] {
			seen[p.CPUMilli] = true
		}
		return len(seen)
	}
	slices.SortFunc(kinds, func(x, y kind) int {
		return cmp.Or(cmp.Compare(quotas(y), quotas(x)), cmp.Compare(abs(x.batch-f.Batch), abs(y.batch-f.Batch)),
			cmp.Compare(x.batch, y.batch), cmp.Compare(x.length, y.length))
	})
	if len(kinds) == 0 {
		return nil
	}
	return groups[kinds[0]]
}

func abs(v int) int { return max(v, -v) }

// asDeclared looks up what is known of the functions of d that may be given more CPU, and has s say how long they would serve with the
// CPU that was declared: what is given is no reason to wait for less, or to need it less. Not so of those that hold devices: see exchange.
func asDeclared(s *plan.Snapshot, d plan.Domain) map[string]*cpuFit {
	var fits map[string]*cpuFit
	copied := false
	finder := s.Finder()
	for _, name := range d.Functions {
		f, ok := finder.Function(name)
		if !ok || f.CPULimit < plan.LeastCPU || len(f.Profile) == 0 {
			continue
		}
		fit, ok := fitCPU(f)
		if !ok {
			continue
		}
		if fits == nil {
			fits = map[string]*cpuFit{}
		}
		fits[name] = &fit
		if f.GPU > 0 || f.CPUNow <= 0 || f.CPUNow == f.CPULimit {
			continue
		}
		if !copied {
			s.Functions, copied = slices.Clone(s.Functions), true
		}
		f, _ = s.Function(name) // the copy: finder has the original
		f.Service.Mean = toDuration(fit.scaled(f.Service.Mean.Seconds(), f.CPUNow, f.CPULimit))
	}
	return fits
}

// scaled returns what a service time that was measured with one quota will be with another, in seconds.
func (c cpuFit) scaled(mean float64, from, to int) float64 { return mean * c.At(to) / c.At(from) }

const (
	// near is the part of its target from which on a function is helped with CPU, and that it is brought down to; far is the one below which
	// it is needed no more.
	near, far = 0.8, 0.6
	// cpuHold is how long CPU is needed no more before it is given back, cpuEvery how long it takes to see what was given.
	cpuHold  = time.Minute
	cpuEvery = 10 * time.Second
)

// compensate gives replicas more CPU where the smoother took others away and tasks come near to taking too long: the least with which
// they do not, as far as the nodes have it. Where there is none to give, or nothing is known of what it would do, a replica stays
// instead. The same bridges the time in which tasks take too long and those that were asked for are not there. Those that hold devices are
// given more than that: see exchange.
//
// QUART's Alg. 1 has its Smooth test C' ≤ max and then C' > max, give the CPU for a count that is not the new one, and go back to
// Correct when there is none. This is one pass: CPU first, else the replica.
func compensate(s *plan.Snapshot, all []correction) {
	var free map[string]int
	for i := range all {
		c := &all[i]
		if c.line.CPUMilli != 0 || c.dear() || c.next.Taken == 0 && c.past.CPU == 0 && !c.short() {
			continue
		}
		if free == nil {
			free = freeCPU(s)
		}
		most := c.mostCPU(s, free)
		wants, ok := c.f.CPULimit, true
		if c.next.Taken == 0 && c.short() {
			ready, _ := c.f.Current()
			if wants, ok = c.leastCPU(ready, most); !ok {
				wants, ok = max(most, c.f.CPULimit), true
			}
		}
		for c.next.Taken > 0 {
			if wants, ok = c.leastCPU(c.line.Count-c.next.Taken, most); ok {
				break
			}
			c.next.Taken-- // the replica stays
		}
		if !ok {
			wants = c.f.CPULimit
		}
		c.give(wants, most, s.At)
		if extra := c.next.CPU - c.quota(); extra > 0 {
			for _, r := range c.f.Replicas {
				free[r.Node] -= extra
			}
		}
		c.line.CPUMilli = c.next.CPU
		if c.seen > 0 {
			c.makeUp()
		}
	}
}

// short says that tasks take too long with the replicas that are ready, and that others were asked for.
func (c *correction) short() bool {
	ready, _ := c.f.Current()
	return c.fit != nil && c.threatened() && 0 < ready && ready < c.line.Count
}

// quota is what a replica may use now.
func (c *correction) quota() int { return cmp.Or(max(c.f.CPUNow, 0), c.f.CPULimit) }

// leastCPU is the least quota with which so many replicas keep well within the target; ok is false when most is not enough. It is found
// by halving, as the prediction falls with the quota.
func (c *correction) leastCPU(replicas, most int) (quota int, ok bool) {
	declared := c.f.CPULimit
	if c.expects(replicas, declared) <= near*c.target {
		return declared, true
	}
	if most <= declared || c.expects(replicas, most) > near*c.target {
		return 0, false
	}
	const grain = 10 // thousandths
	steps := sort.Search((most-declared)/grain, func(k int) bool { return c.expects(replicas, declared+k*grain) <= near*c.target })
	return min(declared+steps*grain, most), true
}

// expects is how long tasks will take with so many replicas of this quota, in seconds: as predicted, or as measured where that is more.
func (c *correction) expects(replicas, quota int) float64 {
	g, measured := c.predicted, c.measured
	if g.f == nil { // nothing was smoothed
		g = *c.stage
	}
	if c.fit != nil && c.known {
		g.service = c.fit.scaled(c.service, c.base, quota)
		g.mu = 1 / g.service
		if measured > 0 {
			now := c.fit.scaled(c.service, c.base, c.quota())
			measured = c.fit.scaled(measured-c.service+now, c.quota(), quota)
		}
	}
	return max(g.sojourn(replicas).Seconds(), measured)
}

// give sets the quota: up to what is wanted at most every so often, and back to what was declared when it has not been needed for a while.
func (c *correction) give(wants, most int, at time.Time) {
	has := min(c.past.CPU, most)
	ago := at.Sub(c.past.CPUAt)
	switch {
	case wants > c.f.CPULimit && wants > has && (c.past.CPU == 0 || ago >= cpuEvery || ago < 0):
		c.next.CPU, c.next.CPUAt = wants, at
		c.why += fmt.Sprintf("; cpu %dm to %dm, as %v is near the target", cmp.Or(c.past.CPU, c.f.CPULimit), wants,
			c.secs(c.expects(c.line.Count-c.next.Taken, c.f.CPULimit)))
		return
	case c.past.CPU == 0 || has <= c.f.CPULimit:
		c.next.CPU = 0
		return
	case ago < 0 || wants > c.f.CPULimit || c.expects(c.line.Count-c.next.Taken, c.f.CPULimit) > far*c.target:
		c.next.CPUAt = at // or the clock was set back
	case ago >= cpuHold:
		c.next.CPU = 0
		c.why += fmt.Sprintf("; cpu back to %dm", c.f.CPULimit)
		return
	}
	c.next.CPU = has
	c.why += fmt.Sprintf("; cpu %dm", has)
}

// anywhere is the quota that a replica may have as far as service times were measured, and every node has it that a new one may come to.
func (c *correction) anywhere(s *plan.Snapshot) int {
	most := c.fit.most
	for i := range s.Nodes {
		if n := &s.Nodes[i]; n.CPUMilli > 0 && len(n.Devices) >= c.f.GPU {
			most = min(most, n.CPUMilli)
		}
	}
	return most
}

// mostCPU is what a replica may be given at most: as far as service times were measured, and half of what is free where replicas are,
// as other domains decide at the same time. 0: nothing.
func (c *correction) mostCPU(s *plan.Snapshot, free map[string]int) int {
	if c.fit == nil {
		return 0
	}
	most := c.anywhere(s)
	here := map[string]int{}
	for _, r := range c.f.Replicas {
		here[r.Node]++
	}
	if len(here) == 0 {
		return 0
	}
	for _, r := range c.f.Replicas {
		share := free[r.Node] / here[r.Node]
		if share > 0 {
			share /= 2
		}
		most = min(most, c.quota()+share)
	}
	return most
}

// freeCPU is what each node has of CPU that its replicas may not use, in thousandths of a core. A node that does not say how much it has
// has none to give.
func freeCPU(s *plan.Snapshot) map[string]int {
	free := make(map[string]int, len(s.Nodes))
	for i := range s.Nodes {
		free[s.Nodes[i].Name] = max(s.Nodes[i].CPUMilli, 0)
	}
	for i := range s.Functions {
		f := &s.Functions[i]
		for _, r := range f.Replicas {
			free[r.Node] -= cmp.Or(max(f.CPUNow, 0), max(f.CPULimit, 0), max(f.CPUMilli, 0))
		}
	}
	return free
}
