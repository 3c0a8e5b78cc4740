package flow

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

var t0 = time.Unix(1_700_000_000, 0)

// graph parses stages with their successors, written as "a>b,c*;b>d;…". A star marks a stage with
// one call per item, "!N" a join of N parts, and "?" a stage that is not idempotent.
func graph(t testing.TB, text string) pipeline.Pipeline {
	t.Helper()
	var fns []pipeline.Function
	for part := range strings.SplitSeq(text, ";") {
		name, next, _ := strings.Cut(part, ">")
		a := map[string]string{pipeline.Prefix + "pipeline": "p"}
		if next != "" {
			a[pipeline.Prefix+"next"] = next
		}
		if n, join, ok := strings.Cut(name, "!"); ok {
			name, a[pipeline.Prefix+"join"] = n, join
		}
		if n, ok := strings.CutSuffix(name, "*"); ok {
			name, a[pipeline.Prefix+"each"] = n, "true"
		}
		if n, ok := strings.CutSuffix(name, "?"); ok {
			name, a[pipeline.Prefix+"idempotent"] = n, "false"
		}
		f, err := pipeline.Parse(name, "ns", nil, a)
		if err != nil {
			t.Fatal(err)
		}
		fns = append(fns, f)
	}
	ps := pipeline.Assemble(fns)
	if len(ps) != 1 || len(ps[0].Faults) > 0 {
		t.Fatalf("graph %q: %+v", text, ps)
	}
	return ps[0]
}

func texts(s ...string) tensor.Activation {
	a := make(tensor.Activation, len(s))
	for i := range s {
		a[i] = tensor.Item{ContentType: "text/plain", Bytes: []byte(s[i])}
	}
	return a
}

func show(a tensor.Activation) string {
	var s []string
	for _, it := range a {
		s = append(s, string(it.Bytes))
	}
	return strings.Join(s, " ")
}

// world drives a core by hand.
type world struct {
	t      *testing.T
	core   *Core
	now    time.Time
	tasks  []*task.Task // submitted and not answered by the test
	cancel []task.Key
	left   []string // functions that get no more tasks

	expected []string // functions without replicas that Expect named
	end      *Finish
}

func newWorld(t *testing.T) *world { return &world{t: t, core: NewCore(), now: t0} }

func (w *world) step(ev Event) {
	w.t.Helper()
	for _, e := range w.core.Step(w.now, ev) {
		switch e := e.(type) {
		case Submit:
			w.tasks = append(w.tasks, e.Task)
		case Expect:
			w.expected = append(w.expected, e.Function)
		case Cancel:
			w.cancel = append(w.cancel, e.Key)
		case Leave:
			w.left = append(w.left, e.Function)
		case Finish:
			if w.end != nil {
				w.t.Fatalf("a second end: %+v", e)
			}
			w.end = &e
		}
	}
}

func (w *world) start(g pipeline.Pipeline, items ...string) {
	w.t.Helper()
	r := task.Request{ID: "r", Target: g.Key().String(), Deadline: w.now.Add(time.Minute), Input: texts(items...)}
	w.step(Start{Request: r, Graph: g, Loads: make([]task.Load, len(g.Stages))})
}

// take removes and returns the oldest submitted task of a stage.
func (w *world) take(stage string) *task.Task {
	w.t.Helper()
	i := slices.IndexFunc(w.tasks, func(t *task.Task) bool { return t.Stage == stage })
	if i < 0 {
		w.t.Fatalf("no task of stage %q among %d", stage, len(w.tasks))
	}
	t := w.tasks[i]
	w.tasks = slices.Delete(w.tasks, i, i+1)
	return t
}

func (w *world) ok(t *task.Task, items ...string) {
	w.t.Helper()
	w.step(Replied{&task.Reply{Key: t.Key, Replica: "r1", Output: texts(items...)}})
}

func (w *world) lost(t *task.Task) {
	w.t.Helper()
	w.step(Replied{&task.Reply{Key: t.Key, Replica: "r1", Code: task.ReplicaLost, Message: "killed by SIGKILL"}})
}

