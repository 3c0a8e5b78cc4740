package main

import (
	"log/slog"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider"
)

// used is the usage of a function's replicas, as far as their cgroups report it.
type used struct {
	replicas         int // in the inventories
	cpuMilli, memory float64
	pids             []int // processes of replicas without a report from a cgroup
}

// usedBy adds the usage of each replica to the entry of its function in the map by. It leaves out
// functions without an entry. All inventories are of this machine.
func usedBy(inventories []node.Inventory, by map[string]*used) {
	for _, inv := range inventories {
		counted := map[int]bool{} // processes: a worker is counted once, for the first of its replicas
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

// cpuLoad measures the CPU usage of functions that are scaled by it. It has a meter of its own,
// because each reading of a meter covers the time since the previous reading.
type cpuLoad struct {
	nodes *nodes
	meter sandbox.Meter
	log   *slog.Logger
}

// of returns the CPU usage by function, in thousandths of a core. It leaves out functions that
// cannot be measured.
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
