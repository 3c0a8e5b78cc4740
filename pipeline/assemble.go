package pipeline

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// String returns the function and annotation at fault, what was got, and what is wanted.
func (f Fault) String() string {
	var where []string
	if f.Function != "" {
		where = append(where, fmt.Sprintf("function %q", f.Function))
	}
	if f.Annotation != "" {
		where = append(where, "annotation "+f.Annotation)
	}
	if len(where) == 0 {
		return fmt.Sprintf("got %s, want %s", f.Got, f.Want)
	}
	return fmt.Sprintf("%s: got %s, want %s", strings.Join(where, ", "), f.Got, f.Want)
}

// Assemble returns the pipelines that the functions form, sorted by namespace and name. The order
// of fns does not matter. A variant of another function is not a separate stage.
func Assemble(fns []Function) []Pipeline {
	byNamespace := map[string]map[string]Function{}
	members := map[Key][]Function{} // by the pipeline's key
	served := map[Key]bool{}        // functions with a variant
	for _, f := range fns {
		if f.VariantOf != "" {
			served[Key{f.VariantOf, f.Namespace}] = true
		}
	}
	for _, f := range fns {
		if f.Retained && !served[f.Key()] {
			continue
		}
		if byNamespace[f.Namespace] == nil {
			byNamespace[f.Namespace] = map[string]Function{}
		}
		byNamespace[f.Namespace][f.Name] = f
		if f.VariantOf != "" {
			continue
		}
		for _, p := range f.Pipelines {
			key := Key{p, f.Namespace}
			members[key] = append(members[key], f)
		}
	}
	var out []Pipeline
	for key, stages := range members {
		out = append(out, assemble(key.Name, key.Namespace, stages, byNamespace[key.Namespace]))
	}
	slices.SortFunc(out, func(a, b Pipeline) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
	})
	return out
}

func assemble(name, namespace string, fns []Function, deployed map[string]Function) Pipeline {
	slices.SortFunc(fns, func(a, b Function) int { return strings.Compare(a.Name, b.Name) })
	a := &assembly{p: Pipeline{Name: name, Namespace: namespace}, at: map[string]int{}}
	for i, f := range fns {
		a.p.Stages = append(a.p.Stages, Stage{Function: f})
		a.at[f.Name] = i
	}
	namesake, taken := deployed[name]
	// stored by an earlier version; a deploy would refuse it.
	if taken && !namesake.StageOf(name) {
		a.fault(fns[0].Name, "pipeline", fmt.Sprintf("%q, which is a function's name too", name), "a pipeline's name that no function of the namespace has")
	}
	a.connect(deployed)
	if i, stage := a.at[name]; stage && len(a.p.Stages[i].Prev) > 0 {
		a.fault(name, "pipeline", fmt.Sprintf("%q, which is the name of this stage, and the stage follows others", name),
			"another name of the pipeline: only its entry stage may have the same")
	}
	a.findEntry()
	a.sort()
	a.check()
	a.addVariants(deployed)
	return a.p
}

// addVariants adds the variants of the stages, and a warning for each variant of a variant.
func (a *assembly) addVariants(deployed map[string]Function) {
	for _, name := range slices.Sorted(maps.Keys(deployed)) {
		f := deployed[name]
		i := slices.IndexFunc(a.p.Stages, func(s Stage) bool { return s.Name == root(f, deployed) })
		if i < 0 {
			continue
		}
		if fault, bad := VariantFault(f, deployed); bad {
			a.p.Warnings = append(a.p.Warnings, fault)
		} else {
			a.p.Stages[i].Variants = append(a.p.Stages[i].Variants, f)
		}
	}
}

// root returns the name of the function to which the chain of variants from f leads; "" if f is not
// a variant, or if the chain is a cycle.
func root(f Function, deployed map[string]Function) string {
	to := f.VariantOf
	for range deployed {
		next := deployed[to].VariantOf
		if next == "" {
			return to
		}
		to = next
	}
	return ""
}

// VariantFault returns why a variant serves no stage: its stage is missing, or is a variant too.
// bad is false if f serves a stage or is not a variant. deployed maps names of f's namespace to
// functions; only the entry of f's stage is read.
func VariantFault(f Function, deployed map[string]Function) (fault Fault, bad bool) {
	if f.VariantOf == "" {
		return Fault{}, false
	}
	fault = Fault{Function: f.Name, Annotation: Prefix + "variant-of"}
	of, there := deployed[f.VariantOf]
	switch {
	case !there:
		fault.Got, fault.Want, fault.Missing = notDeployed(f.VariantOf), "a deployed function of the same namespace", f.VariantOf
	case of.VariantOf != "":
		fault.Got, fault.Want = fmt.Sprintf("%q, which is a variant of %q", f.VariantOf, of.VariantOf), "a function that is no variant"
	default:
		return Fault{}, false
	}
	return fault, true
}

func notDeployed(name string) string { return fmt.Sprintf("%q, which is not deployed", name) }

type assembly struct {
	p  Pipeline
	at map[string]int // index of each stage, while stages are sorted by name
}

func (a *assembly) fault(function, annotation, got, want string) {
	if annotation != "" {
		annotation = Prefix + annotation
	}
	a.p.Faults = append(a.p.Faults, Fault{Function: function, Annotation: annotation, Got: got, Want: want})
}

