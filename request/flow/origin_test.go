package flow

import (
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// annotated sets annotations of stages of a graph. The keys are NAME.ANNOTATION.
func annotated(t testing.TB, g pipeline.Pipeline, annotations map[string]string) pipeline.Pipeline {
	t.Helper()
	g.Stages = slices.Clone(g.Stages)
	for i := range g.Stages {
		s := &g.Stages[i]
		a := map[string]string{}
		for key, v := range annotations {
			if name, ok := strings.CutPrefix(key, s.Name+"."); ok {
				a[pipeline.Prefix+name] = v
			}
		}
		f, err := pipeline.Parse(s.Name, "ns", nil, a)
		if err != nil {
			t.Fatal(err)
		}
		s.Length, s.MaxLength, s.Weight = f.Length, f.MaxLength, f.Weight
		if f.SLO > 0 {
			g.SLO = f.SLO
		}
	}
	return g
}

// by answers a task with items, as a replica of a variant would.
func (w *world) by(t *task.Task, variant string, items ...string) {
	w.t.Helper()
	w.step(Replied{&task.Reply{Key: t.Key, Replica: "r1", Variant: variant, Output: texts(items...)}})
}

func TestTasksNameTheirApplicationAndWhenTheyAreDue(t *testing.T) {
	deadline, arrived := t0.Add(time.Minute), t0.Add(-time.Second)
	for name, c := range map[string]struct {
		slo     string
		arrived time.Time
		due     time.Time
		want    time.Time // Arrived
	}{
		"by the objective, from the arrival": {"5s", arrived, arrived.Add(5 * time.Second), arrived},
		"by the deadline":                    {"", arrived, deadline, arrived},
		"an unknown arrival":                 {"5s", time.Time{}, t0.Add(5 * time.Second), t0},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			set := map[string]string{"a.weight": "7", "b.weight": "2"}
			if c.slo != "" {
				set["a.slo"] = c.slo
			}
			g := annotated(t, graph(t, "a>b,c;b>d;c>d;d"), set)
			service := map[string]time.Duration{"a": 100 * time.Millisecond, "b": 200 * time.Millisecond, "c": 400 * time.Millisecond, "d": 50 * time.Millisecond}
			loads := make([]task.Load, len(g.Stages))
			for i := range g.Stages {
				loads[i].Service = service[g.Stages[i].Name]
			}
			w.step(Start{Request: task.Request{ID: "r", Target: "p.ns", Arrived: c.arrived, Deadline: deadline, Input: texts("x")}, Graph: g, Loads: loads})
			check := func(k *task.Task, rest time.Duration) {
				t.Helper()
				if k.App != "p.ns" || k.Weight != 7 || !k.Arrived.Equal(c.want) || !k.Due.Equal(c.due) {
					t.Errorf("stage %s: app %q, weight %d, arrived %v, due %v; want p.ns, 7, %v, %v", k.Stage, k.App, k.Weight, k.Arrived, k.Due, c.want, c.due)
				}
				want := float64(c.due.Add(-rest).UnixNano()) / 1e9
				if math.Abs(k.Rank-want) > 1e-5 || !k.RankUntil.IsZero() {
					t.Errorf("stage %s: rank %f until %v, want %f for ever", k.Stage, k.Rank, k.RankUntil, want)
				}
			}
			a := w.take("a")
			check(a, 550*time.Millisecond) // by c, the longer way
			w.ok(a, "y")
			check(w.tasks[0], 250*time.Millisecond)
			b, other := w.take("b"), w.take("c")
			check(other, 450*time.Millisecond)
			w.lost(other)
			check(w.tasks[0], 450*time.Millisecond)
			w.ok(b, "y")
			w.ok(w.take("c"), "y")
			check(w.tasks[0], 50*time.Millisecond)
		})
	}
	if never := task.SlackRank(time.Time{}, 0); never < task.SlackRank(t0.Add(1e6*time.Hour), 0) {
		t.Errorf("a task that is never due has rank %f, want it last", never)
	}
}

