package dispatch

import (
	"reflect"
	"testing"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// attachAt plays a replica on node n, whose daemon keeps items.
func attachAt(t *testing.T, s *Shell, name string) *actor {
	t.Helper()
	near, far := pair(t)
	a := &actor{t, wire.NewConn(far)}
	a.write(wire.FrameHello, 0, wire.Hello{Oldest: 1, Newest: 1, PID: 1, Function: "f.ns", Replica: name, Slots: 1, MaxBatch: 2}.Append(nil))
	at := &wire.AtNode{Socket: near, Node: "n", Address: "10.0.0.7:7070"}
	if _, err := s.Attach(t.Context(), pipeline.ParseKey("f.ns"), name, 1, at); err != nil {
		t.Fatal(err)
	}
	a.read(wire.FrameWelcome)
	return a
}

// onNode is an item of 1 MiB that a node keeps.
func onNode(owner, node string) tensor.Item {
	return tensor.Item{Ref: &tensor.Ref{Owner: owner, Blob: "x", Size: 1 << 20, Keeper: tensor.Keeper{Node: node, Sum: 3}}}
}

// ask hands a task to the shell in memory, as a coordinator of this process does.
func (r *rig) ask(name string, keep bool, in ...tensor.Item) {
	r.t.Helper()
	k := newTask(name, 0)
	k.Keep, k.Input = keep, tensor.Input{{Items: in}}
	if !r.shell.Submit(k) {
		r.t.Fatal("the shell does not take the task")
	}
}

// TestKeptItemsPassByReference checks what a replica on a node gets of items that nodes keep, and
// what a coordinator gets of its outputs.
func TestKeptItemsPassByReference(t *testing.T) {
	r := newRig(t, Spec{})
	a := attachAt(t, r.shell, "r1")
	large := tensor.Item{ContentType: "x/y", Bytes: make([]byte, 100<<10)}
	r.ask("k1", true, onNode("k1", "other"), large)
	f := a.read(wire.FrameBatch)
	b, err := wire.DecodeBatch(f.Payload)
	if err != nil || !f.Keep || !f.Kept || len(f.Files) != 1 {
		t.Fatalf("keep %v, kept %v, %d files, %v", f.Keep, f.Kept, len(f.Files), err)
	}
	closeFiles(f.Files)
	if got := b.Calls[0].Input[0].Items[0]; !reflect.DeepEqual(got, onNode("k1", "other")) {
		t.Errorf("the item on a node: %+v", got)
	}
	answer := func(batch uint64, out ...tensor.Item) {
		t.Helper()
		if err := a.conn.Write(wire.Frame{Type: wire.FrameResult, Batch: batch, Payload: wire.Result{Output: out}.Append(nil), Kept: true}); err != nil {
			t.Fatal(err)
		}
	}
	answer(f.Batch, onNode("k1", "n"), text("small"))
	got := r.reply("k1", task.OK, "")
	want := onNode("k1", "n")
	want.Ref.Address = "10.0.0.7:7070"
	if !reflect.DeepEqual(got.Output, tensor.Activation{want, text("small")}) {
		t.Errorf("output %+v", got.Output)
	}

	r.ask("k2", false, text("x"))
	f = a.read(wire.FrameBatch)
	if f.Keep || f.Kept {
		t.Errorf("keep %v, kept %v for a task whose output is needed", f.Keep, f.Kept)
	}
	answer(f.Batch, onNode("k1", "n"))
	r.reply("k2", task.Unavailable, `which node "n" keeps, belongs to request "k1"`)

	r.ask("k3", true, onNode("k3", "other"))
	f = a.read(wire.FrameBatch)
	a.write(wire.FrameError, f.Batch, wire.Error{Code: task.InputLost, Message: "node other is gone", Lost: []string{"x"}}.Append(nil))
	if got := r.reply("k3", task.InputLost, "node other is gone"); !reflect.DeepEqual(got.Lost, []string{"x"}) {
		t.Errorf("lost %q", got.Lost)
	}

	r.ask("k4", true, text("x"))
	f = a.read(wire.FrameBatch)
	answer(f.Batch, onNode("k4", "another"))
	r.reply("k4", task.ReplicaLost, `item 0 is said to be with node "another", want the replica's node "n"`)
}

// TestBatchesOfSeveralProcesses checks whose tasks decide in a batch: if the outputs of another
// process's tasks may stay on the node, all outputs stay. Otherwise, no output stays.
func TestBatchesOfSeveralProcesses(t *testing.T) {
	c := Config{Apart: func(to string) bool { return to == "apart" }}
	type call struct {
		to   string
		keep bool
	}
	near, nearKeeps, apart, apartKeeps := call{"here", false}, call{"here", true}, call{"apart", false}, call{"apart", true}
	for _, tc := range []struct {
		batch []call
		want  bool
	}{
		{[]call{near}, false},
		{[]call{nearKeeps, nearKeeps}, true},
		{[]call{nearKeeps, near}, false},
		{[]call{apartKeeps, apartKeeps}, true},
		{[]call{apartKeeps, near}, true},
		{[]call{near, apartKeeps, nearKeeps}, true},
		{[]call{apartKeeps, apart}, false},
		{[]call{apart, nearKeeps}, false},
	} {
		var batch []*task.Task
		for _, k := range tc.batch {
			batch = append(batch, &task.Task{ReplyTo: k.to, Keep: k.keep})
		}
		if got := c.keeps(batch); got != tc.want {
			t.Errorf("%+v: %v, want %v", tc.batch, got, tc.want)
		}
	}
	if c.Apart = nil; c.keeps([]*task.Task{{Keep: true}, {}}) {
		t.Error("outputs stay on the node although one is needed, and there is one process")
	}
}

// TestKeptItemsForReplicasOfThisMachine checks that a replica of this machine gets files, that it
// cannot speak as a daemon, and that a lost item is reported.
func TestKeptItemsForReplicasOfThisMachine(t *testing.T) {
	r := newRig(t, Spec{})
	n := r.nodes()
	a := attach(t, r.shell, "r1", 1, 1)
	r.ask("k1", true, onNode("k1", "other"))
	n.next("x").comes <- errGone
	if got := r.reply("k1", task.InputLost, `which node "other" keeps, is lost: the node is gone`); !reflect.DeepEqual(got.Lost, []string{"x"}) {
		t.Errorf("lost %q", got.Lost)
	}
	r.ask("k2", true, text("x"))
	f := a.read(wire.FrameBatch)
	if f.Keep || f.Kept {
		t.Errorf("keep %v, kept %v", f.Keep, f.Kept)
	}
	if err := a.conn.Write(wire.Frame{Type: wire.FrameResult, Batch: f.Batch, Payload: wire.Result{Output: tensor.Activation{onNode("k2", "n")}}.Append(nil), Kept: true}); err != nil {
		t.Fatal(err)
	}
	r.reply("k2", task.ReplicaLost, "references to items of a node, from a replica of this machine")

	a = attach(t, r.shell, "r2", 1, 1)
	r.ask("k3", true, text("x"))
	f = a.read(wire.FrameBatch)
	a.write(wire.FrameError, f.Batch, wire.Error{Code: task.InputLost, Lost: []string{"x"}}.Append(nil))
	r.reply("k3", task.ReplicaLost, "a replica of this machine says that its input is lost")
}
