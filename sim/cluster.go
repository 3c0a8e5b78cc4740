package sim

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/request/dispatch"
)

// revision is the revision of every function. No function is redeployed.
const revision = 1

// replica is a replica on a node.
type replica struct {
	name    string
	line    *line
	node    *node
	device  string // in the form of plan.Slot.Device
	state   plan.State
	since   time.Time
	ordered int64
	path    string
	key     bool // its stage was a key stage when it was ordered
	gone    bool
}

// starts records how long replicas took to start, as package cluster does. The mean of each path
// covers about the latest eight starts.
type starts struct {
	list []plan.Start // sorted by path
}

const startsKept = 8

func (s *starts) add(path string, took time.Duration) {
	i, ok := slices.BinarySearchFunc(s.list, path, func(x plan.Start, path string) int { return cmp.Compare(x.Path, path) })
	if !ok {
		s.list = slices.Insert(slices.Clone(s.list), i, plan.Start{Path: path})
	} else {
		s.list = slices.Clone(s.list) // a snapshot has the old one
	}
	x := &s.list[i]
	x.N = min(x.N+1, startsKept)
	x.Mean += (took - x.Mean) / time.Duration(x.N)
}

// apply carries out p, as package cluster does. If atOnce is set, starts take no time: their
// replicas were started before the run.
func (w *world) apply(p *plan.Plan, atOnce bool) {
	w.route(p)
	for i := range p.Wants {
		want := &p.Wants[i]
		l := w.byKey[want.Function]
		if l.cpu != want.CPUMilli {
			l.cpu = want.CPUMilli
			w.rec.stages[l.i].count(w)
		}
		if want.Short != "" {
			w.rec.stages[l.i].short(w, want.Short)
		}
		w.release(l, want)
		for _, slot := range want.Slots {
			if slot.Replica == "" {
				w.order(l, slot, want.Key, atOnce)
			}
		}
	}
	w.warm(p, atOnce)
	for _, n := range w.nodes {
		n.tidy(w)
	}
}

// route lets the stages follow the plan's routing tables, ranks and batches, as package cluster
// does before it releases replicas.
func (w *world) route(p *plan.Plan) {
	tables := p.Tables
	for i := range p.Wants { // sorted, as tables are
		want := &p.Wants[i]
		l := w.byKey[want.Function]
		if want.Batch > 0 && want.Batch != l.batch {
			l.batch = want.Batch
			w.step(l.owner, dispatch.Batched{Lane: l.key, Most: want.Batch})
		}
		if l.own != l.i {
			continue
		}
		o, ev := l.owner, dispatch.Routed{Rank: want.Rank}
		if len(tables) > 0 && tables[0].Stage == l.key {
			ev.Table, tables = &tables[0], tables[1:]
		}
		if ev.Rank == o.rank && (ev.Table == nil || ev.Table.Version == o.table) {
			continue
		}
		if o.rank = ev.Rank; ev.Table != nil {
			o.table = ev.Table.Version
		}
		w.step(o, ev)
	}
}

// warm marks key stages and loads parameters ahead of need, as KeysManagers do.
func (w *world) warm(p *plan.Plan, atOnce bool) {
	for _, n := range w.nodes {
		n.keys = n.keys[:0]
	}
	for i := range p.Warm {
		if want := &p.Warm[i]; want.Warmth >= plan.Host && want.Key {
			n := w.node(want.Node)
			n.keys = append(n.keys, w.byKey[want.Function].i)
		}
	}
	for _, n := range w.nodes {
		n.mark(w)
	}
	for i := range p.Warm {
		if want := &p.Warm[i]; want.Warmth >= plan.Host {
			w.node(want.Node).warm(w, w.byKey[want.Function], want.Key, atOnce)
		}
	}
	for _, n := range w.nodes {
		n.mark(w) // those that are loaded now
	}
}

// release drains the replicas of l that are not in the slots of want.
func (w *world) release(l *line, want *plan.Want) {
	for _, r := range slices.Clone(l.replicas) {
		if r.state == plan.Draining || slices.ContainsFunc(want.Slots, func(s plan.Slot) bool { return s.Replica == r.name }) {
			continue
		}
		if r.state == plan.Starting {
			w.gone(r)
			continue
		}
		r.state, r.since = plan.Draining, w.clock
		w.step(l.owner, dispatch.ReplicaDrain{Name: r.name})
	}
}

// order starts a replica. key reports whether the replica's stage is a key stage. If the node has
// no room for the parameters, order starts nothing, and the next plan may order another replica.
func (w *world) order(l *line, slot plan.Slot, key, atOnce bool) {
	n := w.node(slot.Node)
	path, took, ok := n.start(w, l, atOnce)
	if !ok {
		w.rec.stages[l.i].short(w, "no room for its parameters on "+slot.Node)
		return
	}
	w.started++
	r := &replica{
		name: fmt.Sprintf("%s-%06d", l.spec.Name, w.started), line: l, node: n, device: slot.Device, state: plan.Starting, since: w.clock,
		ordered: w.now, key: key, path: path,
	}
	l.replicas = append(l.replicas, r)
	l.owner.byName[r.name] = r
	n.take(w, r, 1)
	w.rec.stages[l.i].count(w)
	if atOnce {
		w.becomeReady(r)
		return
	}
	w.events.push(w.now+int64(took), ready, l.i, r)
}

func (w *world) becomeReady(r *replica) {
	if r.gone {
		return
	}
	l := r.line
	r.state, r.since = plan.Ready, w.clock
	if took := time.Duration(w.now - r.ordered); took > 0 {
		l.starts.add(r.path, took)
		l.owner.started = took
		w.rec.stages[l.i].start(w, r, took)
	}
	if mean := l.spec.DiesEvery; mean > 0 {
		w.pcg.Seed(mix(w.seed^uint64(w.started)<<32^uint64(l.i)), 1)
		w.events.push(w.now+int64(float64(mean)*w.rand.ExpFloat64()), dies, l.i, r)
	}
	w.rec.stages[l.i].count(w)
	w.step(l.owner, dispatch.ReplicaUp{Lane: l.key, Name: r.name, Slots: l.spec.Slots, MaxBatch: l.spec.Batch, Revision: revision})
	w.poke()
}

// die ends a replica's process.
func (w *world) die(r *replica) {
	if r.gone {
		return
	}
	w.rec.stages[r.line.i].died(w)
	w.gone(r)
	w.step(r.line.owner, dispatch.ReplicaDown{Name: r.name, Cause: "it died, as the scenario has it"})
	w.poke()
}

// gone removes a replica that has ended.
func (w *world) gone(r *replica) {
	if r.gone {
		return
	}
	r.gone = true
	l := r.line
	l.replicas = slices.DeleteFunc(l.replicas, func(x *replica) bool { return x == r })
	delete(l.owner.byName, r.name)
	r.node.take(w, r, -1)
	r.node.tidy(w)
	w.rec.stages[l.i].count(w)
}

func (w *world) node(name string) *node {
	i, _ := slices.BinarySearchFunc(w.nodes, name, func(n *node, name string) int { return cmp.Compare(n.spec.Name, name) })
	return w.nodes[i] // plans are validated
}
