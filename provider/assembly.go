package provider

import (
	"maps"
	"slices"

	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// assembly indexes which functions belong to which pipelines. So a change of one function among
// thousands assembles few pipelines again. Retained functions are in it like deployed ones.
type assembly struct {
	functions map[pipeline.Key]*pipeline.Function    // by key
	members   map[pipeline.Key]map[pipeline.Key]bool // by pipeline: keys of its stages
	// By function: keys of the pipelines with stages that name it in next, and how many.
	leading  map[pipeline.Key]map[pipeline.Key]int
	variants map[pipeline.Key]map[pipeline.Key]bool // by function: keys of its variants
}

func newAssembly() assembly {
	return assembly{map[pipeline.Key]*pipeline.Function{}, map[pipeline.Key]map[pipeline.Key]bool{}, map[pipeline.Key]map[pipeline.Key]int{}, map[pipeline.Key]map[pipeline.Key]bool{}}
}

// change records that a function was deployed, updated or removed. old is the function before the
// change, or nil if there was none. now is the function after the change, or nil if it was removed.
// change returns the sorted keys of the pipelines that may have changed:
//
//   - the pipelines that the function was or is a stage of
//   - the pipelines with a stage that leads to the function
//   - the pipeline with the function's name
//   - the same of the functions that the function was or is a variant of, directly or not
func (a *assembly) change(key pipeline.Key, old, now *pipeline.Function) []pipeline.Key {
	affected := map[pipeline.Key]bool{}
	affects := func(key pipeline.Key) {
		if len(a.members[key]) > 0 {
			affected[key] = true
		}
		for p := range a.leading[key] {
			affected[p] = true
		}
	}
	affects(key)
	for _, f := range []*pipeline.Function{old, now} {
		if f == nil {
			continue
		}
		if f.VariantOf != "" {
			a.vary(pipeline.Key{Name: f.VariantOf, Namespace: f.Namespace}, key, f == now)
			a.above(f, func(of pipeline.Key) {
				affects(of)
				if stage := a.functions[of]; stage != nil && stage.VariantOf == "" {
					for _, name := range stage.Pipelines {
						affected[pipeline.Key{Name: name, Namespace: of.Namespace}] = true
					}
				}
			})
			continue
		}
		for _, name := range f.Pipelines {
			p := pipeline.Key{Name: name, Namespace: f.Namespace}
			affected[p] = true
			a.enter(p, key, f, f == now)
		}
	}
	if a.functions[key] = now; now == nil {
		delete(a.functions, key)
	}
	return slices.SortedFunc(maps.Keys(affected), pipeline.Key.Compare)
}

// above calls each with the functions that f is a variant of, directly or not.
func (a *assembly) above(f *pipeline.Function, each func(pipeline.Key)) {
	for range len(a.functions) + 1 { // the chain may be a cycle
		if f == nil || f.VariantOf == "" {
			return
		}
		of := pipeline.Key{Name: f.VariantOf, Namespace: f.Namespace}
		each(of)
		f = a.functions[of]
	}
}

// vary adds a variant of a function to the index, or removes it.
func (a *assembly) vary(of, variant pipeline.Key, in bool) {
	if !in {
		if delete(a.variants[of], variant); len(a.variants[of]) == 0 {
			delete(a.variants, of)
		}
		return
	}
	if a.variants[of] == nil {
		a.variants[of] = map[pipeline.Key]bool{}
	}
	a.variants[of][variant] = true
}

// enter adds f to the stages of p in the index, or removes it.
func (a *assembly) enter(p, key pipeline.Key, f *pipeline.Function, in bool) {
	by := 1
	if in {
		if a.members[p] == nil {
			a.members[p] = map[pipeline.Key]bool{}
		}
		a.members[p][key] = true
	} else {
		by = -1
		if delete(a.members[p], key); len(a.members[p]) == 0 {
			delete(a.members, p)
		}
	}
	for _, e := range f.Next {
		to := pipeline.Key{Name: e.To, Namespace: f.Namespace}
		if a.leading[to] == nil {
			a.leading[to] = map[pipeline.Key]int{}
		}
		if a.leading[to][p] += by; a.leading[to][p] == 0 {
			delete(a.leading[to], p)
		}
		if len(a.leading[to]) == 0 {
			delete(a.leading, to)
		}
	}
}

// pipeline assembles one pipeline. ok is false if the pipeline has no stages. [pipeline.Assemble]
// gets the pipeline's stages, their variants and the variants of these, the functions that the
// stages lead to with their variants, and the function with the pipeline's name. No other function
// can affect the pipeline.
func (a *assembly) pipeline(key pipeline.Key) (p pipeline.Pipeline, ok bool) {
	seen := map[pipeline.Key]*pipeline.Function{}
	var see func(key pipeline.Key)
	see = func(key pipeline.Key) {
		f := a.functions[key]
		if f == nil || seen[key] != nil {
			return
		}
		seen[key] = f
		for variant := range a.variants[key] {
			see(variant)
		}
	}
	see(key)
	for stage := range a.members[key] {
		see(stage)
		for _, e := range a.functions[stage].Next {
			see(pipeline.Key{Name: e.To, Namespace: stage.Namespace})
		}
	}
	fns := make([]pipeline.Function, 0, len(seen))
	for _, f := range seen {
		fns = append(fns, *f)
	}
	all := pipeline.Assemble(fns)
	i := slices.IndexFunc(all, func(p pipeline.Pipeline) bool { return p.Key() == key })
	if i < 0 { // its only stages are retained, and have no variants
		return pipeline.Pipeline{}, false
	}
	return all[i], true
}
