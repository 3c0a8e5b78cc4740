package main

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
	"github.com/stagecoach-serving/stagecoach/keysmanager/tunnel"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// TestItemsOfAStandbyGoDirectly sends large requests to a control plane that stands by. Their
// pipeline has stages on two nodes. The client's input goes from the standby to the first node, the
// item between the stages from node to node, and the answer from the second node to the standby.
// None of these items goes through the leader or through NATS.
func TestItemsOfAStandbyGoDirectly(t *testing.T) {
	t.Parallel()
	a, b, n, key := twoControls(t, 1)
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte(n.printed("--uses", "2")), 0o600); err != nil {
		t.Fatal(err)
	}
	n.farDaemon("n1", "--token", token)
	n.farDaemon("n2", "--token", token)
	n.splitPipeline()

	b.until(soon, "the standby to know the pipeline", func() bool {
		return b.send(http.MethodPost, "/function/both", "x").Status == http.StatusOK
	})
	whole := func() float64 {
		return b.value(`stagecoach_flow_message_items_total{direction="sent"}`) + b.value(`stagecoach_flow_message_items_total{direction="received"}`)
	}
	items := func(way string) float64 {
		return b.value(fmt.Sprintf("stagecoach_node_items_total{way=%q}", way))
	}
	b.until(soon, "the standby to reach both nodes", func() bool { before := whole(); n.askBoth(); return whole() == before })
	carried := func() float64 {
		return a.value(`stagecoach_tunnel_bytes_total{direction="sent"}`) + a.value(`stagecoach_tunnel_bytes_total{direction="received"}`)
	}
	largest, through := watchMessages(t, n.url, controlAccess(t, key)), carried()
	before := map[string]float64{"whole": whole()}
	const requests = 4
	ways := map[string]float64{"left": 2 * requests, "fetched": requests, "given": requests, "relayed": 0}
	for way := range ways {
		before[way] = items(way)
	}
	for range requests {
		n.askBoth()
	}
	if got := whole() - before["whole"]; got != 0 {
		t.Errorf("%v large items went through NATS", got)
	}
	for way, want := range ways {
		if got := items(way) - before[way]; got != want {
			t.Errorf("%v items %s, want %v", got, way, want)
		}
	}
	if got := carried() - through; got > bigItem {
		t.Errorf("%d requests took %.0f bytes of the leader's connections, want none of their items", requests, got)
	}
	n.until(soon, "a message", func() bool {
		size, messages := largest()
		if size > tensor.InlineLimit+4<<10 {
			t.Fatalf("a message of NATS has %d bytes, want at most 64 KiB and its header", size)
		}
		return messages > 0
	})
	for _, r := range []*rig{a, b} {
		if strings.Contains(r.log.String(), "level=ERROR") {
			t.Errorf("log:\n%s", r.log)
		}
	}
}

// TestAnyControlPlanePassesItemsOn checks which control planes a node asks for an item.
func TestAnyControlPlanePassesItemsOn(t *testing.T) {
	broken := errors.New("broken")
	refused := map[string]error{"r1": &tunnel.RefusedError{Text: "r1"}, "r2": &tunnel.RefusedError{Text: "r2"}, "b1": broken, "ok": nil, "never": errors.New("never asked")}
	for _, tc := range []struct {
		planes string
		want   error
	}{
		{"ok never", nil},
		{"r1 b1 ok never", nil},
		{"r1 r2", refused["r1"]},
		{"r1 b1 r2", broken}, // it is asked again
		{"", tunnel.ErrNotConnected},
	} {
		var planes []identity.Name
		for _, name := range strings.Fields(tc.planes) {
			planes = append(planes, identity.Name{Name: name})
		}
		c, err := openAny(planes, func(to identity.Name) (net.Conn, error) {
			if err := refused[to.Name]; err != nil {
				return nil, err
			}
			return &net.TCPConn{}, nil
		})
		if !errors.Is(err, tc.want) || (c != nil) != (err == nil) {
			t.Errorf("%q: %v, %v, want %v", tc.planes, c, err, tc.want)
		}
	}
}

// TestAllNodesAreReached checks that a node without a connection is noticed.
func TestAllNodesAreReached(t *testing.T) {
	var none *farNodes
	f := &farNodes{}
	if none.reachesAll() || !f.reachesAll() {
		t.Error("want nodes to be reached if there is a tunnel, and no node without a connection")
	}
	if f.noteApart(); f.reachesAll() {
		t.Error("a node without a connection is not noticed")
	}
	if f.apart.Add(-int64(apartFor)); !f.reachesAll() {
		t.Error("a node that has ended still counts")
	}
}
