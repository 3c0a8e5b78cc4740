package dispatch

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

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
		"taken":       {"f.ns", "taken", func(*actor) {}, "attached already"},
		"closed":      {"f.ns", "f-1", func(a *actor) { _ = a.conn.Close() }, "connection closed"},
		"no hello":    {"f.ns", "f-1", func(a *actor) { a.write(wire.FrameResult, 0, nil) }, "want Hello"},
		"bad hello":   {"f.ns", "f-1", func(a *actor) { a.write(wire.FrameHello, 0, []byte{1}) }, "hello"},
		"silent":      {"f.ns", "f-1", func(*actor) {}, "nothing in time"},
		"later":       {"f.ns", "f-1", func(a *actor) { a.write(wire.FrameHello, 0, late.Append(nil)) }, "versions 7 to 9"},
		"other":       {"f.ns", "f-1", func(a *actor) { a.write(wire.FrameHello, 0, other.Append(nil)) }, `of function "g.ns"`},
		"died": {"f.ns", "f-1", func(a *actor) {
			_ = a.conn.Close()
			r.shell.Lost(pipeline.ParseKey("f.ns"), "f-1", task.Death{Cause: "exit status 2"})
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			r.shell.bounds.hello, r.shell.bounds.early = patience, ms
			if name == "silent" {
				r.shell.bounds.hello = ms
			}
			near, far := pair(t)
			tc.play(&actor{t, wire.NewConn(far)})
			if _, err := r.shell.Attach(t.Context(), pipeline.ParseKey(tc.function), tc.replica, 1, near); err == nil || !strings.Contains(err.Error(), tc.want) {
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
		if _, err := r.shell.Attach(ctx, pipeline.ParseKey("f.ns"), "f-1", 1, near); err == nil || !strings.Contains(err.Error(), "changed my mind") {
			t.Errorf("error %v, want the context's cause", err)
		}
	})
	t.Run("died while awaited", func(t *testing.T) {
		near, far := pair(t)
		r.shell.bounds.early = patience
		done := make(chan error, 1)
		go func() {
			_, err := r.shell.Attach(t.Context(), pipeline.ParseKey("f.ns"), "f-1", 1, near)
			done <- err
		}()
		for r.shell.function(pipeline.ParseKey("f.ns")).link("f-1") == nil {
			if len(done) > 0 {
				t.Fatal(<-done)
			}
		}
		_ = far.Close()
		r.shell.Lost(pipeline.ParseKey("f.ns"), "f-1", task.Death{Cause: "exit status 2"})
		if err := receive(t, done, "end of Attach"); err == nil || !strings.Contains(err.Error(), "exit status 2") {
			t.Errorf("error %v, want the cause of death", err)
		}
	})
}

// TestFailedAttachEndsWithItsContext checks that a failed attach does not wait for a report after
// its context ends: the caller then knows how the process ended.
func TestFailedAttachEndsWithItsContext(t *testing.T) {
	r := newRig(t, Spec{})
	r.shell.bounds.early = time.Hour
	near, far := pair(t)
	_ = far.Close()
	inner, stop := context.WithCancelCause(t.Context())
	ctx := askedContext{inner, make(chan struct{}, 10)}
	done := make(chan error, 1)
	go func() {
		_, err := r.shell.Attach(ctx, pipeline.ParseKey("f.ns"), "f-1", 1, near)
		done <- err
	}()
	receive(t, ctx.asked, "look at the context, after the connection has ended")
	stop(errors.New("exit status 2"))
	if err := receive(t, done, "end of Attach"); err == nil || !strings.Contains(err.Error(), "no hello: connection closed") {
		t.Errorf("error %v, want one that says that the connection was closed", err)
	}
}

// askedContext signals when its Err was called and returned nil.
type askedContext struct {
	context.Context
	asked chan struct{}
}

func (c askedContext) Err() error {
	err := c.Context.Err()
	if err == nil {
		c.asked <- struct{}{}
	}
	return err
}

// A replica that does not read delays neither tasks nor other replicas, and is given up eventually.
func TestFrozenReplicaDelaysNobody(t *testing.T) {
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
				r.reply(fmt.Sprint("a", i), task.ReplicaLost, "does not read")
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

// TestFramesOfAdjacentMessagesAreGathered checks that frames wait for the last of several adjacent
// messages. The number of frames that wait is bounded, and a dropped message does not hold the
// frames up.
func TestFramesOfAdjacentMessagesAreGathered(t *testing.T) {
	r := newRig(t, Spec{})
	a := attach(t, r.shell, "f-1", 100, 1)
	n := 0
	submit := func(more bool) {
		n++
		r.bus.sendMore(wire.AppendTask(nil, newTask(fmt.Sprint(n), 0)), more)
	}
	out := r.shell.function(pipeline.ParseKey("f.ns")).link("f-1").out
	waits := func(want int) {
		t.Helper()
		out.mu.Lock()
		defer out.mu.Unlock()
		if len(out.queue) != want {
			t.Fatalf("%d frames wait, want %d", len(out.queue), want)
		}
	}
	submit(true)
	submit(true)
	waits(2)
	submit(false)
	a.batch("1")
	a.batch("2")
	a.batch("3")
	submit(true)
	waits(1)
	r.bus.sendMore([]byte("neither task nor cancel"), false)
	a.batch("4")
	for range gatherLimit {
		submit(true)
	}
	for i := range gatherLimit {
		a.batch(fmt.Sprint(5 + i))
	}
	submit(true)
	waits(1)
}

func TestAnswerConfirmsEarlierFrames(t *testing.T) {
	var u unread
	for id := range uint64(4) {
		u.add(parcel{Send{Batch: id}, 10})
		u.add(parcel{CancelCall{Batch: id}, 1})
	}
	for _, tc := range []struct {
		answered uint64
		want     int
	}{{1, 44 - 21}, {0, 44 - 21}, {3, 1}, {3, 1}} {
		if u.answered(tc.answered); u.bytes() != tc.want {
			t.Errorf("%d bytes may be unread after the answer to %d, want %d", u.bytes(), tc.answered, tc.want)
		}
	}
}

// TestNothingMoreGoesToALostReplica checks that a replica gets no tasks after its connection is
// lost, while the Shell waits for the cause. Tasks that need its revision wait for another replica.
func TestNothingMoreGoesToALostReplica(t *testing.T) {
	r := newRig(t, Spec{Revision: 1})
	r.shell.bounds.cause = patience
	a := attach(t, r.shell, "f-1", 2, 1)
	r.bus.send(wire.AppendTask(nil, together("a", 1, 0).Task))
	a.batch("a")
	_ = a.conn.Close()
	proctest.Until(t, "the line without its replica", func() bool { return r.shell.Load(pipeline.ParseKey("f.ns")).Servers == 0 })
	r.bus.send(wire.AppendTask(nil, together("a", 2, 1).Task))
	r.shell.Lost(pipeline.ParseKey("f.ns"), "f-1", task.Death{Cause: "exit status 2"})
	if lost := r.reply("a", task.ReplicaLost, "exit status 2"); lost.Task != 1 {
		t.Errorf("task %d was lost, want 1", lost.Task)
	}
	b := attach(t, r.shell, "f-2", 1, 1)
	if _, calls := b.batch("a"); calls[0].Key.Task != 2 {
		t.Errorf("task %d, want 2", calls[0].Key.Task)
	}
}
