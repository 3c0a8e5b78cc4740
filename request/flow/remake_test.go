package flow

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// onNode is an item that node n keeps.
func onNode(blob string) tensor.Item {
	return tensor.Item{Ref: &tensor.Ref{Owner: "r", Blob: blob, Size: 1 << 20, Keeper: tensor.Keeper{Node: "n"}}}
}

// keeps answers a task with items that a node keeps.
func (w *world) keeps(t *task.Task, blobs ...string) {
	w.t.Helper()
	r := &task.Reply{Key: t.Key, Replica: "r1", Revision: 7}
	for _, b := range blobs {
		r.Output = append(r.Output, onNode(b))
	}
	w.step(Replied{r})
}

func (w *world) inputLost(t *task.Task, blobs ...string) {
	w.t.Helper()
	w.step(Replied{&task.Reply{Key: t.Key, Replica: "r2", Code: task.InputLost, Message: "item x is lost: node n is gone", Lost: blobs}})
}

// blobs shows the input of a task.
func blobs(in tensor.Input) string {
	var out []string
	for _, p := range in {
		for _, it := range p.Items {
			if it.Ref != nil {
				out = append(out, it.Ref.Blob)
			} else {
				out = append(out, string(it.Bytes))
			}
		}
	}
	return strings.Join(out, " ")
}

// TestWhatMayStayOnNodes checks which tasks say that their outputs may stay on a node: those whose
// outputs other stages get, and nobody has to look at.
func TestWhatMayStayOnNodes(t *testing.T) {
	w := newWorld(t)
	g := graph(t, "a>b;b>c;c")
	g.Stages[1].Length = "bytes"
	w.start(g, "x")
	for _, tc := range []struct {
		stage string
		keep  bool
	}{{"a", true}, {"b", false}, {"c", false}} {
		k := w.take(tc.stage)
		if k.Keep != tc.keep {
			t.Errorf("stage %s: %v, want %v", tc.stage, k.Keep, tc.keep)
		}
		w.ok(k, "y")
	}
}

// TestLostItemsAreMadeAgain checks that the stage which made a lost item runs again, on the same
// revision, and that the stage that needs it gets the new one.
func TestLostItemsAreMadeAgain(t *testing.T) {
	w := newWorld(t)
	w.start(graph(t, "a>b;b"), "x")
	first := w.take("a")
	w.keeps(first, "i1", "i2")
	b := w.take("b")
	w.inputLost(b, "i2")
	w.inputLost(b, "i2") // a duplicate
	again := w.take("a")
	if again.Key != (task.Key{Request: "r", Task: first.Task, Attempt: 2}) || blobs(again.Input) != "x" || again.Together ||
		!reflect.DeepEqual(again.Pins, []task.Pin{{Function: "a.ns", Revision: 7}}) {
		t.Errorf("again: %+v", again)
	}
	if len(w.tasks) != 0 {
		t.Fatalf("%d more tasks before the item is there", len(w.tasks))
	}
	w.lost(again) // as any task
	again = w.take("a")
	w.keeps(again, "j1", "j2")
	b2 := w.take("b")
	if b2.Task != b.Task || b2.Attempt != 2 || blobs(b2.Input) != "j1 j2" || blobs(b.Input) != "i1 i2" {
		t.Errorf("then: %+v", b2)
	}
	w.ok(b2, "end")
	w.output("b=end")
	if n := len(w.end.Response.Stages); n != 5 || !w.end.Blobs {
		t.Errorf("%d timings, want 5; blobs %v", n, w.end.Blobs)
	}
}

