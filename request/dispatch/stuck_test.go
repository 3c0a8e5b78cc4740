package dispatch

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

func TestReplicaIsStuckIfAHandlerDoesNotEnd(t *testing.T) {
	const s = time.Second
	up := func(name string, slots int, timeout time.Duration) ReplicaUp {
		return ReplicaUp{Name: name, Slots: slots, Timeout: timeout}
	}
	for name, steps := range map[string][]step{
		"a call that ignores exec_timeout, and nothing else on the replica": {
			{0, up("r1", 1, s), ""},
			{0, submit("a", 0), "send r1 #1 a; wake 1s"},
			{0, submit("b", 0), ""},
			{1 * s, Tick{}, "cancel r1 #1.0; reply a expired wait=0s service=1s; wake 3s"},
			{3 * s, Tick{}, "stuck r1 (call a ran 2s beyond exec_timeout=1s and did not end); idle r1"},
			{4 * s, answer("r1", 1, 0), ""},
			{4 * s, ReplicaDown{Name: "r1", Cause: "stopped"}, ""},
			{5 * s, up("r2", 1, s), "send r2 #2 b; wake 6s"},
		},
		"other calls go on, and nothing new comes": {
			{0, up("r1", 3, s), ""},
			{0, submit("a", 0), "send r1 #1 a; wake 1s"},
			{1 * s, Tick{}, "cancel r1 #1.0; reply a expired wait=0s service=1s; wake 3s"},
			{2500 * ms, submit("b", 0), "send r1 #2 b"}, // its handler may still end
			{3 * s, Tick{}, "stuck r1 (call a ran 2s beyond exec_timeout=1s and did not end); wake 3.5s"},
			{3 * s, submit("c", 0), "wanted"},
			{3200 * ms, answer("r1", 2, 0), "reply b ok wait=0s service=700ms; idle r1"},
		},
		"other calls end at their limits": {
			{0, up("r1", 2, 0), ""},
			{0, submit("a", 1*s), "send r1 #1 a; wake 1s"},
			{0, submit("b", 5*s), "send r1 #2 b"},
			{1 * s, Tick{}, "cancel r1 #1.0; reply a expired wait=0s service=1s; wake 3s"},
			{3 * s, Tick{}, "stuck r1 (call a ran 2s beyond its deadline and did not end); wake 5s"},
			{5 * s, Tick{}, "cancel r1 #2.0; reply b expired wait=0s service=5s; idle r1"},
		},
		"a handler that lets go": {
			{0, up("r1", 1, s), ""},
			{0, submit("a", 0), "send r1 #1 a; wake 1s"},
			{0, submit("b", 0), ""},
			{1 * s, Tick{}, "cancel r1 #1.0; reply a expired wait=0s service=1s; wake 3s"},
			{2 * s, answer("r1", 1, 0), "send r1 #2 b"},
		},
		"the nearer limit counts": {
			{0, up("r1", 2, 2*s), ""},
			{0, submit("a", 1*s), "send r1 #1 a; wake 1s"},
			{0, submit("b", 9*s), "send r1 #2 b"},
			{1 * s, Tick{}, "cancel r1 #1.0; reply a expired wait=0s service=1s; wake 2s"},
			{1500 * ms, answer("r1", 1, 0), ""},
			{2 * s, Tick{}, "cancel r1 #2.0; reply b expired wait=0s service=2s; wake 4s"},
		},
		"a caller that leaves does not shorten the time that a call has": {
			{0, up("r1", 1, 0), ""},
			{0, submit("a", 9*s), "send r1 #1 a; wake 9s"},
			{1 * s, cancelOf("a"), "cancel r1 #1.0; reply a canceled wait=0s service=1s"},
			{9 * s, Tick{}, "wake 11s"},
			{11 * s, Tick{}, "stuck r1 (call a ran 2s beyond its deadline and did not end); idle r1"},
		},
		"a canceled call without a limit": {
			{0, up("r1", 1, 0), ""},
			{0, submit("a", 0), "send r1 #1 a"},
			{1 * s, cancelOf("a"), "cancel r1 #1.0; reply a canceled wait=0s service=1s; wake 1m1s"},
			{61 * s, Tick{}, "stuck r1 (call a ran 1m0s beyond its cancellation and did not end); idle r1"},
		},
		"several calls hold one replica": {
			{0, ReplicaUp{Name: "r1", Slots: 2, MaxBatch: 2, Timeout: s}, ""},
			{0, submit("a", 0), "send r1 #1 a; wake 1s"},
			{0, submit("b", 0), "send r1 #2 b"},
			{1 * s, Tick{}, "cancel r1 #1.0; reply a expired wait=0s service=1s; cancel r1 #2.0; reply b expired wait=0s service=1s; wake 3s"},
			{3 * s, Tick{}, "stuck r1 (call a ran 2s beyond exec_timeout=1s and did not end); idle r1"},
		},
		"a replica that drains already": {
			{0, up("r1", 2, s), ""},
			{0, submit("a", 0), "send r1 #1 a; wake 1s"},
			{500 * ms, ReplicaDrain{"r1"}, ""},
			{1 * s, Tick{}, "cancel r1 #1.0; reply a expired wait=0s service=1s; wake 3s"},
			{3 * s, Tick{}, "stuck r1 (call a ran 2s beyond exec_timeout=1s and did not end); idle r1"},
		},
		"a suspect does not stay on it": {
			{0, up("r1", 1, s), ""},
			{0, again("x", 0), "send r1 #1 x; wake 1s"},
			{1 * s, Tick{}, "cancel r1 #1.0; reply x expired wait=0s service=1s; wake 3s"},
			{2 * s, again("y", 0), ""},
			{3 * s, Tick{}, "stuck r1 (call x ran 2s beyond exec_timeout=1s and did not end); idle r1"},
			{4 * s, up("r2", 1, s), "send r2 #2 y; wake 5s"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := NewCore(CoreConfig{Function: "f.ns"})
			for i, st := range steps {
				var got []string
				for _, e := range c.Step(at(st.at), st.ev) {
					got = append(got, show(e))
				}
				if s := strings.Join(got, "; "); s != st.want {
					t.Fatalf("step %d: %T\n got %q\nwant %q", i, st.ev, s, st.want)
				}
			}
			if c.Running() > 0 && len(c.lanes[0].replicas) == 0 || c.timers.len() > 0 && len(c.tasks.byKey) == 0 {
				t.Errorf("%d calls run and %d timers are set, and there is no replica", c.Running(), c.timers.len())
			}
		})
	}
}

