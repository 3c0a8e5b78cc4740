package stage

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
	"github.com/stagecoach-serving/stagecoach/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// dispatcher is the other side of a replica under test.
type dispatcher struct {
	t    *testing.T
	conn *wire.Conn
	done chan error // what serve returned
}

func begin(t *testing.T, h Hooks, welcome wire.Welcome) *dispatcher {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var ends [2]*net.UnixConn
	for i, fd := range fds {
		if ends[i], err = connection(fd); err != nil {
			t.Fatal(err)
		}
	}
	h.Slots, h.MaxBatch = max(1, h.Slots), max(1, h.MaxBatch)
	d := &dispatcher{t: t, conn: wire.NewConn(ends[0]), done: make(chan error, 1)}
	hello := wire.Hello{Oldest: wire.OldestVersion, Newest: wire.Version, Function: "f.ns", Replica: "f-1", Slots: h.Slots, MaxBatch: h.MaxBatch}
	go func() { d.done <- serve(t.Context(), wire.NewConn(ends[1]), hello, h, slog.New(slog.DiscardHandler)) }()
	t.Cleanup(func() { _ = d.conn.Close() })
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
	if err := d.conn.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
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
	case <-time.After(20 * time.Second):
		d.t.Error("the replica did not end")
	}
}

func upper(c *Call) (tensor.Activation, error) {
	switch s := string(c.Items()[0].Bytes); s {
	case "bad":
		return nil, BadInput(errors.New("got bad, want good"))
	case "fail":
		return nil, errors.New("broken")
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

func TestEachCallOfABatchHasItsOwnEnd(t *testing.T) {
	d := begin(t, Hooks{Infer: Each(upper), MaxBatch: 4}, welcome)
	d.batch(1, time.Time{}, "a", "bad", "fail", "large")
	if m := d.result(); m.Index != 0 || string(m.Output[0].Bytes) != "A" {
		t.Errorf("result %+v", m)
	}
	d.failure(task.BadInput, "got bad, want good")
	d.failure(task.Failed, "broken")
	if m := d.result(); m.Index != 3 || len(m.Output[0].Bytes) != 1<<20 {
		t.Errorf("large result: call %d, %d bytes", m.Index, len(m.Output[0].Bytes))
	}
	d.send(wire.FrameDrain, 0, nil)
	d.ends("")
}

func TestAPanicLeavesTheReplicaAlive(t *testing.T) {
	d := begin(t, Hooks{Infer: Each(upper)}, welcome)
	d.batch(1, time.Time{}, "panic")
	d.failure(task.Failed, "panicked: ouch")
	d.batch(2, time.Time{}, "b")
	if m := d.result(); string(m.Output[0].Bytes) != "B" {
		t.Errorf("after the panic: %+v", m)
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

func TestDrainWaitsForWhatRuns(t *testing.T) {
	release := make(chan struct{})
	d := begin(t, Hooks{Infer: Each(func(*Call) (tensor.Activation, error) { <-release; return nil, nil })}, welcome)
	d.batch(1, time.Time{}, "x")
	d.send(wire.FrameDrain, 0, nil)
	close(release)
	d.result()
	d.ends("")
}

func TestChunksWaitForCredit(t *testing.T) {
	d := begin(t, Hooks{Infer: Each(func(c *Call) (tensor.Activation, error) {
		_, err := c.Write([]byte("0123456789"))
		return nil, err
	})}, wire.Welcome{Version: wire.Version, Credit: 4})
	d.batch(1, time.Time{}, "x")
	var got []byte
	chunk := func() {
		m, err := wire.DecodeChunk(d.read(wire.FrameChunk).Payload)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, m.Data...)
	}
	chunk()
	if string(got) != "0123" {
		t.Fatalf("with a credit of 4 came %q", got)
	}
	d.send(wire.FrameCredit, 0, wire.Credit{Amount: 100}.Append(nil))
	chunk()
	if string(got) != "0123456789" {
		t.Errorf("streamed %q", got)
	}
	d.result()
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

func TestCreditEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &server{}
		s.credit.init()
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		if _, err := s.credit.take(ctx, 1); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("take without credit: %v", err)
		}
	})
}

func TestLimits(t *testing.T) {
	if s, b, err := limits(Hooks{}, ""); s != 1 || b != 1 || err != nil {
		t.Errorf("defaults: %d slots, batches of %d, %v", s, b, err)
	}
	if s, _, err := limits(Hooks{Slots: 3}, "64"); s != 64 || err != nil {
		t.Errorf("max_inflight=64: %d slots, %v", s, err)
	}
	for _, bad := range []string{"x", "0", "-1"} {
		if _, _, err := limits(Hooks{}, bad); err == nil || !strings.Contains(err.Error(), "max_inflight") {
			t.Errorf("max_inflight=%s: %v", bad, err)
		}
	}
}

func TestStartedByHandSaysWhatItIs(t *testing.T) {
	if os.Getenv(wire.EnvStageFD) != "" {
		t.Skip("this test process has a stage socket")
	}
	if _, err := stageSocket(); !errors.Is(err, errByHand) {
		t.Errorf("got %v", err)
	}
	t.Setenv(wire.EnvStageFD, "two")
	if _, err := stageSocket(); err == nil || !strings.Contains(err.Error(), "want a descriptor") {
		t.Errorf("got %v", err)
	}
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
		case <-d.done: // any end is fine, none is not
		case <-time.After(20 * time.Second):
			t.Fatal("the replica hangs")
		}
	})
}
