package dispatch

import (
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

var functionF = pipeline.ParseKey("f.ns")

// several sends the n-th task of a request with several tasks.
func (r *rig) several(request string, n uint32, revision uint64, deadline time.Time) {
	s := together(request, n, revision)
	s.Task.Deadline = deadline
	r.bus.send(wire.AppendTask(nil, s.Task))
}

// TestDrainWaitsForLeave checks that a replica of an old revision stays until the request leaves,
// over NATS or in the process.
func TestDrainWaitsForLeave(t *testing.T) {
	for _, way := range []string{"bus", "near"} {
		t.Run(way, func(t *testing.T) {
			r := newRig(t, Spec{Revision: 1})
			deadline := time.Now().Add(time.Hour)
			a := attach(t, r.shell, "f-1", 1, 1)
			r.several("a", 1, 0, deadline)
			id, _ := a.batch("a")
			if err := r.shell.Ensure(Spec{Function: functionF, Revision: 2}); err != nil {
				t.Fatal(err)
			}
			a.answer(id, 0)
			r.reply("a", task.OK, "")
			drained := make(chan error, 1)
			go func() { drained <- r.shell.Drain(t.Context(), functionF, "f-1") }()
			r.several("a", 2, 1, deadline.Add(time.Minute))
			id, _ = a.batch("a")
			a.answer(id, 0)
			r.reply("a", task.OK, "")
			proctest.Until(t, "the latest deadline, once it drains", func() bool {
				return r.shell.Due(functionF, "f-1").Equal(deadline.Add(time.Minute))
			})
			if len(drained) > 0 {
				t.Fatal("drained before its request has left")
			}
			if way == "bus" {
				r.bus.send(wire.AppendLeave(nil, "a", "f.ns"))
			} else if !r.shell.Leave("f.ns", "a") {
				t.Fatal("a leave was not taken")
			}
			if err := receive(t, drained, "end of Drain"); err != nil {
				t.Error(err)
			}
			a.read(wire.FrameDrain)
			if due := r.shell.Due(functionF, "f-1"); !due.IsZero() {
				t.Errorf("due at %v, want never", due)
			}
		})
	}
	r := newRig(t, Spec{})
	if r.shell.Leave("other.ns", "a") {
		t.Error("a leave of a function that lives elsewhere was taken")
	}
}

// TestReviveIsCalled checks that Revive is called when tasks wait for a revision without
// replicas. Without a Revive function, the tasks are answered at once.
func TestReviveIsCalled(t *testing.T) {
	for _, asked := range []bool{true, false} {
		r := newRig(t, Spec{Revision: 2})
		revived := make(chan uint64, 10)
		if asked {
			// Set before the first task.
			r.shell.cfg.Revive = func(f pipeline.Key, revision uint64) { revived <- revision }
		}
		r.several("a", 2, 1, time.Now().Add(time.Hour))
		if asked {
			if got := receive(t, revived, "call of Revive"); got != 1 {
				t.Errorf("revision %d was asked for, want 1", got)
			}
			r.shell.NoReplica(functionF, 1, "no room")
			r.reply("a", task.Redeployed, "no room")
		} else {
			r.reply("a", task.Redeployed, "replicas of old revisions are not started here")
		}
	}
}
