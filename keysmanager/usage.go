package keysmanager

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
)

// measure looks at what the processes of the node use.
func (m *Manager) measure() {
	m.pool.Measure(func() ([]*resources.Cgroup, map[*resources.Cgroup][]string) { return m.groups(), m.guests() })
}

// used returns what has been used by function, as of the latest measurement.
func (m *Manager) used() map[string]resources.Used { return m.pool.Used(m.groups(), m.guests()) }

// guests returns the functions of the replicas of each worker, by its group.
func (m *Manager) guests() map[*resources.Cgroup][]string {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := map[*resources.Cgroup][]string{}
	for _, p := range m.processes {
		if p.running && p.zygote.Works() && p.zygote.Held().Group() != nil {
			all[p.zygote.Held().Group()] = append(all[p.zygote.Held().Group()], p.function)
		}
	}
	return all
}

// groups returns the cgroups of what runs.
func (m *Manager) groups() []*resources.Cgroup {
	m.mu.Lock()
	defer m.mu.Unlock()
	var all []*resources.Cgroup
	for _, p := range m.processes {
		if p.running && p.held.Group() != nil {
			all = append(all, p.held.Group())
		}
	}
	for _, s := range m.slots.Values() {
		if s.zygote != nil && s.zygote.Held().Group() != nil {
			all = append(all, s.zygote.Held().Group())
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
		ch <- prometheus.MustNewConstMetric(c.cpu, prometheus.CounterValue, u.CPU.Seconds(), function)
		ch <- prometheus.MustNewConstMetric(c.memory, prometheus.GaugeValue, float64(u.Memory), function)
		ch <- prometheus.MustNewConstMetric(c.throttled, prometheus.CounterValue, u.Throttled.Seconds(), function)
	}
}
