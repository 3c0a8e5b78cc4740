package flow

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// walk is one request in progress.
type walk struct {
	req       task.Request
	graph     pipeline.Pipeline
	name      string   // key of the pipeline as text; empty for a single function
	functions []string // key of each stage's function as text
	entry     int
	stages    []stage // parallel to graph.Stages
	calls     []call  // index: task id - 1
	sinksLeft int
	blobs     bool // some items are in the store
	heapIndex int  // in the heap of deadlines; -1: not in it
	due       time.Time
	unit      string   // of lengths; empty: none was measured
	remakes   *remakes // nil: no output stays on a node

	output  tensor.Input
	header  []task.Header
	timings []task.Timing
}

// stage is the progress of a request in one stage. It has one input per call: one per item, or one
// for all items.
type stage struct {
	need    int          // number of parts to wait for
	parts   tensor.Input // sorted by From, without duplicates
	started bool
	inputs  []tensor.Input
	results []tensor.Activation // by call
	input   [1]tensor.Input     // backs inputs and results if there is one call
	result  [1]tensor.Activation
	issued  int
	done    int
	passed  bool // its output has been passed on

	rest    time.Duration // expected work of the request from this stage on
	origins []origin      // parallel to parts; empty: all comes from the client, of unknown length
	outs    []origin      // of results; nil: no stage follows

	// Of each function that answered one of several calls, the revision that answered first. A pin
	// without a revision is the function that the client wants; see [wanted].
	pins []task.Pin
}

// call is one task and its attempts.
type call struct {
	id      uint32
	stage   int
	item    int
	attempt uint8 // number of the current attempt, from 1
	used    uint8 // attempts that count, see [Attempts]
	ends    uint8 // replicas that ended under it; after the first, the call runs alone
	alone   uint8 // part of ends: replicas that ended by themselves with only this call
	done    bool
	again   bool      // it was done, and makes lost items again
	sent    time.Time // when the current attempt was sent
	from    string    // producer of its input; see task.Task.Variant
	length  int       // of its input; 0: unknown
}

func newWalk(req task.Request, g pipeline.Pipeline, loads []task.Load) *walk {
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
	if w.due = req.Deadline; g.SLO > 0 {
		w.due = req.Arrived.Add(g.SLO)
	}
	for i := len(g.Stages) - 1; i >= 0; i-- { // edges lead to later stages
		for _, e := range g.Stages[i].Next {
			w.stages[i].rest = max(w.stages[i].rest, w.stages[w.index(e.To)].rest)
		}
		w.stages[i].rest = saturated(w.stages[i].rest + saturated(loads[i].Service))
	}
	return w
}

// deliver adds a part to a stage's input, in the order of From. It ignores duplicates and parts
// that come after the stage has started. o is nil for a request's input of unknown length.
func (w *walk) deliver(i int, from string, items tensor.Activation, o *origin) {
	s := &w.stages[i]
	at, twice := slices.BinarySearchFunc(s.parts, from, func(p tensor.Part, from string) int { return strings.Compare(p.From, from) })
	if s.started || twice {
		return
	}
	s.parts = insert(s.parts, at, tensor.Part{From: from, Items: items})
	if o != nil {
		s.origins = insert(s.origins, at, *o)
	}
}

// insert is slices.Insert for one element, with one allocation less for the first one.
func insert[T any](s []T, at int, v T) []T {
	if at == len(s) {
		return append(s, v)
	}
	return slices.Insert(s, at, v)
}

func byFrom(a, b tensor.Part) int { return strings.Compare(a.From, b.From) }

// begin splits a stage's input into calls.
func (w *walk) begin(i int) {
	s := &w.stages[i]
	s.started = true
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
	if len(w.graph.Stages[i].Next) > 0 {
		s.outs = make([]origin, len(s.inputs))
	}
}

// task returns the task for a call's current attempt.
func (w *walk) task(k *call) *task.Task {
	trace := w.req.Traceparent
	if w.req.Traced {
		trace = task.CallParent(trace, k.id, k.attempt)
	}
	pins, together := w.stages[k.stage].pins, len(w.stages[k.stage].inputs) > 1
	if k.again {
		pins, together = w.remakes.pins(k), false // the stage has left its replicas
		if only := w.only(k.stage); only != "" {
			pins = append(pins, task.Pin{Function: only})
		}
	}
	return &task.Task{
		Key:      task.Key{Request: w.req.ID, Task: k.id, Attempt: k.attempt},
		Function: w.functions[k.stage], Pipeline: w.name, Stage: w.graph.Stages[k.stage].Name,
		Deadline: w.req.Deadline, Traceparent: trace, Header: w.req.Header, Input: w.input(k),
		Pins: pins, Together: together,
		Last:   len(w.graph.Stages[k.stage].Next) == 0 && w.sinksLeft == 1 && len(w.stages[k.stage].inputs) == 1,
		Keep:   len(w.graph.Stages[k.stage].Next) > 0 && !w.measures(k),
		Alone:  k.ends > 0,
		Origin: task.Origin{App: w.req.Target, Weight: w.graph.Stages[w.entry].Weight, Arrived: w.req.Arrived, Due: w.due},
		Length: k.length, Variant: k.from, Place: task.Place{Rank: task.SlackRank(w.due, w.stages[k.stage].rest)},
	}
}

