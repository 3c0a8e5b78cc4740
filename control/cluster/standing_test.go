package cluster

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// standing returns the status of the deployed revision of f.ns.
func (w *world) standing() Standing {
	w.mu.Lock()
	s := w.specs[0]
	w.mu.Unlock()
	return w.l.Standing(s.Key, s.Revision, pipeline.Scale{Min: s.Min, Max: s.Max, Zero: s.Zero, ZeroAge: s.ZeroAge})
}

// stands checks the number of replicas of f.ns: wanted, ready, and ready of older revisions.
func (w *world) stands(when string, wanted, ready, older int) {
	w.t.Helper()
	if s := w.standing(); s.Wanted != wanted || s.Ready != ready || s.Older != older {
		w.t.Errorf("%s: %d wanted, %d ready, %d older, want %d, %d, %d", when, s.Wanted, s.Ready, s.Older, wanted, ready, older)
	}
}

// deploy replaces f.ns by a revision with this scale.
func (w *world) deploy(revision uint64, scale pipeline.Scale) {
	w.set(func() {
		w.specs = []FunctionSpec{spec("f", revision)}
		w.specs[0].declare(scale)
	})
}

// TestStandingIsOfTheDeployedRevision checks that no count includes replicas of an older revision,
// or replicas that are being stopped.
func TestStandingIsOfTheDeployedRevision(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		drained := make(chan struct{})
		w.drain = func(ctx context.Context, _ string) error {
			select {
			case <-drained:
			case <-ctx.Done():
			}
			return nil
		}
		hold := make(chan struct{})
		w.want(2)
		w.stands("two replicas", 2, 2, 0)
		w.set(func() {
			w.start = func(ctx context.Context, _ node.Order) error {
				select {
				case <-hold:
				case <-ctx.Done():
				}
				return ctx.Err()
			}
		})
		w.deploy(2, pipeline.Scale{Min: 1, Max: 10})
		w.stands("deployed", 2, 0, 2)
		w.want(2)
		w.stands("the new revision starts", 2, 0, 2)
		close(hold)
		synctest.Wait()
		w.stands("the new revision is ready", 2, 2, 2)
		w.want(2)
		w.stands("the old revision drains", 2, 2, 0)
		p, _ := w.plan(1)
		if err := l.Apply(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		w.stands("one is let go", 1, 1, 0) // before it knows
		synctest.Wait()
		w.stands("it drains", 1, 1, 0)
		close(drained)
	})
}

// TestWantedIsRightBeforeAPlan checks that the wanted count is right before a plan knows of a
// deploy, a wish or a pin.
func TestWantedIsRightBeforeAPlan(t *testing.T) {
	const never = 0 // no plan yet
	asleep := pipeline.Scale{Min: 2, Max: 10, Zero: true, ZeroAge: time.Minute}
	for name, c := range map[string]struct {
		planned int // replicas of an earlier revision
		scale   pipeline.Scale
		wish    int // -1: none
		want    int
	}{
		"a first deploy":                       {never, pipeline.Scale{Min: 3, Max: 10}, -1, 3},
		"a first deploy without a minimum":     {never, pipeline.Scale{Max: 10}, -1, 1},
		"a first deploy that may sleep":        {never, asleep, -1, 2},
		"a first deploy that sleeps at once":   {never, pipeline.Scale{Min: 2, Max: 10, Zero: true}, -1, 0},
		"a first deploy and a wish":            {never, pipeline.Scale{Min: 1, Max: 10}, 4, 4},
		"a wish above the most":                {never, pipeline.Scale{Min: 1, Max: 3}, 4, 3},
		"a wish to sleep":                      {3, pipeline.Scale{Min: 1, Max: 10}, 0, 0},
		"an update":                            {3, pipeline.Scale{Min: 1, Max: 10}, -1, 3},
		"an update with a higher minimum":      {3, pipeline.Scale{Min: 5, Max: 10}, -1, 5},
		"an update with a lower most":          {3, pipeline.Scale{Min: 1, Max: 2}, -1, 2},
		"an update of what is awake":           {1, asleep, -1, 2},
		"an update and a wish":                 {3, pipeline.Scale{Min: 1, Max: 10}, 4, 4},
		"a wish for fewer than load asked for": {3, pipeline.Scale{Min: 1, Max: 10}, 2, 3},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, w *world, l *Local) {
				if c.planned > 0 {
					w.want(c.planned)
				}
				w.deploy(2, c.scale)
				if c.wish >= 0 {
					if err := l.Scale(t.Context(), pipeline.ParseKey("f.ns"), c.wish); err != nil {
						t.Fatal(err)
					}
				}
				if got := w.standing().Wanted; got != c.want {
					t.Errorf("%d wanted, want %d", got, c.want)
				}
				for range 2 { // a plan that knows of it decides
					load := min(6, c.scale.Max)
					w.want(load)
					if got := w.standing().Wanted; got != load {
						t.Errorf("%d wanted, want %d as planned", got, load)
					}
				}
			})
		})
	}
}

