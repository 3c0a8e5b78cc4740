package cluster

import (
	"context"
	"errors"
	"net"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// keepingNode is a fakeNode whose replicas outlive their owners.
type keepingNode struct {
	*fakeNode
	adopt func(replica string, revision uint64) error // nil: done
}

func (n keepingNode) Adopt(_ context.Context, o Offer, spec FunctionSpec) (wire.Socket, error) {
	if n.adopt != nil {
		if err := n.adopt(o.Replica, spec.Revision); err != nil {
			return nil, err
		}
	}
	return wire.NewSocket(new(net.UnixConn)), nil
}

// offers returns the offers of replicas of f.ns.
func offers(revision uint64, names ...string) (out []Offer) {
	for _, name := range names {
		out = append(out, Offer{Replica: name, Function: pipeline.ParseKey("f.ns"), Revision: revision, Path: "fork"})
	}
	return out
}

// next makes w's Local one of an owner that comes after another one, which has left replicas on
// node a. The nodes join with an Adopter.
func next(t *testing.T, f func(t *testing.T, w *world, l *Local, a keepingNode)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w, old := newWorld(t)
		if err := old.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		cfg := old.cfg
		cfg.Joining, cfg.Metrics = NodesJoinWithReplicas, prometheus.NewRegistry()
		l, err := New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		w.l = l
		f(t, w, l, keepingNode{fakeNode: w.node("a")})
		if err := l.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// TestReplicasOfAnEarlierOwnerAreTakenOver has a node join that runs three replicas of an earlier
// owner. The first plan knows them, starts none, and stops the one that it does not want.
func TestReplicasOfAnEarlierOwnerAreTakenOver(t *testing.T) {
	next(t, func(t *testing.T, w *world, l *Local, a keepingNode) {
		names := []string{"f-a", "f-b", "f-c"}
		w.set(func() {
			for _, name := range append(names, "f-x") {
				a.running[name] = true
			}
		})
		l.Join(a)
		w.expect("joined, and has said nothing", w.inSight(), ": 0")
		l.Running("a", append(names, "f-x"), offers(1, names...)...) // f-x is not offered
		w.expect("at once", w.inSight(), "a: 3")
		synctest.Wait()
		w.expect("then", w.states(), "f-a ready, f-b ready, f-c ready")
		w.expect("what runs", strings.Join(w.runs("a"), " "), "f-a f-b f-c")
		w.want(2)
		w.expect("the plan wants two", w.states(), "f-a ready, f-b ready")
		if a.starts != 0 {
			t.Errorf("%d starts", a.starts)
		}
		l.Answered("f-a", time.Second, time.Second)
		events := strings.Split(w.kinds(), ", ")
		slices.Sort(events) // adoptions go on beside each other
		w.expect("events", strings.Join(events, ", "), "f-a adopted, f-b adopted, f-c adopted, f-c draining, f-c stopped")
		if got := l.Replicas(pipeline.ParseKey("f.ns"))[0]; got.Path != "fork" || got.Answered != 0 {
			t.Errorf("%+v", got)
		}
		l.Lost("f-a", task.Death{Cause: "killed"})
		synctest.Wait()
		w.want(2)
		w.expect("one was lost", w.states(), "f-00001 ready, f-b ready")
	})
}

// TestReplicasThatCannotBeTakenOver checks which replicas are stopped: those whose adoption fails,
// and those of functions that are not deployed. Those of a revision that is not known yet wait.
func TestReplicasThatCannotBeTakenOver(t *testing.T) {
	next(t, func(t *testing.T, w *world, l *Local, a keepingNode) {
		a.adopt = func(replica string, _ uint64) error {
			if replica == "f-bad" {
				return errors.New("its socket is gone")
			}
			return nil
		}
		all := offers(1, "f-bad", "f-good", "f-new", "g-a")
		all[2].Revision = 2
		all[3].Function = pipeline.ParseKey("g.ns")
		w.set(func() {
			for _, o := range all {
				a.running[o.Replica] = true
			}
		})
		l.Join(a)
		say := func() { l.Running("a", w.runs("a"), all...); synctest.Wait() }
		say()
		w.expect("what runs", strings.Join(w.runs("a"), " "), "f-good f-new")
		w.expect("what is known", w.states(), "f-good ready")
		if n, _, _ := l.Failure(pipeline.ParseKey("f.ns")); n != 0 {
			t.Errorf("%d failures: no start has failed", n)
		}
		w.set(func() { w.specs[0] = spec("f", 2) })
		time.Sleep(missingFor)
		say()
		w.expect("the new revision is known", w.states(), "f-good ready, f-new ready")
		w.want(1)
		w.expect("it replaces the old one", w.states(), "f-new ready")
	})
}

// TestStoppedReplicasAreNotTakenOver has a node offer replicas that its owner has ended, because
// the stop had failed, or because the node was silent. They are stopped, not taken over.
func TestStoppedReplicasAreNotTakenOver(t *testing.T) {
	for _, silent := range []bool{false, true} {
		next(t, func(t *testing.T, w *world, l *Local, a keepingNode) {
			l.Join(a)
			l.Running("a", nil)
			w.want(1)
			w.set(func() {
				w.stop = func(context.Context, string) error { return errors.New("the order was lost") }
			})
			if silent {
				l.Leave("a")
				l.Lost("f-00001", task.Death{Cause: "its socket broke"})
			} else {
				w.want(0)
			}
			synctest.Wait()
			w.expect("ended", w.states(), "")
			w.expect("what runs", strings.Join(w.runs("a"), " "), "f-00001")
			l.Join(a)
			for range 2 { // the first stop fails, too
				time.Sleep(missingFor)
				l.Running("a", w.runs("a"), offers(1, w.runs("a")...)...)
				synctest.Wait()
				w.expect("known", w.states(), "")
				w.set(func() { w.stop = nil })
			}
			w.expect("at the end", strings.Join(w.runs("a"), " "), "")
			time.Sleep(missingFor)
			l.Running("a", nil)
			if len(l.past) > 0 {
				t.Errorf("remembered: %v", l.past)
			}
		})
	}
}

// TestReplicasOfAnOlderRevisionServe checks that replicas of a revision from before a deploy serve
// until one of the deployed revision is ready, although they are an earlier owner's.
func TestReplicasOfAnOlderRevisionServe(t *testing.T) {
	next(t, func(t *testing.T, w *world, l *Local, a keepingNode) {
		w.set(func() { w.specs[0] = spec("f", 2); a.running["f-old"] = true })
		revision := uint64(0)
		a.adopt = func(_ string, r uint64) error { revision = r; return nil }
		w.attach = after(time.Second)
		l.Join(a)
		l.Running("a", []string{"f-old"}, offers(1, "f-old")...)
		time.Sleep(2 * time.Second)
		w.want(1)
		w.expect("while the new one starts", w.states(), "f-00001 starting, f-old ready")
		time.Sleep(2 * time.Second)
		w.want(1)
		w.expect("then", w.states(), "f-00001 ready")
		if revision != 1 {
			t.Errorf("adopted as revision %d, want 1", revision)
		}
	})
}

// TestCloseLeavesReplicasToTheNextOwner checks that replicas that outlive their owner are neither
// drained nor stopped when it is closed. Others are.
func TestCloseLeavesReplicasToTheNextOwner(t *testing.T) {
	next(t, func(t *testing.T, w *world, l *Local, a keepingNode) {
		l.Join(a)
		l.Running("a", nil)
		w.want(2)
		l.Running("a", w.runs("a"), offers(1, "f-00001")...)
		if err := l.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		w.expect("what runs", strings.Join(w.runs("a"), " "), "f-00001")
		w.set(func() {
			if !slices.Equal(w.released, []string{"f-00001"}) || len(w.attached) > 0 {
				t.Errorf("released %v, still attached %v", w.released, w.attached)
			}
		})
		var kinds []string
		for _, e := range w.told() {
			if e.Kind == HandedOver || e.Kind == Stopped {
				kinds = append(kinds, e.Replica+" "+string(e.Kind))
			}
		}
		slices.Sort(kinds)
		w.expect("events", strings.Join(kinds, ", "), "f-00001 handed over, f-00002 stopped")
	})
}
