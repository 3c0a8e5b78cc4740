package queue

import (
	"github.com/prometheus/client_golang/prometheus"
)

// journalMetrics exports the counts of a journal.
type journalMetrics struct {
	journal *Journal
	pending *prometheus.Desc
	inWork  *prometheus.Desc
	others  []journalMetric
}

type journalMetric struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(Stats) float64
	label []string
}

// NewJournalMetrics returns a collector of the metrics stagecoach_async_*.
func NewJournalMetrics(j *Journal) prometheus.Collector {
	name := func(n string) string { return "stagecoach_async_" + n }
	c := &journalMetrics{
		journal: j,
		pending: prometheus.NewDesc(name("pending"), "Async requests that are accepted and not done, callbacks included.", []string{"function_name"}, nil),
		inWork:  prometheus.NewDesc(name("in_work"), "Async requests that run.", []string{"function_name"}, nil),
	}
	add := func(kind prometheus.ValueType, n, help, label string, values map[string]func(Stats) float64) {
		var labels []string
		if label != "" {
			labels = []string{label}
		}
		d := prometheus.NewDesc(name(n), help, labels, nil)
		for v, f := range values {
			one := journalMetric{desc: d, kind: kind, value: f}
			if label != "" {
				one.label = []string{v}
			}
			c.others = append(c.others, one)
		}
	}
	type values = map[string]func(Stats) float64
	add(prometheus.CounterValue, "requests_total", "Async requests by what became of them at the door.", "result", values{
		"accepted": func(s Stats) float64 { return float64(s.Accepted) },
		"refused":  func(s Stats) float64 { return float64(s.Refused) },
		"resumed":  func(s Stats) float64 { return float64(s.Resumed) },
	})
	add(prometheus.CounterValue, "attempts_total", "Attempts that ended: of requests to run, and of results to be told.", "kind", values{
		"run":      func(s Stats) float64 { return float64(s.Runs) },
		"callback": func(s Stats) float64 { return float64(s.Callbacks) },
	})
	add(prometheus.CounterValue, "retries_total", "Attempts that failed and that another one follows.", "", values{"": func(s Stats) float64 { return float64(s.Retried) }})
	add(prometheus.CounterValue, "done_total", "Async requests that left the journal.", "", values{"": func(s Stats) float64 { return float64(s.Done) }})
	add(prometheus.CounterValue, "dead_total", "Dead letters made.", "", values{"": func(s Stats) float64 { return float64(s.Dead) }})
	add(prometheus.GaugeValue, "dead_letters", "Dead letters kept.", "", values{"": func(s Stats) float64 { return float64(s.Letters) }})
	add(prometheus.GaugeValue, "bytes", "Content of async requests that are accepted and not done.", "", values{"": func(s Stats) float64 { return float64(s.Bytes) }})
	return c
}

// Describe implements prometheus.Collector.
func (c *journalMetrics) Describe(ch chan<- *prometheus.Desc) {
	ch <- c.pending
	ch <- c.inWork
	for _, o := range c.others {
		ch <- o.desc
	}
}

// Collect implements prometheus.Collector. Functions without async requests have no series.
func (c *journalMetrics) Collect(ch chan<- prometheus.Metric) {
	s := c.journal.Stats()
	for f, n := range s.Pending {
		ch <- prometheus.MustNewConstMetric(c.pending, prometheus.GaugeValue, float64(n), f)
		ch <- prometheus.MustNewConstMetric(c.inWork, prometheus.GaugeValue, float64(s.Running[f]), f)
	}
	for _, o := range c.others {
		ch <- prometheus.MustNewConstMetric(o.desc, o.kind, o.value(s), o.label...)
	}
}
