package sim

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
	"github.com/stagecoach-serving/stagecoach/bench/load/arrivals"
	"github.com/stagecoach-serving/stagecoach/demand"
	"github.com/stagecoach-serving/stagecoach/request/dispatch"
	"github.com/stagecoach-serving/stagecoach/request/flow"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// world is the state of one run: one policy on one seed.
type world struct {
	m      *Model
	set    policy.Set
	seed   uint64
	events events
	now    int64     // ns since the run began
	clock  time.Time // now, as cores and policies see it
	end    int64     // end of the arrivals
	hop    int64
	flying int // requests that have begun and not ended

	coordinators []*coordinator
	lines        []*line // parallel to the model's functions
	byKey        map[string]*line
	nodes        []*node
	control      control
	rec          *recorder
	popped       uint64
	started      int // replicas started so far

	pcg   *rand.PCG
	rand  *rand.Rand
	spare []*task.Reply // to be reused
	idle  []*running    // to be reused
}

// epoch is when virtual time begins.
var epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// coordinator holds the flow core of one pipeline.
type coordinator struct {
	*pipe
	i      int
	core   *flow.Core
	source arrivals.Source
	number uint64 // of the latest request
	armed  int64  // time of its next wake; 0: none
	loads  []task.Load
	inbox  string // i in digits

	outlines []tensor.Outline // of the latest request
}

// owner is the dispatcher of one stage. It has a line for each function that can serve the stage.
type owner struct {
	core   *dispatch.Core
	own    *line // of the stage's own function
	lines  []*line
	byName map[string]*replica
	armed  int64 // time of its next wake; 0: none
	// duration of the latest start in any lane; 0: none
	started time.Duration
	table   uint64 // version of its routing table
	rank    string // order of its lines, as in plan.Want
}

// line is the lane of one function, with its replicas.
type line struct {
	*stage
	i        int
	owner    *owner
	lane     *dispatch.Lane
	replicas []*replica // in the order of their starts and names
	starts   starts
	poked    int64             // when it last asked control for more
	cpu      int               // CPU limit that a plan gave its replicas; 0: as declared
	batch    int               // the plan's largest batch; 0: there is no plan yet
	items    tensor.Activation // empty items, of which answers have some
	known    bool              // a node has said how large its parameters are
}

// running is a batch on a replica.
type running struct {
	replica *replica
	batch   uint64
	tasks   []*task.Task
	took    int64
}

// cancel is a cancellation on its way to a line.
type cancel struct{ key task.Key }

// newWorld returns a run that has not begun.
func (m *Model) newWorld(p int, seed uint64) (*world, error) {
	set, err := m.policy(p, seed)
	if err != nil {
		return nil, err
	}
	w := &world{
		m: m, set: set, seed: seed, clock: epoch, end: int64(m.duration), hop: int64(*m.scenario.Hop),
		byKey: make(map[string]*line, len(m.stages)), pcg: rand.NewPCG(seed, 0),
		control: control{learning: learning{learner: demand.New(demand.DefaultLimits())}},
	}
	w.rand = rand.New(w.pcg)
	w.addLines()
	for i := range m.pipelines {
		source, err := m.pipelines[i].source(seed)
		if err != nil {
			return nil, fmt.Errorf("pipelines[%d].arrivals: %w", i, err)
		}
		w.coordinators = append(w.coordinators, &coordinator{
			pipe: &m.pipelines[i], i: i, core: flow.NewCore(), source: arrivals.Until(source, m.duration), inbox: strconv.Itoa(i),
		})
	}
	for i := range m.nodes {
		w.nodes = append(w.nodes, newNode(&m.nodes[i], len(m.stages)))
	}
	w.rec = newRecorder(w)
	return w, nil
}

// addLines makes the dispatchers of the stages, each with a lane per function.
func (w *world) addLines() {
	for i := range w.m.stages {
		s := &w.m.stages[i]
		w.lines = append(w.lines, &line{stage: s, i: i, poked: -int64(time.Hour)})
		w.byKey[s.key] = w.lines[i]
	}
	for _, own := range w.lines {
		if own.own != own.i {
			continue
		}
		o := &owner{own: own, byName: map[string]*replica{}, core: dispatch.NewCore(dispatch.CoreConfig{
			// No task arrives twice here, so none has to be remembered.
			Function: own.key, Revision: revision, QueueLimit: own.spec.QueueLimit, Remember: 1,
		})}
		for _, i := range own.lanes {
			l := w.lines[i]
			o.core.Step(w.clock, dispatch.Deployed{
				Lane: l.key, Revision: revision, MaxLength: l.spec.MaxLength, QueueLimit: l.spec.QueueLimit,
				Batch: l.spec.Batch, AutoBatch: l.spec.AutoBatch, BatchWait: l.spec.BatchWait,
			})
			l.owner, l.lane = o, o.core.Lane(l.key)
			o.lines = append(o.lines, l)
		}
	}
}

