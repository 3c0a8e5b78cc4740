package flow

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/dispatch"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// deployment is a function with its real dispatcher core, and replicas that answer with their
// revision.
type deployment struct {
	core     *dispatch.Core
	revision uint64
	replicas map[string]*fakeReplica
	wake     time.Time
	in       []dispatch.Event // tasks and cancels in transit, in order
	made     int
	asked    []uint64 // revisions for which a replica was requested
}

// fakeReplica is a replica.
type fakeReplica struct {
	revision uint64
	draining time.Time // start of the drain; zero: not draining
	batches  []dispatch.Send
}

// simulation runs real cores of flow and dispatch against each other, with delayed messages.
type simulation struct {
	t     *testing.T
	seed  uint64
	r     *rand.Rand
	now   time.Time
	flow  *Core
	lines map[string]*deployment
	back  []*task.Reply // replies in transit, in order
	ends  map[string]*Finish
	drain time.Duration // time that a replica may take to drain
	slow  bool          // replies to the coordinator are late
	// Replicas also die, each with a chance of 1/rough per step; 0: none does.
	rough   int
	revived int  // number of replicas of old revisions started again
	never   bool // never start a replica of an old revision again
}

func (w *simulation) fatalf(format string, args ...any) {
	w.t.Helper()
	w.t.Fatalf("seed %d: %s", w.seed, fmt.Sprintf(format, args...))
}

func (w *simulation) coordinate(ev Event) {
	for _, e := range w.flow.Step(w.now, ev) {
		switch e := e.(type) {
		case Submit:
			w.check(e.Task)
			w.lines[e.Task.Function].in = append(w.lines[e.Task.Function].in, dispatch.Submit{Task: e.Task})
		case Cancel:
			w.lines[e.Function].in = append(w.lines[e.Function].in, dispatch.Cancel{Key: e.Key})
		case Leave:
			w.lines[e.Function].in = append(w.lines[e.Function].in, dispatch.Leave{Request: e.Request})
		case Finish:
			if w.ends[e.Request] != nil {
				w.fatalf("request %s ends twice", e.Request)
			}
			w.ends[e.Request] = &e
			if e.Error == nil {
				for _, p := range e.Response.Output {
					w.same(e.Request, p.From, p.Items)
				}
			}
		}
	}
}

// check compares the input of a task with what the earlier stages should have answered.
func (w *simulation) check(t *task.Task) {
	for _, p := range t.Input {
		if p.From != "" {
			w.same(t.Request, p.From, p.Items)
		}
	}
}

func (w *simulation) same(request, stage string, items tensor.Activation) {
	for _, it := range items {
		if string(it.Bytes) != string(items[0].Bytes) {
			w.fatalf("request %s has answers of %s and %s from stage %s", request, items[0].Bytes, it.Bytes, stage)
		}
	}
}

func (w *simulation) serve(d *deployment, ev dispatch.Event) {
	for _, e := range d.core.Step(w.now, ev) {
		switch e := e.(type) {
		case dispatch.Send:
			d.replicas[e.Replica].batches = append(d.replicas[e.Replica].batches, e)
		case dispatch.Reply:
			w.back = append(w.back, e.Reply)
		case dispatch.Idle:
			delete(d.replicas, e.Replica)
		case dispatch.Revive:
			d.asked = append(d.asked, e.Revision)
		case dispatch.Evict:
			w.fatalf("evicted: %s", e.Cause)
		case dispatch.Wake:
			d.wake = e.At
		}
	}
}

// up starts a replica.
func (w *simulation) up(d *deployment, revision uint64) {
	d.made++
	name := fmt.Sprintf("r%03d", d.made)
	d.replicas[name] = &fakeReplica{revision: revision}
	w.serve(d, dispatch.ReplicaUp{Name: name, Slots: 1 + w.r.IntN(2), MaxBatch: 1 + w.r.IntN(4), Revision: revision})
}

// pass lets time pass.
func (w *simulation) pass() {
	w.now = w.now.Add(time.Duration(w.r.IntN(20)) * time.Millisecond)
	w.coordinate(Tick{})
	for _, name := range slices.Sorted(maps.Keys(w.lines)) {
		d := w.lines[name]
		if !d.wake.IsZero() && !d.wake.After(w.now) {
			d.wake = time.Time{}
			w.serve(d, dispatch.Tick{})
		}
		w.keep(d)
	}
}

// keep acts as the cluster: it starts missing replicas, drains old ones once a new one runs, and
// ends drains that take too long.
func (w *simulation) keep(d *deployment) {
	for len(d.asked) > 0 && w.r.IntN(10) == 0 {
		revision := d.asked[0]
		d.asked = d.asked[1:]
		if w.never {
			w.serve(d, dispatch.NoReplica{Revision: revision, Cause: "chance"})
		} else {
			w.revived++
			w.up(d, revision)
		}
	}
	fresh := 0
	for _, c := range d.replicas {
		if c.revision == d.revision {
			fresh++
		}
	}
	if fresh == 0 && w.r.IntN(10) == 0 || fresh < 3 && w.r.IntN(100) == 0 {
		w.up(d, d.revision)
	}
	for _, name := range slices.Sorted(maps.Keys(d.replicas)) {
		switch c := d.replicas[name]; {
		case c == nil: // removed during this loop
		case c.draining.IsZero() && c.revision != d.revision && fresh > 0:
			c.draining = w.now
			w.serve(d, dispatch.ReplicaDrain{Name: name})
		case !c.draining.IsZero() && w.now.Sub(c.draining) > w.drain, w.rough > 0 && w.r.IntN(w.rough) == 0:
			delete(d.replicas, name)
			w.serve(d, dispatch.ReplicaDown{Name: name, Cause: "chance"})
		}
	}
}

