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
	"github.com/stagecoach-serving/stagecoach/tensor"
)

func TestTaskTravelsToReplicaAndBack(t *testing.T) {
	r := newRig(t, Spec{QueueLimit: 7, MaxReplicas: 3, Batch: 2, Slots: 1})
	r.submit("a", text("one"))
	if got := receive(t, r.wanted, "demand"); got != "f.ns" {
		t.Errorf("demand for %q", got)
	}
	want := task.Load{Waiting: 1, Max: 6, Limit: 7}
	if got := r.shell.Load(pipeline.ParseKey("f.ns")); got != want {
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
	if got := r.shell.Load(pipeline.ParseKey("f.ns")); got != want {
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
	if start := r.shell.Load(pipeline.ParseKey("f.ns")).Start; start < 7*ms+first.After {
		t.Errorf("start took %v, want at least %v to place and %v to answer", start, 7*ms, first.After)
	}
	id, _ = a.batch("b", "c")
	a.write(wire.FrameError, id, wire.Error{Index: 1, Code: task.BadInput, Message: "no good"}.Append(nil))
	r.reply("c", task.BadInput, "no good")
	a.answer(id, 0)
	r.reply("b", task.OK, "")
	if s := r.shell.Signals(pipeline.ParseKey("f.ns"), time.Now()); s.Demand.Last.IsZero() || s.Waiting != 0 || s.Running != 0 {
		t.Errorf("%+v, want none that waits or runs", s)
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
		r.reply("a", task.OK, "") // answers that it had sent count
		r.shell.Lost(pipeline.ParseKey("f.ns"), "f-1", task.Death{Cause: "killed by signal 9 (out of memory)"})
		if got := r.reply("b", task.ReplicaLost, "killed by signal 9 (out of memory)"); got.Replica != "f-1" {
			t.Errorf("reply from %q, want f-1", got.Replica)
		}
	})
	t.Run("with a report ahead of its answers", func(t *testing.T) {
		r := newRig(t, Spec{})
		r.shell.bounds.cause = patience
		const n = 500
		a := attach(t, r.shell, "f-1", n, 1)
		for i := range n {
			r.submit(fmt.Sprint(i))
			a.batch(fmt.Sprint(i))
		}
		for i := range n {
			a.answer(uint64(i+1), 0)
		}
		r.shell.Lost(pipeline.ParseKey("f.ns"), "f-1", task.Death{Cause: "exit status 0"})
		_ = a.conn.Close()
		for i := range n {
			r.reply(fmt.Sprint(i), task.OK, "")
		}
	})
	t.Run("with a report before the end", func(t *testing.T) {
		r := newRig(t, Spec{})
		a := attach(t, r.shell, "f-1", 1, 1)
		r.submit("a")
		a.batch("a")
		// A child of the replica may still hold the socket.
		r.shell.Lost(pipeline.ParseKey("f.ns"), "f-1", task.Death{Cause: "exit status 3"})
		r.reply("a", task.ReplicaLost, "exit status 3")
		r.shell.bounds.cause = ms
		_ = attach(t, r.shell, "f-2", 1, 1).conn.Close()
		if got := receive(t, r.dropped, "drop"); got != "f-2: connection closed" {
			t.Errorf("dropped %q, want no news of what was told", got)
		}
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

// TestDeathSaysWhetherReplicaWasBusy checks that both Lost and Dropped say whether the replica
// had unanswered calls.
func TestDeathSaysWhetherReplicaWasBusy(t *testing.T) {
	for name, busy := range map[string]bool{"busy": true, "idle": false} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, Spec{})
			f := pipeline.ParseKey("f.ns")
			a := attach(t, r.shell, "f-1", 1, 1)
			r.submit("first")
			id, _ := a.batch("first")
			a.answer(id, 0)
			r.reply("first", task.OK, "")
			if busy {
				r.submit("second")
				a.batch("second")
			}
			if got := r.shell.Lost(f, "f-1", task.Death{Cause: "exit status 3"}); got != busy {
				t.Errorf("Lost says busy %v, want %v", got, busy)
			}
			if busy {
				r.reply("second", task.ReplicaLost, "exit status 3")
			}
			proctest.Until(t, "the end of the replica", func() bool { return r.shell.function(f).link("f-1") == nil })
			if r.shell.Lost(f, "f-1", task.Death{}) || r.shell.Lost(pipeline.ParseKey("no.ns"), "f-1", task.Death{}) {
				t.Error("a replica that is not there is busy")
			}
			r.shell.bounds.cause = ms
			b := attach(t, r.shell, "f-2", 1, 1)
			if busy {
				r.submit("third")
				b.batch("third")
			}
			_ = b.conn.Close()
			receive(t, r.dropped, "drop")
			want := task.Death{Cause: "connection closed", End: task.EndUnclear, Busy: busy}
			if got := receive(t, r.deaths, "death"); got != want {
				t.Errorf("dropped with %+v, want %+v", got, want)
			}
		})
	}
}

