package main

import (
	"github.com/prometheus/client_golang/prometheus"
)

// cacheMetrics exports the caches of daemons as their KeysManagers do themselves, from what they announce: who scrapes up has all
// nodes. Ours exports its own.
type cacheMetrics struct{ nodes nodeList }

// Describe implements prometheus.Collector. It says nothing: the names are also those of our own KeysManager.
func (cacheMetrics) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (c cacheMetrics) Collect(ch chan<- prometheus.Metric) {
	for _, inv := range c.nodes.Inventories() {
		if inv.Embedded {
			continue
		}
		send := func(name, help string, kind prometheus.ValueType, v float64, labels ...string) {
			all := prometheus.Labels{"node": inv.Name}
			for i := 0; i < len(labels); i += 2 {
				all[labels[i]] = labels[i+1]
			}
			ch <- prometheus.MustNewConstMetric(prometheus.NewDesc("stagecoach_cache_"+name, help, nil, all), kind, v)
		}
		const lookups = "Starts that needed a zygote: hit, it was there, or miss."
		send("lookups_total", lookups, prometheus.CounterValue, float64(inv.Counts.Hits), "result", "hit")
		send("lookups_total", lookups, prometheus.CounterValue, float64(inv.Counts.Misses), "result", "miss")
		const evictions = "Zygotes that were ended, by reason: memory, pressure, invalidated or asked."
		e := inv.Counts.Evicted
		for reason, n := range map[string]uint64{"memory": e.Memory, "pressure": e.Pressure, "invalidated": e.Invalidated, "asked": e.Asked} {
			send("evictions_total", evictions, prometheus.CounterValue, float64(n), "reason", reason)
		}
		send("refused_total", "Loads that did not fit into the node's memory.", prometheus.CounterValue, float64(inv.Counts.Refused))
		send("zygotes", "Parameter sets in memory.", prometheus.GaugeValue, float64(len(inv.Zygotes)))
		bytes := int64(0)
		for _, z := range inv.Zygotes {
			bytes += z.Bytes
		}
		send("bytes", "Memory that parameter sets take.", prometheus.GaugeValue, float64(bytes))
		send("free_bytes", "Memory that parameters can be loaded into without an eviction.", prometheus.GaugeValue, float64(inv.Memory.Free))
	}
}
