package dispatch

import (
	"fmt"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/plan"
)

// metrics are the dispatcher's figures, all by function. Those that have a state are read when they are asked for, so that
// tasks do not pay for them.
type metrics struct {
	shell    *Shell
	registry prometheus.Registerer
	depth    *prometheus.Desc
	replicas *prometheus.Desc
	rate     *prometheus.Desc
	cv       *prometheus.Desc
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
		rate:     prometheus.NewDesc(name("arrivals_per_second"), "Rate of arriving tasks, as control sees it.", labels, nil),
		cv:       prometheus.NewDesc(name("arrival_cv_ratio"), "Coefficient of variation of the times between arrivals; 0 while they are too few.", labels, nil),
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
	ch <- m.rate
	ch <- m.cv
}

// Collect reads them, of functions that have had tasks or replicas: a thousand that nobody calls cost nothing.
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	for name, f := range *m.shell.functions.Load() {
		demand, waiting, ready := f.demand()
		if demand.Last.IsZero() && ready == 0 {
			continue
		}
		if demand.Known {
			ch <- prometheus.MustNewConstMetric(m.rate, prometheus.GaugeValue, demand.Rate, name)
			ch <- prometheus.MustNewConstMetric(m.cv, prometheus.GaugeValue, demand.CV, name)
		}
		ch <- prometheus.MustNewConstMetric(m.depth, prometheus.GaugeValue, float64(waiting), name)
		ch <- prometheus.MustNewConstMetric(m.replicas, prometheus.GaugeValue, float64(ready), name)
	}
}

// demand returns a function's demand, and how many tasks and replicas it has.
func (f *function) demand() (d plan.Demand, waiting, replicas int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.core.Demand(time.Now()), f.core.Waiting(), f.core.Replicas()
}

// functionMetrics are one function's figures, each looked up, and made, when it is first used.
type functionMetrics struct {
	wait, service func() prometheus.Observer
	lost, expired func() prometheus.Counter
}

func (m *metrics) of(function string) functionMetrics {
	return functionMetrics{
		wait:    sync.OnceValue(func() prometheus.Observer { return m.wait.WithLabelValues(function) }),
		service: sync.OnceValue(func() prometheus.Observer { return m.service.WithLabelValues(function) }),
		lost:    sync.OnceValue(func() prometheus.Counter { return m.lost.WithLabelValues(function) }),
		expired: sync.OnceValue(func() prometheus.Counter { return m.expired.WithLabelValues(function) }),
	}
}

func (m *metrics) forget(function string) {
	m.wait.DeleteLabelValues(function)
	m.service.DeleteLabelValues(function)
	m.lost.DeleteLabelValues(function)
	m.expired.DeleteLabelValues(function)
}