func TestTasksNameTheProducerOfTheirInput(t *testing.T) {
	const big, small = "big.ns", "small.ns"
	w := newWorld(t)
	w.start(graph(t, "a>b,c;b*>d;c>d;d>e;e"), "x")
	a := w.take("a")
	if a.Variant != plan.FromClient {
		t.Errorf("entry: %q, want the client", a.Variant)
	}
	w.by(a, big, "1", "2")
	b1, b2, c := w.take("b"), w.take("b"), w.take("c")
	for _, k := range []*task.Task{b1, b2, c} {
		if k.Variant != big {
			t.Errorf("task of %s: %q, want %q", k.Stage, k.Variant, big)
		}
	}
	w.lost(b1)
	if b1 = w.take("b"); b1.Variant != big {
		t.Errorf("second attempt: %q, want %q", b1.Variant, big)
	}
	w.by(b1, small, "3")
	if got, want := w.core.where("r"), []Progress{{Stage: "b", Calls: 2, Done: 1, Attempt: 1, Variants: []string{small}}, {Stage: "c", Calls: 1, Attempt: 1}}; !reflect.DeepEqual(got, want) {
		t.Errorf("the request is in %+v, want %+v", got, want)
	}
	w.by(b2, big, "4")
	w.by(c, "", "5")
	d := w.take("d")
	if d.Variant != plan.FromJoin {
		t.Errorf("join: %q, want %q", d.Variant, plan.FromJoin)
	}
	w.by(d, "", "6")
	if e := w.take("e"); e.Variant != "d.ns" {
		t.Errorf("after a reply that names no variant: %q, want the stage's own function", e.Variant)
	}
}

func TestItemsOfAnEachKeepTheirProducer(t *testing.T) {
	w := newWorld(t)
	w.start(graph(t, "a*>b;b*>c;c"), "1", "2", "3")
	w.by(w.take("a"), "v0.ns", "p", "q")
	w.by(w.take("a"), "v1.ns", "r")
	w.by(w.take("a"), "v0.ns")
	want := map[string]string{"p": "v0.ns", "q": "v0.ns", "r": "v1.ns"}
	for range want {
		b := w.take("b")
		item := show(b.Input[0].Items)
		if b.Variant != want[item] {
			t.Errorf("item %s: %q, want %q", item, b.Variant, want[item])
		}
		w.by(b, "w"+b.Variant, item)
	}
	if c := w.take("c"); c.Variant != plan.FromJoin {
		t.Errorf("input of two variants: %q, want %q", c.Variant, plan.FromJoin)
	}
	w = newWorld(t)
	w.start(graph(t, "a*>b;b"), "1", "2")
	w.by(w.take("a"), "v0.ns", "p")
	w.by(w.take("a"), "v0.ns", "q")
	if b := w.take("b"); b.Variant != "v0.ns" {
		t.Errorf("input of one variant: %q, want it", b.Variant)
	}
}

// ids returns an item with a tensor input_ids of shape 1×n, and another tensor.
func ids(n int) tensor.Item {
	return tensor.Item{Tensors: []tensor.Tensor{{Name: "mask", Datatype: "UINT8", Shape: []int64{9}, Data: make([]byte, 9)}, {Name: "input_ids", Datatype: "UINT8", Shape: []int64{1, int64(n)}, Data: make([]byte, n)}}}
}

