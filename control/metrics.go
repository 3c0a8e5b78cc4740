package control

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/autoscaler/placement"
)

// planned exports the plan that was applied last.
type planned struct {
	loop          *Loop
	wanted, short *prometheus.Desc
	cpu, key, kl  *prometheus.Desc
}

func newPlanned(l *Loop) *planned {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("stagecoach_control_"+name, help, labels, nil)
	}
	return &planned{
		loop:   l,
		wanted: desc("wanted_replicas", "Replicas that the plan places on nodes.", "function"),
		short:  desc("short", "1: the plan places fewer replicas than the function should have.", "function"),
		cpu:    desc("cpu_limit_cores", "Cores that each replica may use by the plan; 0: as declared.", "function"),
		key:    desc("key_stage", "1: a key stage: its parameters are evicted last, its replicas are dispersed.", "function"),
		kl:     desc("key_stage_kl", "Divergence (Kullback-Leibler, in nats) of the key stages' replicas over the nodes from an even distribution; 0: even."),
	}
}

// Describe implements prometheus.Collector.
func (p *planned) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{p.wanted, p.short, p.cpu, p.key, p.kl} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (p *planned) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	is := map[bool]float64{true: 1}
	s, last := p.loop.Last()
	for _, w := range last.Wants {
		f, ok := s.Function(w.Function)
		if !ok {
			continue
		}
		gauge(p.wanted, float64(len(w.Slots)), w.Function)
		gauge(p.short, is[w.Short != ""], w.Function)
		gauge(p.cpu, float64(w.CPUMilli)/1000, w.Function)
		gauge(p.key, is[placement.Key(f, w)], w.Function)
	}
	gauge(p.kl, placement.KL(s, last.Wants))
}
