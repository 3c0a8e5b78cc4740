package stage

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

func TestMain(m *testing.M) {
	if hooks, ok := programs()[os.Getenv("STAGE_TEST_PROGRAM")]; ok {
		Main(hooks)
	}
	goleak.VerifyTestMain(m)
}

// dispatcher plays the dispatcher of a replica.
type dispatcher struct {
	t    *testing.T
	conn *wire.Conn
	done chan error // the result of serve
}

// ends returns both ends of a stage socket.
func ends(t *testing.T) (x, y wire.Socket) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if x, err = connection(fds[0]); err != nil {
		t.Fatal(err)
	}
	if y, err = connection(fds[1]); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = x.Close(), y.Close() })
	return x, y
}

func begin(t *testing.T, h Hooks, welcome wire.Welcome) *dispatcher {
	t.Helper()
	return beginCtx(t, t.Context(), h, welcome)
}

func beginCtx(t *testing.T, ctx context.Context, h Hooks, welcome wire.Welcome) *dispatcher {
	t.Helper()
	x, y := ends(t)
	h.Slots, h.MaxBatch = max(1, h.Slots), max(1, h.MaxBatch)
	d := &dispatcher{t: t, conn: wire.NewConn(x), done: make(chan error, 1)}
	hello := wire.Hello{Oldest: wire.OldestVersion, Newest: wire.Version, Function: "f.ns", Replica: "f-1", Slots: h.Slots, MaxBatch: h.MaxBatch}
	go func() { d.done <- serve(ctx, wire.NewConn(y), hello, h, slog.New(slog.DiscardHandler)) }()
	f := d.read(wire.FrameHello)
	if got, err := wire.DecodeHello(f.Payload); err != nil || !reflect.DeepEqual(got, hello) {
		t.Fatalf("hello %+v, %v", got, err)
	}
	d.send(wire.FrameWelcome, 0, welcome.Append(nil))
	return d
}

var welcome = wire.Welcome{Version: wire.Version, Credit: 1 << 20}

func (d *dispatcher) send(t wire.FrameType, batch uint64, payload []byte) {
	d.t.Helper()
	if err := d.conn.Write(wire.Frame{Type: t, Batch: batch, Payload: payload}); err != nil {
		d.t.Fatal(err)
	}
}

func (d *dispatcher) batch(id uint64, deadline time.Time, bodies ...string) {
	d.t.Helper()
	var b wire.Batch
	for i, s := range bodies {
		b.Calls = append(b.Calls, wire.Call{
			Key: task.Key{Request: "r", Task: uint32(i), Attempt: 1}, Deadline: deadline,
			Input: tensor.Input{{Items: tensor.Activation{{ContentType: "text/plain", Bytes: []byte(s)}}}},
		})
	}
	d.send(wire.FrameBatch, id, b.Append(nil))
}

func (d *dispatcher) read(want wire.FrameType) wire.Frame {
	d.t.Helper()
	if err := d.conn.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		d.t.Fatal(err)
	}
	f, err := d.conn.Read()
	if err != nil {
		d.t.Fatalf("reading a frame %v: %v", want, err)
	}
	if f.Type != want {
		d.t.Fatalf("frame %v (%q), want %v", f.Type, f.Payload, want)
	}
	return f
}

func (d *dispatcher) failure(code task.Code, text string) {
	d.t.Helper()
	m, err := wire.DecodeError(d.read(wire.FrameError).Payload)
	if err != nil || m.Code != code || !strings.Contains(m.Message, text) {
		d.t.Errorf("error %+v, %v, want code %d and %q", m, err, code, text)
	}
}

func (d *dispatcher) result() wire.Result {
	d.t.Helper()
	f := d.read(wire.FrameResult)
	m, err := wire.DecodeResult(f.Payload)
	if err != nil {
		d.t.Fatal(err)
	}
	if m.Output, err = wire.Detach(m.Output, f.Files); err != nil {
		d.t.Fatal(err)
	}
	for _, file := range f.Files {
		_ = file.Close()
	}
	return m
}

func (d *dispatcher) ends(want string) {
	d.t.Helper()
	select {
	case err := <-d.done:
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			d.t.Errorf("the replica ended with %v, want %q", err, want)
		}
	case <-time.After(time.Minute):
		d.t.Error("the replica did not end")
	}
}

