package main

import (
	"bytes"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/stagecoach-serving/stagecoach/keysmanager/items"
	"github.com/stagecoach-serving/stagecoach/request/queue"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// largestMessage returns a function that returns the size of the largest message that has passed
// NATS since the call, and how many have.
func (n *nodesRig) largestMessage() func() (largest, messages int) {
	n.t.Helper()
	return watchMessages(n.t, n.url, n.access())
}

// watchMessages is largestMessage with the connection of a user that may read all subjects.
func watchMessages(t *testing.T, urls string, a queue.Access) func() (largest, messages int) {
	t.Helper()
	nc, err := queue.Connect(urls, a, "test", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	all, err := nc.SubscribeSync(">")
	if err == nil {
		err = all.SetPendingLimits(-1, -1)
	}
	if err == nil {
		err = nc.FlushTimeout(soon)
	}
	if err != nil {
		t.Fatal(err)
	}
	return func() (largest, messages int) {
		if err := nc.FlushTimeout(soon); err != nil {
			t.Fatal(err)
		}
		for {
			m, err := all.NextMsg(time.Millisecond)
			if err != nil {
				return largest, messages
			}
			largest, messages = max(largest, len(m.Data)), messages+1
		}
	}
}

// splitPipeline deploys the pipeline "both", with its first stage on n1 and its second one on n2.
func (n *nodesRig) splitPipeline() {
	n.t.Helper()
	n.operate("cordon", "n2")
	n.deployAll(fn{"first", "noop", one(), map[string]string{"pipeline": "both", "next": "second"}, nil})
	n.until(soon, "the first stage on n1", func() bool { return len(n.running("n1", "first")) == 1 })
	n.operate("uncordon", "n2")
	n.operate("cordon", "n1")
	n.deployAll(fn{"second", "noop", one(), map[string]string{"pipeline": "both"}, nil})
	n.until(soon, "the second stage on n2", func() bool { return len(n.running("n2", "second")) == 1 })
}

// bigItem is the size of an item of askBoth.
const bigItem = 2 << 20

// askBoth sends a large item to the pipeline "both", which answers with it.
func (n *nodesRig) askBoth() {
	n.t.Helper()
	big := make([]byte, bigItem)
	_, _ = rand.NewChaCha8([32]byte{}).Read(big) // never fails
	got := n.must(http.StatusOK, http.MethodPost, "/function/both", string(big), "Content-Type", "application/octet-stream")
	if !bytes.Equal(got.Body, big) {
		n.t.Errorf("got %d bytes, want the %d sent ones", len(got.Body), len(big))
	}
}

// TestLargeItemsReachReplicasBesideUp runs a pipeline whose second stage is on the machine of up,
// without a daemon that gets items for it.
func TestLargeItemsReachReplicasBesideUp(t *testing.T) {
	t.Parallel()
	n := startNodes(t, "--no-node")
	n.farDaemon("n1")
	n.daemon("n2")
	n.splitPipeline()
	n.askBoth()
	if got := n.value(`stagecoach_node_items_total{way="fetched"}`); got != 1 {
		t.Errorf("%v items were fetched, want 1", got)
	}
	if got := n.value("stagecoach_node_items_fetch_memory_bytes"); got != 0 {
		t.Errorf("%v bytes are in use after the answer", got)
	}
}

// TestLargeItemsGoFromNodeToNode runs a pipeline whose stages are on two nodes. Its large item goes
// from node to node, and neither through up nor through NATS.
func TestLargeItemsGoFromNodeToNode(t *testing.T) {
	t.Parallel()
	n := startNodes(t, "--no-node")
	n.farDaemon("n1")
	n.farDaemon("n2")
	n.splitPipeline()
	carried := func() float64 {
		return n.value(`stagecoach_tunnel_bytes_total{direction="sent"}`) + n.value(`stagecoach_tunnel_bytes_total{direction="received"}`)
	}
	largest, before := n.largestMessage(), carried()
	const requests = 4
	for range requests {
		n.askBoth()
	}
	// The input and the answer; through up, it would be twice as much.
	if got := carried() - before; got < 2*requests*bigItem || got > 2.5*requests*bigItem {
		t.Errorf("%d requests took %.0f bytes of up's connections, want those of two items of %d each", requests, got, bigItem)
	}
	if got := n.value(`stagecoach_node_items_total{way="left"}`); got != requests {
		t.Errorf("%v items have stayed on their node, want %d", got, requests)
	}
	for _, way := range []string{"fetched", "relayed"} {
		if got := n.value(fmt.Sprintf("stagecoach_node_items_total{way=%q}", way)); got != 0 {
			t.Errorf("%v items were %s", got, way)
		}
	}
	n.until(soon, "an announcement", func() bool {
		size, messages := largest()
		if size > tensor.InlineLimit+4<<10 {
			t.Fatalf("a message of NATS has %d bytes, want at most 64 KiB and its header", size)
		}
		return messages > 0
	})
	if strings.Contains(n.log.String(), "level=ERROR") {
		t.Errorf("log:\n%s", n.log)
	}
}

// TestItemMetricsAreDocumented compares the metrics of a daemon's items with docs/metrics.md.
func TestItemMetricsAreDocumented(t *testing.T) {
	store := items.NewStore(items.Config{Node: "n1", Log: slog.New(slog.DiscardHandler)})
	defer store.Close()
	metrics := prometheus.NewRegistry()
	metrics.MustRegister(newItemMetrics(items.NewCarrier(items.CarrierConfig{Store: store})))
	all, err := metrics.Gather()
	if err != nil {
		t.Fatal(err)
	}
	documented := documentedMetrics(t)
	for _, m := range all {
		d := documented[m.GetName()]
		if kind := strings.ToLower(m.GetType().String()); d.kind != kind {
			t.Errorf("%s is a %s, docs/metrics.md says %q", m.GetName(), kind, d.kind)
		}
		for _, label := range m.GetMetric()[0].GetLabel() {
			if !slices.Contains(d.labels, label.GetName()) {
				t.Errorf("%s has the label %s, docs/metrics.md says %q", m.GetName(), label.GetName(), d.labels)
			}
		}
		delete(documented, m.GetName())
	}
	for name := range documented {
		if strings.HasPrefix(name, "stagecoach_items_") {
			t.Errorf("docs/metrics.md has %s, which is not there", name)
		}
	}
	problems, err := testutil.GatherAndLint(metrics)
	if err != nil || len(problems) > 0 {
		t.Errorf("%v, %v", problems, err)
	}
}
