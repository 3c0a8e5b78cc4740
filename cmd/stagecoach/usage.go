package main

import (
	"log/slog"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider"
)

// used is what the replicas of a function use, as far as their cgroups tell.
type used struct {
	replicas         int // that the inventories have
	cpuMilli, memory float64
	pids             []int // processes of replicas whose cgroups do not tell
}

// usedBy adds up what inventories, all of this machine, say of the functions that are keys of by.
func usedBy(inventories []node.Inventory, by map[string]*used) {
	for _, inv := range inventories {
		counted := map[int]bool{} // processes: a worker's is counted once, for the first of its replicas
		for _, r := range inv.Replicas {
			first := !counted[r.PID]
			counted[r.PID] = true
			u := by[r.Function]
			if u == nil {
				continue
			}
			u.replicas++
			switch {
			case r.Usage == nil && !first:
			case r.Usage != nil:
				u.cpuMilli += float64(r.Usage.CPUMilli)
				u.memory += float64(r.Usage.Memory)
			default:
				u.pids = append(u.pids, r.PID)
			}
		}
	}
}

// Usage implements provider.Status. The usage of replicas that no inventory has yet is unknown, not
// 0.
func (s *status) Usage(key pipeline.Key) (provider.Usage, bool) {
	var u used
	available := s.State(key).Available
	usedBy(s.nodes.Inventories(), map[string]*used{key.String(): &u})
	if u.replicas == 0 && available > 0 {
		return provider.Usage{}, false
	}
	cpu, memory, err := s.meter.Measure(key.String(), u.pids)
	if err != nil {
		s.log.Warn("usage cannot be measured", "function", key, "error", err)
		return provider.Usage{}, false
	}
	return provider.Usage{CPUMilli: u.cpuMilli + cpu, MemoryBytes: u.memory + float64(memory)}, true
}

// cpuLoad measures the processor that functions use, for those that are scaled by it. Its meter is
// its own, since what a meter measures is since it was asked last.
type cpuLoad struct {
	nodes *nodes
	meter sandbox.Meter
	log   *slog.Logger
}

// of returns thousandths of a core by function; what cannot be measured is left out.
func (c *cpuLoad) of(functions []pipeline.Key) map[pipeline.Key]float64 {
	by := make(map[string]*used, len(functions))
	for _, f := range functions {
		by[f.String()] = &used{}
	}
	usedBy(c.nodes.Inventories(), by)
	out := make(map[pipeline.Key]float64, len(functions))
	for _, f := range functions {
		u := by[f.String()]
		milli, _, err := c.meter.Measure(f.String(), u.pids)
		if err != nil {
			c.log.Debug("processor time cannot be measured", "function", f, "error", err)
			continue
		}
		out[f] = u.cpuMilli + milli
	}
	return out
}