func upper(c *Call) (tensor.Activation, error) {
	switch s := string(c.Items()[0].Bytes); s {
	case "bad":
		return nil, BadInput(errors.New("got bad, want good"))
	case "fail":
		return nil, errors.New("broken")
	case "memory":
		return nil, fmt.Errorf("layer 3: %w", OutOfMemory(errors.New("want 2 GiB, 1 GiB of 40 GiB free")))
	case "panic":
		panic("ouch")
	case "large":
		return tensor.Activation{{Bytes: bytes.Repeat([]byte("L"), 1<<20)}}, nil
	case "wait":
		<-c.Context().Done()
		return nil, c.Context().Err()
	default:
		return tensor.Activation{{Bytes: bytes.ToUpper([]byte(s))}}, nil
	}
}

func TestCallsOfABatchEndIndependently(t *testing.T) {
	t.Setenv(envDevices, "GPU-1")
	d := begin(t, Hooks{Infer: Each(upper), MaxBatch: 5}, welcome)
	d.batch(1, time.Time{}, "a", "bad", "fail", "large", "memory")
	if m := d.result(); m.Index != 0 || string(m.Output[0].Bytes) != "A" {
		t.Errorf("result %+v", m)
	}
	d.failure(task.BadInput, "got bad, want good")
	d.failure(task.Failed, "broken")
	if m := d.result(); m.Index != 3 || len(m.Output[0].Bytes) != 1<<20 {
		t.Errorf("large result: call %d, %d bytes", m.Index, len(m.Output[0].Bytes))
	}
	d.failure(task.OutOfMemory, "layer 3: want 2 GiB, 1 GiB of 40 GiB free")
	d.send(wire.FrameDrain, 0, nil)
	d.ends("")
}

func TestAPanicLeavesTheReplicaAlive(t *testing.T) {
	d := begin(t, Hooks{Infer: Each(upper), MaxBatch: 2}, welcome)
	d.batch(1, time.Time{}, "panic", "a")
	d.failure(task.Failed, "panicked: ouch")
	if m := d.result(); m.Index != 1 || string(m.Output[0].Bytes) != "A" {
		t.Errorf("beside the panic: %+v", m)
	}
	d.batch(2, time.Time{}, "b")
	if m := d.result(); string(m.Output[0].Bytes) != "B" {
		t.Errorf("after the panic: %+v", m)
	}
}

// TestABadCallIsFoundByBisection sends a batch with a call for which the hook panics, or returns
// too few results. The other calls get their results, unless a call may not run twice.
func TestABadCallIsFoundByBisection(t *testing.T) {
	var mu sync.Mutex
	var runs []int
	ran := func() (sizes []int) {
		mu.Lock()
		defer mu.Unlock()
		sizes, runs = runs, nil
		return sizes
	}
	infer := func(_ context.Context, calls []*Call) []Result {
		mu.Lock()
		runs = append(runs, len(calls))
		mu.Unlock()
		out := make([]Result, len(calls))
		for i, c := range calls {
			switch text := string(c.Items()[0].Bytes); text {
			case "panic":
				panic("ouch")
			case "short":
				return nil
			case "stream":
				_, _ = c.Write([]byte("piece"))
				fallthrough
			default:
				out[i].Output = c.Items()
			}
		}
		return out
	}
	for bad, want := range map[string]string{"panic": "panicked: ouch", "short": "returned 0 results for 1 calls"} {
		d := begin(t, Hooks{Infer: infer, MaxBatch: 8}, welcome)
		d.batch(1, time.Time{}, "0", "1", "2", "3", "4", bad, "6", "7")
		for i := range 8 {
			if i == 5 {
				d.failure(task.Failed, want)
			} else if m := d.result(); m.Index != i || string(m.Output[0].Bytes) != fmt.Sprint(i) {
				t.Errorf("%s: answer %d: %+v", bad, i, m)
			}
		}
		if runs := ran(); !slices.Equal(runs, []int{8, 4, 4, 2, 1, 1, 2}) {
			t.Errorf("%s: batches of %v", bad, runs)
		}
		d = begin(t, Hooks{Infer: infer, MaxBatch: 8, once: true}, welcome)
		d.batch(1, time.Time{}, "0", bad)
		d.failure(task.Failed, strings.Replace(want, "1 calls", "2 calls", 1))
		d.failure(task.Failed, strings.Replace(want, "1 calls", "2 calls", 1))
		if runs := ran(); !slices.Equal(runs, []int{2}) {
			t.Errorf("%s, not idempotent: batches of %v", bad, runs)
		}
		d = begin(t, Hooks{Infer: infer, MaxBatch: 8}, welcome)
		d.batch(1, time.Time{}, "stream", bad)
		d.read(wire.FrameChunk)
		d.failure(task.Failed, strings.Replace(want, "1 calls", "2 calls", 1))
		d.failure(task.Failed, strings.Replace(want, "1 calls", "2 calls", 1))
		if runs := ran(); !slices.Equal(runs, []int{2}) {
			t.Errorf("%s, after a stream: batches of %v", bad, runs)
		}
	}
}

