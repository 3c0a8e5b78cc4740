package main

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/keysmanager/tunnel"
)

// tunnelMetrics exports the connections with processes on other machines.
type tunnelMetrics struct {
	tunnel                      *tunnel.Tunnel
	connections, streams, bytes *prometheus.Desc
}

func newTunnelMetrics(t *tunnel.Tunnel) prometheus.Collector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("stagecoach_tunnel_"+name, help, labels, nil)
	}
	return &tunnelMetrics{
		t, desc("connections", "Open connections with control planes or nodes on other machines."),
		desc("streams", "Open streams over these connections."),
		desc("bytes_total", "Bytes over these connections, with TLS: sent or received.", "direction"),
	}
}

// Describe implements prometheus.Collector.
func (m *tunnelMetrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{m.connections, m.streams, m.bytes} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (m *tunnelMetrics) Collect(ch chan<- prometheus.Metric) {
	s := m.tunnel.Stats()
	ch <- prometheus.MustNewConstMetric(m.connections, prometheus.GaugeValue, float64(s.Connections))
	ch <- prometheus.MustNewConstMetric(m.streams, prometheus.GaugeValue, float64(s.Streams))
	ch <- prometheus.MustNewConstMetric(m.bytes, prometheus.CounterValue, float64(s.Sent), "sent")
	ch <- prometheus.MustNewConstMetric(m.bytes, prometheus.CounterValue, float64(s.Received), "received")
}
