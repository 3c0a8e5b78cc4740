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

// began says that a function has one replica more.
func (t *totals) began(function string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.of == nil {
		t.of = map[string]*total{}
	}
	f := t.of[function]
	if f == nil {
		f = &total{}
		t.of[function] = f
	}
	f.live++
	f.gone = false
}

// ended takes over what a replica had used.
func (t *totals) ended(e *enclosure, u GroupUsage) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e.replica && !e.done {
		e.done = true
		t.end(e.function, u)
	}
}

// left says that a replica in a worker has ended.
func (t *totals) left(function string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.end(function, GroupUsage{})
}

func (t *totals) end(function string, u GroupUsage) {
	if f := t.of[function]; f != nil {
		f.cpu += u.CPU
		f.throttled += u.Throttled
		f.live--
		t.tidy(function, f)
	}
}

// share takes over what a worker has used since it was last asked, in equal parts for each of its replicas, by function.
func (t *totals) share(e *enclosure, functions []string) {
	u, n := e.usage().GroupUsage, time.Duration(len(functions))
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, name := range functions {
		if f := t.of[name]; f != nil {
			f.cpu += (u.CPU - e.shared.CPU) / n
			f.throttled += (u.Throttled - e.shared.Throttled) / n
		}
	}
	e.shared = u
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
	live, guests := m.enclosures(), m.guests()
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
	for e, functions := range guests {
		part := e.usage().Memory / int64(len(functions))
		for _, name := range functions {
			if f, ok := all[name]; ok {
				f.memory += part
				all[name] = f
			}
		}
	}
	return all
}

// guests returns the functions of the replicas of each worker, by its group.
func (m *Manager) guests() map[*enclosure][]string {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := map[*enclosure][]string{}
	for _, p := range m.processes {
		if p.running && p.zygote.works() && p.zygote.group != nil {
			all[p.zygote.group] = append(all[p.zygote.group], p.function)
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
		m, desc("cpu_seconds_total", "Processor time that replicas have used, in a worker an equal part of its."),
		desc("memory_bytes", "Memory of replicas, without what they share with their zygotes, in a worker an equal part of its."),
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
