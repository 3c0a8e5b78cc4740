package plantest

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// World is a random cluster with a history. It changes between steps and carries out the plans that
// it gets, so policies meet situations that they have caused. Two worlds with the same seed and the
// same plans stay equal.
type World struct {
	rng  *rand.Rand
	s    plan.Snapshot
	next int // number of the next replica's name
}

// NewWorld returns a world of one to twelve functions, with up to four pipelines and up to four
// nodes.
func NewWorld(seed uint64) *World {
	w := &World{rng: rand.New(rand.NewPCG(seed, 1))}
	w.s = plan.Snapshot{Rev: 1, Epoch: 1, At: time.Date(2025, 6, 1, 12, 0, 0, 0, time.UTC)}
	for i := range 1 + w.rng.IntN(4) {
		n := plan.Node{Name: fmt.Sprintf("node-%d", i), Memory: int64(1+w.rng.IntN(8)) << 30, CPUMilli: 2000}
		for d := range w.rng.IntN(3) {
			n.Devices = append(n.Devices, plan.Device{ID: fmt.Sprintf("gpu-%d", d), Memory: 16 << 30})
		}
		w.s.Nodes = append(w.s.Nodes, n)
	}
	for i := range 1 + w.rng.IntN(12) {
		f := plan.Function{Name: fmt.Sprintf("f%02d.ns", i), Revision: 1, Min: w.rng.IntN(3), Batch: 1 + w.rng.IntN(4), Slots: 1 + w.rng.IntN(2)}
		f.Max = f.Min + w.rng.IntN(20)
		f.Zero = w.rng.IntN(2) == 0
		f.ZeroAge = time.Duration(w.rng.IntN(30)) * time.Second
		f.Memory = int64(w.rng.IntN(512)) << 20
		if w.rng.IntN(4) == 0 {
			f.GPU = 1 + w.rng.IntN(2)
			f.DeviceMemory = int64(w.rng.IntN(3)*w.rng.IntN(9)) << 30 // 0: whole devices
		}
		if w.rng.IntN(3) == 0 {
			w.profile(&f)
		}
		w.s.Functions = append(w.s.Functions, f)
	}
	for i := range w.rng.IntN(4) {
		p := plan.Pipeline{Name: fmt.Sprintf("p%d.ns", i), SLO: time.Duration(w.rng.IntN(2000)) * time.Millisecond}
		for range 1 + w.rng.IntN(4) {
			// Some stages are not deployed.
			p.Stages = append(p.Stages, fmt.Sprintf("f%02d.ns", w.rng.IntN(14)))
		}
		p.Edges = w.edges(&p)
		w.s.Pipelines = append(w.s.Pipelines, p)
	}
	return w
}

// edges connects the deployed stages of a pipeline. Each has a random predecessor, and some have
// another one.
func (w *World) edges(p *plan.Pipeline) (edges []plan.Edge) {
	var before []int
	for to, name := range p.Stages {
		if _, ok := w.s.Function(name); !ok {
			continue
		}
		for _, from := range before {
			if from == before[len(before)-1] || w.rng.IntN(4) == 0 {
				edges = append(edges, plan.Edge{From: from, To: to})
			}
		}
		before = append(before, to)
	}
	slices.SortFunc(edges, func(x, y plan.Edge) int { return cmp.Or(cmp.Compare(x.From, y.From), cmp.Compare(x.To, y.To)) })
	return edges
}

// profile gives a function a CPU limit, and service times that were measured with some limits.
func (w *World) profile(f *plan.Function) {
	f.CPULimit = 100 * (1 + w.rng.IntN(5))
	fixed, work := w.rng.IntN(100), 1+w.rng.IntN(100)
	for q := range 1 + w.rng.IntN(5) {
		cpu := 100 << q
		f.Profile = append(f.Profile, plan.Point{
			CPUMilli: cpu, Batch: f.Batch, Mean: time.Duration(fixed+1000*work/cpu) * time.Millisecond, Err: time.Millisecond, N: 10,
		})
	}
}

// Jump sets the world's clock back or forward, by up to a day.
func (w *World) Jump() {
	w.s.At = w.s.At.Add(time.Duration(w.rng.Int64N(int64(48*time.Hour))) - 24*time.Hour)
}

// Snapshot returns a copy of the world's present state.
func (w *World) Snapshot() plan.Snapshot { return clone(w.s) }

// Step lets time pass: load changes, replicas start, stop or are lost, and sometimes a function is
// redeployed.
func (w *World) Step() {
	w.s.Rev++
	dt := time.Duration(20+w.rng.IntN(3000)) * time.Millisecond
	w.s.At = w.s.At.Add(dt)
	for i := range w.s.Nodes {
		w.s.Nodes[i].Unavailable = pick(w.rng, 10, "the node does not answer")
		w.s.Nodes[i].Moving = w.s.Nodes[i].Unavailable != "" && w.s.Rev%2 == 0
		for d := range w.s.Nodes[i].Devices {
			w.s.Nodes[i].Devices[d].Unavailable = pick(w.rng, 10, "the device is lost")
		}
	}
	for i := range w.s.Functions {
		w.load(&w.s.Functions[i])
		w.replicas(&w.s.Functions[i])
		w.bars(&w.s.Functions[i])
	}
	w.stages()
	w.account()
}

func pick(r *rand.Rand, n int, s string) string {
	if r.IntN(n) == 0 {
		return s
	}
	return ""
}

