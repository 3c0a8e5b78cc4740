package nodemetrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
)

// deviceGauges exports the devices of nodes.
type deviceGauges struct {
	inventories                                                       func() []node.Inventory
	memory, used, reserved, utilisation, temperature, power, wellness *prometheus.Desc
}

// NewDevices returns a collector of the metrics stagecoach_device_*.
func NewDevices(inventories func() []node.Inventory) prometheus.Collector {
	desc := func(name, help string) *prometheus.Desc {
		return prometheus.NewDesc("stagecoach_device_"+name, help, []string{"node", "uuid"}, nil)
	}
	return &deviceGauges{
		inventories: inventories,
		memory:      desc("memory_bytes", "Memory of an accelerator."),
		used:        desc("used_bytes", "Memory of an accelerator that processes use, whoever they are."),
		reserved:    desc("reserved_bytes", "Memory of an accelerator that is reserved for replicas."),
		utilisation: desc("utilisation_ratio", "Share of the latest seconds in which an accelerator computed, where it is known."),
		temperature: desc("temperature_celsius", "Temperature of an accelerator, where it is known."),
		power:       desc("power_watts", "Power that an accelerator draws, where it is known."),
		wellness:    desc("healthy", "1 when replicas may run on an accelerator, 0 when it is not well."),
	}
}

// Describe implements prometheus.Collector.
func (g *deviceGauges) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{g.memory, g.used, g.reserved, g.utilisation, g.temperature, g.power, g.wellness} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (g *deviceGauges) Collect(ch chan<- prometheus.Metric) {
	for _, n := range g.inventories() {
		for _, d := range n.Devices {
			gauge := func(desc *prometheus.Desc, v float64) {
				ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, v, n.Name, d.UUID)
			}
			well := 0.0
			if d.Healthy {
				well = 1
			}
			gauge(g.memory, float64(d.Memory))
			gauge(g.used, float64(d.Used))
			gauge(g.reserved, float64(d.Reserved))
			gauge(g.wellness, well)
			if d.Utilisation >= 0 {
				gauge(g.utilisation, d.Utilisation)
			}
			if d.Temperature > 0 {
				gauge(g.temperature, float64(d.Temperature))
			}
			if d.Power > 0 {
				gauge(g.power, d.Power)
			}
		}
	}
}