// TestUpdateOfASleepingFunctionWantsNothing checks that an update wakes nothing, and a wish does.
func TestUpdateOfASleepingFunctionWantsNothing(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		scale := pipeline.Scale{Min: 1, Max: 10, Zero: true, ZeroAge: time.Minute}
		w.deploy(1, scale)
		apply := func() {
			t.Helper()
			s, err := l.Observe(t.Context())
			if err == nil {
				err = l.Apply(t.Context(), plan.Plan{Epoch: 1, Rev: s.Rev, Wants: []plan.Want{{Function: "f.ns", Revision: s.Functions[0].Revision}}})
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		apply()
		w.stands("asleep", 0, 0, 0)
		w.deploy(2, scale)
		w.stands("updated", 0, 0, 0)
		apply()
		w.stands("planned", 0, 0, 0)
		if err := l.Scale(t.Context(), pipeline.ParseKey("f.ns"), 3); err != nil {
			t.Fatal(err)
		}
		w.stands("a wish", 3, 0, 0)
		if _, err := l.Observe(t.Context()); err != nil {
			t.Fatal(err)
		}
		w.stands("a wish that is observed", 3, 0, 0)
		if _, err := l.Pin(pipeline.ParseKey("f.ns"), Pin{Holder: "me", Until: time.Now().Add(time.Minute)}); err != nil {
			t.Fatal(err)
		}
		w.stands("a pin", 1, 0, 0)
	})
}

// TestFailuresAreOfTheDeployedRevision checks that failed starts of an older revision do not count
// for the deployed one.
func TestFailuresAreOfTheDeployedRevision(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.start = func(context.Context, node.Order) error { return errors.New("no such file: stage") }
		w.want(1)
		if s := w.standing(); s.Failing.Count != 1 || !strings.Contains(s.Failing.Cause, "no such file: stage") || time.Until(s.Failing.Until) != firstBackoff {
			t.Errorf("failing %+v in %v, want the first failure", s.Failing, time.Until(s.Failing.Until))
		}
		w.deploy(2, pipeline.Scale{Min: 1, Max: 10})
		if s := w.standing(); s.Failing.Count != 0 || s.Failing.Cause != "" {
			t.Errorf("failing %+v, want nothing of revision 2", s.Failing)
		}
	})
}

// TestRevisionOutOfMemoryOnItsOnlyDeviceHasNoPlace checks that a revision that was out of memory on
// its only device has nowhere to go.
func TestRevisionOutOfMemoryOnItsOnlyDeviceHasNoPlace(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.set(func() {
			w.nodes["a"].devices, w.specs[0].GPU = []plan.Device{{ID: "gpu0", Memory: 1 << 30}}, 1
			w.attach = func(_ context.Context, name string) error {
				l.OutOfMemory(name, &task.MemoryError{Text: "want 2 GiB"})
				return nil
			}
			w.stop = func(_ context.Context, name string) error {
				l.Lost(name, task.Death{Cause: "killed by SIGTERM"})
				return nil
			}
		})
		w.place(1)
		w.place(1)
		if s := w.standing(); s.Wanted != 1 || !strings.HasPrefix(s.Nowhere, "was out of memory, and there is no other device for it: 0 of 1 placed") {
			t.Errorf("%+v, want that it was out of memory", s)
		}
	})
}

// short applies a plan in which f.ns has no place.
func (w *world) short() {
	w.t.Helper()
	s, err := w.l.Observe(w.t.Context())
	if err == nil {
		err = w.l.Apply(w.t.Context(), plan.Plan{Epoch: 1, Rev: s.Rev, Wants: []plan.Want{{Function: "f.ns", Revision: s.Functions[0].Revision, Short: "no room"}}})
	}
	if err != nil {
		w.t.Fatal(err)
	}
	synctest.Wait()
}

