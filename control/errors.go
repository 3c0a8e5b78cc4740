package control

import (
	"math"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/autoscaler"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// compare compares the model's predictions with the measurements of s. It logs when a function's
// predictions begin to be far off, and when they hold again. Only Run's goroutine may call it.
func (l *Loop) compare(s *plan.Snapshot) {
	all, changed := l.watch.Observe(s)
	for _, e := range changed {
		if e.Off {
			l.log.Warn("the model's prediction is far off", "function", e.Function, "predicted", e.Predicted, "measured", e.Stayed,
				"ratio", math.Round(100*e.Ratio())/100, "tasks", e.Tasks)
		} else {
			l.log.Info("the model's prediction holds again", "function", e.Function, "predicted", e.Predicted, "measured", e.Stayed)
		}
	}
	l.mu.Lock()
	l.errors = all
	l.mu.Unlock()
}

// ModelErrors returns the comparisons of predictions with measurements over the last minute, by
// function. Functions that cannot be compared are missing: see [autoscaler.Watch]. The caller must
// not change the result.
func (l *Loop) ModelErrors() map[string]autoscaler.ModelError {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.errors
}

// modelErrors exports the comparisons of predictions with measurements.
type modelErrors struct {
	loop  *Loop
	ratio *prometheus.Desc
}

func newModelErrors(l *Loop) *modelErrors {
	return &modelErrors{l, prometheus.NewDesc("stagecoach_model_error_ratio",
		"How long tasks stayed in the last minute, over how long the model predicted.", []string{"function"}, nil)}
}

// Describe implements prometheus.Collector.
func (m *modelErrors) Describe(ch chan<- *prometheus.Desc) { ch <- m.ratio }

// Collect implements prometheus.Collector.
func (m *modelErrors) Collect(ch chan<- prometheus.Metric) {
	for name, e := range m.loop.ModelErrors() {
		ch <- prometheus.MustNewConstMetric(m.ratio, prometheus.GaugeValue, e.Ratio(), name)
	}
}
