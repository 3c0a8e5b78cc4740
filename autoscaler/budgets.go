package autoscaler

import (
	"cmp"
	"math"
	"slices"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// Budgets implements plan.Budgeter. Each domain may have the fewest replicas of its functions. The
// rest of the cluster's budget of replicas, and each resource, is divided between the domains in
// proportion to their work. Domains that do not use a resource get none of it. If no domain has
// work, all of them get equal parts.
//
// A domain's work is the number of servers that are busy if the most accurate variant of each stage
// serves all requests, plus the servers that drain the waiting tasks in time. It does not depend on
// the variants that serve at present. Otherwise a domain that was short once, and therefore answers
// with cheap variants, would stay short.
//
// A resource is what replicas have and what is free, on nodes that are well. So a domain with more
// than its part has to give some back. Domains without a Mixer share what the Mixers leave: see
// [Gain.Share].
func (Gain) Budgets(s plan.Snapshot, all []plan.Domain) ([]plan.Budget, error) {
	pool := poolOf(&s)
	parts := [1 + resources][]float64{}
	for r := range parts {
		parts[r] = make([]float64, len(all))
	}
	out, minimums := make([]plan.Budget, len(all)), 0
	for i, d := range all {
		work := workOf(&s, d)
		parts[resources][i] = 1 + work // of replicas; a little for domains without work
		for _, name := range d.Functions {
			f, ok := s.Function(name)
			if !ok {
				continue
			}
			least, _ := f.Bounds()
			out[i].Replicas += least
			for r, uses := range [resources]bool{memory: f.Memory > 0, cpu: f.CPUMilli > 0, device: f.GPU > 0} {
				if uses {
					parts[r][i] = 1e-3 + work
				}
			}
		}
		minimums += out[i].Replicas
	}
	for r := range parts {
		sum := 0.0
		for _, p := range parts[r] {
			sum += p
		}
		for i := range parts[r] {
			parts[r][i] /= max(sum, math.SmallestNonzeroFloat64)
		}
	}
	for i := range out {
		b := &out[i]
		if s.Budget > 0 {
			b.Replicas += int(parts[resources][i] * float64(max(s.Budget-minimums, 0)))
		} else {
			b.Replicas = math.MaxInt32
		}
		b.CPUMilli = int(parts[cpu][i] * float64(pool.CPUMilli))
		b.Memory = int64(parts[memory][i] * float64(pool.Memory))
		for _, p := range pool.Devices {
			b.Devices = append(b.Devices, plan.DevicePool{Memory: p.Memory, Free: int64(parts[device][i] * float64(p.Free))})
		}
	}
	return out, nil
}

// poolOf returns what replicas have and what is free, on nodes that are well.
func poolOf(s *plan.Snapshot) plan.Budget {
	var pool plan.Budget
	free := map[string]*plan.Node{}
	for i := range s.Nodes {
		n := &s.Nodes[i]
		if n.Unavailable != "" || n.Leaving {
			continue
		}
		free[n.Name] = n
		pool.CPUMilli += max(n.CPUMilli, 0)
		pool.Memory += max(n.Memory-n.MemoryUsed, 0)
		for _, z := range n.Zygotes {
			if z.Idle {
				pool.Memory += z.Bytes
			}
		}
		for _, d := range n.Devices {
			if d.Unavailable == "" {
				addDevice(&pool, d.Memory, d.Memory-d.MemoryUsed)
			}
		}
	}
	for i := range s.Functions {
		f := &s.Functions[i]
		for _, r := range f.Replicas {
			n := free[r.Node]
			if n == nil || r.State == plan.Draining {
				continue
			}
			pool.Memory += max(f.Memory, 0)
			for _, d := range n.Devices {
				if d.Unavailable == "" && (plan.Slot{Device: r.Device}).On(d.ID) {
					addDevice(&pool, d.Memory, plan.DeviceNeed(max(f.DeviceMemory, 0), d.Memory))
				}
			}
		}
	}
	return pool
}

// addDevice adds free bytes of devices of a size.
func addDevice(b *plan.Budget, size, free int64) {
	i, ok := slices.BinarySearchFunc(b.Devices, size, func(p plan.DevicePool, size int64) int { return cmp.Compare(p.Memory, size) })
	if !ok {
		b.Devices = slices.Insert(b.Devices, i, plan.DevicePool{Memory: size})
	}
	b.Devices[i].Free += max(free, 0)
}

// workOf returns the work of a domain in servers: see [Gain.Budgets].
func workOf(s *plan.Snapshot, d plan.Domain) float64 {
	sum := 0.0
	for _, st := range stagesOf(s, d) {
		best := -1
		for i := range st.lanes {
			if l := &st.lanes[i]; l.known && (best < 0 || l.f.Accurate() > st.lanes[best].f.Accurate()) {
				best = i
			}
		}
		if best < 0 {
			continue
		}
		sum += (st.rate + float64(st.waiting)/DrainWithin.Seconds()) * st.lanes[best].service
	}
	if !(sum < math.MaxInt32) {
		return math.MaxInt32
	}
	return sum
}
