package policy

import (
	"cmp"
	"maps"
	"slices"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// Known returns the names of the allocators and routes that entry stages may ask for, sorted. Ranks
// are [plan.Ranks].
func Known() (allocators, routes []string) {
	s, err := Names{}.Choose()
	if err != nil { // the defaults exist
		return nil, nil
	}
	return slices.Sorted(maps.Keys(s.allocators)), slices.Sorted(maps.Keys(s.routes))
}

// ruled is what the entry stages of a domain ask for, and what they get.
type ruled struct {
	asked     bool // for any policy
	chosen    plan.Chosen
	conflicts []plan.Conflict
}

// rule chooses the policies of a domain. had are those that it had before; empty names mean the
// set's own. A level for which no entry stage asks has the set's own policy. If entry stages ask
// for different policies, the domain keeps the one that it had. Names that do not exist do not
// count.
func (s Set) rule(snap *plan.Snapshot, d plan.Domain, had plan.Chosen) ruled {
	var asked [3][]string
	ask := func(c plan.Chosen) {
		for i, name := range [...]string{c.Allocator, c.Rank, c.Route} {
			if name != "" && !slices.Contains(asked[i], name) {
				asked[i] = append(asked[i], name)
			}
		}
	}
	for _, name := range d.Pipelines {
		if p, ok := snap.Pipeline(name); ok {
			ask(p.Chosen)
		}
	}
	if len(d.Pipelines) == 0 {
		for _, name := range d.Functions {
			if f, ok := snap.Function(name); ok {
				ask(f.Chosen)
			}
		}
	}
	r := ruled{asked: len(asked[0])+len(asked[1])+len(asked[2]) > 0, chosen: plan.Chosen{Allocator: s.names.Allocator, Rank: s.names.Rank, Route: s.names.Route}}
	if !r.asked {
		return r
	}
	r.settle("allocator", asked[0], had.Allocator, &r.chosen.Allocator, func(n string) bool { return s.allocators[n] != nil })
	r.settle("rank", asked[1], had.Rank, &r.chosen.Rank, func(n string) bool { return slices.Contains(plan.Ranks, n) })
	r.settle("route", asked[2], had.Route, &r.chosen.Route, func(n string) bool { return s.routes[n] != nil })
	return r
}

// settle sets the policy of one level, to, which is the set's own so far.
func (r *ruled) settle(level string, asked []string, had string, to *string, known func(string) bool) {
	var valid []string
	for _, name := range asked {
		if known(name) {
			valid = append(valid, name)
		}
	}
	switch {
	case len(valid) == 1:
		*to = valid[0]
	case len(valid) > 1 && had != "" && known(had):
		*to = had
	}
	if len(asked) > 1 || len(valid) < len(asked) {
		slices.Sort(asked)
		r.conflicts = append(r.conflicts, plan.Conflict{Level: level, Asked: asked, Kept: *to})
	}
}

// allocatorOf returns the allocator of a domain with these policies.
func (s Set) allocatorOf(c plan.Chosen) level {
	if a := s.allocators[c.Allocator]; a != nil && c.Allocator != s.names.Allocator {
		return a
	}
	return s.allocator
}

// correctorOf returns the corrector of a domain with these policies; nil: none. An allocator that
// owns the mix has none. Nor has an allocator that an entry stage asks for, unless it is the sizer:
// the corrector would undo what makes the allocator different.
func (s Set) correctorOf(c plan.Chosen) level {
	if c.Allocator != "" && c.Allocator != s.names.Allocator && c.Allocator != "sizer" {
		return nil
	}
	if _, owns := s.allocatorOf(c).(mixer); owns {
		return nil
	}
	return s.corrector
}

// routerOf returns the router of a domain with these policies.
func (s Set) routerOf(c plan.Chosen) plan.Router {
	if r := s.routes[c.Route]; r != nil {
		return r
	}
	return s.router
}

// In returns the names of the policies in force in a domain with these chosen ones. n has no empty
// names, as [Set.Names] returns it.
func (n Names) In(c plan.Chosen) Names {
	s, err := n.Choose()
	if err != nil {
		return n
	}
	n.Allocator, n.Rank, n.Route = cmp.Or(c.Allocator, n.Allocator), cmp.Or(c.Rank, n.Rank), cmp.Or(c.Route, n.Route)
	if s.correctorOf(c) == nil {
		n.Corrector = none
	}
	if _, owns := s.allocatorOf(c).(mixer); owns { // it routes too
		n.Route = n.Allocator
	}
	if n.Allocator != "sizer" { // no other one knows the price
		n.Price = 0
	}
	return n
}