// connect keeps the edges that lead to stages of this pipeline. It ignores an edge to a function
// that belongs only to other pipelines, if the edge's owner is in one of them too.
func (a *assembly) connect(deployed map[string]Function) {
	for i := range a.p.Stages {
		s := &a.p.Stages[i]
		for _, e := range s.Function.Next {
			k, here := a.at[e.To]
			target, exists := deployed[e.To]
			switch {
			case here:
				s.Next = append(s.Next, e)
				// Prev is sorted, because stages are.
				a.p.Stages[k].Prev = append(a.p.Stages[k].Prev, s.Name)
			case !exists:
				a.fault(s.Name, "next", notDeployed(e.To), "a deployed function of the same namespace")
				a.p.Faults[len(a.p.Faults)-1].Missing = e.To
			case target.VariantOf != "":
				a.fault(s.Name, "next", fmt.Sprintf("%q, which is a variant of %q", e.To, target.VariantOf), "the stage that it is a variant of")
			case !sharePipeline(s.Function, target):
				a.fault(s.Name, "next", fmt.Sprintf("%q, which does not belong to the pipeline", e.To), fmt.Sprintf("a function with %spipeline: %s", Prefix, a.p.Name))
			}
		}
	}
}

func sharePipeline(a, b Function) bool {
	return slices.ContainsFunc(a.Pipelines, func(p string) bool { return slices.Contains(b.Pipelines, p) })
}

// findEntry selects the only stage without predecessors as the entry. If there are several, it
// selects the one with an SLO, else the first by name, and reports a fault for each other one.
func (a *assembly) findEntry() {
	var entries []Stage
	for _, s := range a.p.Stages {
		if len(s.Prev) == 0 {
			entries = append(entries, s)
		}
	}
	switch len(entries) {
	case 0:
		a.fault(a.p.Stages[0].Name, "next", "no entry: every stage has a predecessor", "one stage that no other names in "+Prefix+"next")
		return
	case 1:
		a.p.Entry, a.p.SLO = entries[0].Name, entries[0].SLO
		return
	}
	likely := max(0, slices.IndexFunc(entries, func(s Stage) bool { return s.SLO > 0 }))
	for i, s := range entries {
		if i != likely {
			a.fault(s.Name, "pipeline", fmt.Sprintf("%q, which has the entry %q already", a.p.Name, entries[likely].Name),
				fmt.Sprintf("%q in another stage's %snext, or out of the pipeline", s.Name, Prefix))
		}
	}
}

// sort puts the stages into topological order, ties by name. If there is a cycle, it reports a
// fault and sorts by name.
func (a *assembly) sort() {
	left := make([]int, len(a.p.Stages)) // number of predecessors not placed yet
	for i, s := range a.p.Stages {
		left[i] = len(s.Prev)
	}
	var order []int
	for placed := true; placed; {
		placed = false
		for i := range left {
			if left[i] != 0 {
				continue
			}
			left[i], placed = -1, true
			order = append(order, i)
			for _, e := range a.p.Stages[i].Next {
				left[a.at[e.To]]--
			}
			break // start again from the first by name
		}
	}
	if len(order) < len(a.p.Stages) {
		cycle := a.cycle(left)
		a.fault(cycle[0], "next", "the cycle "+strings.Join(append(cycle, cycle[0]), " > "), "a graph without cycles")
		return
	}
	stages := make([]Stage, 0, len(order))
	for _, i := range order {
		stages = append(stages, a.p.Stages[i])
	}
	if len(a.p.Faults) == 0 {
		a.p.Stages = stages
	}
}

// cycle returns the stages of a cycle in order, beginning with the first by name. left has the
// number of unplaced predecessors of each stage that [assembly.sort] could not place. Each of these
// stages has a predecessor that could not be placed either. So a walk from predecessor to
// predecessor comes to some stage twice, and the walk between the two visits is a cycle.
func (a *assembly) cycle(left []int) []string {
	i := slices.IndexFunc(left, func(n int) bool { return n > 0 })
	var path []string
	for !slices.Contains(path, a.p.Stages[i].Name) {
		path = append(path, a.p.Stages[i].Name)
		for _, prev := range a.p.Stages[i].Prev {
			if left[a.at[prev]] > 0 {
				i = a.at[prev]
				break
			}
		}
	}
	path = path[slices.Index(path, a.p.Stages[i].Name):]
	slices.Reverse(path)
	first := slices.Index(path, slices.Min(path))
	return append(path[first:len(path):len(path)], path[:first]...)
}

// checkPolicies reports policies on a stage that is the entry of no pipeline. Only the annotations
// of entry stages count. A stage of several pipelines may be the entry of another one.
func (a *assembly) checkPolicies(s *Stage) {
	if s.Name == a.p.Entry || a.p.Entry == "" || len(s.Pipelines) > 1 {
		return
	}
	least := ""
	if s.MinAccuracy > 0 {
		least = strconv.FormatFloat(s.MinAccuracy, 'g', -1, 64)
	}
	for _, policy := range []struct{ annotation, value string }{{"allocator", s.Allocator}, {"rank", s.Rank}, {"route", s.Route}, {"min-accuracy", least}} {
		if policy.value != "" {
			a.fault(s.Name, policy.annotation, strconv.Quote(policy.value), fmt.Sprintf("it on the entry stage %q alone: it is the whole pipeline's", a.p.Entry))
		}
	}
}

// check reports annotations of stages that do not fit their place.
func (a *assembly) check() {
	for _, s := range a.p.Stages {
		if s.SLO > 0 && s.Name != a.p.Entry && a.p.Entry != "" && len(s.Pipelines) == 1 {
			a.fault(s.Name, "slo", s.SLO.String(), fmt.Sprintf("it on the entry stage %q alone: it is the whole pipeline's", a.p.Entry))
		}
		a.checkPolicies(&s)
		if s.Join > len(s.Prev) {
			a.fault(s.Name, "join", fmt.Sprint(s.Join), fmt.Sprintf("at most its %d predecessors", len(s.Prev)))
		}
	}
	if len(a.p.Faults) > 0 {
		slices.SortFunc(a.p.Stages, func(x, y Stage) int { return strings.Compare(x.Name, y.Name) })
	}
}
