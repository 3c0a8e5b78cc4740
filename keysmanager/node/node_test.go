package node_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
)

// TestStartHandsOverTheSocket starts a replica. Its socket must arrive and work, its phases must be
// reported as they end, and an announcement must follow.
func TestStartHandsOverTheSocket(t *testing.T) {
	b := startBroker(t)
	c := b.watch()
	d := b.join("n.1", newWorker()) // a name with a dot, as hosts have
	var phases []node.Phase
	started, err := c.node("n.1").Start(within(t), node.Order{Replica: "r-1", Spec: spec, CPUMilli: 500, Device: "g0"}, func(p node.Phase) { phases = append(phases, p) })
	if err != nil {
		t.Fatal(err)
	}
	defer started.Conn.Close()
	if started.PID != 42 || started.Path != "cold" || len(started.Phases) != 1 || len(phases) != 1 || phases[0] != started.Phases[0] {
		t.Errorf("started %+v, told phases %v, want process 42, cold, and the phase load in both", started, phases)
	}
	d.mu.Lock()
	o, far := d.orders[0], d.running["r-1"]
	d.mu.Unlock()
	if o.Replica != "r-1" || !reflect.DeepEqual(o.Spec, spec) || o.CPUMilli != 500 || o.Device != "g0" || o.Within <= 0 || o.Within > limit {
		t.Errorf("order %+v, want it whole, within at most %v", o, limit)
	}
	alive(t, started.Conn, far)
	c.until(0, "heard n.1 [r-1]")
	if _, err := c.node("n.1").Do(within(t), node.Order{Kind: node.OrderStop, Replica: "r-1", Grace: time.Second}); err != nil {
		t.Error(err)
	}
	_ = started.Conn.SetReadDeadline(time.Now().Add(limit))
	if n, err := started.Conn.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("%v: read %d bytes of a replica that was stopped: somebody still holds its end", err, n)
	}
	c.until(c.mark(), "heard n.1 []")
}

// TestAnswersHaveResultsAndErrors checks the answers to orders other than successful starts.
func TestAnswersHaveResultsAndErrors(t *testing.T) {
	b := startBroker(t)
	c := b.watch()
	d := b.join("n1", newWorker())
	n := c.node("n1")
	if bytes, err := n.Do(within(t), node.Order{Kind: node.OrderEvict, Function: "f.ns"}); err != nil || bytes != 7 {
		t.Errorf("evict: %d bytes, %v, want 7", bytes, err)
	}
	if _, err := n.Do(within(t), node.Order{Kind: node.OrderSetCPU, Replica: "r-1", CPUMilli: 100}); !errors.Is(err, errors.ErrUnsupported) || !strings.Contains(err.Error(), "no cgroups") {
		t.Errorf("set CPU: %v, want what the worker says, and errors.ErrUnsupported", err)
	}
	if _, err := n.Do(within(t), node.Order{Kind: node.OrderLoad, Spec: imaged("large")}); !errors.Is(err, errFull) || err.Error() != `node "n1": load: full: 3 GiB` {
		t.Errorf("load: %v, want what the worker says, and which error it is", err)
	}
	var room interface{ NeedsMemory() int64 }
	if _, err := n.Do(within(t), node.Order{Kind: node.OrderLoad, Spec: imaged("large")}); !errors.As(err, &room) || room.NeedsMemory() != 3<<30 {
		t.Errorf("%v, want an error that says how many bytes did not fit", err)
	}
	if _, err := n.Start(within(t), node.Order{Replica: "r-1", Spec: imaged("broken")}, nil); errors.Is(err, errFull) || err == nil || !strings.Contains(err.Error(), `node "n1": its image is broken`) {
		t.Errorf("start: %v, want what the worker says", err)
	}
	var short *node.MemoryError
	if _, err := n.Start(within(t), node.Order{Replica: "r-1", Spec: imaged("crowded")}, nil); !errors.As(err, &short) || !slices.Equal(short.Devices, []string{"GPU-1"}) || err.Error() != `node "n1": start: want 2 GiB` {
		t.Errorf("start on a full device: %v with %+v, want what the worker says, and which device is full", err, short)
	}
	if _, err := n.Do(within(t), node.Order{Kind: node.OrderEvict}); err == nil || !strings.Contains(err.Error(), "function or digest") {
		t.Errorf("evict nothing: %v, want a refusal", err)
	}
	d.Leave(true)
	c.until(0, "heard n1")
	if _, err := n.Start(within(t), node.Order{Replica: "r-1", Spec: spec}, nil); err == nil || !strings.Contains(err.Error(), "leaving") {
		t.Errorf("start on a node that leaves: %v", err)
	}
	proctest.Until(t, "the node to leave with patience", func() bool { inv := n.Inventory(); return inv.Leaving && inv.Patient })
	d.Leave(false)
	proctest.Until(t, "the node to leave without patience", func() bool { inv := n.Inventory(); return inv.Leaving && !inv.Patient })
}

