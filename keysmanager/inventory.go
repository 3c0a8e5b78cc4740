package keysmanager

import (
	"cmp"
	"fmt"
	"runtime"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Inventory is what a node is and has. Slices are sorted by function, then digest or name.
type Inventory struct {
	Node       string
	Memory     int64 // bytes for zygotes and replicas
	MemoryUsed int64 // by zygotes
	CPUMilli   int
	Devices    []DeviceInfo // sorted by ID
	Zygotes    []ZygoteInfo
	Failures   []Failure
	Replicas   []ReplicaInfo
	Counts
}

// Counts are of what happened since the start.
type Counts struct {
	Hits, Misses uint64 // starts that found their zygote, and that did not
	Evictions    uint64 // for want of memory
}

// ZygoteInfo is a parameter set in memory.
type ZygoteInfo struct {
	PID      int
	Function string // that uses it; the first by name when several do
	Digest   string // of the image
	Bytes    int64  // proportional set size once loaded
	Replicas int
	Load     time.Duration
}

// Failure is a zygote that did not load or that ended, and is loaded again at the next order after Retry.
type Failure struct {
	Function string // as ZygoteInfo has it
	Digest   string
	Count    int // in a row
	Retry    time.Time
	Cause    string
}

// ReplicaInfo is a replica that runs.
type ReplicaInfo struct {
	Name, Function string
	PID            int
	Path           string // as Replica has it
	Device         string // as Order has it
	Started        time.Time
	Phases         []Phase
}

// Inventory returns what the node has now.
func (m *Manager) Inventory() Inventory {
	m.mu.Lock()
	defer m.mu.Unlock()
	inv := Inventory{Node: m.cfg.Node, Memory: m.cfg.Memory, CPUMilli: 1000 * runtime.GOMAXPROCS(0), Counts: m.counts}
	users := map[zygoteKey]string{}
	for f, k := range m.uses {
		if first, ok := users[k]; !ok || f < first {
			users[k] = f
		}
	}
	for _, k := range m.slots.Keys() {
		s, _ := m.slots.Peek(k)
		switch {
		case s.zygote != nil && s.zygote.alive():
			inv.MemoryUsed += s.zygote.bytes
			inv.Zygotes = append(inv.Zygotes, ZygoteInfo{s.zygote.pid, users[k], k.digest, s.zygote.bytes, s.zygote.replicas(), s.zygote.load})
		case s.err != nil:
			inv.Failures = append(inv.Failures, Failure{users[k], k.digest, s.fails, s.retry, s.err.Error()})
		}
	}
	for _, p := range m.processes {
		if p.running {
			inv.Replicas = append(inv.Replicas, ReplicaInfo{p.replica, p.function, p.pid, p.path, p.device, p.started, p.phases})
		}
	}
	slices.SortFunc(inv.Zygotes, func(a, b ZygoteInfo) int {
		return cmp.Or(cmp.Compare(a.Function, b.Function), cmp.Compare(a.Digest, b.Digest))
	})
	slices.SortFunc(inv.Failures, func(a, b Failure) int {
		return cmp.Or(cmp.Compare(a.Function, b.Function), cmp.Compare(a.Digest, b.Digest))
	})
	slices.SortFunc(inv.Replicas, func(a, b ReplicaInfo) int {
		return cmp.Or(cmp.Compare(a.Function, b.Function), cmp.Compare(a.Name, b.Name))
	})
	return inv
}

// newMetrics registers what the node exports and returns the histogram of starts; all else is read from the inventory.
func (m *Manager) newMetrics(r prometheus.Registerer) (*prometheus.HistogramVec, error) {
	starts := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Namespace: "stagecoach", Subsystem: "replica", Name: "start_seconds", Help: "How long a phase of a replica's start took, by path.",
		Buckets: prometheus.ExponentialBuckets(0.0005, 2, 16),
	}, []string{"phase", "path"})
	all := []prometheus.Collector{starts}
	counter := func(name, help string, labels prometheus.Labels, read func(Counts) uint64) {
		all = append(all, prometheus.NewCounterFunc(
			prometheus.CounterOpts{Namespace: "stagecoach", Subsystem: "cache", Name: name, Help: help, ConstLabels: labels},
			func() float64 {
				m.mu.Lock()
				defer m.mu.Unlock()
				return float64(read(m.counts))
			}))
	}
	gauge := func(name, help string, read func(Inventory) float64) {
		all = append(all, prometheus.NewGaugeFunc(
			prometheus.GaugeOpts{Namespace: "stagecoach", Subsystem: "cache", Name: name, Help: help},
			func() float64 { return read(m.Inventory()) }))
	}
	const lookups = "Starts that needed a zygote: hit, it was there, or miss."
	counter("lookups_total", lookups, prometheus.Labels{"result": "hit"}, func(c Counts) uint64 { return c.Hits })
	counter("lookups_total", lookups, prometheus.Labels{"result": "miss"}, func(c Counts) uint64 { return c.Misses })
	counter("evictions_total", "Idle zygotes ended because memory was short.", nil, func(c Counts) uint64 { return c.Evictions })
	gauge("zygotes", "Parameter sets in memory.", func(inv Inventory) float64 { return float64(len(inv.Zygotes)) })
	gauge("bytes", "Memory that zygotes take.", func(inv Inventory) float64 { return float64(inv.MemoryUsed) })
	for _, c := range all {
		if err := r.Register(c); err != nil {
			return nil, fmt.Errorf("keysmanager: %w", err)
		}
	}
	return starts, nil
}
