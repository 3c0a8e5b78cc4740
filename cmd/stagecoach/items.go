package main

import (
	"cmp"
	"context"
	"errors"
	"net"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
	"github.com/stagecoach-serving/stagecoach/keysmanager/items"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/tunnel"
)

// openItems opens the store of large outputs that other nodes get from this one.
func (f *farSide) openItems() error {
	store := items.NewStore(items.Config{Node: f.d.cfg.node, Limit: int64(f.d.cfg.tunnel.items), Log: f.d.log})
	f.d.onClose(store.Close)
	me := f.d.source.Me()
	f.items = items.NewCarrier(items.CarrierConfig{
		Store: store, Log: f.d.log,
		Direct: func(ctx context.Context, node, addr string, first any) (net.Conn, error) {
			return f.tunnel.Open(ctx, identity.Name{Cluster: me.Cluster, Role: identity.Node, Name: node}, addr, first)
		},
		Control: f.openControl,
	})
	return f.d.metrics.Register(newItemMetrics(f.items))
}

// openControl opens a stream to the control plane with a name, or, if the name is empty, to any
// control plane that accepts the stream.
func (f *farSide) openControl(ctx context.Context, name string, first any) (net.Conn, error) {
	planes := f.tunnel.Peers(identity.Control)
	if name != "" {
		planes = []identity.Name{{Cluster: f.d.source.Me().Cluster, Role: identity.Control, Name: name}}
	}
	return openAny(planes, func(to identity.Name) (net.Conn, error) { return f.tunnel.Open(ctx, to, "", first) })
}

// openAny opens a stream to the first control plane of planes that accepts it. Only the control
// plane that has a request passes on items of the request. If all control planes refuse the stream,
// the error is the first refusal. If one of them could not be asked, the error is not a refusal.
func openAny(planes []identity.Name, open func(identity.Name) (net.Conn, error)) (net.Conn, error) {
	var failed, refused error
	for _, to := range planes {
		c, err := open(to)
		if err == nil {
			return c, nil
		}
		var r *tunnel.RefusedError
		if errors.As(err, &r) {
			refused = cmp.Or(refused, err)
		} else {
			failed = cmp.Or(failed, err)
		}
	}
	return nil, cmp.Or(failed, refused, tunnel.ErrNotConnected)
}

// carrier returns what keeps large outputs; nil: the daemon has no tunnel, or no memory for them.
func (f *farSide) carrier() node.Items {
	if f == nil || f.items.Room() == 0 {
		return nil
	}
	return f.items
}

// held returns how many items the node keeps.
func (f *farSide) held() int {
	if f == nil {
		return 0
	}
	return f.items.Stats().Items
}

// itemMetrics exports the items of a node.
type itemMetrics struct {
	items                                   *items.Carrier
	count, bytes, kept, full, got, gotBytes *prometheus.Desc
	sent, refused, expired, lost            *prometheus.Desc
	room                                    roomMetrics
}

func itemDesc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("stagecoach_items_"+name, help, labels, nil)
}

func newItemMetrics(c *items.Carrier) prometheus.Collector {
	return &itemMetrics{
		items: c, count: itemDesc("held", "Large outputs that the node keeps now."),
		bytes:    itemDesc("held_bytes", "Memory that they use."),
		kept:     itemDesc("kept_total", "Large outputs that the node has kept."),
		full:     itemDesc("full_total", "Large outputs that went through the control plane for want of room."),
		got:      itemDesc("got_total", "Items for replicas of the node, by way: near, from another node, or from or through a control plane.", "way"),
		gotBytes: itemDesc("got_bytes_total", "Bytes of items that came from another node, or from or through a control plane.", "way"),
		sent:     itemDesc("sent_bytes_total", "Bytes of items that other processes got from the node."),
		refused:  itemDesc("refused_total", "Requests for items that the node has refused."),
		expired:  itemDesc("expired_total", "Items that were removed because the end of their request was not announced."),
		lost:     itemDesc("lost_total", "Items that the node could not get."),
		room:     newRoomMetrics("stagecoach_items", c.Fetching),
	}
}

