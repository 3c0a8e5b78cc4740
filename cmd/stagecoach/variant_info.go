package main

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider"
)

// variantInfo exports stagecoach_variant_info. Queries join it with the metrics of functions, so
// that these need no further labels.
type variantInfo struct {
	registry *provider.Registry
	desc     *prometheus.Desc
}

func newVariantInfo(r *provider.Registry) *variantInfo {
	return &variantInfo{r, prometheus.NewDesc("stagecoach_variant_info", "1 for each function that serves a stage with variants: the stage's own function and each variant.",
		[]string{"function", "stage", "accuracy", "max_length"}, nil)}
}

// Describe implements prometheus.Collector.
func (c *variantInfo) Describe(ch chan<- *prometheus.Desc) { ch <- c.desc }

// Collect implements prometheus.Collector.
func (c *variantInfo) Collect(ch chan<- prometheus.Metric) {
	for _, f := range c.registry.Functions() {
		stage := f.Key
		if of := f.Declared.VariantOf; of != "" {
			if _, bad := c.registry.VariantFault(f.Declared); bad {
				continue
			}
			stage = pipeline.Key{Name: of, Namespace: f.Key.Namespace}
		} else if len(c.registry.Variants(f.Key)) == 0 {
			continue
		}
		length := "" // any
		if f.Declared.MaxLength > 0 {
			length = strconv.Itoa(f.Declared.MaxLength)
		}
		ch <- prometheus.MustNewConstMetric(c.desc, prometheus.GaugeValue, 1,
			f.Key.String(), stage.String(), strconv.FormatFloat(c.registry.Accuracy.Function(f).Accuracy, 'g', -1, 64), length)
	}
}
