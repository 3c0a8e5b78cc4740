// Package nodemetrics exports the memory and the devices of nodes to Prometheus.
package nodemetrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
)

// cacheMetrics exports the parameters in the memory of nodes.
type cacheMetrics struct {
	inventories                                            func() []node.Inventory
	lookups, evictions, refused, zygotes, bytes, freeBytes *prometheus.Desc
}

func newCacheMetrics(inventories func() []node.Inventory) prometheus.Collector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("stagecoach_cache_"+name, help, append([]string{"node"}, labels...), nil)
	}
	return &cacheMetrics{
		inventories: inventories,
		lookups:     desc("lookups_total", "Starts that needed a zygote: hit, it was there, or miss.", "result"),
		evictions:   desc("evictions_total", "Zygotes that were ended, by reason: memory, pressure, invalidated or asked.", "reason"),
		refused:     desc("refused_total", "Loads that did not fit into the node's memory."),
		zygotes:     desc("zygotes", "Parameter sets in memory."),
		bytes:       desc("bytes", "Memory that parameter sets take."),
		freeBytes:   desc("free_bytes", "Memory that parameters can be loaded into without an eviction."),
	}
}

// Describe implements prometheus.Collector.
func (c *cacheMetrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.lookups, c.evictions, c.refused, c.zygotes, c.bytes, c.freeBytes} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *cacheMetrics) Collect(ch chan<- prometheus.Metric) {
	for _, inv := range c.inventories() {
		send := func(d *prometheus.Desc, kind prometheus.ValueType, v float64, labels ...string) {
			ch <- prometheus.MustNewConstMetric(d, kind, v, append([]string{inv.Name}, labels...)...)
		}
		send(c.lookups, prometheus.CounterValue, float64(inv.Counts.Hits), "hit")
		send(c.lookups, prometheus.CounterValue, float64(inv.Counts.Misses), "miss")
		e := inv.Counts.Evicted
		for reason, n := range map[string]uint64{"memory": e.Memory, "pressure": e.Pressure, "invalidated": e.Invalidated, "asked": e.Asked} {
			send(c.evictions, prometheus.CounterValue, float64(n), reason)
		}
		send(c.refused, prometheus.CounterValue, float64(inv.Counts.Refused))
		send(c.zygotes, prometheus.GaugeValue, float64(len(inv.Zygotes)))
		bytes := int64(0)
		for _, z := range inv.Zygotes {
			bytes += z.Bytes
		}
		send(c.bytes, prometheus.GaugeValue, float64(bytes))
		send(c.freeBytes, prometheus.GaugeValue, float64(inv.Memory.Free))
	}
}

// Register exports the parameters in the memory of nodes, and their devices. inventories returns
// the latest inventory of each node.
func Register(r prometheus.Registerer, inventories func() []node.Inventory) error {
	if err := r.Register(newCacheMetrics(inventories)); err != nil {
		return err
	}
	return r.Register(NewDevices(inventories))
}