// repeater sends each order three times, as if answers were lost.
type repeater struct{ node.Bus }

func (r repeater) Send(name, kind, reply string, data []byte) error {
	if kind == "order" {
		_ = r.Bus.Send(name, kind, reply, data)
		_ = r.Bus.Send(name, kind, reply, data)
	}
	return r.Bus.Send(name, kind, reply, data)
}

// TestRepeatedOrdersAreCarriedOutOnce sends orders several times. Each must be carried out once and
// answered each time.
func TestRepeatedOrdersAreCarriedOutOnce(t *testing.T) {
	b := startBroker(t)
	w := newWorker()
	b.join("n1", w)
	c := b.watch(func(cfg *node.DirectoryConfig) { cfg.Bus = repeater{cfg.Bus} })
	n := c.node("n1")
	const many = 50
	var wg sync.WaitGroup
	for i := range many {
		wg.Go(func() {
			started, err := n.Start(within(t), node.Order{Replica: "r-" + string(rune('a'+i%26)) + string(rune('a'+i/26)), Spec: spec}, nil)
			if err != nil {
				t.Error(err)
				return
			}
			_ = started.Conn.Close()
		})
	}
	wg.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	if got := len(w.of(node.OrderStart)); got != many || len(w.running) != many {
		t.Errorf("%d starts were carried out and %d run, want %d of each", got, len(w.running), many)
	}
}

// TestAThousandStartsAtOnce runs a thousand starts concurrently. Each must be carried out once and
// hand over its socket. Meanwhile, other orders must be answered. No descriptor may stay open.
func TestAThousandStartsAtOnce(t *testing.T) {
	b := startBroker(t)
	w := newWorker()
	w.hold = make(chan struct{})
	b.join("n1", w, func(cfg *node.ServerConfig) { cfg.Unclaimed = limit })
	c := b.watch()
	n := c.node("n1")
	before := descriptors(t)
	const many = 1000
	var wg sync.WaitGroup
	for i := range many {
		wg.Go(func() {
			started, err := n.Start(within(t), node.Order{Replica: fmt.Sprintf("r-%d", i), Spec: spec}, nil)
			if err != nil {
				t.Error(err)
				return
			}
			defer started.Conn.Close()
			w.mu.Lock()
			far := w.running[fmt.Sprintf("r-%d", i)]
			w.mu.Unlock()
			alive(t, started.Conn, far)
			if _, err := n.Do(within(t), node.Order{Kind: node.OrderStop, Replica: fmt.Sprintf("r-%d", i)}); err != nil {
				t.Error(err)
			}
		})
	}
	w.until(t, "all starts to be under way", func() bool { return len(w.of(node.OrderStart)) == many })
	if _, err := n.Do(within(t), node.Order{Kind: node.OrderEvict, Function: "f.ns"}); err != nil {
		t.Errorf("another order meanwhile: %v", err)
	}
	close(w.hold)
	wg.Wait()
	w.until(t, "nothing to run", func() bool { return len(w.running) == 0 })
	if got := len(w.of(node.OrderStart)); got != many {
		t.Errorf("%d starts were carried out, want %d", got, many)
	}
	deadline := time.Now().Add(limit)
	for descriptors(t) > before { // the daemon closes its ends after ours
		if time.Now().After(deadline) {
			t.Fatalf("%d descriptors are open, want %d", descriptors(t), before)
		}
		runtime.Gosched()
	}
}

