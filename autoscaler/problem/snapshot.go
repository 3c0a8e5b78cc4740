package problem

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// revision is the revision of every function and replica.
const revision = 1

// begin is the time of the first decision.
var begin = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

// observe makes the snapshot of a checked problem.
func (p *Problem) observe(errs *problems) {
	s := plan.Snapshot{Rev: 1, At: begin, Budget: p.Budget}
	for _, n := range p.Nodes {
		for k := range n.Count {
			name := n.Name
			if n.Count > 1 {
				name = fmt.Sprintf("%s-%d", n.Name, k+1)
			}
			node := plan.Node{Name: name, Memory: int64(n.Memory), CPUMilli: int(n.CPU)}
			for g := range n.GPUs {
				node.Devices = append(node.Devices, plan.Device{ID: fmt.Sprintf("gpu%d", g), Memory: int64(n.GPUMemory)})
			}
			s.Nodes = append(s.Nodes, node)
		}
	}
	slices.SortFunc(s.Nodes, func(a, b plan.Node) int { return cmp.Compare(a.Name, b.Name) })
	for i := 1; i < len(s.Nodes); i++ {
		if s.Nodes[i].Name == s.Nodes[i-1].Name {
			errs.add("nodes", fmt.Sprintf("%q twice", s.Nodes[i].Name), "names that stay apart when they are numbered")
		}
	}
	graphs := p.connect(errs)
	if len(*errs) > 0 {
		return
	}
	for i := range p.Pipelines {
		s.Pipelines = append(s.Pipelines, view(graphs[i], p.Pipelines[i]))
	}
	p.spread(graphs)
	total := 0
	for i := range p.Stages {
		st, path := &p.Stages[i], fmt.Sprintf("stages[%d]", i)
		demand := p.demandOf(st)
		lanes := []string{st.Name}
		add := func(path, name, of string, f *Function) {
			out := f.observed(name, of, demand, len(st.Variants) > 0)
			f.place(path, &out, &s, &total, errs)
			s.Functions = append(s.Functions, out)
		}
		add(path, st.Name, "", &st.Function)
		for k := range st.Variants {
			v := &st.Variants[k]
			add(fmt.Sprintf("%s.variants[%d]", path, k), v.Name, st.Name, &v.Function)
			lanes = append(lanes, v.Name)
		}
		p.stages[lanes[0]] = lanes
	}
	slices.SortFunc(s.Functions, func(a, b plan.Function) int { return cmp.Compare(a.Name, b.Name) })
	slices.SortFunc(s.Pipelines, func(a, b plan.Pipeline) int { return cmp.Compare(a.Name, b.Name) })
	p.snapshot = s
	p.checkLengths(errs)
}

// connect makes the pipelines' graphs in the same way as for deployed functions, in the order of
// p.Pipelines.
func (p *Problem) connect(errs *problems) []pipeline.Pipeline {
	var functions []pipeline.Function
	where := map[string]string{} // path of each function
	for i := range p.Stages {
		st := &p.Stages[i]
		where[st.Name] = fmt.Sprintf("stages[%d]", i)
		f := pipeline.Function{
			Name: st.Name, Pipelines: st.Pipelines, Each: st.Each, Join: st.Join, Idempotent: true, Batching: pipeline.Batching{Batch: st.Batch},
			Variant: pipeline.Variant{Accuracy: st.Accuracy, MaxLength: st.MaxLength},
		}
		for _, to := range st.Next {
			f.Next = append(f.Next, pipeline.Edge{To: to})
		}
		functions = append(functions, f)
		for k := range st.Variants {
			v := &st.Variants[k]
			where[v.Name] = fmt.Sprintf("stages[%d].variants[%d]", i, k)
			functions = append(functions, pipeline.Function{
				Name: v.Name, Idempotent: true, Batching: pipeline.Batching{Batch: v.Batch},
				Variant: pipeline.Variant{VariantOf: st.Name, Accuracy: v.Accuracy, MaxLength: v.MaxLength},
			})
		}
	}
	graphs, out := pipeline.Assemble(functions), make([]pipeline.Pipeline, len(p.Pipelines))
	for i, x := range p.Pipelines {
		path := fmt.Sprintf("pipelines[%d]", i)
		k := slices.IndexFunc(graphs, func(g pipeline.Pipeline) bool { return g.Name == x.Name })
		if k < 0 {
			errs.add(path+".name", fmt.Sprintf("%q, which has no stages", x.Name), "it in the pipelines of some")
			continue
		}
		out[i] = graphs[k]
		for _, fault := range out[i].Faults {
			errs.add(cmp.Or(where[fault.Function], path)+"."+cmp.Or(strings.TrimPrefix(fault.Annotation, pipeline.Prefix), "name"), fault.Got, "%s", fault.Want)
		}
	}
	return out
}

