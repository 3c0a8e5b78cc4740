package keysmanager

import (
	"cmp"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Inventory is what a node is and has.
type Inventory struct {
	Node       string
	Memory     int64 // bytes for zygotes and replicas
	MemoryUsed int64 // by zygotes
	CPUMilli   int
	Zygotes    []ZygoteInfo // sorted by function
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

// Inventory returns what the node has now.
func (m *Manager) Inventory() Inventory {
	m.mu.Lock()
	defer m.mu.Unlock()
	inv := Inventory{Node: m.cfg.Node, Memory: m.cfg.Memory, CPUMilli: 1000 * runtime.NumCPU()}
	users := map[zygoteKey]string{}
	for f, k := range m.uses {
		if first, ok := users[k]; !ok || f < first {
			users[k] = f
		}
	}
	for _, k := range m.slots.Keys() {
		s, _ := m.slots.Peek(k)
		if s.zygote == nil || !s.zygote.alive() {
			continue
		}
		inv.MemoryUsed += s.zygote.bytes
		inv.Zygotes = append(inv.Zygotes, ZygoteInfo{s.zygote.cmd.Process.Pid, users[k], k.digest, s.zygote.bytes, s.zygote.replicas(), s.zygote.load})
	}
	slices.SortFunc(inv.Zygotes, func(a, b ZygoteInfo) int {
		return cmp.Or(strings.Compare(a.Function, b.Function), strings.Compare(a.Digest, b.Digest))
	})
	return inv
}

type metrics struct {
	start     *prometheus.HistogramVec
	lookups   *prometheus.CounterVec
	evictions prometheus.Counter
}

func newMetrics(r prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		start: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Namespace: "stagecoach", Subsystem: "replica", Name: "start_seconds", Help: "How long a phase of a replica's start took, by path.",
			Buckets: prometheus.ExponentialBuckets(0.0005, 2, 16),
		}, []string{"phase", "path"}),
		lookups:   prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "stagecoach", Subsystem: "cache", Name: "lookups_total", Help: "Zygotes asked for: hit, they were there, or miss."}, []string{"result"}),
		evictions: prometheus.NewCounter(prometheus.CounterOpts{Namespace: "stagecoach", Subsystem: "cache", Name: "evictions_total", Help: "Idle zygotes ended because memory was short."}),
	}
	for _, c := range []prometheus.Collector{m.start, m.lookups, m.evictions} {
		if err := r.Register(c); err != nil {
			return nil, fmt.Errorf("keysmanager: %w", err)
		}
	}
	return m, nil
}

func (m *metrics) lookup(hit bool) {
	if hit {
		m.lookups.WithLabelValues("hit").Inc()
	} else {
		m.lookups.WithLabelValues("miss").Inc()
	}
}