// TestStuckReplicaBlamesNoCall checks that when a stuck replica ends, for whatever reason, its
// running calls lose no attempt and get the cause.
func TestStuckReplicaBlamesNoCall(t *testing.T) {
	c := NewCore(CoreConfig{Function: "f.ns"})
	c.Step(epoch, ReplicaUp{Name: "r1", Slots: 2})
	c.Step(epoch, submit("a", time.Second))
	c.Step(epoch, submit("b", time.Minute))
	c.Step(at(time.Second), Tick{})
	c.Step(at(3*time.Second), Tick{})
	fx := slices.Clone(c.Step(at(4*time.Second), ReplicaDown{Name: "r1", Cause: "exit status 1", End: task.EndItself}))
	r, ok := fx[0].(Reply)
	if !ok || r.To != "b" || r.Reply.Code != task.ReplicaLost || r.Reply.Blame != task.BlameShared ||
		r.Reply.Message != "call a ran 2s beyond its deadline and did not end; then exit status 1" {
		t.Errorf("got %+v, want that b has lost its replica because of a", fx[0])
	}
}

// TestReplyNamesExecTimeout checks that the reply to a call that ran for too long names the
// variable.
func TestReplyNamesExecTimeout(t *testing.T) {
	c := NewCore(CoreConfig{Function: "f.ns"})
	c.Step(epoch, ReplicaUp{Name: "r1", Timeout: 300 * ms})
	c.Step(epoch, submit("a", time.Minute))
	for _, e := range c.Step(at(300*ms), Tick{}) {
		if r, ok := e.(Reply); ok && (r.Reply.Code != task.Expired || r.Reply.Message != "it ran for longer than exec_timeout, 300ms") {
			t.Errorf("reply %+v, want that exec_timeout ended it", r.Reply)
		}
	}
}

// TestShellReportsStuckReplicas checks that a replica that does not answer a call after its
// exec_timeout is reported, gets no more calls, and is idle at once.
func TestShellReportsStuckReplicas(t *testing.T) {
	t.Parallel()
	r := newRig(t, Spec{Timeout: 100 * ms})
	a := attach(t, r.shell, "f-1", 2, 1)
	r.submit("a")
	id, _ := a.batch("a")
	r.reply("a", task.Expired, "it ran for longer than exec_timeout, 100ms")
	if f := a.read(wire.FrameCancel); f.Batch != id {
		t.Errorf("cancel of batch %d, want %d", f.Batch, id)
	}
	if got := receive(t, r.stuck, "word of it"); !strings.HasPrefix(got, "f-1: call a ran 2") || !strings.HasSuffix(got, "s beyond exec_timeout=100ms and did not end") {
		t.Errorf("told %q", got)
	}
	r.submit("b")
	if err := r.shell.Drain(t.Context(), pipeline.ParseKey("f.ns"), "f-1"); err != nil {
		t.Error(err)
	}
	a.read(wire.FrameDrain)
	b := attach(t, r.shell, "f-2", 1, 1)
	id, _ = b.batch("b")
	b.answer(id, 0)
	r.reply("b", task.OK, "")
	if len(r.stuck) > 0 || len(r.dropped) > 0 {
		t.Errorf("told again: %d times stuck, %d times dropped", len(r.stuck), len(r.dropped))
	}
}