// steps is how many events are handled between checks of the context.
const steps = 1 << 14

// run simulates until all requests have ended. It calls report now and then.
func (w *world) run(ctx context.Context, report func()) error {
	w.tick(true) // deployed functions have their first replicas before requests arrive
	for _, c := range w.coordinators {
		w.next(c)
	}
	w.events.push(w.rec.every, samples, 0, nil)
	for w.now < w.end || w.flying > 0 {
		if w.popped%steps == 0 {
			if err := ctx.Err(); err != nil {
				return err
			}
			report()
		}
		e := w.events.pop()
		w.popped++
		if e.at != w.now {
			w.now, w.clock = e.at, epoch.Add(time.Duration(e.at))
		}
		w.handle(&e)
	}
	w.rec.close(w)
	return nil
}

func (w *world) handle(e *event) {
	switch e.kind {
	case arrives:
		w.arrive(w.coordinators[e.i])
	case submits:
		w.rec.stages[e.i].arrived(w)
		w.step(w.lines[e.i].owner, dispatch.Submit{Task: e.data.(*task.Task)})
	case expects:
		w.step(w.lines[e.i].owner, dispatch.Expect{})
	case cancels:
		w.step(w.lines[e.i].owner, dispatch.Cancel{Key: e.data.(*cancel).key})
	case leaves:
		w.step(w.lines[e.i].owner, dispatch.Leave{Request: e.data.(string)})
	case ends:
		w.ended(w.lines[e.i], e.data.(*running))
	case replies:
		r := e.data.(*task.Reply)
		w.walk(w.coordinators[e.i], flow.Replied{Reply: r})
		*r = task.Reply{}
		w.spare = append(w.spare, r)
	case deadline:
		if c := w.coordinators[e.i]; c.armed == e.at {
			c.armed = 0
			w.walk(c, flow.Tick{})
		}
	case wakes:
		if o := w.lines[e.i].owner; o.armed == e.at {
			o.armed = 0
			w.step(o, dispatch.Tick{})
		}
	case ready:
		w.becomeReady(e.data.(*replica))
	case dies:
		w.die(e.data.(*replica))
	case loaded:
		z := e.data.(*zygote)
		z.arrive(w)
		z.node.tidy(w)
	case ticks:
		if w.control.next == e.at {
			w.tick(false)
		}
	case samples:
		w.rec.sample(w)
		w.events.push(w.now+w.rec.every, samples, 0, nil)
	}
}

// next schedules a pipeline's next request.
func (w *world) next(c *coordinator) {
	if at, ok := c.source.Next(); ok {
		w.events.push(max(int64(at), w.now), arrives, c.i, nil)
	}
}

// arrive begins a request.
func (w *world) arrive(c *coordinator) {
	w.flying++
	c.number++
	w.rec.pipelines[c.i].offer(w)
	// unique over all pipelines
	id := strconv.FormatUint(c.number*uint64(len(w.coordinators))+uint64(c.i), 36)
	c.loads = c.loads[:0]
	for _, i := range c.stages {
		c.loads = append(c.loads, w.lines[i].owner.load())
	}
	w.walk(c, flow.Start{
		Request: task.Request{ID: id, Target: c.key, Deadline: w.clock.Add(c.spec.Timeout), Input: c.input},
		Graph:   c.graph, Loads: c.loads, Outlines: c.outline(w),
	})
	w.next(c)
}

// load returns what admission knows about the stage. A variant's starts count too, because
// any lane may have started last.
func (o *owner) load() task.Load {
	out := task.Load{
		Waiting: o.core.Waiting(), Running: o.core.Running(), Servers: o.core.Servers(), Limit: o.own.spec.QueueLimit,
		Service: o.core.Mean(), Start: o.started,
	}
	for _, l := range o.lines {
		out.Max += l.spec.Max * l.spec.Slots * l.most()
	}
	return out
}

// most returns the largest batch of the line's replicas.
func (l *line) most() int {
	switch {
	case l.batch > 0:
		return min(l.spec.Batch, l.batch)
	case l.spec.AutoBatch:
		return 1
	}
	return l.spec.Batch
}