// view returns a pipeline as policies see it.
func view(g pipeline.Pipeline, x Pipeline) plan.Pipeline {
	out := plan.Pipeline{Name: x.Name, SLO: x.SLO, Chosen: plan.Chosen{Allocator: x.Allocator, Rank: x.Rank, Route: x.Route}}
	for from, st := range g.Stages {
		out.Stages = append(out.Stages, st.Name)
		for _, e := range st.Next {
			to := slices.IndexFunc(g.Stages, func(s pipeline.Stage) bool { return s.Name == e.To })
			out.Edges = append(out.Edges, plan.Edge{From: from, To: to, Each: g.Stages[to].Each})
		}
	}
	slices.SortFunc(out.Edges, func(a, b plan.Edge) int { return cmp.Or(cmp.Compare(a.From, b.From), cmp.Compare(a.To, b.To)) })
	out.Edges = slices.Compact(out.Edges)
	return out
}

// spread sets the calls per second that each pipeline makes to each of its stages. A request makes
// one call to a stage. If the stage has one call per item, it makes as many as the stages before it
// return items, all calls together.
func (p *Problem) spread(graphs []pipeline.Pipeline) {
	p.rates, p.stages, p.lengths = map[string]map[string]float64{}, map[string][]string{}, map[string]int{}
	items := map[string]float64{} // per call
	for i := range p.Stages {
		items[p.Stages[i].Name] = cmp.Or(p.Stages[i].Items, 1)
	}
	for i, g := range graphs {
		x, rates := p.Pipelines[i], map[string]float64{}
		arriving := map[string]float64{} // items per request
		for k, st := range g.Stages {    // in topological order
			calls := 1.0
			if st.Each && k > 0 {
				calls = arriving[st.Name]
			}
			for _, e := range st.Next {
				arriving[e.To] = min(arriving[e.To]+calls*items[st.Name], maxRate)
			}
			rates[st.Name] = min(x.Rate*calls, maxRate)
		}
		p.rates[x.Name], p.lengths[x.Name] = rates, x.Length
	}
}

// demandOf returns the demand of a stage: as given, or as it follows from its pipelines. Then its
// squared CV is the mean of theirs, weighted by rate.
func (p *Problem) demandOf(st *Stage) plan.Demand {
	d := plan.Demand{Known: true}
	if st.Demand != nil {
		d.Rate, d.CV = st.Demand.Rate, st.Demand.CV
	} else {
		square := 0.0
		for _, x := range p.Pipelines { // in their order, for equal sums
			rate := p.rates[x.Name][st.Name]
			cv := cmp.Or(x.CV, 1)
			d.Rate, square = d.Rate+rate, square+rate*cv*cv
		}
		if d.Rate > 0 {
			d.CV = math.Sqrt(square / d.Rate)
		}
	}
	if d.Rate > 0 {
		d.Last = begin
	}
	return d
}

// observed returns a function as policies see it, without its replicas. stage is the demand of its
// stage, which has several lanes or not.
func (f *Function) observed(name, of string, stage plan.Demand, lanes bool) plan.Function {
	out := plan.Function{
		Name: name, Revision: revision, Variant: plan.Variant{Accuracy: f.Accuracy, MaxLength: f.MaxLength}, Min: f.Min, Max: f.Max,
		Zero: f.Zero, ZeroAge: f.ZeroAge, GPU: f.GPU, Memory: int64(f.Memory), CPUMilli: int(f.CPU), CPULimit: int(f.CPULimit),
		CPUNow: int(f.CPUNow), DeviceMemory: int64(f.GPUMemory), Batch: f.Batch, Slots: f.Slots, Waiting: f.Waiting, Running: f.Running,
		Passing: plan.Passing{Items: plan.Items{Known: f.Items > 0, Mean: f.Items}, Expected: f.Expected},
		Wait:    plan.Wait{Known: f.Wait != Wait{}, Mean: f.Wait.Mean, P50: f.Wait.P50, P95: f.Wait.P95, P99: f.Wait.P99, Oldest: f.Wait.Oldest},
		Target:  plan.Target{Type: f.Target.Type, Value: f.Target.Value, Load: f.Target.Load, Known: f.Target.Type != ""},
	}
	out.Demand = stage
	if of != "" {
		out.VariantOf = of
	}
	if lanes {
		out.Stage = stage
		if out.Demand.Rate *= *f.Share; out.Demand.Rate == 0 {
			out.Demand = plan.Demand{Known: true}
		}
	}
	if f.Busy != nil {
		out.Busy = plan.Busy{Known: true, Share: *f.Busy}
	}
	for _, s := range f.Starts {
		out.Starts = append(out.Starts, plan.Start(s))
	}
	slices.SortFunc(out.Starts, func(a, b plan.Start) int { return cmp.Compare(a.Path, b.Path) })
	for _, x := range f.Profile {
		out.Profile = append(out.Profile, plan.Point{CPUMilli: int(x.CPU), Batch: x.Batch, Length: x.Length, Mean: x.Mean, Err: x.Err, CV: x.CV, N: x.N})
	}
	slices.SortFunc(out.Profile, func(a, b plan.Point) int {
		return cmp.Or(cmp.Compare(a.CPUMilli, b.CPUMilli), cmp.Compare(a.Batch, b.Batch), cmp.Compare(a.Length, b.Length))
	})
	out.Service = plan.Service{Known: f.Service.Mean > 0, Mean: f.Service.Mean, CV: f.Service.CV}
	for _, b := range f.Service.Batches {
		out.Service.Batches = append(out.Service.Batches, plan.Batched{Size: b.Size, Mean: b.Mean, N: b.N})
	}
	if !out.Service.Known {
		out.Service = profiled(&out)
	}
	return out
}