// TestFunctionThatNoNodeCouldHold checks that requests for a function get the cause at once if no
// known node could hold it. Full nodes, and nodes that fell silent within the last minute, count as
// nodes that could hold it.
func TestFunctionThatNoNodeCouldHold(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		needs := func(bytes int64) { w.set(func() { w.specs[0].Memory = bytes }) }
		answered := func(when, want string) {
			t.Helper()
			w.short()
			w.mu.Lock()
			got := strings.Join(w.failed, " | ")
			w.failed = nil
			w.mu.Unlock()
			if !strings.Contains(got, want) || (got == "") != (want == "") {
				t.Errorf("%s: answered %q, want %q", when, got, want)
			}
			if s := w.standing(); (s.Nowhere != "") != (want != "") || s.Wanted != 1 || s.Short == "" {
				t.Errorf("%s: %+v, want one replica without a place", when, s)
			}
		}
		needs(1 << 30)
		answered("room that is taken", "")
		needs(2 << 30)
		answered("too large", `function "f.ns" has no replica, and no node could hold one: it needs 2 GiB of memory, and the largest node, a, has 1 GiB`)
		big := w.node("big")
		l.Join(sized{big, 4 << 30})
		answered("a larger node", "")
		l.Leave("big")
		answered("a larger node is silent", "")
		time.Sleep(time.Minute)
		answered("still", "")
		time.Sleep(time.Second)
		answered("for long", "the largest node, a, has 1 GiB")
		if got := l.Lacking(plan.Function{Memory: 1 << 30}); got != nil {
			t.Errorf("lacks %v, want nothing", got)
		}
		if got := fmt.Sprint(l.Lacking(plan.Function{GPU: 1})); !strings.Contains(got, "has no devices") {
			t.Errorf("lacks %v, want devices", got)
		}
	})
}

// TestNoAnswerWhileAReplicaServes checks that waiting tasks are not answered while a hidden replica
// serves, even if no node could hold a new one.
func TestNoAnswerWhileAReplicaServes(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.want(1)
		l.Leave("a")
		w.set(func() { w.specs[0].Memory = 2 << 30 })
		w.short()
		if told := w.answered(); len(told) > 0 || w.standing().Nowhere == "" {
			t.Errorf("answered %q, %+v, want no answer", told, w.standing())
		}
		l.Join(w.nodes["a"])
		l.Running("a", []string{"f-00001"})
	})
}

// TestOldRevisionServesIfNoNodeCouldHoldTheNewOne checks that an old revision is not replaced by a
// revision that no node could hold.
func TestOldRevisionServesIfNoNodeCouldHoldTheNewOne(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.want(1)
		w.set(func() { w.specs = []FunctionSpec{spec("f", 2)}; w.specs[0].Memory = 500 << 30 })
		w.short()
		w.short()
		w.expect("after an update that fits nowhere", w.states(), "f-00001 ready")
		if told := w.answered(); len(told) > 0 || w.standing().Nowhere == "" {
			t.Errorf("answered %q, %+v, want no answer", told, w.standing())
		}
	})
}

// TestAKilledStartIsNotFailing checks that a start that something else ended says nothing about the
// revision.
func TestAKilledStartIsNotFailing(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.set(func() {
			w.start = func(_ context.Context, o node.Order) error {
				l.Lost(o.Replica, task.Death{Cause: "its zygote was killed", End: task.EndShared})
				return errors.New("its zygote was killed")
			}
		})
		w.want(1)
		if st := w.standing(); st.Failing.Count != 0 || l.of(functionF).failure.Count != 1 {
			t.Errorf("%+v, want a failure that is not told", st)
		}
		pass(time.Minute)
		w.set(func() { w.start = func(context.Context, node.Order) error { return errors.New("bad image") } })
		w.want(1)
		if st := w.standing(); st.Failing.Count != 2 || !strings.Contains(st.Failing.Cause, "bad image") {
			t.Errorf("%+v, want the failure told", st)
		}
	})
}

// TestAStartThatIsStoppedIsFailing checks that a replica that the platform stops because it is not
// ready in time has failed by itself.
func TestAStartThatIsStoppedIsFailing(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.set(func() {
			w.attach = func(ctx context.Context, _ string) error { <-ctx.Done(); return ctx.Err() }
			w.stop = func(_ context.Context, name string) error {
				l.Lost(name, task.Death{Cause: "stopped", End: task.EndShared})
				return nil
			}
		})
		w.want(1)
		pass(2 * time.Minute)
		if st := w.standing(); st.Failing.Count != 1 || !strings.Contains(st.Failing.Cause, "not ready within") {
			t.Errorf("%+v, want one failure", st)
		}
	})
}

// sized is a node of another size.
type sized struct {
	*fakeNode
	memory int64
}

func (n sized) Inventory() plan.Node {
	i := n.fakeNode.Inventory()
	i.Memory = n.memory
	return i
}

// TestNodesHaveTimeToJoin checks that while nodes may still join, no function counts as too large.
func TestNodesHaveTimeToJoin(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		l.cfg.Joining = NodesJoin
		huge := plan.Function{Memory: 500 << 30}
		if got := l.Lacking(huge); got != nil {
			t.Errorf("lacks %v just after the start, want to wait for nodes", got)
		}
		time.Sleep(joinWithin)
		if got := l.Lacking(huge); len(got) != 1 {
			t.Errorf("lacks %v, want memory", got)
		}
	})
}
