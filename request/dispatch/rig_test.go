package dispatch

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/stage"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// TestMain turns the test binary into a stage if it is started as one (see process_test.go).
func TestMain(m *testing.M) {
	if os.Getenv(wire.EnvStageFD) != "" {
		stage.Main(stage.Hooks{Infer: stage.Each(infer), Slots: 2})
	}
	goleak.VerifyTestMain(m)
}

const patience = time.Minute

// memoryBus is a Bus within the process. process_test.go uses the real one.
type memoryBus struct {
	mu       sync.Mutex
	handlers map[string]func([]byte, bool)
	replies  chan *task.Reply
	stopping func() // called when a stop begins; nil: nothing is
}

func (b *memoryBus) Tasks(function string, handler func([]byte, bool)) (func(), error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if function == "refused.ns" {
		return nil, errors.New("no")
	}
	b.handlers[function] = handler
	return func() {
		if b.stopping != nil {
			b.stopping()
		}
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(b.handlers, function)
	}, nil
}

func (b *memoryBus) send(msg []byte) { b.sendMore(msg, false) }

func (b *memoryBus) sendTo(function string, msg []byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if h := b.handlers[function]; h != nil {
		h(msg, false)
	}
}

func (b *memoryBus) sendMore(msg []byte, more bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if h := b.handlers["f.ns"]; h != nil {
		h(msg, more)
	}
}

func (b *memoryBus) Reply(_ string, msg []byte) error {
	r, err := wire.DecodeReply(bytes.Clone(msg))
	if err != nil {
		panic(err)
	}
	b.replies <- r
	return nil
}

type rig struct {
	t       *testing.T
	shell   *Shell
	bus     *memoryBus
	store   *tensor.Dir
	metrics *prometheus.Registry
	wanted  chan string
	dropped chan string
	deaths  chan task.Death // deaths that Dropped reported
	full    chan string
	stuck   chan string
	first   chan First
}

func newRig(t *testing.T, spec Spec) *rig {
	t.Helper()
	store, err := tensor.OpenDir(t.TempDir(), 1<<30)
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{
		t: t, store: store, metrics: prometheus.NewRegistry(),
		bus:    &memoryBus{handlers: map[string]func([]byte, bool){}, replies: make(chan *task.Reply, 10_000)},
		wanted: make(chan string, 1000), dropped: make(chan string, 10), deaths: make(chan task.Death, 10), full: make(chan string, 10), stuck: make(chan string, 10), first: make(chan First, 10),
	}
	r.shell, err = New(Config{
		Bus: r.bus, Store: store, Logger: slog.New(slog.DiscardHandler), Registerer: r.metrics,
		OnDemand: func(f pipeline.Key) { r.wanted <- f.String() },
		Dropped: func(_ pipeline.Key, replica string, death task.Death) {
			r.deaths <- death
			r.dropped <- replica + ": " + death.Cause
		},
		OutOfMemory: func(_ pipeline.Key, replica string, short *task.MemoryError) {
			r.full <- fmt.Sprintf("%s: %v, %d replies before", replica, short, len(r.bus.replies))
		},
		Stuck:       func(_ pipeline.Key, replica, cause string) { r.stuck <- replica + ": " + cause },
		FirstAnswer: func(f First) { r.first <- f },
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.shell.Close)
	spec.Function = pipeline.ParseKey("f.ns")
	if err := r.shell.Ensure(spec); err != nil {
		t.Fatal(err)
	}
	return r
}

func (r *rig) submit(name string, in ...tensor.Item) { r.submitUntil(name, time.Time{}, in...) }

func (r *rig) submitUntil(name string, deadline time.Time, in ...tensor.Item) {
	t := newTask(name, 0)
	t.Deadline, t.Input = deadline, tensor.Input{{Items: in}}
	r.bus.send(wire.AppendTask(nil, t))
}

func (r *rig) cancel(name string) {
	r.bus.send(wire.AppendCancel(nil, newTask(name, 0).Key, "f.ns"))
}

func receive[T any](t testing.TB, from <-chan T, what string) T {
	t.Helper()
	select {
	case v := <-from:
		return v
	case <-time.After(patience):
		t.Fatalf("no %s within %v", what, patience)
		panic("unreachable")
	}
}

// metric returns the value of a gauge or counter, or the count of a histogram.
func (r *rig) metric(name string) float64 {
	r.t.Helper()
	families, err := r.metrics.Gather()
	if err != nil {
		r.t.Fatal(err)
	}
	for _, f := range families {
		if m := f.GetMetric(); f.GetName() == "stagecoach_dispatch_"+name && len(m) == 1 && m[0].GetLabel()[0].GetValue() == "f.ns" {
			return m[0].GetGauge().GetValue() + m[0].GetCounter().GetValue() + float64(m[0].GetHistogram().GetSampleCount())
		}
	}
	r.t.Fatalf("no metric %q of one function", name)
	return 0
}

func (r *rig) reply(name string, code task.Code, message string) *task.Reply {
	r.t.Helper()
	got := receive(r.t, r.bus.replies, "reply to "+name)
	if got.Request != name || got.Code != code || !strings.Contains(got.Message, message) {
		r.t.Fatalf("reply to %s: %s %q, want to %s: %s %q", got.Request, codeNames[got.Code], got.Message, name, codeNames[code], message)
	}
	return got
}

// actor is a replica that the test plays.
type actor struct {
	t    testing.TB
	conn *wire.Conn
}

func pair(t testing.TB) (near, far wire.Socket) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var ends [2]wire.Socket
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		ends[i], err = wire.OpenSocket(f)
		_ = f.Close()
		if err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { _ = ends[1].Close() })
	return ends[0], ends[1]
}