func TestLengthIsMeasuredOnceAndPassedOn(t *testing.T) {
	const tokens = "tensor:input_ids:1"
	text := tensor.Item{ContentType: "text/plain", Bytes: []byte("hello")}
	for name, c := range map[string]struct {
		graph  string
		set    map[string]string
		direct bool
		body   int64
		input  tensor.Activation
		output map[string]tensor.Activation // by stage; the default is one item of 100 bytes
		want   map[string][]int             // by stage, in the order of tasks
	}{
		"nothing to measure":                  {graph: "a>b;b", input: tensor.Activation{text}, want: map[string][]int{"a": {0}, "b": {0}}},
		"bytes of the request":                {graph: "a>b;b>c;c", set: map[string]string{"a.length": "bytes"}, input: tensor.Activation{text, text}, want: map[string][]int{"a": {10}, "b": {10}, "c": {10}}},
		"bytes of tensors":                    {graph: "a>b;b", set: map[string]string{"a.length": "bytes"}, input: tensor.Activation{ids(7)}, want: map[string][]int{"a": {16}, "b": {16}}},
		"bytes of each item":                  {graph: "a*>b;b", set: map[string]string{"a.length": "bytes"}, input: tensor.Activation{text, ids(1)}, want: map[string][]int{"a": {5, 10}, "b": {15}}},
		"items":                               {graph: "a>b;b", set: map[string]string{"a.length": "items"}, input: tensor.Activation{text, text, text}, want: map[string][]int{"a": {3}, "b": {3}}},
		"one item each":                       {graph: "a*>b;b*>c;c", set: map[string]string{"a.length": "items"}, input: tensor.Activation{text, text}, want: map[string][]int{"a": {1, 1}, "b": {1, 1}, "c": {2}}},
		"no bytes are the least length":       {graph: "a>b;b", set: map[string]string{"a.length": "bytes"}, input: tensor.Activation{{ContentType: "x/y"}}, want: map[string][]int{"a": {1}, "b": {1}}},
		"no items are the least length":       {graph: "a>b;b", set: map[string]string{"a.length": "items"}, input: nil, want: map[string][]int{"a": {1}, "b": {1}}},
		"a tensor of the request":             {graph: "a>b;b", set: map[string]string{"a.length": tokens, "a.max-length": "8"}, input: tensor.Activation{ids(7)}, want: map[string][]int{"a": {7}, "b": {7}}},
		"the longest of several items":        {graph: "a>b;b", set: map[string]string{"a.length": tokens}, input: tensor.Activation{ids(7), ids(30), ids(2)}, want: map[string][]int{"a": {30}, "b": {30}}},
		"a tensor of each item":               {graph: "a*>b;b*>c;c", set: map[string]string{"a.length": tokens}, input: tensor.Activation{ids(7), ids(30)}, want: map[string][]int{"a": {7, 30}, "b": {7, 30}, "c": {30}}},
		"the output of a tokenizer":           {graph: "a>b;b>c;c", set: map[string]string{"a.length": tokens}, input: tensor.Activation{text}, output: map[string]tensor.Activation{"a": {ids(12)}}, want: map[string][]int{"a": {0}, "b": {12}, "c": {12}}},
		"the output of a stage in the middle": {graph: "a>b;b>c;c>d;d", set: map[string]string{"b.length": "bytes"}, input: tensor.Activation{text}, want: map[string][]int{"a": {0}, "b": {0}, "c": {100}, "d": {100}}},
		"each item of an output":              {graph: "a>b;b*>c;c", set: map[string]string{"a.length": tokens}, input: tensor.Activation{text}, output: map[string]tensor.Activation{"a": {ids(3), ids(4)}}, want: map[string][]int{"a": {0}, "b": {3, 4}, "c": {4}}},
		"items of several calls":              {graph: "a*>b;b*>c;c", set: map[string]string{"a.length": tokens}, input: tensor.Activation{text, text}, output: map[string]tensor.Activation{"a": {ids(3), ids(4)}}, want: map[string][]int{"a": {0, 0}, "b": {3, 4, 3, 4}, "c": {4}}},
		"a second measure does not count":     {graph: "a>b;b>c;c", set: map[string]string{"a.length": "items", "b.length": "bytes"}, input: tensor.Activation{text}, want: map[string][]int{"a": {1}, "b": {1}, "c": {1}}},
		"a join has the longest part":         {graph: "a>b,c;b>d;c>d;d", set: map[string]string{"b.length": "bytes", "c.length": "items"}, input: tensor.Activation{text}, want: map[string][]int{"a": {0}, "b": {0}, "c": {0}, "d": {100}}},
		"nobody needs the output of a sink":   {graph: "a>b;b", set: map[string]string{"b.length": tokens}, input: tensor.Activation{text}, want: map[string][]int{"a": {0}, "b": {0}}},
		"the body of an HTTP request":         {graph: "a", set: map[string]string{"a.length": "bytes"}, direct: true, body: 1234, input: tensor.Activation{{}}, want: map[string][]int{"a": {1234}}},
		"an HTTP request is one item":         {graph: "a", set: map[string]string{"a.length": "items"}, direct: true, body: -1, input: tensor.Activation{{}}, want: map[string][]int{"a": {1}}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			g := annotated(t, graph(t, c.graph), c.set)
			w.step(Start{Request: task.Request{ID: "r", Target: "p.ns", Deadline: t0.Add(time.Minute), Direct: c.direct, Body: c.body, Input: c.input}, Graph: g, Loads: make([]task.Load, len(g.Stages))})
			got := map[string][]int{}
			for len(w.tasks) > 0 {
				k := w.take(w.tasks[0].Stage)
				got[k.Stage] = append(got[k.Stage], k.Length)
				out, given := c.output[k.Stage]
				if !given {
					out = tensor.Activation{{ContentType: "x/y", Bytes: make([]byte, 100)}}
				}
				w.step(Replied{&task.Reply{Key: k.Key, Replica: "r1", Output: out}})
			}
			if !maps.EqualFunc(got, c.want, slices.Equal) || w.end == nil || w.end.Error != nil {
				t.Errorf("lengths %v, want %v; end %+v", got, c.want, w.end)
			}
		})
	}
}

