package flow

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// walk is one request on its way.
type walk struct {
	req       task.Request
	graph     pipeline.Pipeline
	name      string   // pipeline.Key of the pipeline; empty for a function alone
	functions []string // pipeline.Key of each stage's function
	entry     int
	stages    []stage // beside graph.Stages
	calls     []call  // by id-1
	sinksLeft int
	blobs     bool // some item lies in the store
	heapIndex int  // in the heap of deadlines; -1: not there

	output  tensor.Input
	header  []task.Header
	timings []task.Timing
}

// stage is where a request is in one stage. It has one input a call: one for each item, or one for all.
type stage struct {
	need    int          // parts that it waits for
	parts   tensor.Input // a set by From
	started bool
	inputs  []tensor.Input
	results []tensor.Activation // by call
	input   [1]tensor.Input     // memory of inputs and of results, when there is one call
	result  [1]tensor.Activation
	issued  int
	done    int
	passed  bool // its output has gone on

	revision uint64 // of the function, of the first of several calls that was answered well; 0: none was, or nobody knows
}

// call is one task and its attempts.
type call struct {
	id      uint32
	stage   int
	item    int
	attempt uint8 // number of the current attempt, from 1
	used    uint8 // attempts that count, see [Attempts]
	ends    uint8 // replicas that ended under it; after the first, it runs alone
	alone   uint8 // those of ends that ended by themselves and had only this call
	done    bool
	sent    time.Time // the present attempt
}

func newWalk(req task.Request, g pipeline.Pipeline) *walk {
	w := &walk{
		req: req, graph: g, stages: make([]stage, len(g.Stages)), functions: make([]string, len(g.Stages)),
		heapIndex: -1, blobs: hasRefs(req.Input), calls: make([]call, 0, len(g.Stages)), timings: make([]task.Timing, 0, len(g.Stages)),
	}
	if len(g.Stages) > 1 || g.Name != g.Entry {
		w.name = g.Key().String()
	}
	for i := range g.Stages {
		s := &g.Stages[i]
		if w.functions[i] = req.Target; w.name != "" {
			w.functions[i] = s.Key().String()
		}
		w.stages[i].need = needed(s)
		if s.Name == g.Entry {
			w.entry = i
		}
		if len(s.Next) == 0 {
			w.sinksLeft++
		}
	}
	return w
}

// deliver adds a part to a stage's input. A part that is there already, or comes after the stage has begun, changes nothing.
func (w *walk) deliver(i int, from string, items tensor.Activation) {
	s := &w.stages[i]
	if s.started || slices.ContainsFunc(s.parts, func(p tensor.Part) bool { return p.From == from }) {
		return
	}
	s.parts = append(s.parts, tensor.Part{From: from, Items: items})
}

func byFrom(a, b tensor.Part) int { return strings.Compare(a.From, b.From) }

// begin splits a stage's input into calls.
func (w *walk) begin(i int) {
	s := &w.stages[i]
	s.started = true
	slices.SortFunc(s.parts, byFrom)
	if !w.graph.Stages[i].Each {
		s.inputs = append(s.input[:0], s.parts)
	} else {
		for _, p := range s.parts {
			for k := range p.Items {
				s.inputs = append(s.inputs, tensor.Input{{From: p.From, Items: p.Items[k : k+1 : k+1]}})
			}
		}
	}
	if s.results = s.result[:]; len(s.inputs) != 1 {
		s.results = make([]tensor.Activation, len(s.inputs))
	}
}

// task makes the task of a call's present attempt.
func (w *walk) task(k *call) *task.Task {
	trace := w.req.Traceparent
	if w.req.Traced {
		trace = task.CallParent(trace, k.id, k.attempt)
	}
	return &task.Task{
		Key:      task.Key{Request: w.req.ID, Task: k.id, Attempt: k.attempt},
		Function: w.functions[k.stage], Pipeline: w.name, Stage: w.graph.Stages[k.stage].Name,
		Deadline: w.req.Deadline, Traceparent: trace, Header: w.req.Header, Input: w.stages[k.stage].inputs[k.item],
		Revision: w.stages[k.stage].revision, Together: len(w.stages[k.stage].inputs) > 1,
		Last:  len(w.graph.Stages[k.stage].Next) == 0 && w.sinksLeft == 1 && len(w.stages[k.stage].inputs) == 1,
		Alone: k.ends > 0,
	}
}

// mixes says whether a good reply comes from another revision of its function than those before it in the same stage.
func (w *walk) mixes(k *call, r *task.Reply) bool {
	s := &w.stages[k.stage]
	return r.Revision != 0 && s.revision != 0 && r.Revision != s.revision
}

// accept takes a good reply.
func (w *walk) accept(k *call, r *task.Reply) {
	s := &w.stages[k.stage]
	k.done = true
	s.done++
	s.results[k.item] = r.Output
	if len(s.inputs) > 1 {
		s.revision = cmp.Or(s.revision, r.Revision)
	}
	w.blobs = w.blobs || hasRefs(r.Output)
	if len(w.graph.Stages[k.stage].Next) == 0 {
		w.header = r.Header
	}
}

// note writes down what an attempt of a call cost.
func (w *walk) note(now time.Time, k *call, r *task.Reply) {
	w.timings = append(w.timings, task.Timing{
		Stage: w.graph.Stages[k.stage].Name, Function: w.functions[k.stage], Task: k.id, Attempt: k.attempt, Code: r.Code, Message: r.Message,
		Replica: r.Replica, Batch: r.Batch, BatchSize: r.BatchSize, Start: k.sent, End: now, Wait: r.Wait, Service: r.Service,
	})
}

// complete passes a stage's output on once all its calls are done. It reports whether it did so in
// this call.
func (w *walk) complete(i int) bool {
	s := &w.stages[i]
	if !s.started || s.passed || s.done < len(s.inputs) {
		return false
	}
	s.passed = true
	var out tensor.Activation
	if len(s.results) == 1 {
		out = s.results[0]
	} else {
		out = slices.Concat(s.results...)
	}
	st := &w.graph.Stages[i]
	if len(st.Next) == 0 {
		w.output = append(w.output, tensor.Part{From: st.Name, Items: out})
		w.sinksLeft--
	}
	for _, e := range st.Next {
		w.deliver(w.index(e.To), st.Name, out)
	}
	w.blobs = w.blobs || s.hasRefs()
	s.parts, s.inputs, s.results, s.issued, s.done = nil, nil, nil, 0, 0 // what is not needed any more may be large
	s.input, s.result = [1]tensor.Input{}, [1]tensor.Activation{}
	return true
}

func (w *walk) index(name string) int {
	for i := range w.graph.Stages { // which are large: none is copied
		if w.graph.Stages[i].Name == name {
			return i
		}
	}
	return -1
}

// unfinished names the stages that have calls out, in the graph's order.
func (w *walk) unfinished() []string {
	var out []string
	for i := range w.stages {
		if s := &w.stages[i]; s.started && !s.passed {
			out = append(out, w.graph.Stages[i].Name)
		}
	}
	return out
}

// hasRefs says whether some of the stage's input lies in the store: the shell may have put it there.
func (s *stage) hasRefs() bool {
	return slices.ContainsFunc(s.parts, func(p tensor.Part) bool { return hasRefs(p.Items) })
}

func hasRefs(a tensor.Activation) bool {
	return slices.ContainsFunc(a, func(it tensor.Item) bool { return it.Ref != nil })
}