func descriptors(t *testing.T) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

// TestStartGivenUpLeavesNothing lets a start expire, while it runs and after it has ended with its
// answers lost. Nothing may be left.
func TestStartGivenUpLeavesNothing(t *testing.T) {
	b := startBroker(t)
	w := newWorker()
	w.hold = make(chan struct{})
	b.join("n1", w)
	c := b.watch()
	n := c.node("n1")
	ctx, cancel := context.WithCancelCause(within(t))
	go func() {
		w.until(t, "the start to run", func() bool { return len(w.of(node.OrderStart)) == 1 })
		cancel(errors.New("the function was removed"))
	}()
	_, err := n.Start(ctx, node.Order{Replica: "r-1", Spec: spec}, nil)
	if err == nil || !strings.Contains(err.Error(), "the function was removed") {
		t.Errorf("start: %v, want why it was given up", err)
	}
	w.until(t, "the start to be given up", func() bool { return len(w.of("given up")) == 1 })
	w.until(t, "nothing to be left", func() bool { return len(w.running) == 0 })
}

// deaf loses all final answers.
type deaf struct{ node.Bus }

func (d deaf) Listen(name, kind string, f func(node, reply string, data []byte)) (func(), error) {
	return d.Bus.Listen(name, kind, func(node, reply string, data []byte) {
		if !strings.HasPrefix(kind, "answer.") || !strings.Contains(string(data), `"done":true`) {
			f(node, reply, data)
		}
	})
}

// TestUnclaimedReplicaIsStopped checks that a started replica whose socket nobody claims is
// stopped, after a while or when its order is canceled.
func TestUnclaimedReplicaIsStopped(t *testing.T) {
	for name, giveUp := range map[string]bool{"forgotten": false, "given up": true} {
		t.Run(name, func(t *testing.T) {
			b := startBroker(t)
			w := newWorker()
			b.join("n1", w, func(cfg *node.ServerConfig) {
				if !giveUp {
					cfg.Unclaimed = 50 * time.Millisecond
				} else {
					cfg.Unclaimed = time.Hour
				}
			})
			c := b.watch(func(cfg *node.DirectoryConfig) { cfg.Bus = deaf{cfg.Bus} })
			n := c.node("n1")
			ctx, cancel := context.WithCancel(within(t))
			defer cancel()
			if giveUp {
				go func() {
					w.until(t, "the replica to run", func() bool { return len(w.running) == 1 })
					cancel()
				}()
			}
			ended := make(chan error, 1)
			go func() { _, err := n.Start(ctx, node.Order{Replica: "r-1", Spec: spec}, nil); ended <- err }()
			w.until(t, "the replica to be stopped", func() bool { return len(w.of(node.OrderStop)) == 1 && len(w.running) == 0 })
			cancel()
			if err := <-ended; err == nil {
				t.Error("a start whose answer nobody has heard has succeeded")
			}
		})
	}
}

// TestMissedEventsArriveOnceInOrder reports events while nobody listens. A later listener must get
// each once, in order.
func TestMissedEventsArriveOnceInOrder(t *testing.T) {
	b := startBroker(t)
	d := b.join("n1", newWorker())
	for _, r := range []string{"a", "b", "c"} {
		d.Tell(node.Event{Kind: node.EventExit, Replica: r})
	}
	c := b.watch()
	c.until(0, "event n1 3 exit c")
	d.Tell(node.Event{Kind: node.EventExit, Replica: "d"})
	c.until(0, "event n1 4 exit d")
	c.mu.Lock()
	defer c.mu.Unlock()
	var events []string
	for _, s := range c.told {
		if strings.HasPrefix(s, "event") {
			events = append(events, s[len("event n1 "):])
		}
	}
	if got := strings.Join(events, ", "); got != "1 exit a, 2 exit b, 3 exit c, 4 exit d" {
		t.Errorf("events %s, want each once, in order", got)
	}
}

