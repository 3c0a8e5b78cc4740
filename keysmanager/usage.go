package keysmanager

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
)

// measure measures the usage of the node's processes.
func (m *Manager) measure() {
	m.pool.Measure(m.store.seen)
}

// used returns the usage per function, as of the latest measurement.
func (m *Manager) used() map[string]resources.Used { return m.pool.Used(m.store.seen()) }

// seen returns the cgroups of the replicas and zygotes that run. guests has the functions of each
// worker's replicas, by the worker's cgroup.
func (st *store) seen() (live []*resources.Cgroup, guests map[*resources.Cgroup][]string) {
	st.mu.Lock()
	defer st.mu.Unlock()
	live = st.processes.groups()
	for _, s := range st.slots.Values() {
		if s.zygote != nil && s.zygote.Held().Group() != nil {
			live = append(live, s.zygote.Held().Group())
		}
	}
	return live, st.processes.guests()
}

// usageMetrics exports the usage of each function's replicas.
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
		ch <- prometheus.MustNewConstMetric(c.cpu, prometheus.CounterValue, u.CPU.Seconds(), function)
		ch <- prometheus.MustNewConstMetric(c.memory, prometheus.GaugeValue, float64(u.Memory), function)
		ch <- prometheus.MustNewConstMetric(c.throttled, prometheus.CounterValue, u.Throttled.Seconds(), function)
	}
}