func TestWhatCannotBeMeasuredGets400(t *testing.T) {
	const tokens = "tensor:input_ids:1"
	text := tensor.Item{ContentType: "text/plain", Bytes: []byte("hello")}
	flat := tensor.Item{Tensors: []tensor.Tensor{{Name: "input_ids", Datatype: "UINT8", Shape: []int64{5}, Data: make([]byte, 5)}}}
	for name, c := range map[string]struct {
		graph  string
		set    map[string]string
		direct bool
		input  tensor.Item
		output *tensor.Item // of the entry; nil: the request is refused
		cause  string
	}{
		"a request": {
			"a",
			map[string]string{"a.length": tokens, "a.max-length": "8"},
			false, text, nil,
			`the length of its input: got item 0 with 5 bytes of type "text/plain", want tensor "input_ids" with a dimension 1 (annotation stagecoach.dev/length)`,
		},
		"too few dimensions": {"a", map[string]string{"a.length": tokens, "a.max-length": "8"}, false, flat, nil, `got item 0 with tensor "input_ids" of shape [5], want tensor "input_ids" with a dimension 1`},
		"an output":          {"a>b;b", map[string]string{"a.length": tokens}, false, text, &text, `the length of its output: got item 0 with 5 bytes of type "text/plain", want tensor`},
		"an output's shape":  {"a>b;b", map[string]string{"a.length": "tensor:mask:1"}, false, text, func() *tensor.Item { it := ids(4); return &it }(), `got item 0 with tensor "mask" of shape [9], tensor "input_ids" of shape [1 4], want tensor "mask" with a dimension 1`},
		"a chunked body":     {"a", map[string]string{"a.length": "bytes"}, true, tensor.Item{}, nil, "got a body without Content-Length, want bytes"},
		"an HTTP request":    {"a", map[string]string{"a.length": tokens, "a.max-length": "9"}, true, tensor.Item{}, nil, `got an HTTP request, want tensor "input_ids"`},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			g := annotated(t, graph(t, c.graph), c.set)
			w.step(Start{Request: task.Request{ID: "r", Target: "p.ns", Deadline: t0.Add(time.Minute), Direct: c.direct, Body: -1, Input: tensor.Activation{c.input}}, Graph: g, Loads: make([]task.Load, len(g.Stages))})
			if c.output != nil {
				w.step(Replied{&task.Reply{Key: w.take("a").Key, Replica: "r1", Output: tensor.Activation{*c.output}}})
			}
			w.failed(400, "a", c.cause)
			if len(w.tasks) > 0 || w.end.Error.Internal || w.core.Requests() != 0 {
				t.Errorf("%d tasks out, %+v", len(w.tasks), w.end.Error)
			}
		})
	}
}

