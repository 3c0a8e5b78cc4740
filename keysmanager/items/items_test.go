package items

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity/identitytest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/tunnel"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// TestItemsGoDirectly checks that a node gets an item from the node that keeps it, that nothing of
// it goes through the control plane, and that the end of the request removes it.
func TestItemsGoDirectly(t *testing.T) {
	c := newCluster(t)
	a, b := c.node("a", 64<<20), c.node("b", 64<<20)
	content := random(5<<20 + 7)
	ref := a.keep(t, "r1", content)
	c.plane.Adopt(tensor.Activation{{Ref: &ref}, {Bytes: []byte("small")}})
	before := c.up.bytes()
	for range 3 {
		f, err := b.Fetch(t.Context(), ref)
		holds(t, f, err, content)
	}
	if got := c.up.bytes() - before; got > 4<<10 {
		t.Errorf("%d bytes went through the control plane", got)
	}
	if got, want := b.Carried(), (Carried{Fetched: 3, FetchedBytes: 3 * uint64(len(content))}); got != want {
		t.Errorf("b counts %+v, want %+v", got, want)
	}
	if s := a.Store.Stats(); s.Items != 1 || s.Bytes != ref.Size {
		t.Errorf("a counts %+v", s)
	}
	// A node counts an item after its last byte, which may have come by then.
	until(t, "a to count what it has sent", func() bool { return a.Store.Stats().Sent == 3*uint64(ref.Size) })
	if err := c.plane.Drop("another"); err != nil {
		t.Error(err)
	}
	if err := c.plane.Drop("r1"); err != nil {
		t.Error(err)
	}
	until(t, "the item to be dropped", func() bool { s := a.Store.Stats(); return s.Items == 0 && s.Bytes == 0 })
	f, err := b.Fetch(t.Context(), ref)
	fails(t, "after the request's end", f, err, "its request has ended")
	if got := b.Carried(); got.Lost != 1 || !strings.Contains(b.text.String(), ref.Blob) || !strings.Contains(a.text.String(), "request for an item refused") {
		t.Errorf("b counts %+v, and the logs are\n%s\n%s", got, a.text, b.text)
	}
	if p := c.plane.Passed(); p.Left != 1 || p.LeftBytes != uint64(ref.Size) || p.Relayed+p.Fetched != 0 {
		t.Errorf("the control plane counts %+v", p)
	}
}

// TestItemsOfTheSameNodeAreNotCopied checks that a node passes on its own items as they are.
func TestItemsOfTheSameNodeAreNotCopied(t *testing.T) {
	c := newCluster(t)
	a := c.node("a", 64<<20)
	content := random(1 << 20)
	ref := a.keep(t, "r1", content)
	one, err := a.Fetch(t.Context(), ref)
	if err != nil {
		t.Fatal(err)
	}
	two, err := a.Fetch(t.Context(), ref)
	if err != nil {
		t.Fatal(err)
	}
	first, err1 := one.Stat()
	second, err2 := two.Stat()
	if err := errors.Join(err1, err2); err != nil || !os.SameFile(first, second) {
		t.Errorf("two files, want one (%v)", err)
	}
	a.Store.Drop("r1")
	holds(t, one, nil, content) // it outlives its item
	holds(t, two, nil, content)
	if got := a.Carried(); got != (Carried{Near: 2}) {
		t.Errorf("counts %+v", got)
	}
}

