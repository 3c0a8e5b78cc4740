package flow

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// randomGraph returns a graph of 1 to 7 stages. Some stages have one call per item. If wild is set,
// some joins wait for fewer than all parts, and some stages are not idempotent.
func randomGraph(t *testing.T, r *rand.Rand, wild bool) pipeline.Pipeline {
	n := 1 + r.IntN(7)
	next, prevs := make([][]string, n), make([]int, n)
	// every stage has an earlier predecessor, so there is one entry and no cycle.
	for i := 1; i < n; i++ {
		from := r.IntN(i)
		next[from] = append(next[from], fmt.Sprint("s", i))
		prevs[i]++
		if other := r.IntN(i); other != from && r.IntN(2) == 0 {
			next[other] = append(next[other], fmt.Sprint("s", i))
			prevs[i]++
		}
	}
	var parts []string
	for i := range n {
		name := fmt.Sprint("s", i)
		if wild && r.IntN(4) == 0 {
			name += "?"
		}
		if r.IntN(3) == 0 {
			name += "*"
		}
		if wild && prevs[i] > 0 && r.IntN(2) == 0 {
			name += fmt.Sprint("!", 1+r.IntN(prevs[i]))
		}
		parts = append(parts, name+">"+strings.Join(next[i], ","))
	}
	return graph(t, strings.Join(parts, ";"))
}

// TestRandomGraphsMatchDirectEvaluation runs random graphs with random replies, duplicates and
// losses, and compares the results with a direct evaluation.
func TestRandomGraphsMatchDirectEvaluation(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 7))
		g := randomGraph(t, r, false)
		w := newWorld(t)
		w.start(g, "i0", "i1", "i2")
		var answered []*task.Task
		for steps := 0; w.end == nil; steps++ {
			if steps > 100_000 || len(w.tasks) == 0 {
				t.Fatalf("seed %d: stuck with %d tasks", seed, len(w.tasks))
			}
			k := w.tasks[r.IntN(len(w.tasks))]
			switch {
			case r.IntN(10) == 0 && k.Attempt < Attempts:
				w.take0(k)
				w.lost(k)
			case r.IntN(10) == 0 && len(answered) > 0:
				w.ok(answered[r.IntN(len(answered))], "duplicate")
			default:
				w.take0(k)
				answered = append(answered, k)
				w.ok(k, run(k.Stage, k.Input)...)
			}
		}
		want := evaluate(g, []string{"i0", "i1", "i2"})
		w.output(want)
		if w.core.Requests() != 0 || len(w.core.deadlines) != 0 {
			t.Fatalf("seed %d: something is left", seed)
		}
	}
}

func (w *world) take0(k *task.Task) {
	w.tasks = slices.DeleteFunc(w.tasks, func(t *task.Task) bool { return t == k })
}

// run is what the stages of random graphs compute: as many items as the name's digit modulo 3, made
// from all input.
func run(stage string, in tensor.Input) []string {
	all := stage + "("
	for _, p := range in {
		all += p.From + ":" + show(p.Items) + ","
	}
	all += ")"
	h := 0
	for _, c := range all {
		h = (h*31 + int(c)) % 1009
	}
	out := make([]string, h%3)
	for i := range out {
		out[i] = fmt.Sprint(stage, "-", h, "-", i)
	}
	return out
}

func evaluate(g pipeline.Pipeline, input []string) string {
	outputs := map[string][]string{}
	var sinks []string
	for _, s := range g.Stages {
		in := tensor.Input{}
		if s.Name == g.Entry {
			in = append(in, tensor.Part{Items: texts(input...)})
		}
		for _, p := range s.Prev {
			in = append(in, tensor.Part{From: p, Items: texts(outputs[p]...)})
		}
		if s.Each {
			for _, p := range in {
				for k := range p.Items {
					outputs[s.Name] = append(outputs[s.Name], run(s.Name, tensor.Input{{From: p.From, Items: p.Items[k : k+1]}})...)
				}
			}
		} else {
			outputs[s.Name] = run(s.Name, in)
		}
		if len(s.Next) == 0 {
			sinks = append(sinks, s.Name)
		}
	}
	slices.Sort(sinks)
	for i, s := range sinks {
		sinks[i] = s + "=" + strings.Join(outputs[s], " ")
	}
	return strings.Join(sinks, ";")
}
