package pipeline

import (
	"fmt"
	"slices"
	"strconv"
)

// Disagreements returns a fault for each policy that the entry stage of p asks for, if the entry
// stage of another pipeline asks for a different one. It matters only for pipelines that a chain of
// shared functions connects, because all of these have one policy. They keep the one that they had.
// all has the pipelines of p's namespace, and may have others.
func Disagreements(p Pipeline, all []Pipeline) []Fault {
	own := p.entry()
	if own == nil || own.Policies == (Policies{}) {
		return nil
	}
	var faults []Fault
	for _, other := range connected(p, all) {
		entry := other.entry()
		if entry == nil || entry.Name == own.Name {
			continue
		}
		for _, level := range []struct{ annotation, own, other string }{
			{"allocator", own.Allocator, entry.Allocator}, {"rank", own.Rank, entry.Rank}, {"route", own.Route, entry.Route},
		} {
			if level.own == "" || level.other == "" || level.own == level.other {
				continue
			}
			faults = append(faults, Fault{
				Function: own.Name, Annotation: Prefix + level.annotation, Got: strconv.Quote(level.own),
				Want: fmt.Sprintf("%q, as the entry stage %q of pipeline %q has: the pipelines share functions, and keep the %s that they had",
					level.other, entry.Name, other.Name, level.annotation),
			})
		}
	}
	return faults
}

// entry returns the entry stage, or nil if it is not known.
func (p *Pipeline) entry() *Stage {
	if i := slices.IndexFunc(p.Stages, func(s Stage) bool { return s.Name == p.Entry }); i >= 0 {
		return &p.Stages[i]
	}
	return nil
}

// connected returns the other pipelines of all that a chain of shared functions connects with p, in
// the order of all.
func connected(p Pipeline, all []Pipeline) []Pipeline {
	reached := map[string]bool{} // functions
	in := make([]bool, len(all))
	add := func(p *Pipeline) {
		for _, s := range p.Stages {
			reached[s.Name] = true
		}
	}
	add(&p)
	for more := true; more; {
		more = false
		for i := range all {
			q := &all[i]
			if in[i] || q.Namespace != p.Namespace || q.Name == p.Name {
				continue
			}
			if slices.ContainsFunc(q.Stages, func(s Stage) bool { return reached[s.Name] }) {
				in[i], more = true, true
				add(q)
			}
		}
	}
	var out []Pipeline
	for i := range all {
		if in[i] {
			out = append(out, all[i])
		}
	}
	return out
}
