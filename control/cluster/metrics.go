package cluster

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// metrics are the cluster's metrics.
type metrics struct {
	states stateCounts
	aims   aims
	starts *prometheus.HistogramVec
	ends   *prometheus.CounterVec
	memory *prometheus.CounterVec
}

func newMetrics(l *Local) metrics {
	return metrics{
		states: stateCounts{l, prometheus.NewDesc("stagecoach_cluster_replicas", "Replicas of a function by state: starting, ready, draining; hidden: their node is silent.", []string{"function", "state"}, nil)},
		aims: aims{
			l,
			prometheus.NewDesc("stagecoach_cluster_target", "Target load per replica of a function: its label scale.target times the proportion.", []string{"function", "type"}, nil),
			prometheus.NewDesc("stagecoach_cluster_target_load", "Present load of all replicas of a function together, in the unit of its label scale.type: rps, capacity (tasks that wait or run) or cpu (thousandths of a core).", []string{"function", "type"}, nil),
			prometheus.NewDesc("stagecoach_cluster_budget_replicas", "Replicas that all functions may have together; 0: as many as the nodes hold.", nil, nil),
		},
		starts: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Namespace: "stagecoach", Subsystem: "replica", Name: "start_seconds",
			Help:    "How long a phase of a replica's start took, by path; total: from its order to its being ready.",
			Buckets: prometheus.ExponentialBuckets(0.0005, 2, 18),
		}, []string{"phase", "path"}),
		ends: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: "stagecoach", Subsystem: "cluster", Name: "replica_ends_total",
			Help: "Replicas that ended, by how: stopped, lost, failed (at their start).",
		}, []string{"how"}),
		memory: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: "stagecoach", Subsystem: "device", Name: "out_of_memory_total",
			Help: "Replicas that were out of memory on an accelerator, at their start or in a call.",
		}, []string{"node", "uuid"}),
	}
}

func (m metrics) collectors() []prometheus.Collector {
	return []prometheus.Collector{m.starts, m.ends, m.memory, m.states, m.aims}
}

// stateCounts counts replicas when it is collected. A function without replicas has no series.
type stateCounts struct {
	local *Local
	desc  *prometheus.Desc
}

// Describe implements prometheus.Collector.
func (c stateCounts) Describe(ch chan<- *prometheus.Desc) { ch <- c.desc }

// Collect implements prometheus.Collector.
func (c stateCounts) Collect(ch chan<- prometheus.Metric) {
	for function, n := range c.local.Counts() {
		for state, n := range map[string]int{
			plan.Starting.String(): n.Starting, plan.Ready.String(): n.Ready, plan.Draining.String(): n.Draining, "hidden": n.Hidden,
		} {
			ch <- prometheus.MustNewConstMetric(c.desc, prometheus.GaugeValue, float64(n), function.String(), state)
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

// aims exports the targets of functions whose owners declared one, as last observed, and the
// budget.
type aims struct {
	local                 *Local
	value, load, replicas *prometheus.Desc
}

// Describe implements prometheus.Collector.
func (a aims) Describe(ch chan<- *prometheus.Desc) {
	ch <- a.value
	ch <- a.load
	ch <- a.replicas
}

// Collect implements prometheus.Collector.
func (a aims) Collect(ch chan<- prometheus.Metric) {
	ch <- prometheus.MustNewConstMetric(a.replicas, prometheus.GaugeValue, float64(a.local.cfg.Budget))
	a.local.mu.Lock()
	defer a.local.mu.Unlock()
	for function, t := range a.local.targets {
		ch <- prometheus.MustNewConstMetric(a.value, prometheus.GaugeValue, t.Value, function, t.Type)
		if t.Known {
			ch <- prometheus.MustNewConstMetric(a.load, prometheus.GaugeValue, t.Load, function, t.Type)
		}
	}
}