func TestReplicaThatBreaksTheProtocolIsDropped(t *testing.T) {
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
		}, "a file that came with the frame"},
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
			if got := receive(t, r.deaths, "death"); got.End != task.EndItself || !got.Busy {
				t.Errorf("dropped with %+v, want by itself, and busy", got)
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
	many := make([]tensor.Item, wire.MaxFiles+1) // more items than a frame can have files
	for i := range many {
		many[i] = in[0]
	}
	r.submit("b", many...)
	if _, calls = a.batch("b"); len(calls[0].Input[0].Items) != len(many) {
		t.Errorf("%d items came, want %d", len(calls[0].Input[0].Items), len(many))
	}
}

// TestResponseInProcessIsNotStored checks that the output of a request's last task goes to a
// coordinator in this process as a value, and to any other by reference.
func TestResponseInProcessIsNotStored(t *testing.T) {
	r := newRig(t, Spec{})
	near := make(chan *task.Reply, 1)
	r.shell.cfg.Near = func(to string, reply *task.Reply) bool { // set before the first task
		if to == "near" {
			near <- reply
		}
		return to == "near"
	}
	a := attach(t, r.shell, "f-1", 3, 1)
	large := text(strings.Repeat("x", 300<<10))
	for _, tc := range []struct {
		name, to string
		last     bool
	}{{"response", "near", true}, {"handed on", "near", false}, {"elsewhere", "far", true}} {
		x := newTask(tc.name, 0)
		x.ReplyTo, x.Last, x.Input = tc.to, tc.last, tensor.Input{{Items: tensor.Activation{text("in")}}}
		r.shell.Submit(x)
		id, _ := a.batch(tc.name)
		a.answer(id, 0, large)
		var got *task.Reply
		if tc.to == "near" {
			got = receive(t, near, "the reply")
		} else {
			got = r.reply(tc.name, task.OK, "")
		}
		if stored := tc.name != "response"; len(got.Output) != 1 || (got.Output[0].Ref != nil) != stored || !stored && string(got.Output[0].Bytes) != string(large.Bytes) {
			t.Errorf("%s: %d items, reference %v, want the item stored: %v", tc.name, len(got.Output), got.Output[0].Ref, stored)
		}
	}
}

func TestCallWithoutItsInputFails(t *testing.T) {
	r := newRig(t, Spec{Batch: 2})
	r.submit("a", tensor.Item{Ref: &tensor.Ref{Owner: "a", Blob: "gone", Size: 100_000}})
	r.submit("b")
	r.submit("c")
	a := attach(t, r.shell, "f-1", 1, 2)
	r.reply("a", task.Unavailable, `blob "gone" of "a"`)
	if got := r.reply("b", task.InputLost, "another call"); got.Lost != nil { // it runs again
		t.Errorf("lost items of b: %v", got.Lost)
	}
	a.batch("c")
}

func TestDrainWaitsForRunningCalls(t *testing.T) {
	r := newRig(t, Spec{})
	a := attach(t, r.shell, "f-1", 1, 1)
	r.submit("a")
	id, _ := a.batch("a")
	short, stop := context.WithCancelCause(t.Context())
	stop(errors.New("no time"))
	if err := r.shell.Drain(short, pipeline.ParseKey("f.ns"), "f-1"); err == nil || !strings.Contains(err.Error(), "no time") {
		t.Errorf("drain of a busy replica: %v, want the context's cause", err)
	}
	r.submit("b")
	done := make(chan error, 1)
	go func() { done <- r.shell.Drain(t.Context(), pipeline.ParseKey("f.ns"), "f-1") }()
	a.answer(id, 0)
	r.reply("a", task.OK, "")
	if err := receive(t, done, "end of Drain"); err != nil {
		t.Error(err)
	}
	a.read(wire.FrameDrain) // b gets no frame before Drain
	_ = a.conn.Close()
	b := attach(t, r.shell, "f-2", 1, 1)
	b.batch("b")
	if err := r.shell.Drain(t.Context(), pipeline.ParseKey("f.ns"), "nobody"); err != nil {
		t.Errorf("drain of nobody: %v", err)
	}
	if len(r.dropped) > 0 {
		t.Errorf("dropped %q, want no news of a drained replica", <-r.dropped)
	}
}