// profiled returns the service time of a function that was only profiled. It is the share of a call
// in the smallest profiled batch of the shortest inputs, at the profiled CPU limit that is nearest
// to the function's; without a limit, at the largest.
func profiled(f *plan.Function) plan.Service {
	if len(f.Profile) == 0 {
		return plan.Service{}
	}
	off := func(x plan.Point) int {
		if f.CPULimit == 0 {
			return -x.CPUMilli
		}
		return max(x.CPUMilli-f.CPULimit, f.CPULimit-x.CPUMilli)
	}
	x := slices.MinFunc(f.Profile, func(a, b plan.Point) int {
		return cmp.Or(cmp.Compare(off(a), off(b)), cmp.Compare(a.Batch, b.Batch), cmp.Compare(a.Length, b.Length))
	})
	return plan.Service{Known: true, Mean: max(x.Mean/time.Duration(x.Batch), 1), CV: x.CV}
}

// place adds the replicas of a function to out and their memory to the nodes. total counts the
// replicas of the problem.
func (f *Function) place(path string, out *plan.Function, s *plan.Snapshot, total *int, errs *problems) {
	for i, r := range f.Replicas {
		path := fmt.Sprintf("%s.replicas[%d]", path, i)
		if *total += r.Count; *total > maxReplicas {
			errs.add(path+".count", fmt.Sprintf("%d replicas of all functions", *total), "at most %d", maxReplicas)
			return
		}
		at, ok := slices.BinarySearchFunc(s.Nodes, r.Node, func(n plan.Node, name string) int { return cmp.Compare(n.Name, name) })
		if !ok {
			errs.add(path+".node", fmt.Sprintf("%q", r.Node), "one of the nodes, numbered if their count is above 1")
			continue
		}
		n := &s.Nodes[at]
		devices := plan.Slot{Device: r.Device}.Devices()
		if len(devices) != out.GPU {
			errs.add(path+".device", fmt.Sprintf("%q", r.Device), "as many devices as gpu says, %d", out.GPU)
		}
		n.MemoryUsed += out.Memory * int64(r.Count)
		for _, id := range devices {
			k := slices.IndexFunc(n.Devices, func(d plan.Device) bool { return d.ID == id })
			if k < 0 {
				errs.add(path+".device", fmt.Sprintf("%q", id), "one of the node's, such as gpu0")
				continue
			}
			if r.Count > 1 || slices.ContainsFunc(out.Replicas, func(x plan.Replica) bool { return x.Node == n.Name && (plan.Slot{Device: x.Device}).On(id) }) {
				errs.add(path+".count", "two on "+id+" of "+n.Name, "one, as a function has one replica per device")
			}
			n.Devices[k].MemoryUsed += plan.DeviceNeed(out.DeviceMemory, n.Devices[k].Memory) * int64(r.Count)
			if n.Devices[k].MemoryUsed > n.Devices[k].Memory {
				errs.add(path+".device", plan.Size(n.Devices[k].MemoryUsed)+" of "+id+" in use", "at most %s", plan.Size(n.Devices[k].Memory))
			}
		}
		if n.MemoryUsed > n.Memory {
			errs.add(path+".count", plan.Size(n.MemoryUsed)+" of "+n.Name+" in use", "at most %s", plan.Size(n.Memory))
		}
		for range r.Count {
			name := fmt.Sprintf("%s-%06d", out.Name, len(out.Replicas)+1)
			out.Replicas = append(out.Replicas, plan.Replica{Name: name, Revision: revision, Node: n.Name, Device: r.Device, State: states[r.State], Since: begin})
		}
	}
}

// checkLengths checks that some function of each stage takes the items of its pipelines.
func (p *Problem) checkLengths(errs *problems) {
	for i, x := range p.Pipelines {
		for _, st := range p.Stages {
			if !slices.Contains(st.Pipelines, x.Name) {
				continue
			}
			longest, any := 0, false
			for _, lane := range p.stages[st.Name] {
				f, _ := p.snapshot.Function(lane)
				any = any || f.Takes(x.Length) || x.Length == 0
				longest = max(longest, f.MaxLength)
			}
			if !any {
				errs.add(fmt.Sprintf("pipelines[%d].length", i), fmt.Sprint(x.Length), "at most %d, which is the most that stage %s takes", longest, st.Name)
			}
		}
	}
}
