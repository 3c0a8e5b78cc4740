package provider

import (
	"maps"
	"slices"

	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// assembly knows which functions have to do with which pipelines, so that a change of one function among thousands asks for
// few pipelines to be assembled anew.
type assembly struct {
	functions map[string]*pipeline.Function // by key
	members   map[string]map[string]bool    // by key of the pipeline: keys of its stages
	leading   map[string]map[string]int     // by key of a function: keys of the pipelines with a stage that names it as next, and how often
}

func newAssembly() assembly {
	return assembly{map[string]*pipeline.Function{}, map[string]map[string]bool{}, map[string]map[string]int{}}
}

// change takes note of a function that was old and is now, nil meaning not there, and returns the keys of the pipelines that
// may be others now, sorted: those that it was or is a stage of, those with a stage that leads to it, the one of its name.
func (a *assembly) change(key string, old, now *pipeline.Function) []string {
	affected := map[string]bool{}
	if len(a.members[key]) > 0 {
		affected[key] = true
	}
	for p := range a.leading[key] {
		affected[p] = true
	}
	for _, f := range []*pipeline.Function{old, now} {
		if f == nil || f.VariantOf != "" {
			continue
		}
		for _, name := range f.Pipelines {
			p := pipeline.Key(name, f.Namespace)
			affected[p] = true
			a.enter(p, key, f, f == now)
		}
	}
	if a.functions[key] = now; now == nil {
		delete(a.functions, key)
	}
	return slices.Sorted(maps.Keys(affected))
}

// enter makes f a stage of p in the index, or no longer.
func (a *assembly) enter(p, key string, f *pipeline.Function, in bool) {
	by := 1
	if in {
		if a.members[p] == nil {
			a.members[p] = map[string]bool{}
		}
		a.members[p][key] = true
	} else {
		by = -1
		if delete(a.members[p], key); len(a.members[p]) == 0 {
			delete(a.members, p)
		}
	}
	for _, e := range f.Next {
		to := pipeline.Key(e.To, f.Namespace)
		if a.leading[to] == nil {
			a.leading[to] = map[string]int{}
		}
		if a.leading[to][p] += by; a.leading[to][p] == 0 {
			delete(a.leading[to], p)
		}
		if len(a.leading[to]) == 0 {
			delete(a.leading, to)
		}
	}
}

// pipeline assembles one pipeline; ok is false when it has no stages. What [pipeline.Assemble] sees beside its stages are the
// functions that they lead to and the function of its name: nothing else can change it.
func (a *assembly) pipeline(key string) (p pipeline.Pipeline, ok bool) {
	stages := a.members[key]
	if len(stages) == 0 {
		return pipeline.Pipeline{}, false
	}
	seen := map[string]*pipeline.Function{}
	see := func(key string) {
		if f := a.functions[key]; f != nil {
			seen[key] = f
		}
	}
	see(key)
	for stage := range stages {
		see(stage)
		for _, e := range a.functions[stage].Next {
			see(pipeline.Key(e.To, a.functions[stage].Namespace))
		}
	}
	fns := make([]pipeline.Function, 0, len(seen))
	for _, f := range seen {
		fns = append(fns, *f)
	}
	all := pipeline.Assemble(fns)
	i := slices.IndexFunc(all, func(p pipeline.Pipeline) bool { return pipeline.Key(p.Name, p.Namespace) == key })
	return all[i], true
}