func (w *World) load(f *plan.Function) {
	switch w.rng.IntN(4) {
	case 0: // no requests
		f.Demand.Rate, f.Waiting, f.Running = 0, 0, 0
	case 1, 2:
		f.Demand = plan.Demand{Known: true, Rate: w.rng.ExpFloat64() * 30, CV: w.rng.Float64() * 3, Last: w.s.At.Add(-time.Duration(w.rng.IntN(1000)) * time.Millisecond)}
		for i := range f.Demand.Envelope {
			f.Demand.Envelope[i] = 1 + int(f.Demand.Rate*f.Demand.Envelope.Stretch(i).Seconds())
		}
		f.Waiting, f.Running = int(w.rng.ExpFloat64()*10), w.rng.IntN(5)
	}
	if f.Expected = 0; f.Waiting == 0 && f.Running == 0 {
		f.Expected = int(w.s.Rev+f.Revision) % 3
	}
	f.Wait, f.Busy = plan.Wait{}, plan.Busy{}
	if f.Demand.Rate > 0 && w.rng.IntN(4) > 0 {
		mean := time.Duration(w.rng.ExpFloat64() * 2e8)
		f.Wait = plan.Wait{Known: true, Mean: mean, P50: mean / 2, P95: 2 * mean, P99: 4 * mean}
		f.Busy = plan.Busy{Known: true, Share: w.rng.Float64()}
	}
	if f.Waiting > 0 {
		f.Wait.Oldest = time.Duration(w.rng.ExpFloat64() * 2e8)
	}
	if f.Demand.Known && w.rng.IntN(4) == 0 {
		f.Service = plan.Service{Known: true, Mean: time.Duration(1+w.rng.ExpFloat64()*2e8) * time.Nanosecond, CV: w.rng.Float64()}
	}
}

func (w *World) replicas(f *plan.Function) {
	kept := f.Replicas[:0]
	for _, r := range f.Replicas {
		switch lost := w.rng.IntN(20) == 0; {
		case lost, r.State == plan.Draining && w.rng.IntN(2) == 0:
			continue
		case r.State == plan.Starting && w.rng.IntN(2) == 0:
			r.State, r.Since = plan.Ready, w.s.At
		}
		kept = append(kept, r)
	}
	f.Replicas = kept
	if w.rng.IntN(30) == 0 {
		f.Revision++
	}
}

// bars keeps a function that needs devices off some of them.
func (w *World) bars(f *plan.Function) {
	f.Bars = nil
	for _, n := range w.s.Nodes {
		for _, d := range n.Devices {
			if f.GPU > 0 && w.rng.IntN(5) == 0 {
				f.Bars = append(f.Bars, plan.Bar{Node: n.Name, Device: d.ID, Count: 1, Until: w.s.At.Add(time.Minute), Cause: "out of memory"})
			}
		}
	}
}

// Apply starts the wanted replicas and drains all others.
func (w *World) Apply(wants []plan.Want) {
	for _, want := range wants {
		i := slices.IndexFunc(w.s.Functions, func(f plan.Function) bool { return f.Name == want.Function })
		f := &w.s.Functions[i]
		f.CPUNow = want.CPUMilli
		for r := range f.Replicas {
			keep := slices.ContainsFunc(want.Slots, func(s plan.Slot) bool { return s.Replica == f.Replicas[r].Name })
			if !keep && f.Replicas[r].State != plan.Draining {
				f.Replicas[r].State, f.Replicas[r].Since = plan.Draining, w.s.At
			}
		}
		for _, s := range want.Slots {
			if s.Replica == "" {
				w.next++
				f.Replicas = append(f.Replicas, plan.Replica{
					Name: fmt.Sprintf("%s-%04d", f.Name, w.next), Revision: f.Revision, Node: s.Node, Device: s.Device, State: plan.Starting, Since: w.s.At,
				})
			}
		}
	}
	w.account()
}

// account computes memory and zygotes. A function has a zygote on each node where it has a replica.
func (w *World) account() {
	for i := range w.s.Nodes {
		n := &w.s.Nodes[i]
		n.MemoryUsed, n.Zygotes = 0, nil
		for d := range n.Devices {
			n.Devices[d].MemoryUsed = 0
		}
		for _, f := range w.s.Functions {
			here := 0
			for _, r := range f.Replicas {
				if r.Node != n.Name {
					continue
				}
				here++
				n.MemoryUsed += f.Memory
				for _, id := range (plan.Slot{Device: r.Device}).Devices() {
					d := slices.IndexFunc(n.Devices, func(d plan.Device) bool { return d.ID == id })
					n.Devices[d].MemoryUsed += plan.DeviceNeed(f.DeviceMemory, n.Devices[d].Memory)
				}
			}
			if here > 0 {
				n.Zygotes = append(n.Zygotes, plan.Zygote{Function: f.Name, Digest: "d", Bytes: f.Memory})
				n.MemoryUsed += f.Memory
			}
		}
	}
}

func clone(s plan.Snapshot) plan.Snapshot {
	s.Nodes, s.Functions, s.Pipelines = slices.Clone(s.Nodes), slices.Clone(s.Functions), slices.Clone(s.Pipelines)
	for i := range s.Nodes {
		s.Nodes[i].Devices, s.Nodes[i].Zygotes = slices.Clone(s.Nodes[i].Devices), slices.Clone(s.Nodes[i].Zygotes)
	}
	for i := range s.Functions {
		f := &s.Functions[i]
		f.Replicas, f.Bars, f.Starts, f.Profile = slices.Clone(f.Replicas), slices.Clone(f.Bars), slices.Clone(f.Starts), slices.Clone(f.Profile)
	}
	for i := range s.Pipelines {
		p := &s.Pipelines[i]
		p.Stages, p.Edges = slices.Clone(p.Stages), slices.Clone(p.Edges)
	}
	return s
}
