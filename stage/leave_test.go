package stage

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

func TestDrainWaitsForRunningCalls(t *testing.T) {
	release := make(chan struct{})
	d := begin(t, Hooks{Infer: Each(func(*Call) (tensor.Activation, error) { <-release; return nil, nil })}, welcome)
	d.batch(1, time.Time{}, "x")
	d.send(wire.FrameDrain, 0, nil)
	close(release)
	d.result()
	d.ends("")
}

// streamer writes ten bytes before its result.
func streamer(c *Call) (tensor.Activation, error) {
	_, err := c.Write([]byte("0123456789"))
	return nil, err
}

func (d *dispatcher) chunk() string {
	d.t.Helper()
	m, err := wire.DecodeChunk(d.read(wire.FrameChunk).Payload)
	if err != nil {
		d.t.Fatal(err)
	}
	return string(m.Data)
}

// TestADrainingReplicaStillListens drains a replica that runs a call that needs credit, and a call
// that is then canceled.
func TestADrainingReplicaStillListens(t *testing.T) {
	d := begin(t, Hooks{Infer: Each(streamer)}, wire.Welcome{Version: wire.Version, Credit: 4})
	d.batch(1, time.Time{}, "x")
	d.chunk()
	d.send(wire.FrameDrain, 0, nil)
	d.send(wire.FrameDrain, 0, nil) // a second Drain has no effect
	d.send(wire.FrameCredit, 0, wire.Credit{Amount: 100}.Append(nil))
	if got := d.chunk(); got != "456789" {
		t.Errorf("after the drain came %q", got)
	}
	d.result()
	d.ends("")

	d = begin(t, Hooks{Infer: Each(upper)}, welcome)
	d.batch(1, time.Time{}, "wait")
	d.send(wire.FrameDrain, 0, nil)
	d.send(wire.FrameCancel, 1, wire.Cancel{Index: wire.CancelAll}.Append(nil))
	d.failure(task.Canceled, "canceled")
	d.ends("")
}

func TestReplicaToldToEndFinishesItsCalls(t *testing.T) {
	ctx, end := context.WithCancel(t.Context())
	begun, release := make(chan struct{}), make(chan struct{})
	d := beginCtx(t, ctx, Hooks{Slots: 2, Infer: Each(func(*Call) (tensor.Activation, error) {
		close(begun)
		<-release
		return nil, nil
	})}, welcome)
	d.batch(1, time.Time{}, "x")
	<-begun
	end()
	if m, err := wire.DecodeCredit(d.read(wire.FrameCredit).Payload); err != nil || m.Amount != 0 {
		t.Errorf("credit %+v, %v, want none", m, err)
	}
	d.batch(2, time.Time{}, "sent before the credit came")
	d.failure(task.ReplicaLost, "told to end")
	close(release)
	d.result()
	d.ends("")
}

func TestAReplicaToldToEndDoesNotWaitForAWelcome(t *testing.T) {
	x, y := ends(t)
	ctx, end := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- serve(ctx, wire.NewConn(y), wire.Hello{Slots: 1, MaxBatch: 1}, Hooks{}, slog.New(slog.DiscardHandler))
	}()
	if f, err := wire.NewConn(x).Read(); err != nil || f.Type != wire.FrameHello {
		t.Fatalf("%v, %v", f.Type, err)
	}
	end()
	(&dispatcher{t: t, done: done}).ends("")
}

// TestReplicaEndsAlthoughNobodyReads plays a dispatcher that reads no answers and then breaks the
// protocol.
func TestReplicaEndsAlthoughNobodyReads(t *testing.T) {
	begun := make(chan struct{})
	d := begin(t, Hooks{Infer: Each(func(*Call) (tensor.Activation, error) {
		close(begun)
		out := make(tensor.Activation, 200) // inline, and more than a socket's buffer holds
		for i := range out {
			out[i].Bytes = make([]byte, tensor.InlineLimit)
		}
		return out, nil
	})}, welcome)
	d.batch(1, time.Time{}, "x")
	<-begun
	d.send(wire.FrameHello, 0, nil)
	d.ends("frame Hello")
}

func TestChunksWaitForCredit(t *testing.T) {
	d := begin(t, Hooks{Infer: Each(streamer)}, wire.Welcome{Version: wire.Version, Credit: 4})
	d.batch(1, time.Time{}, "x")
	if got := d.chunk(); got != "0123" {
		t.Fatalf("with a credit of 4 came %q", got)
	}
	d.send(wire.FrameCredit, 0, wire.Credit{Amount: 100}.Append(nil))
	if got := d.chunk(); got != "456789" {
		t.Errorf("then came %q", got)
	}
	d.result()
}

func TestFinishedCallsDoNotStream(t *testing.T) {
	kept := make(chan *Call, 2)
	d := begin(t, Hooks{MaxBatch: 2, Infer: Each(func(c *Call) (tensor.Activation, error) { kept <- c; return nil, nil })}, welcome)
	d.batch(1, time.Time{}, "x", "y")
	for range 2 {
		d.result()
		if _, err := (<-kept).Write([]byte("late")); !errors.Is(err, context.Canceled) {
			t.Errorf("a chunk after the result: %v", err)
		}
	}
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