// TestWrongReferencesAreRefused checks that a node sends an item only for the whole reference.
func TestWrongReferencesAreRefused(t *testing.T) {
	c := newCluster(t)
	a, b := c.node("a", 64<<20), c.node("b", 64<<20)
	good := a.keep(t, "r1", random(100<<10))
	for what, tc := range map[string]struct {
		change func(*tensor.Ref)
		want   string
	}{
		"another request": {func(r *tensor.Ref) { r.Owner = "r2" }, "its request has ended, or the daemon was restarted"},
		"another item":    {func(r *tensor.Ref) { r.Blob = "X" }, "its request has ended, or the daemon was restarted"},
		"another size":    {func(r *tensor.Ref) { r.Size-- }, "it has 102400 bytes"},
		"another sum":     {func(r *tensor.Ref) { r.Sum++ }, "want 102400 with"},
	} {
		ref := good
		tc.change(&ref)
		f, err := b.Fetch(t.Context(), ref)
		fails(t, what, f, err, tc.want)
		f, err = c.plane.Open(ref)
		fails(t, what+", for the control plane", f, err, tc.want)
		var lost *task.LostError
		if !errors.As(err, &lost) || lost.Item != ref.Blob || !strings.Contains(lost.Text, `node "a"`) {
			t.Errorf("%s: %v, want a LostError that names the node", what, err)
		}
	}
	ask := askFor(good)
	ask.Node = "z"
	_, err := b.process.Open(t.Context(), a.me, a.addr, ask)
	fails(t, "another node", nil, err, `it is said to be with node "z", and this is node "a"`)
	if s := a.Store.Stats(); s.Refused != 9 {
		t.Errorf("%d requests refused, want 9", s.Refused)
	}
	other := newProcess(t, identitytest.New(t, "c2").Source(identity.Node, "b"))
	if _, err := other.Open(t.Context(), a.me, a.addr, askFor(good)); err == nil {
		t.Error("a node of another cluster gets an item")
	}
	until(t, "the stranger in the log", func() bool { return strings.Contains(a.text.String(), "connection of the tunnel refused") })
	if _, err := b.process.Open(t.Context(), a.me, a.addr, drops{tunnel.Request{V: tunnel.Version, Want: WantDrop}, []string{"r1"}}); err == nil || !strings.Contains(err.Error(), "is no control plane") {
		t.Errorf("a node drops items: %v", err)
	}
	f, err := b.Fetch(t.Context(), good)
	holds(t, f, err, random(100<<10))
}

// TestFaultyTransfers checks what is done with bytes that are not those of the item.
func TestFaultyTransfers(t *testing.T) {
	content := random(300 << 10)
	for what, tc := range map[string]struct {
		sent  []byte
		want  string
		tries int // transfers, with those through the control plane
	}{
		"truncated": {content[:len(content)-1], "its bytes did not come: 307199 of 307200", 6},
		"nothing":   {nil, "its bytes did not come: 0 of 307200", 6},
		"too much":  {append(bytes.Clone(content), 1), "its bytes are wrong: more than 307200", 1},
		"changed":   {append(bytes.Clone(content[:len(content)-1]), ^content[len(content)-1]), "its bytes are wrong: checksum", 1},
	} {
		t.Run(what, func(t *testing.T) {
			c := newCluster(t)
			a, b := c.node("a", 64<<20), c.node("b", 64<<20)
			ref := a.keep(t, "r1", content)
			c.plane.Adopt(tensor.Activation{{Ref: &ref}})
			tries := make(chan struct{}, 10)
			a.Handle(WantItem, func(_ context.Context, _ identity.Name, _ json.RawMessage, s net.Conn) {
				tries <- struct{}{}
				if tunnel.Accept(s) == nil {
					_, _ = s.Write(tc.sent)
				}
			})
			f, err := b.Fetch(t.Context(), ref)
			fails(t, "a node", f, err, tc.want)
			if len(tries) != tc.tries || b.Carried().Lost != 1 {
				t.Errorf("%d transfers, counts %+v, want %d transfers", len(tries), b.Carried(), tc.tries)
			}
			got, err := c.plane.Get(ref)
			fails(t, "the control plane", nil, err, tc.want)
			if len(got) > len(content) {
				t.Errorf("%d bytes were kept", len(got))
			}
		})
	}
}

