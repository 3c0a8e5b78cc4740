package cluster

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/plan"
)

// metrics are the cluster's figures.
type metrics struct {
	states stateCounts
	starts *prometheus.HistogramVec
	ends   *prometheus.CounterVec
}

func newMetrics(l *Local) metrics {
	return metrics{
		states: stateCounts{l, prometheus.NewDesc("stagecoach_cluster_replicas", "Replicas of a function by state: starting, ready, draining.", []string{"function", "state"}, nil)},
		starts: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Namespace: "stagecoach", Subsystem: "cluster", Name: "start_seconds",
			Help:    "Time from a replica's order to its being ready, by path: fork, cold, process.",
			Buckets: prometheus.ExponentialBucketsRange(0.005, 60, 16),
		}, []string{"path"}),
		ends: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: "stagecoach", Subsystem: "cluster", Name: "replica_ends_total",
			Help: "Replicas that are gone, by how: stopped, lost, failed (to start).",
		}, []string{"how"}),
	}
}

func (m metrics) collectors() []prometheus.Collector {
	return []prometheus.Collector{m.starts, m.ends, m.states}
}

// stateCounts counts replicas when it is asked to. A function without any has no series.
type stateCounts struct {
	local *Local
	desc  *prometheus.Desc
}

// Describe implements prometheus.Collector.
func (c stateCounts) Describe(ch chan<- *prometheus.Desc) { ch <- c.desc }

// Collect implements prometheus.Collector.
func (c stateCounts) Collect(ch chan<- prometheus.Metric) {
	for function, n := range c.local.Counts() {
		for state, n := range map[plan.State]int{plan.Starting: n.Starting, plan.Ready: n.Ready, plan.Draining: n.Draining} {
			ch <- prometheus.MustNewConstMetric(c.desc, prometheus.GaugeValue, float64(n), function, state.String())
		}
	}
}

func (m metrics) register(r prometheus.Registerer) error {
	for i, c := range m.collectors() {
		if err := r.Register(c); err != nil {
			for _, done := range m.collectors()[:i] {
				r.Unregister(done)
			}
			return err
		}
	}
	return nil
}

func (m metrics) unregister(r prometheus.Registerer) {
	for _, c := range m.collectors() {
		r.Unregister(c)
	}
}
