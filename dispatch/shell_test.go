package dispatch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/stage"
	"github.com/stagecoach-serving/stagecoach/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
	"github.com/stagecoach-serving/stagecoach/wire"
)

// TestMain makes the test binary a stage when it is started as one: see process_test.go.
func TestMain(m *testing.M) {
	if os.Getenv(wire.EnvStageFD) != "" {
		stage.Main(stage.Hooks{Infer: stage.Each(infer), Slots: 2})
	}
	goleak.VerifyTestMain(m)
}

const patience = 20 * time.Second

// memoryBus is a Bus within the process; process_test.go has the real one.
type memoryBus struct {
	mu       sync.Mutex
	handlers map[string]func([]byte)
	replies  chan *task.Reply
}

func (b *memoryBus) Tasks(function string, handler func([]byte)) (func(), error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if function == "refused.ns" {
		return nil, errors.New("no")
	}
	b.handlers[function] = handler
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(b.handlers, function)
	}, nil
}

func (b *memoryBus) send(msg []byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if h := b.handlers["f.ns"]; h != nil {
		h(msg)
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
		bus:    &memoryBus{handlers: map[string]func([]byte){}, replies: make(chan *task.Reply, 10_000)},
		wanted: make(chan string, 1000), dropped: make(chan string, 10), first: make(chan First, 10),
	}
	r.shell, err = New(Config{
		Bus: r.bus, Store: store, Logger: slog.New(slog.DiscardHandler), Registerer: r.metrics,
		OnDemand:    func(f string) { r.wanted <- f },
		Dropped:     func(_, replica, cause string) { r.dropped <- replica + ": " + cause },
		FirstAnswer: func(f First) { r.first <- f },
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.shell.Close)
	spec.Function = "f.ns"
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

// metric returns a gauge, a counter, or how often a histogram was told something.
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

// actor is a replica played by the test.
type actor struct {
	t    testing.TB
	conn *wire.Conn
}

func pair(t testing.TB) (near, far *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var ends [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		c, err := net.FileConn(f)
		_ = f.Close()
		if err != nil {
			t.Fatal(err)
		}
		ends[i] = c.(*net.UnixConn)
	}
	t.Cleanup(func() { _ = ends[1].Close() })
	return ends[0], ends[1]
}

// attach plays a replica up to its Welcome.
func attach(t testing.TB, s *Shell, name string, slots, maxBatch int) *actor {
	t.Helper()
	near, far := pair(t)
	a := &actor{t, wire.NewConn(far)}
	a.write(wire.FrameHello, 0, wire.Hello{
		Oldest: 1, Newest: 1, PID: 1, Function: "f.ns", Replica: name, Slots: slots, MaxBatch: maxBatch, Place: 7 * ms,
	}.Append(nil))
	hello, err := s.Attach(t.Context(), "f.ns", name, near)
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

// batch reads a Batch and wants these requests in it.
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

func TestRoundTrip(t *testing.T) {
	r := newRig(t, Spec{QueueLimit: 7, MaxReplicas: 3, Batch: 2, Slots: 1})
	r.submit("a", text("one"))
	if got := receive(t, r.wanted, "demand"); got != "f.ns" {
		t.Errorf("demand for %q", got)
	}
	want := task.Load{Waiting: 1, Max: 6, Limit: 7}
	if got := r.shell.Load("f.ns"); got != want {
		t.Errorf("load %+v, want %+v", got, want)
	}
	a := attach(t, r.shell, "f-1", 4, 8)
	id, calls := a.batch("a")
	if got := string(calls[0].Input[0].Items[0].Bytes); got != "one" {
		t.Errorf("input %q, want one", got)
	}
	r.submit("b")
	r.submit("c")
	want = task.Load{Waiting: 2, Running: 1, Servers: 2, Max: 6, Limit: 7}
	if got := r.shell.Load("f.ns"); got != want {
		t.Errorf("load %+v, want %+v", got, want)
	}
	a.answer(id, 0, text("ONE"))
	got := r.reply("a", task.OK, "")
	if string(got.Output[0].Bytes) != "ONE" || got.Replica != "f-1" || got.Service != 3*ms || got.Wait <= 0 {
		t.Errorf("reply %+v", got)
	}
	first := receive(t, r.first, "first answer")
	if first.Replica != "f-1" || first.After <= 0 || !first.Waited {
		t.Errorf("first answer %+v", first)
	}
	if start := r.shell.Load("f.ns").Start; start < 7*ms+first.After {
		t.Errorf("start took %v, want at least %v to place and %v to answer", start, 7*ms, first.After)
	}
	id, _ = a.batch("b", "c")
	a.write(wire.FrameError, id, wire.Error{Index: 1, Code: task.BadInput, Message: "no good"}.Append(nil))
	r.reply("c", task.BadInput, "no good")
	a.answer(id, 0)
	r.reply("b", task.OK, "")
	if demand, _, waiting, running := r.shell.Signals("f.ns", time.Now()); demand.Last.IsZero() || waiting != 0 || running != 0 {
		t.Errorf("demand %+v, %d wait, %d run, want none", demand, waiting, running)
	}
	if wait, service, replicas := r.metric("wait_seconds"), r.metric("service_seconds"), r.metric("replicas"); wait != 3 || service != 2 || replicas != 1 {
		t.Errorf("metrics: %v waits, %v services, %v replicas, want 3, 2, 1", wait, service, replicas)
	}
}

func TestConnectionLostMidBatch(t *testing.T) {
	t.Run("with a report", func(t *testing.T) {
		r := newRig(t, Spec{})
		r.shell.bounds.cause = patience
		a := attach(t, r.shell, "f-1", 2, 1)
		r.submit("a")
		r.submit("b")
		first, _ := a.batch("a")
		a.batch("b")
		a.answer(first, 0)
		_ = a.conn.Close()
		r.reply("a", task.OK, "") // what it had sent counts
		r.shell.Lost("f.ns", "f-1", "killed by signal 9 (out of memory)")
		if got := r.reply("b", task.ReplicaLost, "killed by signal 9 (out of memory)"); got.Replica != "f-1" {
			t.Errorf("reply from %q, want f-1", got.Replica)
		}
	})
	t.Run("with a report before the end", func(t *testing.T) {
		r := newRig(t, Spec{})
		a := attach(t, r.shell, "f-1", 1, 1)
		r.submit("a")
		a.batch("a")
		r.shell.Lost("f.ns", "f-1", "exit status 3") // a child of its own may still hold the socket
		r.reply("a", task.ReplicaLost, "exit status 3")
	})
	t.Run("without a report", func(t *testing.T) {
		r := newRig(t, Spec{})
		r.shell.bounds.cause = ms
		a := attach(t, r.shell, "f-1", 1, 1)
		r.submit("a")
		a.batch("a")
		_ = a.conn.Close()
		r.reply("a", task.ReplicaLost, "connection closed")
		if got := receive(t, r.dropped, "drop"); got != "f-1: connection closed" {
			t.Errorf("dropped %q", got)
		}
	})
}

func TestProtocolBreaks(t *testing.T) {
	for name, tc := range map[string]struct {
		send func(a *actor, id uint64)
		want string
	}{
		"frame of no type":   {func(a *actor, id uint64) { a.write(99, id, nil) }, "type 99"},
		"result cut off":     {func(a *actor, id uint64) { a.write(wire.FrameResult, id, []byte{0}) }, "result"},
		"frame of the other": {func(a *actor, id uint64) { a.write(wire.FrameDrain, id, nil) }, "Drain"},
		"call out of range":  {func(a *actor, id uint64) { a.answer(id, 5) }, "call 5 of batch 1"},
		"no such file": {func(a *actor, id uint64) {
			a.write(wire.FrameResult, id, wire.Result{Output: tensor.Activation{{Ref: &tensor.Ref{Owner: "fd:", Blob: "0", Size: 9}}}}.Append(nil))
		}, "a file that rides with the frame"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, Spec{})
			a := attach(t, r.shell, "f-1", 1, 1)
			r.submit("a")
			id, _ := a.batch("a")
			tc.send(a, id)
			r.reply("a", task.ReplicaLost, tc.want)
			if got := receive(t, r.dropped, "drop"); !strings.Contains(got, tc.want) {
				t.Errorf("dropped %q, want %q", got, tc.want)
			}
			if _, err := a.conn.Read(); err == nil {
				t.Error("its connection is still open")
			}
			b := attach(t, r.shell, "f-1", 1, 1) // the name is free again
			r.submit("b")
			b.batch("b")
		})
	}
}

func TestLargeItemsGoByReference(t *testing.T) {
	r := newRig(t, Spec{Batch: 4})
	a := attach(t, r.shell, "f-1", 1, 4)
	large := text(strings.Repeat("x", 300<<10))
	in, err := tensor.Externalise(r.store, "a", tensor.Activation{large, text("small")})
	if err != nil || in[0].Ref == nil {
		t.Fatal(in, err)
	}
	r.submit("a", in...)
	id, calls := a.batch("a")
	if items := calls[0].Input[0].Items; len(items) != 2 || string(items[0].Bytes) != string(large.Bytes) || string(items[1].Bytes) != "small" {
		t.Errorf("%d items came", len(items))
	}
	a.answer(id, 0, text("s"), large)
	out := r.reply("a", task.OK, "").Output
	if len(out) != 2 || out[1].Ref == nil || out[1].Ref.Owner != "a" {
		t.Fatalf("output %+v, want a small item and a reference owned by the request", out)
	}
	back, err := tensor.Resolve(r.store, out)
	if err != nil || string(back[1].Bytes) != string(large.Bytes) {
		t.Errorf("the stored item differs: %v", err)
	}
	many := make([]tensor.Item, wire.MaxFiles+1) // more than files can ride along
	for i := range many {
		many[i] = in[0]
	}
	r.submit("b", many...)
	if _, calls = a.batch("b"); len(calls[0].Input[0].Items) != len(many) {
		t.Errorf("%d items came, want %d", len(calls[0].Input[0].Items), len(many))
	}
}

func TestMissingInput(t *testing.T) {
	r := newRig(t, Spec{Batch: 2})
	r.submit("a", tensor.Item{Ref: &tensor.Ref{Owner: "a", Blob: "gone", Size: 100_000}})
	r.submit("b")
	r.submit("c")
	a := attach(t, r.shell, "f-1", 1, 2)
	r.reply("a", task.Unavailable, `blob "gone" of "a"`)
	r.reply("b", task.ReplicaLost, "another call")
	a.batch("c")
}

func TestDrain(t *testing.T) {
	r := newRig(t, Spec{})
	a := attach(t, r.shell, "f-1", 1, 1)
	r.submit("a")
	id, _ := a.batch("a")
	short, stop := context.WithCancelCause(t.Context())
	stop(errors.New("no time"))
	if err := r.shell.Drain(short, "f.ns", "f-1"); err == nil || !strings.Contains(err.Error(), "no time") {
		t.Errorf("drain of a busy replica: %v, want the context's cause", err)
	}
	r.submit("b")
	done := make(chan error, 1)
	go func() { done <- r.shell.Drain(t.Context(), "f.ns", "f-1") }()
	a.answer(id, 0)
	r.reply("a", task.OK, "")
	if err := receive(t, done, "end of Drain"); err != nil {
		t.Error(err)
	}
	a.read(wire.FrameDrain) // and not b
	_ = a.conn.Close()
	b := attach(t, r.shell, "f-2", 1, 1)
	b.batch("b")
	if err := r.shell.Drain(t.Context(), "f.ns", "nobody"); err != nil {
		t.Errorf("drain of nobody: %v", err)
	}
	if len(r.dropped) > 0 {
		t.Errorf("dropped %q, want no news of a drained replica", <-r.dropped)
	}
}

func TestRemove(t *testing.T) {
	r := newRig(t, Spec{})
	a := attach(t, r.shell, "f-1", 1, 1)
	r.submit("a")
	a.batch("a")
	r.submit("b")
	near, _ := pair(t)
	attached := make(chan error, 1)
	go func() {
		_, err := r.shell.Attach(t.Context(), "f.ns", "f-2", near)
		attached <- err
	}()
	for r.shell.function("f.ns").link("f-2") == nil {
		select {
		case err := <-attached:
			t.Fatal(err)
		default:
		}
	}
	r.shell.Remove("f.ns")
	r.reply("b", task.Unavailable, "removed")
	r.reply("a", task.Unavailable, "removed")
	if err := receive(t, attached, "end of Attach"); err == nil {
		t.Error("a replica was attached to a removed function")
	}
	if _, err := a.conn.Read(); err == nil {
		t.Error("its replica's connection is still open")
	}
	if got := r.shell.Load("f.ns"); got != (task.Load{}) {
		t.Errorf("load %+v of a removed function", got)
	}
	if err := r.shell.Ensure(Spec{Function: "f.ns"}); err != nil {
		t.Fatal(err)
	}
	attach(t, r.shell, "f-1", 1, 1)
	if err := r.shell.Ensure(Spec{Function: "refused.ns"}); err == nil || r.shell.function("refused.ns") != nil {
		t.Errorf("a function without a bus: %v", err)
	}
}

func TestAttachRefuses(t *testing.T) {
	r := newRig(t, Spec{})
	good := wire.Hello{Oldest: 1, Newest: 1, Function: "f.ns", Slots: 1, MaxBatch: 1}
	late, other := good, good
	late.Oldest, late.Newest = 7, 9
	other.Function = "g.ns"
	attach(t, r.shell, "taken", 1, 1)
	for name, tc := range map[string]struct {
		function, replica string
		play              func(a *actor)
		want              string
	}{
		"no function": {"g.ns", "f-1", func(*actor) {}, `no function "g.ns"`},
		"taken":       {"f.ns", "taken", func(*actor) {}, "one of that name"},
		"closed":      {"f.ns", "f-1", func(a *actor) { _ = a.conn.Close() }, "connection closed"},
		"no hello":    {"f.ns", "f-1", func(a *actor) { a.write(wire.FrameResult, 0, nil) }, "want Hello"},
		"bad hello":   {"f.ns", "f-1", func(a *actor) { a.write(wire.FrameHello, 0, []byte{1}) }, "hello"},
		"silent":      {"f.ns", "f-1", func(*actor) {}, "nothing in time"},
		"later":       {"f.ns", "f-1", func(a *actor) { a.write(wire.FrameHello, 0, late.Append(nil)) }, "versions 7 to 9"},
		"other":       {"f.ns", "f-1", func(a *actor) { a.write(wire.FrameHello, 0, other.Append(nil)) }, `of function "g.ns"`},
		"died":        {"f.ns", "f-1", func(a *actor) { _ = a.conn.Close(); r.shell.Lost("f.ns", "f-1", "exit status 2") }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			r.shell.bounds.hello, r.shell.bounds.cause = patience, ms
			if name == "silent" {
				r.shell.bounds.hello = ms
			}
			near, far := pair(t)
			tc.play(&actor{t, wire.NewConn(far)})
			if _, err := r.shell.Attach(t.Context(), tc.function, tc.replica, near); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want %q", err, tc.want)
			}
			if _, err := near.Write([]byte{0}); err == nil {
				t.Error("its connection is still open")
			}
		})
	}
	t.Run("canceled", func(t *testing.T) {
		near, _ := pair(t)
		ctx, stop := context.WithCancelCause(t.Context())
		stop(errors.New("changed my mind"))
		if _, err := r.shell.Attach(ctx, "f.ns", "f-1", near); err == nil || !strings.Contains(err.Error(), "changed my mind") {
			t.Errorf("error %v, want the context's cause", err)
		}
	})
	t.Run("died while awaited", func(t *testing.T) {
		near, far := pair(t)
		r.shell.bounds.cause = patience
		done := make(chan error, 1)
		go func() {
			_, err := r.shell.Attach(t.Context(), "f.ns", "f-1", near)
			done <- err
		}()
		for r.shell.function("f.ns").link("f-1") == nil {
			if len(done) > 0 {
				t.Fatal(<-done)
			}
		}
		_ = far.Close()
		r.shell.Lost("f.ns", "f-1", "exit status 2")
		if err := receive(t, done, "end of Attach"); err == nil || !strings.Contains(err.Error(), "exit status 2") {
			t.Errorf("error %v, want the cause of death", err)
		}
	})
}