// TestLostItemsOfSeveralStages loses items of a chain, of a join and of calls per item.
func TestLostItemsOfSeveralStages(t *testing.T) {
	t.Run("a chain", func(t *testing.T) {
		w := newWorld(t)
		w.start(graph(t, "a>b;b>c;c"), "x")
		w.keeps(w.take("a"), "a1")
		w.keeps(w.take("b"), "b1")
		w.inputLost(w.take("c"), "b1")
		w.inputLost(w.take("b"), "a1") // the node had both
		w.keeps(w.take("a"), "a2")
		b := w.take("b")
		if blobs(b.Input) != "a2" || b.Attempt != 3 {
			t.Errorf("b: %+v", b)
		}
		w.keeps(b, "b2")
		w.ok(w.take("c"), "end")
		w.output("c=end")
	})
	t.Run("two consumers", func(t *testing.T) {
		w := newWorld(t)
		w.start(graph(t, "a>b,c;b>d;c>d;d"), "x")
		w.keeps(w.take("a"), "a1")
		b, c := w.take("b"), w.take("c")
		w.inputLost(b, "a1")
		w.inputLost(c, "a1")
		w.keeps(w.take("a"), "a2")
		if len(w.tasks) != 2 {
			t.Fatalf("%d tasks, want both consumers, and one run of a", len(w.tasks))
		}
		w.keeps(w.take("b"), "b1")
		w.keeps(w.take("c"), "c1")
		d := w.take("d")
		w.inputLost(d, "b1", "c1")
		w.keeps(w.take("b"), "b2")
		if len(w.tasks) != 1 {
			t.Fatalf("%d tasks, want c alone: d waits for both", len(w.tasks))
		}
		w.keeps(w.take("c"), "c2")
		if d = w.take("d"); blobs(d.Input) != "b2 c2" {
			t.Errorf("d gets %s", blobs(d.Input))
		}
		w.ok(d, "end")
		w.output("d=end")
	})
	t.Run("calls per item", func(t *testing.T) {
		w := newWorld(t)
		w.start(graph(t, "a>b;b*"), "x")
		w.keeps(w.take("a"), "i1", "i2")
		b1, b2 := w.take("b"), w.take("b")
		w.ok(b1, "one")
		w.inputLost(b2, "i2")
		w.keeps(w.take("a"), "j1", "j2")
		b2 = w.take("b")
		if blobs(b2.Input) != "j2" {
			t.Errorf("b gets %s", blobs(b2.Input))
		}
		w.ok(b2, "two")
		w.output("b=one two")
	})
	t.Run("an item that was made again for another call", func(t *testing.T) {
		w := newWorld(t)
		w.start(graph(t, "a>b,c;b;c"), "x")
		w.keeps(w.take("a"), "a1")
		w.inputLost(w.take("b"), "a1")
		w.keeps(w.take("a"), "a2")
		w.inputLost(w.take("c"), "a1") // it was sent before
		c := w.take("c")
		if blobs(c.Input) != "a2" || len(w.tasks) != 1 {
			t.Errorf("c gets %s, %d tasks are left, want that of b", blobs(c.Input), len(w.tasks))
		}
	})
}

// TestLostItemsThatCannotBeMadeAgain checks when a lost item ends its request.
func TestLostItemsThatCannotBeMadeAgain(t *testing.T) {
	for name, tc := range map[string]struct {
		graph string
		play  func(w *world)
		stage string
		want  string
	}{
		"not idempotent": {"a?>b;b", func(w *world) {
			w.keeps(w.take("a"), "i")
			w.inputLost(w.take("b"), "i")
		}, "b", `item x is lost: node n is gone; not tried again: stage "a", which has made it, is declared not idempotent`},
		"the third time": {"a>b;b", func(w *world) {
			w.keeps(w.take("a"), "i")
			w.inputLost(w.take("b"), "i")
			w.keeps(w.take("a"), "j")
			w.inputLost(w.take("b"), "j")
			w.keeps(w.take("a"), "k")
			w.inputLost(w.take("b"), "k")
		}, "b", `not tried again: `},
		"another number of items": {"a>b;b", func(w *world) {
			w.keeps(w.take("a"), "i")
			w.inputLost(w.take("b"), "i")
			w.keeps(w.take("a"), "j", "k")
		}, "a", "it has made 2 items again, of 1"},
		"of nobody": {"a>b;b", func(w *world) {
			w.ok(w.take("a"), "i")
			w.inputLost(w.take("b"), "i")
		}, "b", "no stage is known that has made it"},
		"the replicas of its maker end": {"a>b;b", func(w *world) {
			w.keeps(w.take("a"), "i")
			w.inputLost(w.take("b"), "i")
			w.lost(w.take("a"))
			w.lost(w.take("a"))
		}, "a", "lost its replica"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.start(graph(t, tc.graph), "x")
			tc.play(w)
			w.failed(http.StatusBadGateway, tc.stage, tc.want)
		})
	}
	w := newWorld(t)
	w.start(graph(t, "a>b;b"), "x")
	w.keeps(w.take("a"), "i")
	w.inputLost(w.take("b"), "i")
	w.step(Replied{&task.Reply{Key: w.take("a").Key, Code: task.Redeployed, Message: "revision 7 is gone"}})
	w.failed(http.StatusServiceUnavailable, "a", "was redeployed while the request ran")
}