// TestBrokenTransfersAreTriedAgain checks how often a receiver asks for an item whose bytes do not
// come at first, and that it does not ask again if the item is lost for certain.
func TestBrokenTransfersAreTriedAgain(t *testing.T) {
	content := random(300 << 10)
	for what, tc := range map[string]struct {
		broken  int64 // transfers that break
		ended   bool  // the control plane knows that the node has ended
		refused bool  // the node has the item no more
		unknown bool  // the control plane does not know the request
		ofNode  int64 // transfers for a node; one try has two of them
		ofPlane int64 // transfers for the control plane
		got     bool
	}{
		"once, for the control plane":  {broken: 1, ofNode: 2, ofPlane: 2, got: true},
		"twice, for the control plane": {broken: 2, ofNode: 3, ofPlane: 3, got: true},
		"for ever":                     {broken: 99, ofNode: 6, ofPlane: 3},
		"the node has ended":           {broken: 99, ended: true, ofNode: 6, ofPlane: 1},
		"the request has ended":        {broken: 99, unknown: true, ofNode: 1, ofPlane: 3},
		"the item is gone":             {refused: true, ofNode: 1, ofPlane: 1},
	} {
		t.Run(what, func(t *testing.T) {
			c := newCluster(t)
			a, b := c.node("a", 64<<20), c.node("b", 64<<20)
			ref := a.keep(t, "r1", content)
			if !tc.unknown {
				c.plane.Adopt(tensor.Activation{{Ref: &ref}})
			}
			var asked atomic.Int64
			a.Handle(WantItem, func(ctx context.Context, peer identity.Name, first json.RawMessage, s net.Conn) {
				if asked.Add(1) > tc.broken {
					a.Serve(ctx, peer, first, s)
				} else if tunnel.Accept(s) == nil {
					_, _ = s.Write(content[:100<<10])
				}
			})
			if tc.refused {
				a.Store.Drop("r1")
			}
			if tc.ended {
				c.ended.Store("a", true)
			}
			check := func(who string, f *os.File, err error, want int64) {
				t.Helper()
				if tc.got {
					holds(t, f, err, content)
				} else if err == nil {
					t.Errorf("%s gets the item", who)
					_ = f.Close()
				}
				if got := asked.Swap(0); got != want {
					t.Errorf("%s has asked %d times, want %d", who, got, want)
				}
			}
			f, err := b.Fetch(t.Context(), ref)
			check("a node", f, err, tc.ofNode)
			f, err = c.plane.Fetch(t.Context(), ref)
			check("the control plane", f, err, tc.ofPlane)
		})
	}
}

// TestTriesEndWithTheirContext checks that nothing is tried again for a call that has ended.
func TestTriesEndWithTheirContext(t *testing.T) {
	ctx, end := context.WithCancel(t.Context())
	n := 0
	err := tries(ctx, time.Hour, func() bool { end(); return true }, func() error { n++; return errBroken })
	if !errors.Is(err, errBroken) || n != 1 {
		t.Errorf("%d tries, %v", n, err)
	}
}

// TestTheControlPlanePassesItemsOn checks the way of an item between nodes that do not reach each
// other, and that such a node is not dialed for each item.
func TestTheControlPlanePassesItemsOn(t *testing.T) {
	c := newCluster(t)
	a, b := c.node("a", 64<<20), c.node("b", 64<<20)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_ = l.Close() // nobody listens there
	content := random(1 << 20)
	ref := a.keep(t, "r1", content)
	known := ref
	c.plane.Adopt(tensor.Activation{{Ref: &known}})
	ref.Address = l.Addr().String()
	for range 2 {
		f, err := b.Fetch(t.Context(), ref)
		holds(t, f, err, content)
	}
	if got, want := b.Carried(), (Carried{Relayed: 2, RelayedBytes: 2 << 20}); got != want {
		t.Errorf("b counts %+v, want %+v", got, want)
	}
	until(t, "the control plane's counts", func() bool { p := c.plane.Passed(); return p.Relayed == 2 && p.RelayedBytes == 2<<20 })
	if n := strings.Count(b.text.String(), "no connection comes about"); n != 1 {
		t.Errorf("%d attempts to connect, want one:\n%s", n, b.text)
	}
	other := ref
	other.Owner = "r2"
	f, err := b.Fetch(t.Context(), other)
	fails(t, "an item of a request that has ended", f, err, `request "r2" has no items with node "a" any more`)
	c.up.Drop(b.me)
	f, err = b.Fetch(t.Context(), ref)
	fails(t, "without the control plane", f, err, "through the control plane: its bytes did not come: tunnel: no connection")
}

// TestALostNode checks the error for items of a node that has ended, and that it comes at once.
func TestALostNode(t *testing.T) {
	c := newCluster(t)
	a, b := c.node("a", 64<<20), c.node("b", 64<<20)
	ref := a.keep(t, "r1", random(1<<20))
	a.process.Close()
	c.ended.Store("a", true)
	f, err := b.Fetch(t.Context(), ref)
	fails(t, "a node", f, err, "connection refused")
	f, err = c.plane.Open(ref)
	fails(t, "the control plane", f, err, `which node "a" keeps, is lost`)
}