// Describe implements prometheus.Collector.
func (m *itemMetrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{m.count, m.bytes, m.kept, m.full, m.got, m.gotBytes, m.sent, m.refused, m.expired, m.lost} {
		ch <- d
	}
	m.room.describe(ch)
}

// Collect implements prometheus.Collector.
func (m *itemMetrics) Collect(ch chan<- prometheus.Metric) {
	s, c := m.items.Stats(), m.items.Carried()
	counter := func(d *prometheus.Desc, v uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	ch <- prometheus.MustNewConstMetric(m.count, prometheus.GaugeValue, float64(s.Items))
	ch <- prometheus.MustNewConstMetric(m.bytes, prometheus.GaugeValue, float64(s.Bytes))
	counter(m.kept, s.Kept)
	counter(m.full, s.Full)
	counter(m.got, c.Near, "near")
	counter(m.got, c.Fetched, "node")
	counter(m.got, c.Relayed, "control")
	counter(m.gotBytes, c.FetchedBytes, "node")
	counter(m.gotBytes, c.RelayedBytes, "control")
	counter(m.sent, s.Sent)
	counter(m.refused, s.Refused)
	counter(m.expired, s.Expired)
	counter(m.lost, c.Lost)
	m.room.collect(ch)
}

// roomMetrics export the memory of fetched items.
type roomMetrics struct {
	read                   func() items.Rooms
	bytes, waiting, waited *prometheus.Desc
}

func newRoomMetrics(prefix string, read func() items.Rooms) roomMetrics {
	return roomMetrics{
		read: read, bytes: prometheus.NewDesc(prefix+"_fetch_memory_bytes", "Memory of items that were fetched from nodes for batches without an answer.", nil, nil),
		waiting: prometheus.NewDesc(prefix+"_fetch_waiting", "Batches that wait for memory for their items.", nil, nil),
		waited:  prometheus.NewDesc(prefix+"_fetch_wait_seconds_total", "How long batches have waited for memory for their items, in all.", nil, nil),
	}
}

func (m roomMetrics) describe(ch chan<- *prometheus.Desc) {
	ch <- m.bytes
	ch <- m.waiting
	ch <- m.waited
}

func (m roomMetrics) collect(ch chan<- prometheus.Metric) {
	r := m.read()
	ch <- prometheus.MustNewConstMetric(m.bytes, prometheus.GaugeValue, float64(r.Used))
	ch <- prometheus.MustNewConstMetric(m.waiting, prometheus.GaugeValue, float64(r.Waiting))
	ch <- prometheus.MustNewConstMetric(m.waited, prometheus.CounterValue, r.Waited.Seconds())
}

// planeMetrics exports the items of nodes, as the control plane sees them.
type planeMetrics struct {
	plane        *items.Plane
	items, bytes *prometheus.Desc
	room         roomMetrics
}

func newPlaneMetrics(p *items.Plane) prometheus.Collector {
	return &planeMetrics{
		p, prometheus.NewDesc("stagecoach_node_items_total", "Items that nodes keep, by what became of them: left with the node, fetched by the control plane for itself, relayed to another node, or given to a node by the control plane that has the request.", []string{"way"}, nil),
		prometheus.NewDesc("stagecoach_node_items_bytes_total", "Bytes of these items.", []string{"way"}, nil),
		newRoomMetrics("stagecoach_node_items", p.Fetching),
	}
}

// Describe implements prometheus.Collector.
func (m *planeMetrics) Describe(ch chan<- *prometheus.Desc) {
	ch <- m.items
	ch <- m.bytes
	m.room.describe(ch)
}

// Collect implements prometheus.Collector.
func (m *planeMetrics) Collect(ch chan<- prometheus.Metric) {
	p := m.plane.Passed()
	both := func(way string, items, bytes uint64) {
		ch <- prometheus.MustNewConstMetric(m.items, prometheus.CounterValue, float64(items), way)
		ch <- prometheus.MustNewConstMetric(m.bytes, prometheus.CounterValue, float64(bytes), way)
	}
	both("left", p.Left, p.LeftBytes)
	both("fetched", p.Fetched, p.FetchedBytes)
	both("relayed", p.Relayed, p.RelayedBytes)
	both("given", p.Given, p.GivenBytes)
	m.room.collect(ch)
}