func (w *world) output(want string) {
	w.t.Helper()
	if w.end == nil || w.end.Response == nil {
		w.t.Fatalf("the request has not ended well: %+v", w.end)
	}
	var got []string
	for _, p := range w.end.Response.Output {
		got = append(got, p.From+"="+show(p.Items))
	}
	if s := strings.Join(got, ";"); s != want {
		w.t.Errorf("output %q, want %q", s, want)
	}
}

func (w *world) failed(status int, stage, cause string) {
	w.t.Helper()
	if w.end == nil || w.end.Error == nil {
		w.t.Fatalf("the request has not failed: %+v", w.end)
	}
	if e := w.end.Error; e.Status != status || e.Stage != stage || !strings.Contains(e.Cause, cause) {
		w.t.Errorf("%d %q %q, want %d %q and %q", e.Status, e.Stage, e.Cause, status, stage, cause)
	}
	if w.core.Requests() != 0 {
		w.t.Errorf("%d requests left", w.core.Requests())
	}
}

func TestOutputOfAStageIsInputOfTheNext(t *testing.T) {
	w := newWorld(t)
	w.start(graph(t, "a>b;b"), "x")
	a := w.take("a")
	if a.Input[0].From != "" || show(a.Input[0].Items) != "x" || a.Function != "a.ns" || a.Pipeline != "p.ns" {
		t.Errorf("first task %+v", a)
	}
	w.ok(a, "y", "z")
	b := w.take("b")
	if b.Input[0].From != "a" || show(b.Input[0].Items) != "y z" {
		t.Errorf("second task's input %+v", b.Input)
	}
	w.ok(b, "end")
	w.output("b=end")
	if n := len(w.end.Response.Stages); n != 2 {
		t.Errorf("%d timings, want 2", n)
	}
}

func TestDiamondJoinsBySet(t *testing.T) {
	w := newWorld(t)
	w.start(graph(t, "a>b,c;b>d;c>d;d"), "x")
	w.ok(w.take("a"), "y")
	c := w.take("c")
	w.ok(c, "from-c")
	w.ok(c, "again") // a duplicate changes nothing
	if len(w.tasks) != 1 {
		t.Fatalf("d began with one of two parts: %+v", w.tasks)
	}
	w.ok(w.take("b"), "from-b")
	d := w.take("d")
	if want := (tensor.Input{{From: "b", Items: texts("from-b")}, {From: "c", Items: texts("from-c")}}); !reflect.DeepEqual(d.Input, want) {
		t.Errorf("joined input %+v", d.Input)
	}
	w.ok(d, "end")
	w.output("d=end")
}

func TestJoinOfOneGoesOnWithTheFirst(t *testing.T) {
	w := newWorld(t)
	w.start(graph(t, "a>b,c;b>d;c>d;d!1"), "x")
	w.ok(w.take("a"), "y")
	w.ok(w.take("c"), "first")
	w.ok(w.take("d"), "end")
	w.output("d=end")
	if b := w.take("b"); len(w.cancel) != 1 || w.cancel[0] != b.Key {
		t.Errorf("canceled %v, want the task of b %v", w.cancel, b.Key)
	}
}

func TestEachOfNoneOneAndMany(t *testing.T) {
	for _, n := range []int{0, 1, 1000} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			w := newWorld(t)
			w.start(graph(t, "a>b;b*>c;c"), "x")
			var items, want []string
			for i := range n {
				items = append(items, fmt.Sprint(i))
				want = append(want, fmt.Sprint("<", i, ">"))
			}
			w.ok(w.take("a"), items...)
			most := 0
			r := rand.New(rand.NewPCG(1, uint64(n)))
			for done := 0; done < n; done++ { // in any order
				most = max(most, len(w.tasks))
				b := w.tasks[r.IntN(len(w.tasks))]
				w.tasks = slices.DeleteFunc(w.tasks, func(t *task.Task) bool { return t == b })
				w.ok(b, "<"+show(b.Input[0].Items)+">")
			}
			if most > EachWindow {
				t.Errorf("%d calls out at a time, want at most %d", most, EachWindow)
			}
			c := w.take("c")
			if got := show(c.Input[0].Items); got != strings.Join(want, " ") {
				t.Errorf("joined %q", got)
			}
			w.ok(c, "end")
			w.output("c=end")
		})
	}
}