// answer lets a replica answer a call.
func (w *simulation) answer() {
	for _, fn := range slices.Sorted(maps.Keys(w.lines)) {
		d := w.lines[fn]
		for _, name := range slices.Sorted(maps.Keys(d.replicas)) {
			c := d.replicas[name]
			if c == nil || len(c.batches) == 0 || w.r.IntN(3) > 0 {
				continue
			}
			b := c.batches[0]
			c.batches = c.batches[1:]
			for i, t := range b.Tasks {
				n := 1
				if t.Stage == "a" {
					n = w.r.IntN(2 * EachWindow)
				}
				out := make(tensor.Activation, n)
				for k := range out {
					out[k] = tensor.Item{Bytes: fmt.Appendf(nil, "%s@%d", t.Stage, c.revision)}
				}
				w.serve(d, dispatch.Result{Replica: name, Batch: b.Batch, Call: i, Reply: &task.Reply{Output: out}})
			}
		}
	}
}

// post delivers messages in transit.
func (w *simulation) post() {
	for _, fn := range slices.Sorted(maps.Keys(w.lines)) {
		d := w.lines[fn]
		for range w.r.IntN(len(d.in)/2 + 2) {
			if len(d.in) > 0 {
				ev := d.in[0]
				d.in = d.in[1:]
				w.serve(d, ev)
			}
		}
	}
	if w.slow && w.r.IntN(60) > 0 {
		return
	}
	for range w.r.IntN(len(w.back)/2 + 2) {
		if len(w.back) > 0 {
			r := w.back[0]
			w.back = w.back[1:]
			w.coordinate(Replied{r})
		}
	}
}

// play runs requests through redeploys and returns their number by status; 0: success.
func (w *simulation) play(g pipeline.Pipeline, requests int) map[int]int {
	for i := range g.Stages {
		key := g.Stages[i].Key().String()
		w.lines[key] = &deployment{core: dispatch.NewCore(dispatch.CoreConfig{Function: key, Revision: 1, QueueLimit: 1 << 20}), revision: 1, replicas: map[string]*fakeReplica{}}
		w.up(w.lines[key], 1)
	}
	started := 0
	for steps := 0; len(w.ends) < requests; steps++ {
		if steps > 300_000 {
			w.fatalf("%d of %d requests have ended", len(w.ends), requests)
		}
		if started < requests && w.r.IntN(20) == 0 {
			r := task.Request{ID: fmt.Sprint("q", started), Target: g.Key().String(), Input: texts("x")}
			started++
			w.coordinate(Start{Request: r, Graph: g, Loads: make([]task.Load, len(g.Stages))})
		}
		if w.r.IntN(300) == 0 {
			d := w.lines["b.ns"]
			d.revision++
			w.serve(d, dispatch.Deployed{Revision: d.revision})
		}
		w.pass()
		w.answer()
		w.post()
	}
	ends := map[int]int{}
	for _, f := range w.ends {
		if f.Error == nil {
			ends[0]++
			continue
		}
		ends[f.Error.Status]++
		if f.Error.Status == http.StatusServiceUnavailable && !strings.Contains(f.Error.Cause, `function "b" was redeployed while the request ran`) {
			w.fatalf("request ended with %+v", f.Error)
		}
	}
	w.emptied()
	return ends
}

// emptied checks that all old replicas stop once nobody needs them.
func (w *simulation) emptied() {
	for range 1000 {
		w.pass()
		w.answer()
		w.post()
	}
	for fn, d := range w.lines {
		for name, c := range d.replicas {
			if c.revision != d.revision {
				w.fatalf("replica %s of %s is of revision %d and still there, want %d: %+v", name, fn, c.revision, d.revision, c)
			}
		}
		if d.core.Waiting()+d.core.Running() > 0 {
			w.fatalf("%s: %d wait and %d run", fn, d.core.Waiting(), d.core.Running())
		}
	}
}

func newSimulation(t *testing.T, seed uint64) *simulation {
	return &simulation{
		t: t, seed: seed, r: rand.New(rand.NewPCG(seed, 21)), now: t0, flow: NewCore(),
		lines: map[string]*deployment{}, ends: map[string]*Finish{}, drain: time.Hour,
	}
}