// TestABatchEndsWithItsLastCall runs a hook that waits only for the batch's context.
func TestABatchEndsWithItsLastCall(t *testing.T) {
	calls := make(chan []*Call, 3)
	d := begin(t, Hooks{MaxBatch: 2, Infer: func(ctx context.Context, c []*Call) []Result {
		calls <- c
		<-ctx.Done()
		return []Result{{Err: c[0].Context().Err()}, {Err: c[1].Context().Err()}}
	}}, welcome)
	d.batch(1, time.Time{}, "a", "b")
	c := <-calls
	d.send(wire.FrameCancel, 1, wire.Cancel{Index: 1}.Append(nil))
	<-c[1].Context().Done()
	if err := c[0].Context().Err(); err != nil {
		t.Errorf("call 0 ended with call 1: %v", err)
	}
	d.send(wire.FrameCancel, 1, wire.Cancel{Index: 0}.Append(nil))
	d.failure(task.Canceled, "canceled")
	d.failure(task.Canceled, "canceled")
	d.batch(2, time.Now().Add(10*time.Millisecond), "a", "b")
	d.failure(task.Expired, "deadline")
	d.failure(task.Expired, "deadline")
	d.batch(3, time.Time{}, "a", "b")
	_ = d.conn.Close()
	d.ends("") // a hook that waits for its context does not keep the process alive
}

func TestLargeInputsTravelInFiles(t *testing.T) {
	d := begin(t, Hooks{Infer: Each(func(c *Call) (tensor.Activation, error) {
		var n []byte
		for _, it := range c.Items() {
			n = fmt.Appendf(n, "%d ", len(it.Bytes))
		}
		return tensor.Activation{{Bytes: n}}, nil
	})}, welcome)
	large := tensor.Item{ContentType: "x", Bytes: make([]byte, 1<<20)}
	in := tensor.Input{{From: "a", Items: tensor.Activation{large}}, {From: "b", Items: tensor.Activation{{Bytes: []byte("small")}, large}}}
	var files []*os.File
	for i := range in {
		var more []*os.File
		var err error
		if in[i].Items, more, err = wire.Attach(in[i].Items, len(files), nil); err != nil {
			t.Fatal(err)
		}
		files = append(files, more...)
	}
	if len(files) != 2 {
		t.Fatalf("%d files, want 2", len(files))
	}
	err := d.conn.Write(wire.Frame{Type: wire.FrameBatch, Batch: 1, Payload: wire.Batch{Calls: []wire.Call{{Input: in}}}.Append(nil), Files: files})
	for _, f := range files {
		_ = f.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	if m := d.result(); string(m.Output[0].Bytes) != "1048576 5 1048576 " {
		t.Errorf("items of %s bytes", m.Output[0].Bytes)
	}
}

func TestCancelAndDeadlineEndACall(t *testing.T) {
	d := begin(t, Hooks{Infer: Each(upper), Slots: 2}, welcome)
	d.batch(1, time.Time{}, "wait")
	d.send(wire.FrameCancel, 1, wire.Cancel{Index: wire.CancelAll}.Append(nil))
	d.failure(task.Canceled, "canceled")
	d.batch(2, time.Now().Add(10*time.Millisecond), "wait")
	d.failure(task.Expired, "deadline")
	d.send(wire.FrameCancel, 1, wire.Cancel{}.Append(nil)) // too late: nothing happens
	d.batch(3, time.Time{}, "c")
	d.result()
}

func strayRef() []byte {
	ref := tensor.Item{Ref: &tensor.Ref{Owner: "fd:", Blob: "0", Size: 1}}
	return wire.Batch{Calls: []wire.Call{{Input: tensor.Input{{Items: tensor.Activation{ref}}}}}}.Append(nil)
}

func TestBrokenDispatchersEndTheReplica(t *testing.T) {
	for name, tc := range map[string]struct {
		do   func(d *dispatcher)
		want string
	}{
		"closes":          {func(d *dispatcher) { _ = d.conn.Close() }, ""},
		"garbage":         {func(d *dispatcher) { d.send(wire.FrameBatch, 1, []byte("junk")) }, "batch:"},
		"wrong frame":     {func(d *dispatcher) { d.send(wire.FrameHello, 0, nil) }, "frame Hello"},
		"too many":        {func(d *dispatcher) { d.batch(1, time.Time{}, "wait"); d.batch(2, time.Time{}, "wait") }, "want at most 1"},
		"large batch":     {func(d *dispatcher) { d.batch(1, time.Time{}, "a", "b") }, "batch 1 of 2 calls, want at most 1"},
		"file not there":  {func(d *dispatcher) { d.send(wire.FrameBatch, 1, strayRef()) }, "call 0 of batch 1: item 0: reference"},
		"bad while busy":  {func(d *dispatcher) { d.batch(1, time.Time{}, "wait"); d.send(wire.FrameHello, 0, nil) }, "frame Hello"},
		"same batch":      {func(d *dispatcher) { d.batch(1, time.Time{}, "wait"); d.batch(1, time.Time{}, "wait") }, "batch 1"},
		"closes, running": {func(d *dispatcher) { d.batch(1, time.Time{}, "wait"); _ = d.conn.Close() }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			d := begin(t, Hooks{Infer: Each(upper)}, welcome)
			tc.do(d)
			d.ends(tc.want)
		})
	}
	d := begin(t, Hooks{Infer: Each(upper)}, wire.Welcome{Version: 9})
	d.ends("version 9")
}

