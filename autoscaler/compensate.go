package autoscaler

import (
	"cmp"
	"fmt"
	"slices"
	"sort"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/profile"
)

// cpuFit is a service time as a function of a replica's CPU quota.
type cpuFit struct {
	profile.Line
	most int // largest measured quota; larger ones are unknown
}

// fitCPU returns the regression of f's service time on 1/quota. It uses points of one batch size
// and input length: those with the most quotas, and among equals those whose batch size is closest
// to f's own. ok is false if fewer than three quotas were measured, or if f is not faster with more
// CPU.
//
// QUART also measures its response times offline, and adds "a specific number of CPUs" (§5.3). It
// does not print how many.
func fitCPU(f *plan.Function) (fit cpuFit, ok bool) {
	points := likePoints(f)
	for _, p := range points {
		fit.most = max(fit.most, p.CPUMilli)
	}
	fit.Line, ok = profile.Fit(points)
	return fit, ok && fit.B > 0
}

// likePoints returns the measured points of one batch and length.
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

// asDeclared returns, by name, the fits of the functions of d that may get extra CPU. In s, it
// replaces their service times by the times with the declared CPU; s.Functions is then a copy.
// Otherwise extra CPU would shorten the service times that the next decision uses to give or take
// extra CPU. Functions that hold devices keep their measured service times: see exchange.
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
		f, _ = s.Function(name) // the copy in s; finder has the original
		f.Service.Mean = toDuration(fit.scaled(f.Service.Mean.Seconds(), f.CPUNow, f.CPULimit))
		f.Service.Batches = slices.Clone(f.Service.Batches)
		for k := range f.Service.Batches {
			b := &f.Service.Batches[k]
			b.Mean = toDuration(fit.scaled(b.Mean.Seconds(), f.CPUNow, f.CPULimit))
		}
	}
	return fits
}

// scaled converts a service time that was measured with one quota to another quota. Times are in
// seconds.
func (c cpuFit) scaled(mean float64, from, to int) float64 { return mean * c.At(to) / c.At(from) }

const (
	// near and far are limits for the times of tasks, as parts of a function's target. A function
	// gets extra CPU if its tasks take longer than near. It no longer needs the extra CPU if,
	// without this CPU, its tasks would be faster than far.
	near, far = 0.8, 0.6
	// cpuHold is how long extra CPU must be unneeded before it is taken back. cpuEvery is how long
	// a change of CPU takes to show its effect.
	cpuHold  = time.Minute
	cpuEvery = 10 * time.Second
)

// compensate gives CPU to functions from which the smoother has taken replicas. If the tasks of
// such a function come near the target, its other replicas get the smallest quota that keeps tasks
// well within the target. If the nodes do not have this CPU free, or its effect is unknown, the
// replica stays instead.
//
// compensate also gives CPU while tasks take too long and requested replicas have not started. It
// skips functions that hold devices and are faster with more CPU: see exchange.
//
// QUART's Alg. 1 works differently. Its Smooth tests C' ≤ max and then C' > max, and gives CPU for
// a count that is not the new one. If there is no CPU, it goes back to Correct. This implementation
// needs one pass: it tries CPU first, and keeps the replica if that is not enough.
func compensate(s *plan.Snapshot, all []correction) {
	var free map[string]int
	for i := range all {
		c := &all[i]
		if c.line.CPUMilli != 0 || c.wantsIdleCPU() || c.next.Taken == 0 && c.past.CPU == 0 && !c.short() {
			continue
		}
		if free == nil && c.fit != nil {
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

// short reports whether tasks take too long with the ready replicas, while more replicas have been
// requested.
func (c *correction) short() bool {
	ready, _ := c.f.Current()
	return c.fit != nil && c.threatened() && 0 < ready && ready < c.line.Count
}

// quota returns the CPU that a replica may use now, in thousandths of a core.
func (c *correction) quota() int { return cmp.Or(max(c.f.CPUNow, 0), c.f.CPULimit) }

// leastCPU returns the smallest quota with which this many replicas stay well within the target. ok
// is false if most is not enough. It bisects, because the predicted time falls as the quota rises.
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

// expects returns how long tasks will take with this many replicas of this quota, in seconds. It is
// the larger of the predicted and the measured time.
func (c *correction) expects(replicas, quota int) float64 {
	mu, measured := c.mu, c.measured
	if c.fit != nil && c.known {
		service := c.fit.scaled(c.service, c.base, quota)
		mu = 1 / service
		if measured > 0 {
			now := c.fit.scaled(c.latency, c.base, c.quota())
			measured = c.fit.scaled(measured-c.latency+now, c.quota(), quota)
		}
	}
	return max(c.sojournAt(mu, replicas).Seconds(), measured)
}

// give sets the quota. It raises the quota to wants, but waits for cpuEvery between two raises. It
// goes back to the declared quota once extra CPU has not been needed for the time cpuHold.
func (c *correction) give(wants, most int, at time.Time) {
	has := min(c.past.CPU, most)
	ago, raised := at.Sub(c.past.CPUAt), at.Sub(c.past.CPURaised)
	switch {
	case wants > c.f.CPULimit && wants > has && (c.past.CPU == 0 || raised >= cpuEvery || raised < 0):
		c.next.CPU, c.next.CPUAt, c.next.CPURaised = wants, at, at
		c.why += fmt.Sprintf("; cpu %dm to %dm, as tasks would take %v with %dm, target %v", cmp.Or(c.past.CPU, c.f.CPULimit), wants,
			c.secs(c.expects(c.serving(), c.f.CPULimit)), c.f.CPULimit, c.secs(c.target))
		return
	case c.past.CPU == 0 || has <= c.f.CPULimit:
		c.next.CPU, c.next.CPURaised = 0, time.Time{}
		return
	case ago < 0 || wants > c.f.CPULimit || c.expects(c.serving(), c.f.CPULimit) > far*c.target:
		c.next.CPUAt = at // also if the clock was set back
	case ago >= cpuHold:
		c.next.CPU, c.next.CPURaised = 0, time.Time{}
		c.why += fmt.Sprintf("; cpu back to %dm", c.f.CPULimit)
		return
	}
	c.next.CPU = has
	c.why += fmt.Sprintf("; cpu %dm", has)
}

// serving returns the number of replicas that will serve. If fewer are ready than are requested, it
// returns the ready ones: a budget may keep the others from starting for as long as it lasts.
func (c *correction) serving() int {
	count := c.line.Count - c.next.Taken
	if ready, _ := c.f.Current(); ready > 0 {
		return min(count, ready)
	}
	return count
}

// anywhere returns the largest measured quota, but at most the CPU of the smallest node on which a
// new replica may start.
func (c *correction) anywhere(s *plan.Snapshot) int {
	most := c.fit.most
	for i := range s.Nodes {
		if n := &s.Nodes[i]; n.CPUMilli > 0 && len(n.Devices) >= c.f.GPU {
			most = min(most, n.CPUMilli)
		}
	}
	return most
}

// mostCPU returns the largest quota that a replica may get, in thousandths of a core; 0: no extra
// CPU is possible. It is at most the largest quota that was measured. Beyond its present quota, a
// replica gets at most half of its even share of the node's free CPU, because other domains decide
// at the same time.
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

// freeCPU returns per node the CPU that is left beyond the limits of all replicas, in thousandths
// of a core. A replica without a limit counts with its request. A node whose CPU is unknown has
// none.
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