// TestRandomGraphsKeepProducersAndLengths runs random graphs whose stages are answered by random
// variants. Each item says which variant made it and how long the input of that call was.
func TestRandomGraphsKeepProducersAndLengths(t *testing.T) {
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 11))
		g := randomGraph(t, r, true)
		if r.IntN(2) == 0 {
			g.Stages[0].Length = "bytes"
		}
		w := newWorld(t)
		w.start(g, "i0", "i1", "i22")
		calls := map[string]int{}
		for w.end == nil {
			k := w.tasks[r.IntN(len(w.tasks))]
			w.take0(k)
			if r.IntN(10) == 0 && k.Attempt < Attempts {
				w.step(Replied{&task.Reply{Key: k.Key, Code: task.ReplicaLost, Message: "killed"}})
				continue
			}
			if want, known := producerOf(g, k); known && k.Variant != want {
				t.Fatalf("seed %d: a task of %s for %v has producer %q, want %q", seed, k.Stage, k.Input, k.Variant, want)
			}
			if (k.Length > 0) != (g.Stages[0].Length != "") {
				t.Fatalf("seed %d: a task of %s has length %d", seed, k.Stage, k.Length)
			}
			if want, known := lengthOf(g, k); known && k.Length != want {
				t.Fatalf("seed %d: a task of %s for %v has length %d, want %d", seed, k.Stage, k.Input, k.Length, want)
			}
			calls[k.Stage]++
			variant := fmt.Sprintf("v%d.ns", r.IntN(3))
			var items []string
			for i := range r.IntN(3) {
				items = append(items, fmt.Sprintf("%d@%s@%d", i, variant, k.Length))
			}
			w.by(k, variant, items...)
		}
	}
}

// each reports whether a task is one of a stage with one call per item.
func each(g pipeline.Pipeline, k *task.Task) bool {
	return g.Stages[slices.IndexFunc(g.Stages, func(s pipeline.Stage) bool { return s.Name == k.Stage })].Each
}

// producerOf returns the producer that the items of a task name. known is false without items.
func producerOf(g pipeline.Pipeline, k *task.Task) (producer string, known bool) {
	if k.Stage == g.Entry {
		return plan.FromClient, true
	}
	if len(k.Input) > 1 {
		return plan.FromJoin, true
	}
	var all []string
	for _, it := range k.Input[0].Items {
		all = append(all, strings.Split(string(it.Bytes), "@")[1])
	}
	if len(all) == 0 {
		return "", false
	}
	if slices.ContainsFunc(all, func(v string) bool { return v != all[0] }) {
		return plan.FromJoin, true
	}
	// Another call may have been answered by another variant, without an item.
	return all[0], each(g, k)
}

// lengthOf returns the length that a task must have. known is false if its items do not say it.
func lengthOf(g pipeline.Pipeline, k *task.Task) (length int, known bool) {
	switch {
	case g.Stages[0].Length == "":
		return 0, true
	case k.Stage == g.Entry && each(g, k):
		return len(k.Input[0].Items[0].Bytes), true
	case k.Stage == g.Entry:
		return len("i0i1i22"), true
	case each(g, k):
		n, err := strconv.Atoi(strings.Split(string(k.Input[0].Items[0].Bytes), "@")[2])
		return n, err == nil
	}
	return 0, false
}
