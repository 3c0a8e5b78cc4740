package sim

import (
	"cmp"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
)

// The pace of control, from packages control and dispatch.
const (
	gap         = int64(20 * time.Millisecond)  // least time between a tick and a requested one
	wantedEvery = int64(100 * time.Millisecond) // least time between two requests of a line
)

// control is the state of the control loop.
type control struct {
	next     int64 // time of the next tick
	last     int64 // time of the last tick
	rev      uint64
	memory   policy.Memory
	learning learning
	snap     plan.Snapshot // its slices are reused

	ticks, held, refused int
	decisions            digest
	complaint            string // why a tick first had its plan refused, or held a domain
}

// poke requests an early tick.
func (w *world) poke() {
	c := &w.control
	if at := max(w.now, c.last+gap); at < c.next {
		c.next = at
		w.events.push(at, ticks, 0, nil)
	}
}

// tick observes, decides and applies. A refused plan leaves the memory as it was.
func (w *world) tick(first bool) {
	c := &w.control
	c.ticks++
	c.last, c.next = w.now, w.now+int64(w.m.scenario.Tick)
	w.observe()
	p, memory, held, err := w.set.Decide(c.snap, c.memory)
	for _, h := range held {
		c.held++
		c.complaint = cmp.Or(c.complaint, h.Err.Error())
	}
	if err != nil {
		c.refused++
		c.complaint = cmp.Or(c.complaint, err.Error())
	} else {
		c.memory = memory
		c.decisions.add(&p)
		w.apply(&p, first)
	}
	w.events.push(c.next, ticks, 0, nil)
}

// observe makes a snapshot of the virtual cluster, as package cluster does of the real one.
func (w *world) observe() {
	c := &w.control
	c.rev++
	s := &c.snap
	s.Rev, s.At, s.Epoch, s.Budget, s.Pipelines = c.rev, w.clock, 1, w.m.scenario.Budget, w.m.snapshot
	s.Nodes = s.Nodes[:0]
	for _, n := range w.nodes {
		s.Nodes = append(s.Nodes, n.observe())
	}
	if s.Functions == nil {
		s.Functions = make([]plan.Function, len(w.lines))
		for i, l := range w.lines {
			s.Functions[i] = l.declared()
		}
	}
	var expected map[string]int
	for i, l := range w.lines {
		f := &s.Functions[i]
		is := l.lane.Signals(w.clock)
		f.Stage, f.Lengths, f.Items = is.Stage, is.Lengths, is.Items
		f.Demand, f.Service, f.Wait, f.Busy, f.Waiting, f.Running = is.Demand, is.Service, is.Wait, is.Busy, is.Waiting, is.Running
		f.Starts, f.CPUNow = l.starts.list, l.cpu
		if l.known {
			f.Parameters = int64(l.spec.Parameters)
		}
		f.Replicas = f.Replicas[:0]
		f.Expected = 0
		if f.Zero && f.Waiting == 0 && f.Running == 0 { // for other functions it is not used
			if expected == nil {
				expected = w.expected()
			}
			f.Expected = expected[l.key]
		}
		for _, r := range l.replicas {
			f.Replicas = append(f.Replicas, plan.Replica{Name: r.name, Revision: revision, Node: r.node.spec.Name, Device: r.device, State: r.state, Since: r.since})
		}
	}
	c.learning.fill(s)
	s.ChooseBatches()
}

// expected returns how many requests will still reach each stage.
func (w *world) expected() map[string]int {
	counts := map[string]int{}
	for _, c := range w.coordinators {
		c.core.Expected(counts)
	}
	return counts
}

// declared returns the part of a stage's snapshot that does not change.
func (l *line) declared() plan.Function {
	s := &l.spec
	variantOf := ""
	if s.variantOf != "" {
		variantOf = keyOf(s.variantOf)
	}
	batch, auto := s.Batch, 0
	if s.AutoBatch {
		batch, auto = 1, s.Batch
	}
	f := plan.Function{
		Variant: plan.Variant{VariantOf: variantOf, Accuracy: s.Accuracy, MaxLength: s.MaxLength, BatchWait: s.BatchWait},
		Name:    l.key, Revision: revision, Min: s.Min, Max: s.Max, Zero: s.Zero, ZeroAge: s.ZeroAge, GPU: s.GPU, DeviceMemory: int64(s.GPUMemory),
		Memory: int64(s.Memory), CPUMilli: int(s.CPU), CPULimit: int(s.CPULimit), Batch: batch, Slots: s.Slots, Profile: l.service.points(),
	}
	f.AutoBatch = auto
	return f
}
