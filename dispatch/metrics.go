package dispatch

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics are the dispatcher's figures, all by function. Those that have a state are read when they are asked for, so that
// tasks do not pay for them.
type metrics struct {
	shell    *Shell
	registry prometheus.Registerer
	depth    *prometheus.Desc
	replicas *prometheus.Desc
	wait     *prometheus.HistogramVec
	service  *prometheus.HistogramVec
	lost     *prometheus.CounterVec
	expired  *prometheus.CounterVec
}

func newMetrics(r prometheus.Registerer, s *Shell) (*metrics, error) {
	labels := []string{"function"}
	name := func(n string) string { return prometheus.BuildFQName("stagecoach", "dispatch", n) }
	spans := prometheus.ExponentialBucketsRange(0.0001, 30, 20)
	m := &metrics{
		shell: s, registry: r,
		depth:    prometheus.NewDesc(name("queue_depth"), "Tasks that wait.", labels, nil),
		replicas: prometheus.NewDesc(name("replicas"), "Replicas that get tasks.", labels, nil),
		wait: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: name("wait_seconds"), Help: "Time from a task's arrival to its replica, or to its end in the line.", Buckets: spans,
		}, labels),
		service: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: name("service_seconds"), Help: "Time of a good call on its replica.", Buckets: spans,
		}, labels),
		lost: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: name("replicas_lost_total"), Help: "Replicas whose connection ended unasked.",
		}, labels),
		expired: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: name("expired_total"), Help: "Tasks whose deadline passed, waiting or running.",
		}, labels),
	}
	for i, c := range m.collectors() {
		if err := r.Register(c); err != nil {
			for _, done := range m.collectors()[:i] {
				r.Unregister(done)
			}
			return nil, fmt.Errorf("register metrics: %w", err)
		}
	}
	return m, nil
}

func (m *metrics) collectors() []prometheus.Collector {
	return []prometheus.Collector{m, m.wait, m.service, m.lost, m.expired}
}

func (m *metrics) close() {
	for _, c := range m.collectors() {
		m.registry.Unregister(c)
	}
}

// Describe sends the figures that have a state.
func (m *metrics) Describe(ch chan<- *prometheus.Desc) {
	ch <- m.depth
	ch <- m.replicas
}

// Collect reads them.
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	for name, f := range *m.shell.functions.Load() {
		ch <- prometheus.MustNewConstMetric(m.depth, prometheus.GaugeValue, float64(f.load.waiting.Load()), name)
		ch <- prometheus.MustNewConstMetric(m.replicas, prometheus.GaugeValue, float64(f.load.replicas.Load()), name)
	}
}

// functionMetrics are one function's figures, looked up once.
type functionMetrics struct {
	wait, service prometheus.Observer
	lost, expired prometheus.Counter
}

func (m *metrics) of(function string) functionMetrics {
	return functionMetrics{
		wait: m.wait.WithLabelValues(function), service: m.service.WithLabelValues(function),
		lost: m.lost.WithLabelValues(function), expired: m.expired.WithLabelValues(function),
	}
}

func (m *metrics) forget(function string) {
	m.wait.DeleteLabelValues(function)
	m.service.DeleteLabelValues(function)
	m.lost.DeleteLabelValues(function)
	m.expired.DeleteLabelValues(function)
}