// TestRandomLosses runs random graphs whose items are on nodes, and loses some of them. Each
// request ends with the output that it has without losses.
func TestRandomLosses(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 8))
		g := randomGraph(t, r, false)
		contents := map[string]string{} // by blob
		text := func(a tensor.Activation) (out []string) {
			for _, it := range a {
				if it.Ref != nil {
					out = append(out, contents[it.Ref.Blob])
				} else {
					out = append(out, string(it.Bytes))
				}
			}
			return out
		}
		w, losses := newWorld(t), 0
		w.start(g, "i0", "i1", "i2")
		for steps := 0; w.end == nil; steps++ {
			if steps > 100_000 || len(w.tasks) == 0 {
				t.Fatalf("seed %d: stuck with %d tasks", seed, len(w.tasks))
			}
			k := w.tasks[r.IntN(len(w.tasks))]
			w.take0(k)
			in := make(tensor.Input, len(k.Input))
			var refs []string
			for i, p := range k.Input {
				in[i] = tensor.Part{From: p.From, Items: texts(text(p.Items)...)}
				for _, it := range p.Items {
					if it.Ref != nil && r.IntN(2) == 0 && !slices.Contains(refs, it.Ref.Blob) {
						refs = append(refs, it.Ref.Blob)
					}
				}
			}
			if len(refs) > 0 && losses < 2 && r.IntN(4) == 0 {
				losses++
				w.inputLost(k, refs...)
				continue
			}
			var out tensor.Activation
			for _, s := range run(k.Stage, in) {
				if !k.Keep || r.IntN(3) == 0 {
					out = append(out, texts(s)...)
					continue
				}
				blob := fmt.Sprint("b", len(contents))
				contents[blob] = s
				out = append(out, onNode(blob))
			}
			w.step(Replied{&task.Reply{Key: k.Key, Replica: "r1", Revision: 1, Output: out}})
		}
		w.output(evaluate(g, []string{"i0", "i1", "i2"}))
		if w.core.Requests() != 0 || len(w.core.deadlines) != 0 {
			t.Fatalf("seed %d: something is left", seed)
		}
	}
}

// TestCallsBesideALostItemRunAgain checks that a call which no replica got, because another call of
// its batch had lost an item, runs again. That holds for stages that are not idempotent too, and
// does not count as an attempt.
func TestCallsBesideALostItemRunAgain(t *testing.T) {
	w := newWorld(t)
	g := graph(t, "a")
	g.Stages[0].Idempotent = false
	w.start(g, "x")
	for range Attempts + 1 {
		k := w.take("a")
		w.inputLost(k)
		w.inputLost(k) // a duplicate
	}
	w.ok(w.take("a"), "end")
	w.output("a=end")
}

// TestCallsBesideLostItemsEnd checks that a call which no replica ever gets fails in the end.
func TestCallsBesideLostItemsEnd(t *testing.T) {
	w := newWorld(t)
	w.start(graph(t, "a"), "x")
	for range mostAttempts {
		w.inputLost(w.take("a"))
	}
	w.failed(http.StatusBadGateway, "a", "item x is lost")
}