// only returns the function that the client wants for a stage; empty: any.
func (w *walk) only(stage int) string {
	t := task.Task{Pins: w.stages[stage].pins}
	return t.Only()
}

// strays reports whether a successful reply comes from another function than the client wants for
// the stage. Only a dispatcher of an earlier version sends tasks elsewhere.
func (w *walk) strays(k *call, r *task.Reply) bool {
	only := w.only(k.stage)
	return only != "" && only != w.answering(k, r)
}

// mixes reports whether a successful reply comes from another revision than earlier replies to
// calls of the same stage.
func (w *walk) mixes(k *call, r *task.Reply) bool {
	pinned := w.pinned(k, r)
	return r.Revision != 0 && pinned != 0 && r.Revision != pinned
}

// pinned returns the revision that earlier answers have fixed for the function of a reply; 0: none.
func (w *walk) pinned(k *call, r *task.Reply) uint64 {
	t := task.Task{Pins: w.stages[k.stage].pins}
	return t.Pinned(w.answering(k, r))
}

// answering returns the function whose replica gave a reply: the stage's own or a variant.
func (w *walk) answering(k *call, r *task.Reply) string {
	return cmp.Or(r.Variant, w.functions[k.stage])
}

// accept stores a successful reply. It returns the client's error if the output cannot be measured
// although it has to be.
func (w *walk) accept(k *call, r *task.Reply, outlines []tensor.Outline) *task.Error {
	s := &w.stages[k.stage]
	k.done = true
	if s.outs != nil {
		o, refused := w.produced(k, r, outlines)
		if refused != nil {
			return refused
		}
		s.outs[k.item] = o
	}
	s.done++
	s.results[k.item] = r.Output
	if len(s.inputs) > 1 && r.Revision != 0 && w.pinned(k, r) == 0 {
		// Tasks that were sent keep the earlier slice.
		s.pins = append(slices.Clip(s.pins), task.Pin{Function: w.answering(k, r), Revision: r.Revision})
	}
	w.blobs = w.blobs || hasRefs(r.Output)
	w.remember(k, r)
	if len(w.graph.Stages[k.stage].Next) == 0 {
		w.header = r.Header
	}
	return nil
}

// note records the timing of an attempt.
func (w *walk) note(now time.Time, k *call, r *task.Reply) {
	given := 0
	for _, p := range w.input(k) {
		given += len(p.Items)
	}
	w.timings = append(w.timings, task.Timing{
		Stage: w.graph.Stages[k.stage].Name, Function: w.functions[k.stage], Task: k.id, Attempt: k.attempt, Code: r.Code, Message: r.Message,
		Replica: r.Replica, Variant: r.Variant, Given: given, Returned: len(r.Output), Length: k.length, Batch: r.Batch, BatchSize: r.BatchSize, Start: k.sent, End: now, Wait: r.Wait, Service: r.Service,
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
	if len(st.Next) > 0 {
		o := s.merged(w.unit)
		for _, e := range st.Next {
			w.deliver(w.index(e.To), st.Name, out, &o)
		}
	}
	w.blobs = w.blobs || s.hasRefs()
	// Releases memory that is no longer needed and may be large.
	s.parts, s.inputs, s.results, s.issued, s.done = nil, nil, nil, 0, 0
	s.origins, s.outs = nil, nil
	s.input, s.result = [1]tensor.Input{}, [1]tensor.Activation{}
	return true
}

func (w *walk) index(name string) int {
	for i := range w.graph.Stages { // by index: stages are too large to copy
		if w.graph.Stages[i].Name == name {
			return i
		}
	}
	return -1
}

// unfinished returns the stages with outstanding calls, in the graph's order.
func (w *walk) unfinished() []string {
	var out []string
	for i := range w.stages {
		if s := &w.stages[i]; s.started && !s.passed {
			out = append(out, w.graph.Stages[i].Name)
		}
	}
	return out
}

// hasRefs reports whether some input of the stage is in the store, where the shell may have put it.
func (s *stage) hasRefs() bool {
	return slices.ContainsFunc(s.parts, func(p tensor.Part) bool { return hasRefs(p.Items) })
}

func hasRefs(a tensor.Activation) bool {
	return slices.ContainsFunc(a, func(it tensor.Item) bool { return it.Ref != nil })
}
