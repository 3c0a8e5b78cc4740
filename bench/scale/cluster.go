package scale

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// size says how large a cluster is.
type size struct{ nodes, functions, replicas int }

// sized returns the size of a cluster of this many nodes. It has a function per node and five
// replicas per function.
func sized(nodes int) size { return size{nodes, nodes, 5 * nodes} }

const (
	stagesPerPipeline = 5
	deviceEvery       = 5 // one node in five has devices
	devicesPerNode    = 8
	gib               = int64(1) << 30
)

// started is the time at which the generated clusters are observed.
var started = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)

// cluster returns a generated cluster without replicas. Three functions in five are stages of
// pipelines. Half of all have parameters, and one in ten needs a device. The load of each function
// needs about five replicas. A function may be a key stage if its number is even.
func (z size) cluster() plan.Snapshot {
	rng := rand.New(rand.NewPCG(1, uint64(z.nodes)))
	s := plan.Snapshot{Rev: 1, Epoch: 1, At: started}
	for i := range z.nodes {
		n := plan.Node{Name: fmt.Sprintf("node-%04d", i), Memory: 64 * gib, MemoryUsed: rng.Int64N(8) * gib, Threshold: 48 * gib, CPUMilli: 32000}
		for k := range devicesPerNode {
			if i%deviceEvery == 0 {
				n.Devices = append(n.Devices, plan.Device{ID: fmt.Sprintf("gpu-%04d-%d", i, k), Memory: 80 * gib})
			}
		}
		s.Nodes = append(s.Nodes, n)
	}
	for i := range z.functions {
		s.Functions = append(s.Functions, z.function(i, rng))
	}
	for i := 0; i+stagesPerPipeline <= z.functions*3/5; i += stagesPerPipeline {
		p := plan.Pipeline{Name: fmt.Sprintf("p%04d.scale", i), SLO: 2 * time.Second}
		for k := range stagesPerPipeline {
			p.Stages = append(p.Stages, s.Functions[i+k].Name)
			if k > 0 {
				p.Edges = append(p.Edges, plan.Edge{From: k - 1, To: k})
			}
		}
		s.Pipelines = append(s.Pipelines, p)
	}
	return s
}

func (z size) function(i int, rng *rand.Rand) plan.Function {
	mean := time.Duration(100+rng.IntN(100)) * time.Millisecond
	each := float64(z.replicas) / float64(z.functions)
	f := plan.Function{
		Name: fmt.Sprintf("f%04d.scale", i), Revision: 1, Min: 1, Max: 20, Batch: 1, Slots: 1,
		Memory: (1 + rng.Int64N(8)) * gib / 8, CPUMilli: 250 * rng.IntN(5), Waiting: rng.IntN(2), Running: 2,
		// Utilisation leaves room for waits that fit the pipelines' objectives.
		Demand:  plan.Demand{Known: true, Rate: 0.6 * each / mean.Seconds(), CV: 1, Last: started},
		Service: plan.Service{Known: true, Mean: mean, CV: 0.5},
		Wait:    plan.Wait{Known: true, Mean: 20 * time.Millisecond, P50: 10 * time.Millisecond, P95: 50 * time.Millisecond, P99: 80 * time.Millisecond},
		Busy:    plan.Busy{Known: true, Share: 0.6},
		Starts:  []plan.Start{{Path: "cold", Mean: 2 * time.Second, N: 1}, {Path: "fork", Mean: 20 * time.Millisecond, N: 3}},
	}
	if i%2 == 1 {
		f.Min = int(each) // it has no more than its minimum, so it is no key stage
	}
	if i%4 < 2 {
		f.Parameters = (1 + rng.Int64N(16)) * gib / 4
	}
	if i%10 == 3 {
		f.GPU = 1
		if i%20 == 3 {
			f.DeviceMemory = 20 * gib
		}
	}
	return f
}

// apply returns the cluster after a plan was carried out: all replicas are ready, and their
// parameters are in memory.
func apply(s plan.Snapshot, p plan.Plan) plan.Snapshot {
	s.Rev++
	s.At = s.At.Add(time.Second)
	s.Nodes, s.Functions = slices.Clone(s.Nodes), slices.Clone(s.Functions)
	at := make(map[string]*plan.Node, len(s.Nodes))
	for i := range s.Nodes {
		n := &s.Nodes[i]
		n.Devices, n.Zygotes = slices.Clone(n.Devices), slices.Clone(n.Zygotes)
		at[n.Name] = n
	}
	runs := map[[2]string]bool{}
	for i := range p.Wants {
		f, w := &s.Functions[i], &p.Wants[i]
		had := f.Replicas
		f.Replicas = make([]plan.Replica, 0, len(w.Slots))
		for k, slot := range w.Slots {
			runs[[2]string{f.Name, slot.Node}] = true
			if j := slices.IndexFunc(had, func(r plan.Replica) bool { return r.Name == slot.Replica }); j >= 0 {
				f.Replicas = append(f.Replicas, had[j])
				continue
			}
			n := at[slot.Node]
			n.MemoryUsed += f.Memory
			for j := range n.Devices {
				if d := &n.Devices[j]; slot.On(d.ID) {
					d.MemoryUsed += plan.DeviceNeed(f.DeviceMemory, d.Memory)
				}
			}
			f.Replicas = append(f.Replicas, plan.Replica{
				Name: fmt.Sprintf("%s-%d-%d", f.Name, s.Rev, k), Revision: f.Revision, Node: slot.Node, Device: slot.Device, State: plan.Ready, Since: s.At,
			})
		}
		slices.SortFunc(f.Replicas, func(x, y plan.Replica) int { return cmp.Compare(x.Name, y.Name) })
	}
	for _, w := range p.Warm {
		f, ok := s.Function(w.Function)
		n := at[w.Node]
		if !ok || f.Parameters == 0 || slices.ContainsFunc(n.Zygotes, func(z plan.Zygote) bool { return z.Function == w.Function }) {
			continue
		}
		n.Zygotes = append(n.Zygotes, plan.Zygote{Function: w.Function, Digest: "sha256:" + w.Function, Bytes: f.Parameters, Idle: !runs[[2]string{w.Function, w.Node}]})
		n.MemoryUsed += f.Parameters
	}
	for _, n := range at {
		slices.SortFunc(n.Zygotes, func(x, y plan.Zygote) int { return cmp.Compare(x.Function, y.Function) })
	}
	return s
}