// walk steps a coordinator and carries out its effects.
func (w *world) walk(c *coordinator, ev flow.Event) {
	for _, e := range c.core.Step(w.clock, ev) {
		switch e := e.(type) {
		case flow.Submit:
			e.Task.ReplyTo = c.inbox
			w.events.push(w.now+w.hop, submits, w.byKey[e.Task.Function].i, e.Task)
		case flow.Expect:
			w.events.push(w.now+w.hop, expects, w.byKey[e.Function].i, nil)
		case flow.Cancel:
			w.events.push(w.now+w.hop, cancels, w.byKey[e.Function].i, &cancel{e.Key})
		case flow.Leave:
			w.events.push(w.now+w.hop, leaves, w.byKey[e.Function].i, e.Request)
		case flow.Finish:
			w.flying--
			w.rec.finish(w, c.i, &e)
			w.control.learning.add(w.clock, c.pipe, &e)
		}
	}
	if at, ok := c.core.Next(); ok {
		if ns := int64(at.Sub(epoch)); c.armed == 0 || ns < c.armed {
			c.armed = ns
			w.events.push(ns, deadline, c.i, nil)
		}
	}
}

// step steps a stage's dispatcher and carries out its effects.
func (w *world) step(o *owner, ev dispatch.Event) {
	for _, e := range o.core.Step(w.clock, ev) {
		switch e := e.(type) {
		case dispatch.Send:
			w.begin(o.byName[e.Replica], &e)
		case dispatch.Reply:
			i, _ := strconv.Atoi(e.To) // To is an inbox
			w.events.push(w.now+w.hop, replies, i, e.Reply)
		case dispatch.Wake:
			o.armed = int64(e.At.Sub(epoch))
			w.events.push(max(o.armed, w.now), wakes, o.own.i, nil)
		case dispatch.Idle:
			w.gone(o.byName[e.Replica])
		case dispatch.Evict:
			w.gone(o.byName[e.Replica])
		case dispatch.Wanted:
			if l := w.byKey[e.Lane]; w.now-l.poked >= wantedEvery {
				l.poked = w.now
				w.poke()
			}
		}
	}
	for _, l := range o.lines {
		w.rec.stages[l.i].queue(w, l.lane.Waiting())
	}
}

// begin runs a batch on a replica.
func (w *world) begin(r *replica, s *dispatch.Send) {
	l, length := r.line, 0
	for _, t := range s.Tasks {
		length = max(length, t.Length)
	}
	w.reseed(s.Tasks[0], l.own, times)
	took := max(int64(l.service.base(len(s.Tasks), l.cpu, length)*l.service.draw(w.rand)), 1)
	var b *running
	if n := len(w.idle); n > 0 {
		b, w.idle = w.idle[n-1], w.idle[:n-1]
	} else {
		b = &running{}
	}
	*b = running{r, s.Batch, s.Tasks, took}
	w.events.push(w.now+took, ends, l.i, b)
}

// What is drawn per call.
const (
	times   = 0
	outputs = 3
)

// reseed makes the next random draw depend only on the run's seed, the task, the stage and what is
// drawn, so that all policies and all variants get the same draw.
func (w *world) reseed(t *task.Task, stage int, what uint64) {
	h := w.seed*0x9E3779B97F4A7C15 + uint64(stage)<<40 + uint64(t.Task)<<8 + uint64(t.Attempt)
	for i := range len(t.Request) {
		h = (h ^ uint64(t.Request[i])) * 1099511628211 // FNV-1a
	}
	w.pcg.Seed(mix(h), what)
}

// mix spreads bits (the finalizer of SplitMix64; Steele, Lea and Flood 2014).
func mix(h uint64) uint64 {
	h = (h ^ h>>30) * 0xBF58476D1CE4E5B9
	h = (h ^ h>>27) * 0x94D049BB133111EB
	return h ^ h>>31
}

// ended answers the calls of a batch.
func (w *world) ended(l *line, b *running) {
	if b.replica.gone {
		return // the replica died, and its tasks were answered
	}
	w.rec.stages[l.i].busy(w, b.took)
	for call := range b.tasks {
		r := w.reply()
		if r.Output = l.output; l.outputs != nil {
			r.Output = l.answer(w, b.tasks[call])
		}
		w.step(l.owner, dispatch.Result{Replica: b.replica.name, Batch: b.batch, Call: call, Reply: r})
	}
	b.tasks = nil
	w.idle = append(w.idle, b)
}

// answer returns a random number of items. It depends only on the run's seed, the task and the
// stage, as service times do.
func (l *line) answer(w *world, t *task.Task) tensor.Activation {
	w.reseed(t, l.own, outputs)
	n := l.outputs.draw(w.rand, 0)
	if n > len(l.items) {
		l.items = make(tensor.Activation, n)
	}
	return l.items[:n:n]
}

func (w *world) reply() *task.Reply {
	if n := len(w.spare); n > 0 {
		r := w.spare[n-1]
		w.spare = w.spare[:n-1]
		return r
	}
	return &task.Reply{}
}
