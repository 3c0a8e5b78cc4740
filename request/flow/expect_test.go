package flow

import (
	"maps"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
)

// TestBeginningRequestExpectsSleepingStages checks that functions of later stages without replicas
// are told at once, and that each later stage is expected until its own calls are submitted.
func TestBeginningRequestExpectsSleepingStages(t *testing.T) {
	g := graph(t, "a>b,c;b>d;c>d;d")
	w := newWorld(t)
	loads := []task.Load{{}, {}, {Servers: 2}, {}} // stages a, b, c, d: only c has a replica
	w.step(Start{Request: task.Request{ID: "r", Target: g.Key().String(), Deadline: w.now.Add(time.Minute), Input: texts("x")}, Graph: g, Loads: loads})
	if want := []string{"b.ns", "d.ns"}; !slices.Equal(w.expected, want) {
		t.Errorf("told %v, want %v: a has its task, and c has a replica", w.expected, want)
	}
	w.expects(map[string]int{"b.ns": 1, "c.ns": 1, "d.ns": 1})
	w.ok(w.take("a"), "x")
	w.expects(map[string]int{"d.ns": 1})
	w.ok(w.take("b"), "x")
	w.expects(map[string]int{"d.ns": 1}) // d waits for c as well
	w.ok(w.take("c"), "x")
	w.expects(map[string]int{})
	w.ok(w.take("d"), "x")
	w.expects(map[string]int{})
	if len(w.expected) != 2 {
		t.Errorf("told %v, want nothing after the start", w.expected)
	}
}

// TestEndedRequestsExpectNothing checks that a failed or expired request's later stages are no
// longer expected.
func TestEndedRequestsExpectNothing(t *testing.T) {
	g := graph(t, "a>b;b*>c;c")
	for name, end := range map[string]func(w *world){
		"failed": func(w *world) {
			w.step(Replied{&task.Reply{Key: w.take("a").Key, Code: task.Failed, Message: "broken"}})
			w.failed(http.StatusInternalServerError, "a", "broken")
		},
		"canceled": func(w *world) { w.step(Canceled{"r"}) },
		"late":     func(w *world) { w.now = w.now.Add(time.Hour); w.step(Tick{}) },
		"no items": func(w *world) { // b has no call, and c none that waits for b
			w.ok(w.take("a"))
			w.take("c")
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.start(g, "x")
			w.expects(map[string]int{"b.ns": 1, "c.ns": 1})
			end(w)
			w.expects(map[string]int{})
		})
	}
}

func (w *world) expects(want map[string]int) {
	w.t.Helper()
	got := map[string]int{}
	if w.core.Expected(got); !maps.Equal(got, want) {
		w.t.Errorf("expected %v, want %v", got, want)
	}
}

// TestTheLastTaskIsMarked checks that Last is set only on a task whose output is the whole
// response.
func TestTheLastTaskIsMarked(t *testing.T) {
	for text, want := range map[string]string{
		"a": "a", "a>b;b": "b", "a>b;b*": "", // calls of b wait for one another
		"a>b,c;b;c": "", // the answers of b and c wait for each other
	} {
		w := newWorld(t)
		w.start(graph(t, text), "x", "y")
		got := ""
		for len(w.tasks) > 0 {
			x := w.take(w.tasks[0].Stage)
			if x.Last {
				got += x.Stage
			}
			w.ok(x, "x", "y")
		}
		if got != want {
			t.Errorf("%s: last is %q, want %q", text, got, want)
		}
	}
}

// TestCoordinatorCountsExpectedRequests checks that later stages expect a request whose first stage
// has not answered.
func TestCoordinatorCountsExpectedRequests(t *testing.T) {
	r := newRig(t, graph(t, "a>b;b>c;c"), nil, func(x *task.Task) *task.Reply { return echo(x) })
	near := &neighbour{c: r.Coordinator, owns: "a", asked: make(chan string, 10), expected: make(chan string, 10)}
	r.cfg.Near = near // set before the first request
	done := make(chan *task.Error, 1)
	go func() { _, terr := r.Invoke(t.Context(), request("r", "never")); done <- terr }()
	<-near.asked
	for _, want := range []string{"b.ns", "c.ns"} {
		select {
		case got := <-near.expected:
			if got != want {
				t.Errorf("the neighbour was told of %s, want %s", got, want)
			}
		case <-time.After(time.Minute):
			t.Fatalf("the neighbour was told nothing, want %s", want)
		}
	}
	if got, want := r.Expected(), map[string]int{"b.ns": 1, "c.ns": 1}; !maps.Equal(got, want) {
		t.Errorf("expected %v, want %v", got, want)
	}
	r.replied(&task.Reply{Key: task.Key{Request: r.only(t), Task: 1, Attempt: 1}, Output: texts("x")})
	if terr := <-done; terr != nil {
		t.Error(terr)
	}
	if got := r.Expected(); len(got) > 0 {
		t.Errorf("expected %v after the end, want nothing", got)
	}
	r.close()
}

// only returns the id of the only request in flight.
func (r *rig) only(t *testing.T) (id string) {
	t.Helper()
	for _, s := range r.shards {
		s.mu.Lock()
		for run := range s.waiting {
			id = run
		}
		s.mu.Unlock()
	}
	return id
}
