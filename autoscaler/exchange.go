package autoscaler

import (
	"cmp"
	"fmt"
	"math"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// serviceFade is the time constant with which measured service times follow the true ones. Package
// dispatch uses the same constant.
const serviceFade = 30 * time.Second

// exchange gives idle CPU to replicas that hold devices, if that saves a replica. Such a replica is
// expensive because of its device, while cores beside it are idle. CPU is given first, and the
// replica is removed later: the allocator asks for fewer replicas only when the measured service
// times have become shorter.
//
// A replica may use its declared CPU, and an even share of the CPU that no replica on its node
// declares. Its quota is at most the largest that was measured. Shares depend only on what is
// declared, so domains that decide at the same time do not take the same cores. QUART does it the
// other way round: it removes the replica first, and then "compensates" with any CPU that a server
// has.
//
// CPU is taken back when it was useless for a while: it saved no replica, and tasks would have been
// in time without it. If the node no longer has the CPU, the CPU is taken back at once, and the
// count rises to what is needed without it.
func exchange(s *plan.Snapshot, all []correction) {
	var share map[string]int
	for i := range all {
		c := &all[i]
		if !c.wantsIdleCPU() || c.line.CPUMilli != 0 {
			continue
		}
		if share == nil {
			share = evenCPU(s)
		}
		c.next.CPU = c.exchanged(c.evenMost(s, share), s.At)
		for c.next.Taken > 0 && c.expects(c.line.Count-c.next.Taken, cmp.Or(c.next.CPU, c.f.CPULimit)) > near*c.target {
			c.next.Taken-- // the replica stays
		}
		c.line.CPUMilli = c.next.CPU
		c.makeUp()
	}
}

// wantsIdleCPU reports whether replicas hold devices, and serve faster with more CPU.
func (c *correction) wantsIdleCPU() bool { return c.fit != nil && c.known && c.f.GPU > 0 }

// fits records what is known about the function's use of CPU.
func (c *correction) fits(fit *cpuFit, at time.Time) {
	c.fit, c.next.Inverse = fit, 0
	if fit == nil || !c.known {
		return
	}
	now := 1 / float64(c.quota())
	v := cmp.Or(c.past.Inverse, now)
	if !(v > 0 && v <= 1) {
		v = now
	}
	dt := clamp(at.Sub(c.past.At).Seconds(), 0, longestStep.Seconds())
	v += (now - v) * (1 - math.Exp(-dt/serviceFade.Seconds()))
	c.next.Inverse, c.seen = v, max(int(math.Round(1/v)), 1)
	if c.base = c.f.CPULimit; c.wantsIdleCPU() {
		c.base = c.seen
	}
}

// worthCPU reports whether extra CPU is useful. One of these conditions is enough:
//
//   - A replica could be removed.
//   - Tasks take too long.
//   - Extra CPU was given, and tasks would take too long without it.
func (c *correction) worthCPU() bool {
	least, _ := c.f.Bounds()
	switch n := c.line.Count; {
	case n <= 0:
		return false
	case n > max(least, 1), c.threatened():
		return true
	default:
		return c.past.CPU > 0 && !c.waitsWithin(far, n, c.f.CPULimit)
	}
}

// waitsWithin reports whether tasks wait at most this part of their allowed wait, with this many
// replicas of this quota.
func (c *correction) waitsWithin(part float64, replicas, quota int) bool {
	return c.expects(replicas, quota)-c.fit.scaled(c.latency, c.base, quota) <= part*(c.target-c.latency)
}

// exchanged returns the quota for the replicas, in thousandths of a core; 0: as declared.
func (c *correction) exchanged(most int, at time.Time) int {
	declared := c.f.CPULimit
	has := max(min(c.past.CPU, most), declared)
	wants := declared
	switch ago := at.Sub(c.past.CPUAt); {
	case c.worthCPU():
		wants, c.next.CPUAt = has, at
		if 10*most >= 11*has { // a smaller gain is not worth a change
			wants = most
		}
	case has > declared && ago < 0: // the clock was set back
		wants, c.next.CPUAt = has, at
	case has > declared && ago < cpuHold:
		wants = has
	}
	switch {
	case wants > declared && wants == c.past.CPU:
		c.why += fmt.Sprintf("; cpu %dm", wants)
	case wants > declared && wants < c.past.CPU:
		c.why += fmt.Sprintf("; cpu %dm to %dm, as nodes have no more", c.past.CPU, wants)
	case wants > declared:
		c.why += fmt.Sprintf("; cpu %dm to %dm, which is idle, before devices", cmp.Or(c.past.CPU, declared), wants)
	case c.past.CPU > 0:
		c.why += fmt.Sprintf("; cpu back to %dm", declared)
	}
	if wants == declared {
		return 0
	}
	return wants
}

// makeUp adds the replicas that are needed if replicas have less CPU than when service times were
// measured. The allocator does not see the change yet.
func (c *correction) makeUp() {
	quota := cmp.Or(c.next.CPU, c.f.CPULimit)
	ratio := c.fit.scaled(1, c.seen, quota)
	if ratio < 1.02 || c.line.Count <= 0 {
		return
	}
	before := c.line.Count
	limit := min(int(math.Ceil(float64(before)*ratio)), max(c.most, before))
	for c.line.Count < limit && !c.waitsWithin(1, c.line.Count, quota) {
		c.line.Count++
	}
	if c.line.Count > before {
		c.next.Taken = 0
		c.why += fmt.Sprintf("; %d with less CPU than so far", c.line.Count)
	}
}

// evenMost returns the largest quota that a replica may have, in thousandths of a core.
func (c *correction) evenMost(s *plan.Snapshot, share map[string]int) int {
	most := c.anywhere(s)
	for _, r := range c.f.Replicas {
		most = min(most, c.f.CPULimit+share[r.Node])
	}
	if len(c.f.Replicas) == 0 {
		return 0
	}
	return most
}

// evenCPU returns per node the CPU that no replica declares, divided by the node's replicas, in
// thousandths of a core. A node whose CPU is unknown has none.
func evenCPU(s *plan.Snapshot) map[string]int {
	left, on := make(map[string]int, len(s.Nodes)), make(map[string]int, len(s.Nodes))
	for i := range s.Nodes {
		left[s.Nodes[i].Name] = max(s.Nodes[i].CPUMilli, 0)
	}
	for i := range s.Functions {
		f := &s.Functions[i]
		for _, r := range f.Replicas {
			left[r.Node] -= cmp.Or(max(f.CPULimit, 0), max(f.CPUMilli, 0))
			on[r.Node]++
		}
	}
	for name, n := range on {
		left[name] = max(left[name], 0) / n
	}
	return left
}
