package node_test

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
)

// reign is a control plane's epoch for a test.
type reign struct {
	epoch  atomic.Uint64
	lapsed atomic.Bool
}

var errLapsed = errors.New("the lease is not held")

func (r *reign) now() (uint64, error) {
	if r.lapsed.Load() {
		return 0, errLapsed
	}
	return r.epoch.Load(), nil
}

func (r *reign) of(epoch uint64) func(*node.DirectoryConfig) {
	r.epoch.Store(epoch)
	return func(c *node.DirectoryConfig) { c.Epoch = r.now }
}

// TestOldEpochsOrderNothing has two control planes order from one node. The node carries out no
// order of the older one after the newer one has spoken, not even after the daemon was started
// again, and undoes what the older one has under way.
func TestOldEpochsOrderNothing(t *testing.T) {
	b := startBroker(t)
	file := filepath.Join(t.TempDir(), "epoch")
	persist := func(c *node.ServerConfig) { c.Epoch = file }
	codes[node.CodeOldEpoch] = node.ErrOldEpoch
	w := newWorker()
	w.hold = make(chan struct{})
	d := b.join("a", w, persist)

	var first, second reign
	old := b.watch(first.of(7))
	old.until(0, "joined a")
	started := make(chan error, 1)
	go func() {
		_, err := old.node("a").Start(within(t), node.Order{Replica: "under-way", Spec: imaged("x")}, nil)
		started <- err
	}()
	w.until(t, "the start to run", func() bool { return len(w.of(node.OrderStart)) == 1 })

	next := b.watch(second.of(9))
	next.until(0, "joined a")
	if _, err := next.node("a").Do(within(t), node.Order{Kind: node.OrderForget, Function: "f"}); err != nil {
		t.Fatal(err)
	}
	w.until(t, "the older one's start to be given up", func() bool { return len(w.of("given up")) == 1 })
	if err := <-started; err == nil {
		t.Error("a start succeeds after a newer control plane has taken over")
	}
	refused := func(d *daemon, what string) {
		t.Helper()
		before := len(d.orders)
		_, err := old.node("a").Do(within(t), node.Order{Kind: node.OrderForget, Function: "g"})
		if !errors.Is(err, node.ErrOldEpoch) || !strings.Contains(err.Error(), "is 7,") || !strings.Contains(err.Error(), "epoch 9") {
			t.Errorf("%s: %v, want ErrOldEpoch with both epochs", what, err)
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		if len(d.orders) != before {
			t.Errorf("%s: the order was carried out", what)
		}
	}
	refused(d, "while the daemon runs")
	if text, err := os.ReadFile(file); err != nil || string(text) != "9\n" {
		t.Errorf("the file has %q, %v; want 9", text, err)
	}

	d.stop()
	since := next.mark()
	again := b.join("a", w, persist)
	next.until(since, "joined a")
	if inv := next.node("a").Inventory(); inv.Epoch != 9 {
		t.Errorf("the next daemon announces epoch %d, want 9", inv.Epoch)
	}
	third := b.watch(new(reign).of(8))
	if _, err := next.node("a").Do(within(t), node.Order{Kind: node.OrderForget, Function: "f"}); err != nil {
		t.Error(err)
	}
	if n := len(third.Clients()); n != 0 {
		t.Errorf("a control plane of epoch 8 uses %d nodes, want none", n)
	}
	_ = again
}

// TestNoOrdersWithoutTheLease checks that a control plane whose lease has lapsed sends nothing,
// and sends the order with its new epoch when it holds the lease again.
func TestNoOrdersWithoutTheLease(t *testing.T) {
	b := startBroker(t)
	w := newWorker()
	b.join("a", w)
	var mine reign
	c := b.watch(mine.of(1))
	c.until(0, "joined a")
	mine.lapsed.Store(true)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if _, err := c.node("a").Do(ctx, node.Order{Kind: node.OrderForget, Function: "f"}); err == nil || !strings.Contains(err.Error(), "not sent: "+errLapsed.Error()) {
		t.Errorf("without the lease: %v, want that it was not sent", err)
	}
	done := make(chan error, 1)
	go func() {
		_, err := c.node("a").Do(within(t), node.Order{Kind: node.OrderForget, Function: "g"})
		done <- err
	}()
	mine.epoch.Store(2)
	mine.lapsed.Store(false)
	if err := <-done; err != nil {
		t.Error(err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if all := w.of(node.OrderForget); len(all) != 1 || all[0].Function != "g" || all[0].Epoch != 2 {
		t.Errorf("carried out %+v, want the second order alone, of epoch 2", all)
	}
}

// TestImagesNeedNoEpoch asks for images as another daemon does, after the daemon has seen an epoch.
func TestImagesNeedNoEpoch(t *testing.T) {
	b := startBroker(t)
	b.join("a", newWorker(), func(c *node.ServerConfig) {
		c.Images = func(_ context.Context, conn net.Conn) { _, _ = io.CopyN(conn, conn, 5) }
	})
	c := b.watch(new(reign).of(7))
	c.until(0, "joined a")
	if _, err := c.node("a").Do(within(t), node.Order{Kind: node.OrderForget, Function: "f"}); err != nil {
		t.Fatal(err)
	}
	inv := c.node("a").Inventory()
	conn, err := node.DialImages(within(t), inv.ImageSource())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "hello"); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(conn); err != nil || string(got) != "hello" {
		t.Errorf("%q, %v, want what was sent", got, err)
	}
}
