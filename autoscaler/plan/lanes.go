package plan

import (
	"cmp"
	"slices"
)

// Lanes are the functions that can serve a stage.
type Lanes struct {
	Stage string
	// Functions are the stage's own function, if it is deployed, and its variants, sorted.
	Functions []string
}

// Serves returns the name of the stage that f serves: that of which it is a variant, or its own.
func (f *Function) Serves() string { return cmp.Or(f.VariantOf, f.Name) }

// Accurate returns the accuracy of f's answers; 1 if f declares none.
func (f *Function) Accurate() float64 {
	if f.Accuracy > 0 && f.Accuracy <= 1 {
		return f.Accuracy
	}
	return 1
}

// Takes reports whether f takes inputs of this length; 0 means any length.
func (f *Function) Takes(length int) bool {
	return f.MaxLength <= 0 || length > 0 && length <= f.MaxLength
}

// Lanes returns the stages that have several lanes, sorted by stage. A variant of a variant is no
// lane, because it serves no stage.
func (s *Snapshot) Lanes() []Lanes {
	var of map[string][]string
	for i := range s.Functions {
		f := &s.Functions[i]
		if f.VariantOf == "" {
			continue
		}
		own, deployed := s.Function(f.VariantOf)
		if deployed && own.VariantOf != "" {
			continue
		}
		if of == nil {
			of = map[string][]string{}
		}
		if deployed && len(of[own.Name]) == 0 {
			of[own.Name] = []string{own.Name}
		}
		of[f.VariantOf] = append(of[f.VariantOf], f.Name)
	}
	var out []Lanes
	for stage, functions := range of {
		if len(functions) > 1 {
			slices.Sort(functions)
			out = append(out, Lanes{stage, functions})
		}
	}
	slices.SortFunc(out, func(a, b Lanes) int { return cmp.Compare(a.Stage, b.Stage) })
	return out
}

// LanesIn returns the stages of a domain that have several lanes, sorted by stage.
func (s *Snapshot) LanesIn(d Domain) []Lanes {
	if !slices.ContainsFunc(d.Functions, func(name string) bool {
		f, ok := s.Function(name)
		return ok && f.VariantOf != ""
	}) {
		return nil
	}
	return slices.DeleteFunc(s.Lanes(), func(l Lanes) bool {
		_, in := slices.BinarySearch(d.Functions, l.Functions[0])
		return !in
	})
}

// lanesOf returns the lanes of a stage. all is the result of [Snapshot.Lanes].
func lanesOf(all []Lanes, stage string) []string {
	if i, ok := slices.BinarySearchFunc(all, stage, func(l Lanes, stage string) int { return cmp.Compare(l.Stage, stage) }); ok {
		return all[i].Functions
	}
	return []string{stage}
}

// Step is how one stage's answers become another stage's tasks.
type Step struct {
	From, To string // stages
	Join     bool   // To has parts from several stages: its tasks come from FromJoin
	Each     bool   // To has one call per item that From returns
}

// Steps returns the steps of a domain's pipelines, sorted by From, then To. If two pipelines have
// the same step, it is there once for each way of taking it.
func (s *Snapshot) Steps(d Domain) []Step {
	var out []Step
	for _, name := range d.Pipelines {
		p, ok := s.Pipeline(name)
		if !ok {
			continue
		}
		into := make([]int, len(p.Stages))
		for _, e := range p.Edges {
			if e.onwards(p) {
				into[e.To]++
			}
		}
		for _, e := range p.Edges {
			if e.onwards(p) {
				out = append(out, Step{p.Stages[e.From], p.Stages[e.To], into[e.To] > 1, e.Each})
			}
		}
	}
	less := map[bool]int{true: 1}
	slices.SortFunc(out, func(a, b Step) int {
		return cmp.Or(cmp.Compare(a.From, b.From), cmp.Compare(a.To, b.To), less[a.Join]-less[b.Join], less[a.Each]-less[b.Each])
	})
	return slices.Compact(out)
}

// onwards reports whether e leads from a stage of p to a later one.
func (e Edge) onwards(p *Pipeline) bool { return 0 <= e.From && e.From < e.To && e.To < len(p.Stages) }

// Sources returns the sources of a stage's tasks, sorted: FromClient, the lanes of each stage
// before it, and FromJoin if the tasks have parts from several stages. all is the result of
// [Snapshot.Lanes].
func Sources(steps []Step, all []Lanes, stage string) []string {
	out := []string{FromClient}
	for _, st := range steps {
		switch {
		case st.To != stage:
		case st.Join:
			out = append(out, FromJoin)
		default:
			out = append(out, lanesOf(all, st.From)...)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// Entries returns the stages at which requests enter a domain's pipelines, sorted.
func (s *Snapshot) Entries(d Domain) []string {
	var out []string
	for _, name := range d.Pipelines {
		p, ok := s.Pipeline(name)
		if !ok {
			continue
		}
		for k, stage := range p.Stages {
			if !slices.ContainsFunc(p.Edges, func(e Edge) bool { return e.To == k && e.onwards(p) }) {
				out = append(out, stage)
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// pipelineNames returns the names of all pipelines.
func (s *Snapshot) pipelineNames() []string {
	out := make([]string, len(s.Pipelines))
	for i := range s.Pipelines {
		out[i] = s.Pipelines[i].Name
	}
	return out
}
