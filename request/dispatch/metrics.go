package dispatch

import (
	"fmt"
	"math/bits"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// metrics are the dispatcher's metrics by function. Gauges are computed when they are read, so that
// they add no cost to tasks.
type metrics struct {
	shell    *Shell
	registry prometheus.Registerer

	depth, replicas, rate, cv, lately, oldest, busy, serviceCV, batch *prometheus.Desc

	wait    *prometheus.HistogramVec
	service *prometheus.HistogramVec
	lost    *prometheus.CounterVec
	expired *prometheus.CounterVec
	dropped *prometheus.CounterVec
}

func newMetrics(r prometheus.Registerer, s *Shell) (*metrics, error) {
	labels := []string{"function"}
	name := func(n string) string { return prometheus.BuildFQName("stagecoach", "dispatch", n) }
	spans := prometheus.ExponentialBucketsRange(0.0001, 30, 20)
	m := &metrics{
		shell: s, registry: r,
		depth:    prometheus.NewDesc(name("queue_depth"), "Waiting tasks.", labels, nil),
		replicas: prometheus.NewDesc(name("replicas"), "Replicas that get tasks.", labels, nil),
		rate:     prometheus.NewDesc(name("arrivals_per_second"), "Rate of arriving tasks, as control sees it.", labels, nil),
		cv:       prometheus.NewDesc(name("arrival_cv_ratio"), "Coefficient of variation of the times between arrivals; 0 while they are too few.", labels, nil),

		lately:    prometheus.NewDesc(name("wait_lately_seconds"), "Percentiles of how long the tasks of the last 15 s waited, as control sees them.", append(labels, "p"), nil),
		oldest:    prometheus.NewDesc(name("oldest_wait_seconds"), "How long the oldest waiting task has waited; 0: none waits.", labels, nil),
		busy:      prometheus.NewDesc(name("busy_ratio"), "Share of the ready replicas' slots that has been taken lately.", labels, nil),
		serviceCV: prometheus.NewDesc(name("service_cv_ratio"), "Coefficient of variation of service times; 0 while they are too few.", labels, nil),
		batch:     prometheus.NewDesc(name("batch_seconds"), "Mean time of the latest batches whose size is above half of the label size and at most the label size.", append(labels, "size"), nil),

		wait: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: name("wait_seconds"), Help: "Time from a task's arrival to its replica, or to its end in the line.", Buckets: spans,
		}, labels),
		service: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: name("service_seconds"), Help: "Time of a successful call on its replica.", Buckets: spans,
		}, labels),
		lost: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: name("replicas_lost_total"), Help: "Replicas whose connection ended unexpectedly.",
		}, labels),
		expired: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: name("expired_total"), Help: "Tasks whose deadline passed, waiting or running.",
		}, labels),
		dropped: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: name("dropped_total"), Help: "Tasks that a policy dropped, by reason.",
		}, append(labels, "reason")),
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
	return []prometheus.Collector{m, m.wait, m.service, m.lost, m.expired, m.dropped}
}

func (m *metrics) close() {
	for _, c := range m.collectors() {
		m.registry.Unregister(c)
	}
}

// Describe sends the descriptions of the gauges.
func (m *metrics) Describe(ch chan<- *prometheus.Desc) {
	ch <- m.depth
	ch <- m.replicas
	ch <- m.rate
	ch <- m.cv
	ch <- m.lately
	ch <- m.oldest
	ch <- m.busy
	ch <- m.serviceCV
	ch <- m.batch
}

// Collect reads the gauges of functions that have had tasks or replicas. A thousand unused
// functions cost nothing.
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	for key, f := range *m.shell.functions.Load() {
		name := key.String()
		is, ready, ok := f.signals()
		if !ok || is.Demand.Last.IsZero() && ready == 0 {
			continue
		}
		send := func(d *prometheus.Desc, v float64, labels ...string) {
			ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, append([]string{name}, labels...)...)
		}
		if is.Demand.Known {
			send(m.rate, is.Demand.Rate)
			send(m.cv, is.Demand.CV)
		}
		if is.Wait.Known {
			send(m.lately, is.Wait.P50.Seconds(), "50")
			send(m.lately, is.Wait.P95.Seconds(), "95")
			send(m.lately, is.Wait.P99.Seconds(), "99")
		}
		if is.Service.Known {
			send(m.serviceCV, is.Service.CV)
		}
		for _, b := range is.Service.Batches {
			send(m.batch, b.Mean.Seconds(), sizeLabel(b.Size))
		}
		if is.Busy.Known {
			send(m.busy, is.Busy.Share)
		}
		send(m.oldest, is.Wait.Oldest.Seconds())
		send(m.depth, float64(is.Waiting))
		send(m.replicas, float64(ready))
	}
}

// sizeLabel returns the label for a batch size: the upper bound of the size's class (see
// sizeClass). Classes keep the number of labels small.
func sizeLabel(size int) string { return strconv.Itoa(1 << bits.Len(uint(max(size, 1)-1))) }

// signals returns all measurements of a function's lane, and its number of replicas. ok is false if
// it has no lane.
func (f *function) signals() (is plan.Signals, replicas int, ok bool) {
	o := f.lock()
	defer o.mu.Unlock()
	l := o.core.Lane(f.lane)
	if l == nil || f.removed.Load() {
		return plan.Signals{}, 0, false
	}
	return l.Signals(time.Now()), l.Replicas(), true
}

// functionMetrics are the metrics of one function. Each is created when it is first used.
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
	m.dropped.DeletePartialMatch(prometheus.Labels{"function": function})
}