func TestSinksAreNamed(t *testing.T) {
	w := newWorld(t)
	w.start(graph(t, "a>b,c;b;c"), "x")
	w.ok(w.take("a"), "y")
	w.ok(w.take("c"), "1")
	w.ok(w.take("b"), "2")
	w.output("b=2;c=1")
}

func TestCallHasThreeAttemptsAfterLostReplicas(t *testing.T) {
	w := newWorld(t)
	w.start(graph(t, "a>b;b"), "x")
	w.ok(w.take("a"), "y")
	first := w.take("b")
	w.lost(first)
	second := w.take("b")
	if second.Attempt != 2 || second.Task != first.Task || show(second.Input[0].Items) != "y" {
		t.Errorf("second attempt %+v", second)
	}
	w.ok(first, "late") // the late answer of an attempt that was given up
	if w.end != nil {
		t.Fatal("an attempt given up has ended the request")
	}
	w.lost(second)
	w.lost(w.take("b"))
	w.failed(http.StatusBadGateway, "b", "attempt 3 of 3: killed by SIGKILL")
}

// A replica whose device is out of memory takes no more tasks. Its failed task is tried on others.
func TestCallHasThreeAttemptsAfterOutOfMemory(t *testing.T) {
	short := func(w *world, k *task.Task, replica string) {
		w.step(Replied{&task.Reply{Key: k.Key, Replica: replica, Code: task.OutOfMemory, Message: "device GPU-1: want 2 GiB, 1 GiB of 40 GiB free"}})
	}
	w := newWorld(t)
	w.start(graph(t, "a>b;b"), "x")
	w.ok(w.take("a"), "y")
	short(w, w.take("b"), "r1")
	if second := w.take("b"); second.Attempt != 2 || show(second.Input[0].Items) != "y" {
		t.Errorf("second attempt %+v", second)
	} else {
		w.ok(second, "z")
	}
	w.output("b=z")

	w = newWorld(t)
	w.start(graph(t, "a"), "x")
	for range Attempts {
		short(w, w.take("a"), "r1")
	}
	w.failed(http.StatusServiceUnavailable, "a", "out of memory in attempt 3 of 3: device GPU-1: want 2 GiB, 1 GiB of 40 GiB free; if that lasts, reserve what it takes with the annotation stagecoach.dev/gpu-memory")
	if e := w.end.Error; e.RetryAfter == 0 || !e.Internal {
		t.Errorf("%+v, want Retry-After and the platform's fault", e)
	}

	w = newWorld(t)
	w.start(graph(t, "a?"), "x")
	short(w, w.take("a"), "r1")
	w.failed(http.StatusBadGateway, "a", "declared not idempotent, may have run")
}

func TestNonIdempotentStageIsNotTriedAgain(t *testing.T) {
	w := newWorld(t)
	w.start(graph(t, "a?"), "x")
	a := w.take("a")
	// No replica had the task.
	w.step(Replied{&task.Reply{Key: a.Key, Code: task.ReplicaLost, Message: "gone before it got there"}})
	w.lost(w.take("a"))
	w.failed(http.StatusBadGateway, "a", "not idempotent")
}

func TestEndsOfTasksAreEndsOfRequests(t *testing.T) {
	for c, status := range map[task.Code]int{
		task.BadInput: 400, task.Failed: 500, task.Expired: 504, task.Overloaded: 429, task.Unavailable: 503, task.Code(99): 500,
	} {
		w := newWorld(t)
		w.start(graph(t, "a>b,c;b;c"), "x")
		w.ok(w.take("a"), "y")
		w.step(Replied{&task.Reply{Key: w.take("b").Key, Code: c, Message: "why"}})
		w.failed(status, "b", "why")
		if len(w.cancel) != 1 || w.cancel[0] != w.take("c").Key {
			t.Errorf("code %d: canceled %v, want the task of c alone", c, w.cancel)
		}
	}
}

