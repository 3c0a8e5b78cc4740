package keysmanager

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// totals add up what replicas that have ended had used, by function. The zero value is ready.
type totals struct {
	mu sync.Mutex
	of map[string]*total
}

type total struct {
	cpu, throttled time.Duration
	live           int  // replicas that have not ended
	gone           bool // the function is not deployed any more: forgotten with its last replica
}

// began says that a replica has a group.
func (t *totals) began(e *enclosure) {
	if !e.replica {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.of == nil {
		t.of = map[string]*total{}
	}
	f := t.of[e.function]
	if f == nil {
		f = &total{}
		t.of[e.function] = f
	}
	f.live++
	f.gone = false
}

// ended takes over what a replica had used.
func (t *totals) ended(e *enclosure, u GroupUsage) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if f := t.of[e.function]; f != nil && e.replica && !e.done {
		e.done = true
		f.cpu += u.CPU
		f.throttled += u.Throttled
		f.live--
		t.tidy(e.function, f)
	}
}

// forget drops a function, once its last replica has ended.
func (t *totals) forget(function string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if f := t.of[function]; f != nil {
		f.gone = true
		t.tidy(function, f)
	}
}

func (t *totals) tidy(function string, f *total) {
	if f.gone && f.live == 0 {
		delete(t.of, function)
	}
}

// used is what the replicas of a function have used.
type used struct {
	cpu, throttled time.Duration
	memory         int64
}

// used returns what has been used by function, as of the latest measurement.
func (m *Manager) used() map[string]used {
	all := map[string]used{}
	live := m.enclosures()
	m.totals.mu.Lock()
	defer m.totals.mu.Unlock()
	for name, f := range m.totals.of {
		all[name] = used{cpu: f.cpu, throttled: f.throttled}
	}
	for _, e := range live {
		if f, ok := all[e.function]; ok && e.replica && !e.done {
			u := e.usage()
			all[e.function] = used{f.cpu + u.CPU, f.throttled + u.Throttled, f.memory + u.Memory}
		}
	}
	return all
}

// enclosures returns the groups of what runs.
func (m *Manager) enclosures() []*enclosure {
	m.mu.Lock()
	defer m.mu.Unlock()
	var all []*enclosure
	for _, p := range m.processes {
		if p.running && p.group != nil {
			all = append(all, p.group)
		}
	}
	for _, s := range m.slots.Values() {
		if s.zygote != nil && s.zygote.group != nil {
			all = append(all, s.zygote.group)
		}
	}
	return all
}

// usageMetrics exports what the replicas of each function have used.
type usageMetrics struct {
	m                      *Manager
	cpu, memory, throttled *prometheus.Desc
}

func newUsageMetrics(m *Manager) usageMetrics {
	desc := func(name, help string) *prometheus.Desc {
		return prometheus.NewDesc("stagecoach_replica_"+name, help, []string{"function"}, nil)
	}
	return usageMetrics{
		m, desc("cpu_seconds_total", "Processor time that replicas have used."),
		desc("memory_bytes", "Memory of replicas, without what they share with their zygotes."),
		desc("throttled_seconds_total", "Time for which replicas were kept from the processor by their limit."),
	}
}

// Describe implements prometheus.Collector.
func (c usageMetrics) Describe(ch chan<- *prometheus.Desc) {
	ch <- c.cpu
	ch <- c.memory
	ch <- c.throttled
}

// Collect implements prometheus.Collector.
func (c usageMetrics) Collect(ch chan<- prometheus.Metric) {
	c.m.measure()
	for function, u := range c.m.used() {
		ch <- prometheus.MustNewConstMetric(c.cpu, prometheus.CounterValue, u.cpu.Seconds(), function)
		ch <- prometheus.MustNewConstMetric(c.memory, prometheus.GaugeValue, float64(u.memory), function)
		ch <- prometheus.MustNewConstMetric(c.throttled, prometheus.CounterValue, u.throttled.Seconds(), function)
	}
}
