package dispatch

import (
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// TestTasksFromTheSameProcess checks that a coordinator in the same process exchanges values with
// the dispatcher, in order and without the bus.
func TestTasksFromTheSameProcess(t *testing.T) {
	r := newRig(t, Spec{MaxReplicas: 1})
	near := make(chan *task.Reply, 10)
	r.shell.cfg.Near = func(to string, reply *task.Reply) bool { // set before the first task
		if to != "near" {
			return false
		}
		near <- reply
		return true
	}
	submit := func(name, replyTo string) {
		x := newTask(name, 0)
		x.ReplyTo, x.Input = replyTo, tensor.Input{{Items: tensor.Activation{{Bytes: []byte(name)}}}}
		if !r.shell.Submit(x) {
			t.Fatalf("%s was not taken", name)
		}
	}
	submit("a", "near")
	submit("b", "near")
	submit("c", "far")
	submit("d", "near")
	if !r.shell.Cancel("f.ns", newTask("b", 0).Key) {
		t.Error("a cancel was not taken")
	}
	if got := receive(t, near, "reply to b"); got.Request != "b" || got.Code != task.Canceled {
		t.Errorf("got %+v, want b canceled", got)
	}
	a := attach(t, r.shell, "r1", 1, 1)
	for _, name := range []string{"a", "c", "d"} {
		id, _ := a.batch(name)
		a.answer(id, 0, tensor.Item{Bytes: []byte(name)})
		if name == "c" {
			r.reply("c", task.OK, "")
			continue
		}
		if got := receive(t, near, "reply to "+name); got.Request != name || got.Code != task.OK || string(got.Output[0].Bytes) != name {
			t.Errorf("got %+v, want the answer to %s", got, name)
		}
	}
	other := newTask("e", 0)
	other.Function = "other.ns"
	if r.shell.Submit(other) || r.shell.Cancel("other.ns", other.Key) {
		t.Error("a task and a cancel of a function that lives elsewhere were taken")
	}
	submit("f", "near")
	_, _ = a.batch("f")
	submit("g", "near")
	r.shell.Remove(pipeline.ParseKey("f.ns")) // tasks in the intake are still answered
	for range 2 {
		if got := receive(t, near, "reply at the end"); got.Code != task.Unavailable {
			t.Errorf("got %+v, want unavailable", got)
		}
	}
	if len(r.bus.replies) > 0 {
		t.Error("the bus has carried a reply to a neighbour")
	}
}

// TestExpectAsksForAReplica checks that Expect asks for a replica only if the function has none.
func TestExpectAsksForAReplica(t *testing.T) {
	r := newRig(t, Spec{MaxReplicas: 1})
	r.shell.Expect("other.ns") // owned by another process
	r.shell.Expect("f.ns")
	if got := receive(t, r.wanted, "the demand"); got != "f.ns" {
		t.Errorf("%s is wanted, want f.ns", got)
	}
	a := attach(t, r.shell, "r1", 1, 1)
	f := r.shell.function(pipeline.ParseKey("f.ns"))
	o := f.lock()
	f.wanted = time.Time{} // as if the last call was long ago
	o.mu.Unlock()
	r.shell.Expect("f.ns")
	r.shell.Submit(newTask("a", 0)) // taken after the Expect
	_, _ = a.batch("a")
	if len(r.wanted) > 0 {
		t.Error("a replica is wanted although there is one")
	}
}

// TestIntakeIsBounded checks that Submit returns false when the line is held up, and that no task
// is lost.
func TestIntakeIsBounded(t *testing.T) {
	in := intake{wake: make(chan struct{}, 1)}
	for i := range intakeLimit {
		if !in.put(Tick{}) {
			t.Fatalf("event %d was refused, want %d to be taken", i, intakeLimit)
		}
	}
	if in.put(Tick{}) {
		t.Error("one more than the limit was taken")
	}
	in.close()
	n := 0
	in.run(func(_ Event, more bool) {
		n++
		if more != (n < intakeLimit) {
			t.Errorf("event %d: more is %v", n, more)
		}
	})
	if n != intakeLimit {
		t.Errorf("%d events were taken, want %d", n, intakeLimit)
	}
	if in.put(Tick{}) {
		t.Error("an event was taken after the end")
	}
}
