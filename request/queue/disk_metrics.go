package queue

import (
	"github.com/prometheus/client_golang/prometheus"
)

// diskMetrics exports metrics of the disk of the state folder.
type diskMetrics struct {
	disk                     *Disk
	free, degraded, reopened *prometheus.Desc
}

// NewDiskMetrics returns a collector of the metrics of a disk: free bytes, and what is refused.
func NewDiskMetrics(d *Disk) prometheus.Collector {
	return &diskMetrics{
		disk: d,
		free: prometheus.NewDesc("stagecoach_disk_free_bytes", "Bytes left on the disk of the state folder; -1 if they cannot be read.", nil, nil),
		degraded: prometheus.NewDesc("stagecoach_degraded",
			"1 while something is refused. low: async requests, and below 16 MiB changes too, because the disk is nearly full. stopped: both, because a write has failed.", []string{"cause"}, nil),
		reopened: prometheus.NewDesc("stagecoach_disk_reopened_total", "Times that the streams of NATS were opened again after a failed write.", nil, nil),
	}
}

// Describe implements prometheus.Collector.
func (s *diskMetrics) Describe(ch chan<- *prometheus.Desc) {
	ch <- s.free
	ch <- s.degraded
	ch <- s.reopened
}

// Collect implements prometheus.Collector.
func (s *diskMetrics) Collect(ch chan<- prometheus.Metric) {
	now := s.disk.Stats()
	one := func(yes bool) float64 {
		if yes {
			return 1
		}
		return 0
	}
	ch <- prometheus.MustNewConstMetric(s.free, prometheus.GaugeValue, float64(now.Free))
	ch <- prometheus.MustNewConstMetric(s.degraded, prometheus.GaugeValue, one(now.Low), "low")
	ch <- prometheus.MustNewConstMetric(s.degraded, prometheus.GaugeValue, one(now.Stopped), "stopped")
	ch <- prometheus.MustNewConstMetric(s.reopened, prometheus.CounterValue, float64(now.Reopened))
}