// TestOutOfMemoryIsReported checks that the callback comes before the caller's reply, and that the
// replica gets no more calls.
func TestOutOfMemoryIsReported(t *testing.T) {
	r := newRig(t, Spec{})
	a := attach(t, r.shell, "f-1", 2, 1)
	r.submit("a")
	r.submit("b")
	first, _ := a.batch("a")
	second, _ := a.batch("b")
	a.write(wire.FrameError, first, wire.Error{Code: task.OutOfMemory, Message: "want 2 GiB"}.Append(nil))
	if got := receive(t, r.full, "word of it"); got != "f-1: want 2 GiB, 0 replies before" {
		t.Errorf("told %q", got)
	}
	r.reply("a", task.OutOfMemory, "want 2 GiB")
	r.submit("c")
	b := attach(t, r.shell, "f-2", 1, 1)
	third, _ := b.batch("c")
	b.answer(third, 0)
	r.reply("c", task.OK, "")
	a.write(wire.FrameError, second, wire.Error{Code: task.OutOfMemory, Message: "want 3 GiB"}.Append(nil))
	r.reply("b", task.OutOfMemory, "want 3 GiB")
	if err := r.shell.Drain(t.Context(), pipeline.ParseKey("f.ns"), "f-1"); err != nil {
		t.Error(err)
	}
	a.read(wire.FrameDrain)
	if len(r.full) > 0 {
		t.Errorf("told again: %s", <-r.full)
	}
}

func TestRemoveAnswersTasksAndClosesConnections(t *testing.T) {
	r := newRig(t, Spec{})
	a := attach(t, r.shell, "f-1", 1, 1)
	r.submit("a")
	a.batch("a")
	r.submit("b")
	near, _ := pair(t)
	attached := make(chan error, 1)
	go func() {
		_, err := r.shell.Attach(t.Context(), pipeline.ParseKey("f.ns"), "f-2", 1, near)
		attached <- err
	}()
	for r.shell.function(pipeline.ParseKey("f.ns")).link("f-2") == nil {
		select {
		case err := <-attached:
			t.Fatal(err)
		default:
		}
	}
	r.shell.Remove(pipeline.ParseKey("f.ns"))
	r.reply("b", task.Unavailable, "removed")
	r.reply("a", task.Unavailable, "removed")
	if err := receive(t, attached, "end of Attach"); err == nil {
		t.Error("a replica was attached to a removed function")
	}
	if _, err := a.conn.Read(); err == nil {
		t.Error("its replica's connection is still open")
	}
	if got := r.shell.Load(pipeline.ParseKey("f.ns")); got != (task.Load{}) {
		t.Errorf("load %+v of a removed function", got)
	}
	if err := r.shell.Ensure(Spec{Function: pipeline.ParseKey("f.ns")}); err != nil {
		t.Fatal(err)
	}
	attach(t, r.shell, "f-1", 1, 1)
	if err := r.shell.Ensure(Spec{Function: pipeline.ParseKey("refused.ns")}); err == nil || r.shell.function(pipeline.ParseKey("refused.ns")) != nil {
		t.Errorf("a function without a bus: %v", err)
	}
}

// TestCloseStopsAllFunctionsTogether has a bus whose stops end only after all of them have begun.
func TestCloseStopsAllFunctionsTogether(t *testing.T) {
	r := newRig(t, Spec{})
	r.shell.cfg.Me = "me"
	for _, name := range []string{"g.ns", "h.ns", "v.ns"} {
		spec := Spec{Function: pipeline.ParseKey(name)}
		if name == "v.ns" {
			spec.VariantOf = pipeline.ParseKey("f.ns")
		}
		if err := r.shell.Ensure(spec); err != nil {
			t.Fatal(err)
		}
	}
	r.submit("a")
	begun := make(chan struct{}, 4)
	ctx, goOn := context.WithCancel(t.Context())
	r.bus.stopping = func() { begun <- struct{}{}; <-ctx.Done() }
	closed := make(chan struct{})
	go func() { defer close(closed); r.shell.Close() }()
	defer func() { goOn(); <-closed }()
	for range 4 {
		receive(t, begun, "begin of a stop")
	}
	r.submit("b") // still on its way
	goOn()
	for _, name := range []string{"a", "b"} {
		if by, back := r.reply(name, task.Unavailable, task.OwnerEnds).GivenBack(); by != "me" || !back {
			t.Errorf("task %s is given back: %t, by %q, want me", name, back, by)
		}
	}
}

func TestShellExpiresAndCancelsTasks(t *testing.T) {
	r := newRig(t, Spec{})
	r.submitUntil("waits", time.Now().Add(time.Second))
	r.reply("waits", task.Expired, "waited")
	r.submit("fails")
	r.shell.Fail(pipeline.ParseKey("f.ns"), 0, "exit status 1, three times in a row")
	r.reply("fails", task.Unavailable, "exit status 1")
	a := attach(t, r.shell, "f-1", 1, 1)
	r.submitUntil("runs", time.Now().Add(3*time.Second))
	id, _ := a.batch("runs")
	r.reply("runs", task.Expired, "ran")
	a.read(wire.FrameCancel)
	r.submit("a")
	a.answer(id, 0) // nobody reads it, but it frees the slot
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