func FuzzServe(f *testing.F) {
	f.Add(uint8(wire.FrameBatch), wire.Batch{Calls: []wire.Call{{Input: tensor.Input{{Items: tensor.Activation{{Bytes: []byte("a")}}}}}}}.Append(nil))
	f.Add(uint8(wire.FrameCancel), wire.Cancel{}.Append(nil))
	f.Fuzz(func(t *testing.T, kind uint8, payload []byte) {
		d := begin(t, Hooks{Infer: Each(func(c *Call) (tensor.Activation, error) { return c.Items(), nil })}, welcome)
		if err := d.conn.Write(wire.Frame{Type: wire.FrameType(kind), Batch: 1, Payload: payload}); err == nil {
			_ = d.conn.Write(wire.Frame{Type: wire.FrameDrain})
		}
		select {
		case <-d.done: // any result is fine, but there must be one
		case <-time.After(time.Minute):
			t.Fatal("the replica hangs")
		}
	})
}

// TestQuickResultsShareASystemCall checks that one goroutine sends the results of quick batches
// that come together, and that all results are sent.
func TestQuickResultsShareASystemCall(t *testing.T) {
	x, y := ends(t)
	s := &server{conn: wire.NewConn(x)}
	far := wire.NewConn(y)
	gather := func(batch uint64) {
		t.Helper()
		if err := s.conn.Gather(wire.Frame{Type: wire.FrameResult, Batch: batch}); err != nil {
			t.Fatal(err)
		}
	}
	s.flushing.Store(true) // another goroutine will send
	gather(1)
	if err := s.flush(true); err != nil {
		t.Fatal(err)
	}
	raw, err := y.(syscall.Conn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var n int
	if cerr := raw.Control(func(fd uintptr) { n, err = unix.IoctlGetInt(int(fd), unix.TIOCINQ) }); n != 0 || err != nil || cerr != nil {
		t.Fatalf("%d bytes, %v, %v, want none before the other one sends", n, err, cerr)
	}
	s.flushing.Store(false)
	gather(2)
	if err := s.flush(true); err != nil {
		t.Fatal(err)
	}
	if s.flushing.Load() {
		t.Error("flushing is still set")
	}
	for want := range uint64(2) {
		if f, err := far.Read(); err != nil || f.Batch != want+1 {
			t.Fatalf("result of batch %d, %v, want %d", f.Batch, err, want+1)
		}
	}

	d := begin(t, Hooks{Slots: 64, MaxBatch: 1, Infer: Each(upper)}, wire.Welcome{Version: 1})
	for id := range uint64(64) {
		d.batch(id+1, time.Time{}, fmt.Sprint("b", id))
	}
	for range 64 {
		d.result()
	}
}

func TestThreadsAreAskedFor(t *testing.T) {
	asked := make(chan int, 2)
	h := Hooks{Infer: Each(upper), threads: func(total int) { asked <- total }}
	d := begin(t, h, welcome)
	d.send(wire.FrameThreads, 0, wire.Threads{Total: 3}.Append(nil))
	d.batch(1, time.Time{}, "a")
	d.result() // the frame before it has been read
	if got := <-asked; got != 3 {
		t.Errorf("asked for %d threads, want 3", got)
	}
	d.send(wire.FrameThreads, 0, []byte{1})
	d.ends("threads: 1 bytes, want 2")

	h.threads = nil // as for a stage without a model
	d = begin(t, h, welcome)
	d.send(wire.FrameThreads, 0, wire.Threads{Total: 3}.Append(nil))
	d.batch(1, time.Time{}, "a")
	d.result()
}