// TestRedeploysUnderLoad redeploys a function again and again while requests have many calls of it.
// All answers in one request must come from one revision. No request may fail, because old replicas
// get all the time that they need.
func TestRedeploysUnderLoad(t *testing.T) {
	g := graph(t, "a>b;b*>c;c")
	for seed := range uint64(6) {
		w := newSimulation(t, seed)
		w.slow = seed%2 == 1
		if ends := w.play(g, 60); ends[0] != 60 {
			t.Fatalf("seed %d: ends %v, want 60 well", seed, ends)
		}
		if d := w.lines["b.ns"]; d.revision < 3 {
			t.Errorf("seed %d: revision %d at the end, want some redeploys", seed, d.revision)
		}
	}
}

// TestRedeploysWithLossesNeverMixRevisions is TestRedeploysUnderLoad with replicas that die and old
// replicas that get too little time. Requests may fail, but never mix revisions.
func TestRedeploysWithLossesNeverMixRevisions(t *testing.T) {
	g := graph(t, "a>b;b*>c;c")
	all := map[int]int{}
	for seed := range uint64(8) {
		w := newSimulation(t, seed)
		w.rough, w.never, w.drain = 2000, true, time.Duration(w.r.IntN(3000))*time.Millisecond
		for status, n := range w.play(g, 60) {
			all[status] += n
		}
	}
	if all[0] < 300 || all[http.StatusServiceUnavailable] < 5 {
		t.Errorf("ends %v, want most of them well and some redeployed", all)
	}
	t.Log(all)
}

func (w *world) okOf(t *task.Task, revision uint64) {
	w.t.Helper()
	w.step(Replied{&task.Reply{Key: t.Key, Replica: "r1", Revision: revision, Output: texts("x")}})
}

func (w *world) redeployed(t *task.Task) {
	w.t.Helper()
	w.step(Replied{&task.Reply{Key: t.Key, Code: task.Redeployed, Message: "no replica of revision 7 starts"}})
}

func TestRequestKeepsTheRevisionThatAnsweredFirst(t *testing.T) {
	w := newWorld(t)
	w.start(graph(t, "a*>b;b"), slices.Repeat([]string{"x"}, EachWindow+2)...)
	first := w.take("a")
	if first.Pins != nil || !first.Together {
		t.Errorf("first task %+v, want any revision, and together", first)
	}
	w.okOf(first, 7)
	next := w.tasks[len(w.tasks)-1]
	if next.Task != EachWindow+1 || next.Pinned(next.Function) != 7 {
		t.Errorf("next task %d of revision %d, want %d of 7", next.Task, next.Pinned(next.Function), EachWindow+1)
	}
	lost := w.take("a")
	w.lost(lost)
	if again := w.tasks[len(w.tasks)-1]; again.Task != lost.Task || again.Pinned(again.Function) != 7 {
		t.Errorf("again %+v, want task %d of revision 7", again, lost.Task)
	}
	for len(w.tasks) > 0 && w.tasks[0].Stage == "a" {
		w.okOf(w.take("a"), 7)
	}
	if b := w.take("b"); b.Pins != nil || b.Together {
		t.Errorf("task of b %+v, want any revision, and alone", b)
	}
}

func TestARedeployedTask(t *testing.T) {
	const cause = `function "a" was redeployed while the request ran: no replica of revision 7 starts`
	t.Run("is tried on the new one while nothing was used", func(t *testing.T) {
		w := newWorld(t)
		// It was never placed, so it may run again although its stage is not idempotent.
		w.start(graph(t, "a?*"), "x", "y")
		w.redeployed(w.take("a"))
		w.okOf(w.take("a"), 8)
		w.okOf(w.take("a"), 8)
		w.output("a=x x")
	})
	t.Run("ends the request when something was", func(t *testing.T) {
		w := newWorld(t)
		w.start(graph(t, "a*"), "x", "y")
		w.okOf(w.take("a"), 7)
		w.redeployed(w.take("a"))
		w.failed(http.StatusServiceUnavailable, "a", cause)
		if e := w.end.Error; !e.Internal || e.RetryAfter != time.Second {
			t.Errorf("%+v, want the platform's fault, and to be tried again", e)
		}
	})
	t.Run("ends it for good when the stage may not run twice", func(t *testing.T) {
		w := newWorld(t)
		w.start(graph(t, "a?*"), "x", "y")
		w.okOf(w.take("a"), 7)
		w.redeployed(w.take("a"))
		w.failed(http.StatusBadGateway, "a", cause+`; stage "a", which is declared not idempotent, may have run`)
	})
	t.Run("is not tried for ever", func(t *testing.T) {
		w := newWorld(t)
		w.start(graph(t, "a*"), "x", "y")
		for range Attempts {
			w.redeployed(w.tasks[len(w.tasks)-1])
		}
		w.failed(http.StatusServiceUnavailable, "a", cause)
	})
	t.Run("answers of two revisions end the request", func(t *testing.T) {
		w := newWorld(t)
		w.start(graph(t, "a*"), "x", "y")
		w.okOf(w.take("a"), 7)
		w.okOf(w.take("a"), 8)
		w.failed(http.StatusServiceUnavailable, "a", "redeployed while the request ran: two of its calls were answered by different revisions")
	})
}