// TestReplicasServeWithoutNATS stops NATS and starts it again. Meanwhile, a replica's socket must
// work, and orders must say why they fail. Afterwards, missed events must arrive.
func TestReplicasServeWithoutNATS(t *testing.T) {
	b := startBroker(t)
	w := newWorker()
	d := b.join("n1", w)
	c := b.watch(func(cfg *node.DirectoryConfig) { cfg.Silence = 2 * time.Second })
	n := c.node("n1")
	started, err := n.Start(within(t), node.Order{Replica: "r-1", Spec: spec}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer started.Conn.Close()
	c.until(0, "heard n1 [r-1]")
	from := c.mark()
	b.stop()
	if got := c.until(from, "left n1"); !strings.Contains(got, "silent for") {
		t.Errorf("%s, want silence as the cause", got)
	}
	alive(t, started.Conn, w.running["r-1"])
	d.Tell(node.Event{Kind: node.EventExit, Replica: "r-0"})
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := n.Do(ctx, node.Order{Kind: node.OrderForget, Function: "f.ns"}); err == nil || !strings.Contains(err.Error(), "not sent") {
		t.Errorf("order without NATS: %v, want that it was not sent", err)
	}
	done := make(chan error, 1)
	go func() { // this one waits for its return
		_, err := n.Do(within(t), node.Order{Kind: node.OrderLoad, Spec: spec})
		done <- err
	}()
	from = c.mark()
	b.start()
	c.until(from, "joined n1")
	c.until(from, "heard n1 [r-1]")
	c.until(from, "event n1 1 exit r-0")
	if err := <-done; err != nil {
		t.Errorf("order that waited for NATS: %v", err)
	}
}

// TestASilentNodeLeavesAndReturns lets a daemon fall silent without a goodbye, and return.
func TestASilentNodeLeavesAndReturns(t *testing.T) {
	b := startBroker(t)
	c := b.watch(func(cfg *node.DirectoryConfig) { cfg.Silence = 2 * time.Second })
	mute := &muted{}
	b.join("n1", newWorker(), func(cfg *node.ServerConfig) { mute.Bus = cfg.Bus; cfg.Bus = mute })
	c.node("n1")
	for range 2 {
		from := c.mark()
		mute.set(true)
		c.until(from, "left n1: its daemon is silent")
		if got := len(c.Inventories()); got != 0 {
			t.Errorf("%d inventories of no node", got)
		}
		mute.set(false)
		c.until(from, "joined n1")
	}
	if got := c.Inventories(); len(got) != 1 || got[0].Name != "n1" {
		t.Errorf("inventories %+v, want n1's", got)
	}
}

// muted loses what is sent while it is on.
type muted struct {
	node.Bus
	mu sync.Mutex
	on bool
}

func (m *muted) set(on bool) { m.mu.Lock(); defer m.mu.Unlock(); m.on = on }

func (m *muted) Send(name, kind, reply string, data []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.on {
		return nil
	}
	return m.Bus.Send(name, kind, reply, data)
}

// TestTakenNameIsRefused starts two daemons with one name. The second may have the name only after
// the first has ended.
func TestTakenNameIsRefused(t *testing.T) {
	b := startBroker(t)
	c := b.watch()
	first := b.join("n1", newWorker())
	c.node("n1")
	second := b.join("n1", newWorker())
	err := second.end(t)
	if !errors.Is(err, node.ErrTaken) || !strings.Contains(err.Error(), first.me.String()) {
		t.Errorf("the later daemon ends with %v, want who has the name: %v", err, first.me)
	}
	from := c.mark()
	first.stop()
	c.until(from, "left n1: its daemon has ended")
	third := b.join("n1", newWorker())
	c.until(from, "joined n1")
	if got := c.node("n1").Inventory().ID; got != third.me.ID {
		t.Errorf("inventory of daemon %s, want the new one's, %s", got, third.me.ID)
	}
}

// TestOneOfTwoDaemonsGetsTheName starts two daemons that both miss the other's question for the
// name. One of them must end when it hears the announcements of the other.
func TestOneOfTwoDaemonsGetsTheName(t *testing.T) {
	b := startBroker(t)
	early := time.Now().Add(-time.Minute)
	var both []*daemon
	for _, id := range []string{"A", "B"} {
		both = append(both, b.join("n1", newWorker(), func(cfg *node.ServerConfig) {
			cfg.Bus = deafToWho{cfg.Bus}
			cfg.Me.Started, cfg.Me.ID = early, id
		}))
	}
	err := both[1].end(t)
	if !errors.Is(err, node.ErrTaken) {
		t.Errorf("the later daemon ends with %v", err)
	}
	select {
	case err := <-both[0].ended:
		t.Errorf("the first daemon ends too: %v", err)
		both[0].ended <- err
	default:
	}
}

// deafToWho is a Bus that drops all answers to the question which daemon has a name.
type deafToWho struct{ node.Bus }

func (d deafToWho) Listen(name, kind string, f func(node, reply string, data []byte)) (func(), error) {
	if strings.HasPrefix(kind, "answer.") {
		return d.Bus.Listen(name, kind, func(node, reply string, _ []byte) { f(node, reply, nil) })
	}
	return d.Bus.Listen(name, kind, f)
}

// TestRefusedDaemonsEndWithTheReason checks which daemons may not join.
func TestRefusedDaemonsEndWithTheReason(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*node.ServerConfig)
		want   string
	}{
		"elsewhere": {func(cfg *node.ServerConfig) { cfg.Me.Boot, cfg.Me.Host = "another", "far" }, "on another machine (host far"},
		"our own":   {func(cfg *node.ServerConfig) { cfg.Me.Name = "mine" }, "is a part of `stagecoach up` itself"},
	} {
		t.Run(name, func(t *testing.T) {
			b := startBroker(t)
			c := b.watch(func(cfg *node.DirectoryConfig) { cfg.Own = "mine" })
			d := b.join("n1", newWorker(), tc.change)
			err := d.end(t)
			if !errors.Is(err, node.ErrRefused) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("the daemon ends with %v, want %q", err, tc.want)
			}
			if len(c.Clients()) > 0 {
				t.Error("it has joined")
			}
		})
	}
}

