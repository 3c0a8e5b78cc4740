package sim

import (
	"cmp"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/bench/load/arrivals"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

func compare(a, b string) int { return cmp.Compare(a, b) }

// connect makes the pipelines' graphs, in the same way as for deployed functions.
func (m *Model) connect(p *problems) {
	var functions []pipeline.Function
	where := map[string]string{} // path of each function
	for i := range m.functions {
		s := &m.functions[i]
		where[s.Name] = s.path
		f := pipeline.Function{
			Name: s.Name, Namespace: namespace, Pipelines: s.Pipelines, Each: s.Each, Join: s.Join, QueueLimit: s.QueueLimit,
			Idempotent: true, Batching: pipeline.Batching{Batch: s.Batch}, Variant: pipeline.Variant{VariantOf: s.variantOf, Accuracy: s.Accuracy, MaxLength: s.MaxLength},
		}
		for _, to := range s.Next {
			f.Next = append(f.Next, pipeline.Edge{To: to})
		}
		functions = append(functions, f)
	}
	graphs := pipeline.Assemble(functions)
	for i := range m.pipelines {
		pipe, path := &m.pipelines[i], fmt.Sprintf("pipelines[%d]", i)
		k := slices.IndexFunc(graphs, func(g pipeline.Pipeline) bool { return g.Name == pipe.spec.Name })
		if k < 0 {
			p.add(path+".name", "%q has no stages, want it in the pipelines of some", pipe.spec.Name)
			continue
		}
		pipe.graph = graphs[k]
		pipe.graph.SLO = pipe.spec.SLO
		for _, fault := range pipe.graph.Faults {
			p.add(cmp.Or(where[fault.Function], path)+"."+cmp.Or(strings.TrimPrefix(fault.Annotation, pipeline.Prefix), "name"), "got %s, want %s", fault.Got, fault.Want)
		}
		entry := &pipe.graph.Stages[0] // of a graph without faults
		if entry.Weight = pipe.spec.Weight; len(pipe.spec.Length.kinds()) > 0 {
			entry.Length = lengthUnit
		}
		chosen := plan.Chosen{Allocator: pipe.spec.Allocator, Rank: pipe.spec.Rank, Route: pipe.spec.Route}
		view := plan.Pipeline{Name: pipe.key, SLO: pipe.spec.SLO, Chosen: chosen}
		for _, st := range pipe.graph.Stages {
			key := keyOf(st.Name)
			pipe.stages = append(pipe.stages, m.index(key))
			view.Stages = append(view.Stages, key)
		}
		view.Edges = edges(pipe.graph)
		m.snapshot = append(m.snapshot, view)
	}
	slices.SortFunc(m.snapshot, func(a, b plan.Pipeline) int { return compare(a.Name, b.Name) })
}

// edges returns the graph's edges in the form of a snapshot.
func edges(g pipeline.Pipeline) []plan.Edge {
	var out []plan.Edge
	for from, st := range g.Stages {
		for _, e := range st.Next {
			to := slices.IndexFunc(g.Stages, func(s pipeline.Stage) bool { return s.Name == e.To })
			out = append(out, plan.Edge{From: from, To: to, Each: g.Stages[to].Each})
		}
	}
	slices.SortFunc(out, func(a, b plan.Edge) int { return cmp.Or(cmp.Compare(a.From, b.From), cmp.Compare(a.To, b.To)) })
	return slices.Compact(out)
}

// addArrivals makes the source of a pipeline's requests. If the scenario has no duration, the run
// lasts at least until the source ends.
func (m *Model) addArrivals(i int, open Opener, p *problems) {
	pipe, path := &m.pipelines[i], fmt.Sprintf("pipelines[%d].arrivals", i)
	a := pipe.spec.Arrivals
	given := 0
	for _, is := range []bool{a.Rate != "", a.MMPP != "", a.Trace.File != "", a.Make != nil} {
		if is {
			given++
		}
	}
	if given != 1 {
		p.add(path, "%d of rate, mmpp and trace are given, want one", given)
		return
	}
	within(p, path+".cv", *a.CV, 0, maxCV)
	salt := uint64(i) << 32
	var length time.Duration
	var err error
	switch {
	case a.Rate != "":
		var rate arrivals.Profile
		if rate, err = arrivals.ParseProfile(a.Rate); err == nil {
			length, pipe.about = rate.Length(), fmt.Sprintf("%s per second, CV %g", rate, *a.CV)
			pipe.source = func(seed uint64) (arrivals.Source, error) { return arrivals.Renewal(rate, *a.CV, seed+salt) }
		}
		path += ".rate"
	case a.MMPP != "":
		var states arrivals.States
		if states, err = arrivals.ParseStates(a.MMPP); err == nil {
			pipe.about = fmt.Sprintf("MMPP %s, %.4g per second on average", states, states.Mean())
			pipe.source = func(seed uint64) (arrivals.Source, error) { return arrivals.MMPP(states, seed+salt) }
		}
		path += ".mmpp"
	case a.Make != nil:
		pipe.about, pipe.source = "made in code", a.Make
	default:
		length, err = pipe.trace(a.Trace, salt, open)
		path += ".trace"
	}
	if err == nil {
		_, err = pipe.source(m.scenario.Seed)
	}
	if err != nil {
		p.add(path, "%v", err)
		return
	}
	if m.scenario.Duration == 0 {
		m.duration = max(m.duration, length)
	}
}

// trace reads a recorded load.
func (p *pipe) trace(t Trace, salt uint64, open Opener) (time.Duration, error) {
	f, err := open(t.File)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	tr, err := arrivals.ReadTrace(f, t.Format, t.Column)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", t.File, err)
	}
	if tr, err = tr.Cut(t.From, t.To); err != nil {
		return 0, fmt.Errorf("%s: %w", t.File, err)
	}
	p.source = func(seed uint64) (arrivals.Source, error) {
		return tr.Replay(arrivals.Replay{Speed: t.Speed, Scale: t.Scale, Spread: t.Spread, Loop: t.Loop}, seed+salt)
	}
	length := time.Duration(float64(tr.Length) / max(t.Speed, 1e-3))
	p.about = fmt.Sprintf("trace %s from %v for %v, speed %g, scale %g, %.4g per second on average",
		filepath.Base(t.File), t.From, tr.Length, t.Speed, t.Scale, tr.Arrivals()*t.Scale/max(length.Seconds(), 1e-9))
	return length, nil
}