// TestBounds checks that a Store keeps no more than it may, per function and in all, and for how
// long.
func TestBounds(t *testing.T) {
	c := newCluster(t)
	a := c.node("a", 1<<20)
	item := file(t, random(300<<10))
	keep := func(owner, function string, deadline time.Time) (tensor.Ref, error) {
		return a.Keep(wire.Owner{Request: owner, Deadline: deadline}, function, item, 300<<10)
	}
	now := time.Now()
	if _, err := keep("r1", "f.ns", now.Add(time.Hour)); err != nil {
		t.Fatal(err)
	}
	_, err := keep("r2", "f.ns", now)
	fails(t, "more than half for one function", nil, err, `307200 of them by "f.ns", which may have half`)
	second, err := keep("r2", "g.ns", now.Add(time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	if _, err = keep("r3", "h.ns", time.Time{}); err != nil {
		t.Fatal(err)
	}
	_, err = keep("r4", "i.ns", now)
	if !errors.Is(err, ErrFull) {
		t.Errorf("more than there is room for: %v", err)
	}
	it, done, err := a.read(second)
	if err != nil {
		t.Fatal(err)
	}
	a.Store.Drop("r2", "r2", "nobody")
	if s := a.Store.Stats(); s.Items != 2 || s.Bytes != 3*300<<10 || s.Full != 2 {
		t.Errorf("while it is read: %+v", s)
	}
	if _, err := it.file.ReadAt(make([]byte, 10), 0); err != nil {
		t.Errorf("a reader's file: %v", err)
	}
	done()
	if s := a.Store.Stats(); s.Bytes != 2*300<<10 {
		t.Errorf("after the last reader: %+v", s)
	}
	a.sweep(now.Add(longest - time.Second))
	if s := a.Store.Stats(); s.Items != 2 {
		t.Errorf("before the time of an item is up: %+v", s)
	}
	a.sweep(now.Add(longest + time.Minute))
	if s := a.Store.Stats(); s.Items != 1 || s.Expired != 1 {
		t.Errorf("after 10 minutes: %+v, want the item without a deadline gone", s)
	}
	a.sweep(now.Add(time.Hour + grace + time.Second))
	if s := a.Store.Stats(); s.Items != 0 || s.Bytes != 0 || len(a.functions) != 0 || len(a.owners) != 0 {
		t.Errorf("after the deadline: %+v", s)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	for what, f := range map[string]*os.File{"a pipe": r, "a file that is too short": file(t, random(10))} {
		if _, err := a.Keep(wire.Owner{Request: "r"}, "f.ns", f, 300<<10); err == nil || a.Store.Stats().Bytes != 0 {
			t.Errorf("%s: %v, %+v", what, err, a.Store.Stats())
		}
	}
}

// TestPlaneGetsItems checks that the control plane reads items of nodes and its own alike.
func TestPlaneGetsItems(t *testing.T) {
	c := newCluster(t)
	a := c.node("a", 64<<20)
	item := tensor.Item{ContentType: "x/y", Bytes: random(200 << 10)}
	ref := a.keep(t, "r1", tensor.AppendItem(nil, item))
	own, err := tensor.Externalise(c.plane, "r1", tensor.Activation{item})
	if err != nil {
		t.Fatal(err)
	}
	got, err := tensor.Resolve(c.plane, tensor.Activation{{Ref: &ref}, own[0]})
	if err != nil || !bytes.Equal(got[0].Bytes, item.Bytes) || !bytes.Equal(got[1].Bytes, item.Bytes) {
		t.Errorf("%d items, %v", len(got), err)
	}
	stays, err := tensor.ResolveStored(c.plane, tensor.Activation{{Ref: &ref}, own[0]})
	if err != nil || stays[0].Ref == nil || stays[1].Ref != nil {
		t.Errorf("without items of nodes: %+v, %v", stays, err)
	}
	outlines, err := tensor.Outlines(c.plane, tensor.Activation{{Ref: &ref}})
	if err != nil || outlines[0].Bytes != 200<<10 {
		t.Errorf("outlines %+v, %v", outlines, err)
	}
	if p := c.plane.Passed(); p.Fetched != 2 || p.FetchedBytes != 2*uint64(ref.Size) {
		t.Errorf("counts %+v", p)
	}
}