// TestNextDaemonTakesOverTheReplicas kills a daemon and starts another with its name, which must
// take over the running replicas under the same node.
func TestNextDaemonTakesOverTheReplicas(t *testing.T) {
	b := startBroker(t)
	c := b.watch(func(cfg *node.DirectoryConfig) { cfg.Silence = time.Minute })
	mute := &muted{}
	w := newWorker()
	first := b.join("n1", w, func(cfg *node.ServerConfig) { mute.Bus = cfg.Bus; cfg.Bus = mute })
	n := c.node("n1")
	started, err := n.Start(within(t), node.Order{Replica: "r-1", Spec: spec}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer started.Conn.Close()
	mute.set(true)
	first.stop()
	from := c.mark()
	second := b.join("n1", w)
	second.Tell(node.Event{Kind: node.EventExit, Replica: "r-0"})
	c.until(from, "event n1 1 exit r-0")
	if got := n.Inventory(); got.ID != second.me.ID || len(got.Replicas) != 1 {
		t.Errorf("inventory %+v, want the second daemon's, with r-1", got)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.told[from:] {
		if strings.HasPrefix(s, "left") || strings.HasPrefix(s, "joined") {
			t.Errorf("%s: the node was never away", s)
		}
	}
}

// TestLostLinesAreReportedInPlace prints more than anyone can read, and checks that lost lines are
// reported in place.
func TestLostLinesAreReportedInPlace(t *testing.T) {
	b := startBroker(t)
	d := b.join("n1", newWorker())
	text := strings.Repeat("x", 8<<10)
	const many = 2000 // 16 MB
	for range many {
		d.Line(node.Line{Function: "f.ns", Replica: "r-1", Text: text})
	}
	d.Line(node.Line{Replica: "r-1", Text: ""}) // there is room for none
	var mu sync.Mutex
	got, lost := 0, uint64(0)
	c := b.watch(func(cfg *node.DirectoryConfig) {
		note := cfg.Line
		cfg.Line = func(name string, l node.Line) {
			mu.Lock()
			if l.Text == text {
				got++
			}
			lost += l.Lost
			mu.Unlock()
			if l.Lost > 0 || len(l.Text) < 10 {
				note(name, l)
			}
		}
	})
	c.until(0, "line n1  \"\"")
	d.Line(node.Line{Replica: "r-2", Text: "after"})
	c.until(0, `line n1 r-2 "after"`)
	mu.Lock()
	defer mu.Unlock()
	if got == 0 || got+int(lost) < many {
		t.Errorf("%d lines came and %d were lost, of %d", got, lost, many)
	}
	c.until(0, "heard n1")
	if inv := c.Inventories(); len(inv) != 1 || inv[0].OutputLost != lost {
		t.Errorf("the inventory says %d lost lines, want %d", inv[0].OutputLost, lost)
	}
}

// TestNextControlPlaneGetsEarlierLines has two control planes read lines, one after the other. The
// second gets what the first has got. One that reads again gets no line twice.
func TestNextControlPlaneGetsEarlierLines(t *testing.T) {
	b := startBroker(t)
	d := b.join("n1", newWorker())
	first := b.watch()
	d.Line(node.Line{Function: "f.ns", Replica: "r-1", Text: "one"})
	d.Line(node.Line{Function: "f.ns", Replica: "r-1", Text: "two"})
	first.until(0, `line n1 r-1 "two"`)
	second := b.watch()
	second.until(0, `line n1 r-1 "two"`)
	d.Line(node.Line{Function: "f.ns", Replica: "r-1", Text: "three"})
	// Whichever reads now takes the lines from the other, which then reads again.
	for _, c := range []*cluster{first, second} {
		c.until(0, `line n1 r-1 "three"`)
	}
	first.Close()
	d.Line(node.Line{Function: "f.ns", Replica: "r-1", Text: "four"})
	second.until(0, `line n1 r-1 "four"`)
	for _, c := range []*cluster{first, second} {
		c.mu.Lock()
		defer c.mu.Unlock()
		var got []string
		for _, s := range c.told {
			if strings.HasPrefix(s, "line") {
				got = append(got, s)
			}
		}
		if want := []string{`line n1 r-1 "one" 0`, `line n1 r-1 "two" 0`, `line n1 r-1 "three" 0`}; !slices.Equal(got[:min(len(got), 3)], want) || len(got) > 4 {
			t.Errorf("%q, want %q first, and none twice", got, want)
		}
	}
}

// TestSocketIsPrivate checks the permissions of a socket. Its path is too long for the kernel.
func TestSocketIsPrivate(t *testing.T) {
	b := startBroker(t)
	path := t.TempDir() + "/" + strings.Repeat("long", 30) + "/run/node.sock"
	c := b.watch()
	b.join("n1", newWorker(), func(cfg *node.ServerConfig) { cfg.Socket = path })
	started, err := c.node("n1").Start(within(t), node.Order{Replica: "r-1", Spec: spec}, nil)
	if err != nil {
		t.Fatal(err)
	}
	_ = started.Conn.Close()
	for file, want := range map[string]os.FileMode{path: 0o600 | os.ModeSocket, path[:len(path)-len("/node.sock")]: 0o700 | os.ModeDir} {
		info, err := os.Stat(file)
		if err != nil || info.Mode() != want {
			t.Errorf("%s: mode %v, %v, want %v", file, info.Mode(), err, want)
		}
	}
}

// TestEarlyConnectionsAreServed connects to a daemon's socket as soon as the socket exists. That
// may be before NewServer has returned.
func TestEarlyConnectionsAreServed(t *testing.T) {
	b := startBroker(t)
	for i := range 20 {
		path := filepath.Join(t.TempDir(), "node.sock")
		answered := make(chan error, 1)
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		go func() {
			var dialer net.Dialer
			for {
				c, err := dialer.DialContext(ctx, "unix", path)
				if err == nil {
					_ = c.SetDeadline(time.Now().Add(limit))
					_, err = fmt.Fprintf(c, "{\"v\":%d,\"want\":\"lines\"}\n", node.Version)
					if err == nil {
						_, err = bufio.NewReader(c).ReadString('\n')
					}
					_ = c.Close()
					answered <- err
					return
				}
				if ctx.Err() != nil {
					answered <- err
					return
				}
			}
		}()
		d := b.join(fmt.Sprint("n", i), newWorker(), func(cfg *node.ServerConfig) { cfg.Socket = path })
		if err := <-answered; err != nil {
			t.Fatal(err)
		}
		d.stop()
		cancel()
	}
}