// attach plays a replica's start until its Welcome.
func attach(t testing.TB, s *Shell, name string, slots, maxBatch int) *actor {
	t.Helper()
	near, far := pair(t)
	a := &actor{t, wire.NewConn(far)}
	a.write(wire.FrameHello, 0, wire.Hello{
		Oldest: 1, Newest: 1, PID: 1, Function: "f.ns", Replica: name, Slots: slots, MaxBatch: maxBatch, Place: 7 * ms,
	}.Append(nil))
	hello, err := s.Attach(t.Context(), pipeline.ParseKey("f.ns"), name, 1, near)
	if err != nil || hello.Slots != slots {
		t.Fatalf("attach: %+v, %v", hello, err)
	}
	a.read(wire.FrameWelcome)
	return a
}

func (a *actor) write(kind wire.FrameType, batch uint64, payload []byte) {
	a.t.Helper()
	if err := a.conn.Write(wire.Frame{Type: kind, Batch: batch, Payload: payload}); err != nil {
		a.t.Fatal(err)
	}
}

func (a *actor) read(want wire.FrameType) wire.Frame {
	a.t.Helper()
	_ = a.conn.SetReadDeadline(time.Now().Add(patience))
	f, err := a.conn.Read()
	if err != nil || f.Type != want {
		a.t.Fatalf("read %v (%q), %v, want %v", f.Type, f.Payload, err, want)
	}
	return f
}

// batch reads a Batch and checks the requests in it.
func (a *actor) batch(want ...string) (id uint64, calls []wire.Call) {
	a.t.Helper()
	f := a.read(wire.FrameBatch)
	b, err := wire.DecodeBatch(f.Payload)
	if err != nil {
		a.t.Fatal(err)
	}
	var got []string
	for _, c := range b.Calls {
		got = append(got, c.Key.Request)
		for _, p := range c.Input {
			if _, err := wire.Detach(p.Items, f.Files); err != nil {
				a.t.Fatal(err)
			}
		}
	}
	closeFiles(f.Files)
	if strings.Join(got, "+") != strings.Join(want, "+") {
		a.t.Fatalf("batch of %v, want %v", got, want)
	}
	return f.Batch, b.Calls
}

func (a *actor) answer(batch uint64, call int, out ...tensor.Item) {
	a.t.Helper()
	items, files, err := wire.Attach(out, 0, nil)
	if err != nil {
		a.t.Fatal(err)
	}
	payload := wire.Result{Index: call, Service: 3 * ms, Output: items}.Append(nil)
	if err := a.conn.Write(wire.Frame{Type: wire.FrameResult, Batch: batch, Payload: payload, Files: files}); err != nil {
		a.t.Fatal(err)
	}
	closeFiles(files)
}

func text(s string) tensor.Item { return tensor.Item{ContentType: "text/plain", Bytes: []byte(s)} }