// A replica that stands still holds up neither those who submit nor another replica, and is given up in the end.
func TestAFrozenReplicaHoldsUpNobody(t *testing.T) {
	for name, size := range map[string]int{"many small inputs": 4 << 10, "large ones": 60 << 10} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, Spec{})
			r.shell.bounds.write = 500 * ms
			n := (2 << 20) / size
			attach(t, r.shell, "frozen", n, 1)
			for i := range n {
				r.submit(fmt.Sprint("a", i), text(strings.Repeat("x", size)))
			}
			b := attach(t, r.shell, "good", n+1, 1)
			r.submit("b")
			id, _ := b.batch("b")
			b.answer(id, 0)
			r.reply("b", task.OK, "")
			for i := range n {
				r.reply(fmt.Sprint("a", i), task.ReplicaLost, "reads no more")
			}
			receive(t, r.dropped, "drop")
		})
	}
}

func TestManySmallInputsInOrder(t *testing.T) {
	r := newRig(t, Spec{})
	a := attach(t, r.shell, "f-1", 1000, 1)
	go func() {
		for i := range 1000 {
			r.submit(fmt.Sprint(i), text(strings.Repeat("x", i*8)))
		}
	}()
	for i := range 1000 {
		id, _ := a.batch(fmt.Sprint(i))
		a.answer(id, 0)
		r.reply(fmt.Sprint(i), task.OK, "")
	}
}

