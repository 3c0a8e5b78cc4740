package cluster

import "github.com/prometheus/client_golang/prometheus"

// metrics are the cluster's figures.
type metrics struct {
	starts *prometheus.HistogramVec
	ends   *prometheus.CounterVec
}

func newMetrics() metrics {
	return metrics{
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

func (m metrics) collectors() []prometheus.Collector { return []prometheus.Collector{m.starts, m.ends} }

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