// TestClientIsNotToldToRetryCallsThatMayHaveRun checks that a request does not get 429 or 503 if a
// stage that is not idempotent may have run. Clients and the journal retry after 429 and 503.
func TestClientIsNotToldToRetryCallsThatMayHaveRun(t *testing.T) {
	refused := func(w *world, name, replica string) {
		w.step(Replied{&task.Reply{Key: w.take(name).Key, Code: task.Unavailable, Replica: replica, Message: "why"}})
	}
	for name, tc := range map[string]struct {
		graph  string
		play   func(w *world)
		status int
		stage  string
		cause  string
	}{
		"never got to a replica": {"a?", func(w *world) { refused(w, "a", "") }, 503, "a", "why"},
		"got to one":             {"a?", func(w *world) { refused(w, "a", "r1") }, 502, "a", `why; stage "a", which is declared not idempotent, may have run`},
		"one before it has run":  {"a?>b;b", func(w *world) { w.ok(w.take("a"), "x"); refused(w, "b", "") }, 502, "b", `stage "a"`},
		"one beside it may have": {"a>b,c;b;c?", func(w *world) { w.ok(w.take("a"), "x"); refused(w, "b", "") }, 502, "b", `stage "c"`},
		"its siblings may have":  {"a?*", func(w *world) { refused(w, "a", "") }, 502, "a", `stage "a"`},
		"one after it has not":   {"a>b;b>c;c?", func(w *world) { w.ok(w.take("a"), "x"); refused(w, "b", "r1") }, 503, "b", "why"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.start(graph(t, tc.graph), "x", "y")
			tc.play(w)
			w.failed(tc.status, tc.stage, tc.cause)
			if e := w.end.Error; (e.RetryAfter > 0) != (tc.status == http.StatusServiceUnavailable) || !e.Internal {
				t.Errorf("%+v, want Retry-After with 503 alone, and the platform's fault", e)
			}
		})
	}
}

func TestDeadlineAndCancelEndARequestInEveryPhase(t *testing.T) {
	for phase := range 3 {
		for _, byClient := range []bool{true, false} {
			w := newWorld(t)
			w.start(graph(t, "a>b;b*>c;c"), "x")
			if phase > 0 {
				w.ok(w.take("a"), "1", "2")
			}
			if phase > 1 {
				w.ok(w.take("b"), "1")
				w.ok(w.take("b"), "2")
			}
			out := len(w.tasks)
			if byClient {
				w.step(Canceled{"r"})
				w.failed(statusClientClosed, "", "client")
			} else {
				if at, ok := w.core.Next(); !ok || !at.Equal(t0.Add(time.Minute)) {
					t.Fatalf("next tick %v %v, want the deadline", at, ok)
				}
				w.now = t0.Add(time.Minute)
				w.step(Tick{})
				w.failed(http.StatusGatewayTimeout, []string{"a", "b", "c"}[phase], "deadline passed")
			}
			if len(w.cancel) != out {
				t.Errorf("phase %d: %d tasks canceled, %d were out", phase, len(w.cancel), out)
			}
		}
	}
}

func TestNoRetryAfterTheDeadline(t *testing.T) {
	w := newWorld(t)
	w.start(graph(t, "a"), "x")
	w.now = t0.Add(time.Minute)
	w.lost(w.take("a"))
	w.failed(http.StatusBadGateway, "a", "attempt 1 of 3")
}

func BenchmarkOneStage(b *testing.B) {
	g := graph(b, "a")
	c := NewCore()
	loads := make([]task.Load, 1)
	r := task.Request{ID: "r", Target: "p.ns", Deadline: t0.Add(time.Minute), Input: texts("x")}
	b.ReportAllocs()
	for b.Loop() {
		out := c.Step(t0, Start{Request: r, Graph: g, Loads: loads})
		k := out[0].(Submit).Task.Key
		c.Step(t0, Replied{&task.Reply{Key: k, Output: r.Input}})
	}
}