func TestTimerAndCancel(t *testing.T) {
	r := newRig(t, Spec{})
	r.submitUntil("waits", time.Now().Add(5*ms))
	r.reply("waits", task.Expired, "waited")
	a := attach(t, r.shell, "f-1", 1, 1)
	r.submitUntil("runs", time.Now().Add(200*ms))
	id, _ := a.batch("runs")
	r.reply("runs", task.Expired, "ran")
	a.read(wire.FrameCancel)
	r.submit("a")
	a.answer(id, 0) // nobody reads it, but the slot is free
	id, _ = a.batch("a")
	r.cancel("a")
	r.reply("a", task.Canceled, "")
	if f := a.read(wire.FrameCancel); f.Batch != id {
		t.Errorf("cancel of batch %d, want %d", f.Batch, id)
	}
	r.bus.send([]byte("nonsense"))
	r.submit("b")
	a.write(wire.FrameCredit, 0, wire.Credit{Amount: 2}.Append(nil))
	a.batch("b")
	if got := r.metric("expired_total"); got != 2 {
		t.Errorf("%v expired, want 2", got)
	}
}

func TestStreamsArePutTogether(t *testing.T) {
	r := newRig(t, Spec{})
	a := attach(t, r.shell, "f-1", 1, 1)
	r.submit("a")
	id, _ := a.batch("a")
	chunk := bytes.Repeat([]byte("c"), streamGrant/2)
	for range 2 {
		a.write(wire.FrameChunk, id, wire.Chunk{Data: chunk}.Append(nil))
	}
	if c, err := wire.DecodeCredit(a.read(wire.FrameCredit).Payload); err != nil || c.Amount != streamGrant {
		t.Errorf("credit %+v, %v, want %d", c, err, streamGrant)
	}
	a.answer(id, 0, text("end"))
	out, err := tensor.Resolve(r.store, r.reply("a", task.OK, "").Output)
	if err != nil || len(out) != 1 || out[0].ContentType != "text/plain" || len(out[0].Bytes) != streamGrant+3 {
		t.Errorf("output %d items, %v, want one of chunks and end", len(out), err)
	}
	var s streams
	s.add(1, wire.Chunk{Data: make([]byte, streamLimit+9)})
	reply := &task.Reply{}
	if s.finish(1, 0, reply); reply.Code != task.Failed {
		t.Errorf("an endless stream: %+v, want failed", reply)
	}
}
