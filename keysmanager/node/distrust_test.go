package node_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
)

// logs collects what a logger prints.
type logs struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logs) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logs) until(t *testing.T, want string) {
	t.Helper()
	deadline := time.Now().Add(limit)
	for {
		l.mu.Lock()
		text := l.b.String()
		l.mu.Unlock()
		if strings.Contains(text, want) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("waited %v for %q in\n%s", limit, want, text)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func (l *logs) logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

// liar is a worker whose announcements lie when they are told to.
type liar struct {
	*worker
	lie func(*node.Inventory) // guarded by worker.mu; nil: none
}

func (l *liar) Inventory() node.Inventory {
	inv := l.worker.Inventory()
	l.mu.Lock()
	defer l.mu.Unlock()
	inv.Memory = node.Memory{Bound: "machine", Total: 8 << 30, Used: 1 << 30, Threshold: 7 << 30, Free: 6 << 30}
	if l.lie != nil {
		l.lie(&inv)
	}
	return inv
}

// lies are announcements that no honest daemon makes, and what is said about them.
func lies() map[string]func(*node.Inventory) {
	return map[string]func(*node.Inventory){
		"memory.total: -1, want 0 to":                   func(i *node.Inventory) { i.Memory = node.Memory{Total: -1, Used: -1} },
		"memory.used: 8589934593, want 0 to 8589934592": func(i *node.Inventory) { i.Memory.Used = i.Memory.Total + 1 },
		"memory.total: 4611686018427387904, want":       func(i *node.Inventory) { i.Memory.Total = 1 << 62 },
		"memory.free: 8589934593, want 0 to":            func(i *node.Inventory) { i.Memory.Free = i.Memory.Total + 1 },
		"cpu.total: 2000000000, want 0 to":              func(i *node.Inventory) { i.CPU.Total = 2_000_000_000 },
		`is there twice`:                                func(i *node.Inventory) { i.Replicas = []node.Replica{{Name: "r"}, {Name: "r"}} },
		`replicas[0].name: \"a b\", want a name`:        func(i *node.Inventory) { i.Replicas = []node.Replica{{Name: "a b"}} },
		"zygotes: 4097, want at most 4096":              func(i *node.Inventory) { i.Zygotes = make([]node.Zygote, 4097) },
		"zygotes[0].bytes: -5, want 0 to":               func(i *node.Inventory) { i.Zygotes = []node.Zygote{{Bytes: -5}} },
		"devices[0].free: 2, want 0 to 1":               func(i *node.Inventory) { i.Devices = []node.Device{{UUID: "g", Memory: 1, Free: 2}} },
		`devices[0].uuid: \"a,b\", want a name without`: func(i *node.Inventory) { i.Devices = []node.Device{{UUID: "a,b"}} },
		"devices[0].utilisation: 7, want at most 1":     func(i *node.Inventory) { i.Devices = []node.Device{{UUID: "g", Utilisation: 7}} },
		"devices[0].power: -3, want 0 or more":          func(i *node.Inventory) { i.Devices = []node.Device{{UUID: "g", Power: -3}} },
	}
}

// TestLyingAnnouncementsAreRefused has a daemon lie in each way, one after the other. Each time,
// its node leaves, both sides say why, and the other node is not affected. The node is back with
// its next honest announcement.
func TestLyingAnnouncementsAreRefused(t *testing.T) {
	b := startBroker(t)
	var up, down logs
	c := b.watch(func(cfg *node.DirectoryConfig) { cfg.Log = up.logger() }, new(reign).of(7))
	l := &liar{worker: newWorker()}
	d := b.join("n1", l.worker, func(cfg *node.ServerConfig) { cfg.Worker, cfg.Log = l, down.logger() })
	b.join("n2", newWorker())
	c.node("n1")
	c.node("n2")
	for want, lie := range lies() {
		mark := c.mark()
		l.change(func() { l.lie = lie })
		d.Changed()
		c.until(mark, "left n1: its announcement was refused: inventory: ")
		up.until(t, "announcement of a node refused")
		up.until(t, want)
		down.until(t, "the control plane refuses this node's announcement")
		down.until(t, want)
		c.until(mark, "heard n2")
		if all := c.Clients(); len(all) != 1 || all[0].Name() != "n2" {
			t.Errorf("%s: %d nodes, want n2 alone", want, len(all))
		}
		if away := c.Away(); len(away) != 1 || away[0].Name != "n1" || !strings.Contains(away[0].Cause, "refused") {
			t.Errorf("%s: away are %+v, want n1", want, away)
		}
		mark = c.mark()
		l.change(func() { l.lie = nil })
		d.Changed()
		c.until(mark, "joined n1")
	}
	for _, s := range c.told {
		if strings.HasPrefix(s, "left n2") {
			t.Errorf("told %q, want that n2 stays", s)
		}
	}
}

// TestForeignAnnouncementsAreRefused sends announcements that no release makes: of other versions,
// of another node's name, and with text that is no JSON. Nodes that are there must stay.
func TestForeignAnnouncementsAreRefused(t *testing.T) {
	b := startBroker(t)
	var up logs
	c := b.watch(func(cfg *node.DirectoryConfig) { cfg.Log = up.logger() })
	b.join("n1", newWorker())
	c.node("n1")
	bus := b.link("stranger")
	orders := make(chan node.Order, 16)
	stop, err := bus.Listen("n2", "order", func(_, _ string, data []byte) {
		var o node.Order
		if json.Unmarshal(data, &o) == nil {
			orders <- o
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	for text, want := range map[string]string{
		`{"v":0,"name":"n2","id":"OLD"}`:                                   "version 0, want 1: run the same release of stagecoach everywhere",
		`{"v":2,"name":"n2","id":"NEW"}`:                                   "version 2, want 1",
		`{"v":1,"name":"n2","id":"HUGE"}` + strings.Repeat(" ", 5<<20):     "want at most 4194304",
		`{"v":1,"name":"n1","id":"THIEF"}`:                                 `inventory of "n1"`,
		`{"v":1,"name":"n2","id":"NAN","devices":[{"utilisation":NaN}]}`:   "invalid character 'N'",
		`{"v":1,"name":"n2","id":"BIG","devices":[{"utilisation":1e999}]}`: "cannot unmarshal number 1e999",
	} {
		if err := bus.Send("n2", "inventory", "", []byte(text)); err != nil {
			t.Fatal(err)
		}
		up.until(t, strings.ReplaceAll(want, `"`, `\"`))
		select {
		case o := <-orders:
			if o.Kind != node.OrderComplain || !strings.Contains(o.Cause, want) || !strings.Contains(text, fmt.Sprintf("%q", o.To)) {
				t.Errorf("%.100s: order %+v, want a complaint with %q", text, o, want)
			}
		case <-time.After(limit):
			t.Fatalf("%.100s: no order in %v", text, limit)
		}
	}
	if err := bus.Send("n1", "inventory", "", []byte("hello")); err != nil {
		t.Fatal(err)
	}
	up.until(t, "want a JSON object")
	if all := c.Clients(); len(all) != 1 || all[0].Name() != "n1" || len(c.Away()) > 0 {
		t.Errorf("%d nodes, away %v, want n1 alone", len(all), c.Away())
	}
}

// TestRemoveEndsTheDaemon removes a node that is heard. Its daemon ends, and the next one may join.
func TestRemoveEndsTheDaemon(t *testing.T) {
	b := startBroker(t)
	c := b.watch()
	d := b.join("n1", newWorker())
	c.node("n1")
	if err := c.Remove(within(t), "n1", "an operator removed it"); err != nil {
		t.Fatal(err)
	}
	c.until(0, "left n1: an operator removed it")
	if err := d.end(t); err == nil || !strings.Contains(err.Error(), "an operator removed it") {
		t.Errorf("the daemon ended with %v", err)
	}
	d.stop()
	if len(c.Clients())+len(c.Away()) > 0 {
		t.Errorf("nodes %v, away %v, want none", c.Clients(), c.Away())
	}
	// Its last announcements may still be on their way, and the first refusal may be lost.
	bus, orders := b.link("late"), make(chan node.Order, 16)
	stop, err := bus.Listen("n1", "order", func(_, _ string, data []byte) {
		var o node.Order
		if json.Unmarshal(data, &o) == nil {
			orders <- o
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	late, err := json.Marshal(node.Inventory{V: node.Version, Identity: d.me})
	if err != nil {
		t.Fatal(err)
	}
	if err := bus.Send("n1", "inventory", "", late); err != nil {
		t.Fatal(err)
	}
	select {
	case o := <-orders:
		if o.Kind != node.OrderRefuse || o.To != d.me.ID {
			t.Errorf("order %+v, want a refusal", o)
		}
	case <-time.After(limit):
		t.Fatalf("no refusal within %v", limit)
	}
	stop()
	mark := c.mark()
	e := b.join("n1", newWorker())
	c.until(mark, "joined n1")
	mark = c.mark()
	e.stop()
	c.until(mark, "left n1")
	if away := c.Away(); len(away) != 1 || !away[0].Ended || away[0].ID != e.me.ID {
		t.Errorf("away %+v, want the one that has ended", away)
	}
	if err := c.Remove(within(t), "n1", "x"); err != nil || len(c.Away()) > 0 {
		t.Errorf("%v, away %v, want none", err, c.Away())
	}
}

func TestProbe(t *testing.T) {
	b := startBroker(t)
	c := b.watch(func(cfg *node.DirectoryConfig) { cfg.Version = "v9" })
	p, ahead, margin, err := node.Probe(within(t), b.link("new"), "n7")
	if err != nil || p.Version != "v9" || ahead.Abs() > margin || margin <= 0 {
		t.Errorf("%+v, ahead by %v, give or take %v, %v, want v9 and the same clock", p, ahead, margin, err)
	}
	if len(c.Clients()) > 0 {
		t.Error("a probe makes a node")
	}
}

// FuzzDecodeInventory decodes announcements. One that is accepted has only numbers that fit
// together, and stays the same when it is encoded and decoded again.
func FuzzDecodeInventory(f *testing.F) {
	honest := node.Inventory{
		V: 1, Identity: node.Identity{Name: "n", ID: "A"}, Memory: node.Memory{Total: 8, Used: 3, Threshold: 7, Free: 4}, CPU: node.CPU{Total: 1000},
		Devices: []node.Device{{UUID: "g", Memory: 8, Used: 2, Free: 4, Utilisation: 0.5}}, Zygotes: []node.Zygote{{Function: "f.ns", Bytes: 3}},
		Replicas: []node.Replica{{Name: "f-1", Function: "f.ns"}},
	}
	add := func(inv node.Inventory) {
		b, err := json.Marshal(inv)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	add(honest)
	for _, lie := range lies() {
		inv := honest
		if lie(&inv); len(inv.Zygotes) < 100 {
			add(inv)
		}
	}
	f.Add([]byte(`{"v":1,"name":"n","id":"A","memory":{"total":1e18}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		inv, err := node.DecodeInventory(b)
		if err != nil {
			return
		}
		m := inv.Memory
		if m.Total < 0 || m.Total > 1<<50 || m.Used < 0 || m.Used > m.Total && m.Bound != "--memory" || m.Free < 0 || m.Free > m.Total || inv.CPU.Total < 0 {
			t.Errorf("accepted %+v, %+v", m, inv.CPU)
		}
		names := map[string]bool{}
		for _, r := range inv.Replicas {
			if names[r.Name] {
				t.Errorf("accepted replica %q twice", r.Name)
			}
			names[r.Name] = true
		}
		for _, d := range inv.Devices {
			if d.Free < 0 || d.Free > d.Memory || d.Utilisation > 1 {
				t.Errorf("accepted device %+v", d)
			}
		}
		again, err := json.Marshal(inv)
		if err != nil {
			return // a time that JSON has no form for
		}
		if _, err := node.DecodeInventory(again); err != nil {
			t.Errorf("%s is accepted, and then not: %v", b, err)
		}
	})
}
