package node_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// shelf is a fake store of items. An item's content is its blob.
type shelf struct {
	mu    sync.Mutex
	kept  []string // request/function/size
	full  bool
	hold  chan struct{} // closed when Fetch may return
	asked chan string

	reserved int         // batches
	released chan string // their first items
}

func newShelf() *shelf {
	s := &shelf{hold: make(chan struct{}), asked: make(chan string, 10), released: make(chan string, 10)}
	close(s.hold)
	return s
}

func (s *shelf) Room() int64 { return 1 << 20 }

func (s *shelf) Keep(owner wire.Owner, function string, f *os.File, size int64) (tensor.Ref, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.full {
		return tensor.Ref{}, errors.New("full")
	}
	s.kept = append(s.kept, owner.Request+"/"+function)
	return tensor.Ref{Owner: owner.Request, Blob: "kept", Size: size, Keeper: tensor.Keeper{Node: "n1", Sum: 5}}, nil
}

func (s *shelf) Reserve(_ context.Context, refs []tensor.Ref) (func(), error) {
	if refs[0].Blob == "large" {
		return nil, errors.New("no room")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reserved++
	return func() { s.released <- refs[0].Blob }, nil
}

func (s *shelf) Fetch(ctx context.Context, ref tensor.Ref) (*os.File, error) {
	s.mu.Lock()
	hold := s.hold
	s.mu.Unlock()
	s.asked <- ref.Blob
	select {
	case <-hold:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	if ref.Blob == "lost" {
		return nil, errors.New("node z is gone")
	}
	f, err := wire.NewMemory()
	if err == nil {
		_, err = f.Write(tensor.AppendItem(nil, tensor.Item{ContentType: "x/y", Bytes: []byte(ref.Blob)}))
	}
	return f, err
}

// ends are both ends of a stage socket of a node that keeps items.
type ends struct {
	t             *testing.T
	near, replica *wire.Conn
}

func (b *broker) carried(s *shelf) (*ends, *wire.AtNode) {
	b.t.Helper()
	f, c := b.joinFar("n1", func(cfg *node.ServerConfig) { cfg.Items = s })
	started, err := c.node("n1").Start(within(b.t), node.Order{Replica: "r-1", Spec: spec}, nil)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { _ = started.Conn.Close() })
	at, ok := started.Conn.(*wire.AtNode)
	if !ok {
		b.t.Fatalf("the socket is a %T, want a *wire.AtNode", started.Conn)
	}
	e := &ends{b.t, wire.NewConn(at), f.replica(b.t, "r-1")}
	_ = e.near.SetReadDeadline(time.Now().Add(limit))
	_ = e.replica.SetReadDeadline(time.Now().Add(limit))
	return e, at
}

// send sends a batch with one call per input.
func (e *ends) send(number uint64, keep bool, inputs ...tensor.Item) {
	e.t.Helper()
	b, kept := wire.Batch{}, false
	for i, in := range inputs {
		b.Calls = append(b.Calls, wire.Call{Key: task.Key{Request: "q", Task: uint32(i), Attempt: 1}, Input: tensor.Input{{Items: tensor.Activation{in}}}})
		kept = kept || in.Ref != nil
	}
	if err := e.near.Write(wire.Frame{Type: wire.FrameBatch, Batch: number, Payload: b.Append(nil), Keep: keep, Kept: kept}); err != nil {
		e.t.Fatal(err)
	}
}

// gets reads a batch as a replica does, and returns its inputs.
func (e *ends) gets(number uint64) (inputs []string) {
	e.t.Helper()
	f, err := e.replica.Read()
	if err != nil || f.Type != wire.FrameBatch || f.Batch != number || f.Keep || f.Kept {
		e.t.Fatalf("the replica gets %+v, %v, want batch %d without flags", f, err, number)
	}
	b, err := wire.DecodeBatch(f.Payload)
	if err != nil {
		e.t.Fatal(err)
	}
	for _, c := range b.Calls {
		items, err := wire.Detach(c.Input[0].Items, f.Files)
		if err != nil {
			e.t.Fatal(err)
		}
		inputs = append(inputs, string(items[0].Bytes))
	}
	for _, file := range f.Files {
		_ = file.Close()
	}
	return inputs
}

// answer sends an output as a replica does, and returns what the control plane gets.
func (e *ends) answer(number uint64, call int, out tensor.Activation) wire.Frame {
	e.t.Helper()
	items, files, err := wire.Attach(out, 0, nil)
	if err == nil {
		err = e.replica.Write(wire.Frame{Type: wire.FrameResult, Batch: number, Payload: wire.Result{Index: call, Output: items}.Append(nil), Files: files})
	}
	for _, file := range files {
		_ = file.Close()
	}
	if err != nil {
		e.t.Fatal(err)
	}
	f, err := e.near.Read()
	if err != nil || f.Type != wire.FrameResult {
		e.t.Fatalf("the control plane gets %v, %v", f.Type, err)
	}
	for _, file := range f.Files {
		_ = file.Close()
	}
	return f
}

func at(blob string) tensor.Item {
	return tensor.Item{Ref: &tensor.Ref{Owner: "q", Blob: blob, Size: int64(len(tensor.AppendItem(nil, tensor.Item{ContentType: "x/y", Bytes: []byte(blob)}))), Keeper: tensor.Keeper{Node: "z", Address: "z:1"}}}
}

// TestOutputsStayOnTheNode checks which outputs a daemon keeps: the large ones of batches that may
// be kept.
func TestOutputsStayOnTheNode(t *testing.T) {
	s := newShelf()
	e, socket := startBroker(t).carried(s)
	if socket.Node != "n1" || socket.Address == "" {
		t.Errorf("the socket is of node %q at %q", socket.Node, socket.Address)
	}
	large := tensor.Activation{{ContentType: "x/y", Bytes: bytes.Repeat([]byte{1}, 100<<10)}}
	small := tensor.Item{ContentType: "x/y", Bytes: []byte("in")}
	e.send(1, true, small, small, small)
	e.send(2, false, small)
	e.gets(1)
	e.gets(2)
	e.send(4, true, small)
	cancel := wire.Frame{Type: wire.FrameCancel, Batch: 4, Payload: wire.Cancel{}.Append(nil)}
	if err := e.near.Write(cancel); err != nil {
		t.Fatal(err)
	}
	e.gets(4)
	expect(t, e.replica, wire.FrameCancel)
	for what, tc := range map[string]struct {
		batch uint64
		call  int
		out   tensor.Activation
		full  bool
		kept  bool
	}{
		"a large output":                   {1, 0, large, false, true},
		"a small output":                   {1, 1, tensor.Activation{small}, false, false},
		"no room":                          {1, 2, large, true, false},
		"a batch that must not be kept":    {2, 0, large, false, false},
		"a call that nobody has asked for": {3, 0, large, false, false},
		"a call that was canceled":         {4, 0, large, false, false},
	} {
		s.mu.Lock()
		s.full = tc.full
		s.mu.Unlock()
		f := e.answer(tc.batch, tc.call, tc.out)
		if f.Kept != tc.kept || (len(f.Files) == 0) != (tc.kept || len(tc.out[0].Bytes) < 100) {
			t.Errorf("%s: kept %v, %d files, want kept %v", what, f.Kept, len(f.Files), tc.kept)
		}
		m, err := wire.DecodeResult(f.Payload)
		if err != nil || tc.kept && (m.Output[0].Ref.Owner != "q" || m.Output[0].Ref.Node != "n1") {
			t.Errorf("%s: %+v, %v", what, m.Output, err)
		}
	}
	if len(s.kept) != 1 || s.kept[0] != "q/"+spec.Function {
		t.Errorf("kept %q", s.kept)
	}
}

// TestInputsComeFromNodes checks that a daemon gives its replica items of nodes as files, that
// other frames do not wait for them, and what it answers if an item is lost.
func TestInputsComeFromNodes(t *testing.T) {
	s := newShelf()
	e, _ := startBroker(t).carried(s)
	small := tensor.Item{ContentType: "x/y", Bytes: []byte("in")}
	e.send(1, true, at("first"), small)
	if got := e.gets(1); got[0] != "first" || got[1] != "in" {
		t.Errorf("inputs %q", got)
	}
	if f := e.answer(1, 0, tensor.Activation{{ContentType: "x/y", Bytes: make([]byte, 100<<10)}}); !f.Kept {
		t.Error("the output of a batch with items is not kept")
	}

	<-s.asked
	e.send(4, true, small, at("lost"))
	<-s.asked
	if m := e.fails(4); m.Code != task.InputLost || m.Index != 0 || m.Lost != nil {
		t.Errorf("the other call: %+v", m)
	}
	if m := e.fails(4); m.Code != task.InputLost || m.Index != 1 || len(m.Lost) != 1 || m.Lost[0] != "lost" || !strings.Contains(m.Message, `which node "z" keeps, is lost: node z is gone`) {
		t.Errorf("the call whose item is lost: %+v", m)
	}

	s.mu.Lock()
	s.hold = make(chan struct{})
	s.mu.Unlock()
	e.send(5, false, at("late"))
	<-s.asked
	e.cancel(5, wire.CancelAll)
	if m := e.fails(5); m.Code != task.Canceled {
		t.Errorf("a canceled batch: %+v", m)
	}
	e.send(7, false, at("large"))
	if m := e.fails(7); m.Code != task.Unavailable || !strings.Contains(m.Message, "memory for items of nodes: no room") {
		t.Errorf("without memory for its items: %+v", m)
	}
	e.send(6, false, at("later")) // still on its way when the socket ends
	<-s.asked
	_ = e.near.Close()
	if _, err := e.replica.Read(); !errors.Is(err, io.EOF) {
		t.Errorf("after the end: %v", err)
	}
	var released []string
	for range s.reserved {
		released = append(released, received(t, s.released))
	}
	// The second call of batch 1 has no answer, so its memory is released at the end.
	if want := "lost late"; strings.Join(released[:2], " ") != want || len(released) != 4 {
		t.Errorf("memory is released for %q, want 4 batches, with %s first", released, want)
	}
}

// TestCanceledCallsDoNotWaitForItems checks that a call is answered at once if it is canceled while
// its batch waits for items, that the replica does not get it, and that the answers to the other
// calls are theirs.
func TestCanceledCallsDoNotWaitForItems(t *testing.T) {
	s := newShelf()
	hold := make(chan struct{})
	s.hold = hold
	e, _ := startBroker(t).carried(s)
	small := tensor.Item{ContentType: "x/y", Bytes: []byte("in")}
	large := tensor.Activation{{ContentType: "x/y", Bytes: bytes.Repeat([]byte{1}, 100<<10)}}
	e.send(2, true, small, at("slow"), small, small)
	<-s.asked
	e.send(3, false, small)
	e.gets(3) // before batch 2
	e.cancel(2, 0)
	if m := e.fails(2); m.Code != task.Canceled || m.Index != 0 {
		t.Errorf("the canceled call: %+v", m)
	}
	close(hold)
	if got := e.gets(2); strings.Join(got, " ") != "slow in in" {
		t.Errorf("inputs %q", got)
	}
	e.cancel(2, 0) // nobody has it any more
	e.cancel(2, 2)
	if f := expect(t, e.replica, wire.FrameCancel); f.Batch != 2 || f.Payload[0] != 1 {
		t.Errorf("cancel of call %d of batch %d, want 1 of 2", f.Payload[0], f.Batch)
	}
	if err := e.replica.Write(wire.Frame{Type: wire.FrameChunk, Batch: 2, Payload: wire.Chunk{Index: 2, Data: []byte("abc")}.Append(nil)}); err != nil {
		t.Fatal(err)
	}
	if m, err := wire.DecodeChunk(expect(t, e.near, wire.FrameChunk).Payload); err != nil || m.Index != 3 || string(m.Data) != "abc" {
		t.Errorf("chunk %+v, %v, want one of call 3", m, err)
	}
	if m, err := wire.DecodeResult(e.answer(2, 0, large).Payload); err != nil || m.Index != 1 || m.Output[0].Ref == nil {
		t.Errorf("output %+v, %v, want that of call 1, which stays on the node", m, err)
	}
	if m, err := wire.DecodeResult(e.answer(2, 2, tensor.Activation{small}).Payload); err != nil || m.Index != 3 {
		t.Errorf("output %+v, %v, want that of call 3", m, err)
	}
	if err := e.replica.Write(wire.Frame{Type: wire.FrameError, Batch: 2, Payload: wire.Error{Index: 1, Code: task.Canceled}.Append(nil)}); err != nil {
		t.Fatal(err)
	}
	if m := e.fails(2); m.Index != 2 || m.Code != task.Canceled {
		t.Errorf("error %+v, want that of call 2", m)
	}
	received(t, s.released)
}

// fails returns an answer of the daemon in place of the replica's.
func (e *ends) fails(number uint64) wire.Error {
	e.t.Helper()
	f := expect(e.t, e.near, wire.FrameError)
	m, err := wire.DecodeError(f.Payload)
	if err != nil || f.Batch != number {
		e.t.Fatalf("the control plane gets an error of batch %d, %v, want one of batch %d", f.Batch, err, number)
	}
	return m
}

// cancel cancels a call as the control plane does.
func (e *ends) cancel(number uint64, call int) {
	e.t.Helper()
	if err := e.near.Write(wire.Frame{Type: wire.FrameCancel, Batch: number, Payload: wire.Cancel{Index: call}.Append(nil)}); err != nil {
		e.t.Fatal(err)
	}
}

// received receives a value.
func received(t *testing.T, from <-chan string) string {
	t.Helper()
	select {
	case v := <-from:
		return v
	case <-time.After(limit):
		t.Fatalf("nothing within %v", limit)
		return ""
	}
}

// TestReplicasCannotNameItemsOfNodes checks that a replica which claims to be a daemon is cut off.
func TestReplicasCannotNameItemsOfNodes(t *testing.T) {
	forged := wire.Result{Output: tensor.Activation{at("secret")}}.Append(nil)
	for what, f := range map[string]wire.Frame{
		"a flag of daemons": {Type: wire.FrameResult, Batch: 1, Payload: forged, Kept: true},
		"a lost input":      {Type: wire.FrameError, Batch: 1, Payload: wire.Error{Code: task.InputLost, Lost: []string{"x"}}.Append(nil)},
	} {
		t.Run(what, func(t *testing.T) {
			e, _ := startBroker(t).carried(newShelf())
			if err := e.replica.Write(f); err != nil {
				t.Fatal(err)
			}
			if f, err := e.near.Read(); err == nil {
				t.Errorf("the control plane gets %+v, want the end", f)
			}
		})
	}
}

// TestKeptReplicasKeepOutputs checks that outputs also stay on the node if the replica may outlive
// its control plane, and that the next one can take it over.
func TestKeptReplicasKeepOutputs(t *testing.T) {
	b, s := startBroker(t), newShelf()
	f, c := b.joinFar("n1", keeps, func(cfg *node.ServerConfig) { cfg.Items = s })
	started, err := c.node("n1").Start(within(t), node.Order{Replica: "r-1", Spec: spec}, nil)
	if err != nil {
		t.Fatal(err)
	}
	replica := f.replica(t, "r-1")
	socket := started.Conn
	for first := true; ; first = false {
		e := &ends{t, greet(t, socket, replica, first), replica}
		e.send(1, true, at("an item"))
		got := expect(t, replica, wire.FrameBatch)
		if len(got.Files) != 1 || got.Keep || got.Kept {
			t.Errorf("the replica gets %+v", got)
		}
		_ = got.Files[0].Close()
		if f := e.answer(got.Batch, 0, tensor.Activation{{ContentType: "x/y", Bytes: make([]byte, 100<<10)}}); !f.Kept || f.Batch != 1 {
			t.Errorf("the output of batch %d: kept %v", f.Batch, f.Kept)
		}
		_ = e.near.Close()
		if !first {
			break
		}
		if socket, err = c.node("n1").Adopt(within(t), node.Order{Replica: "r-1", Spec: spec}); err != nil {
			t.Fatal(err)
		}
	}
	if len(s.kept) != 2 {
		t.Errorf("kept %q", s.kept)
	}
}
