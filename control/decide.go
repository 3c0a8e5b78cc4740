package control

import (
	"cmp"
	"fmt"
	"runtime/debug"
	"slices"

	"github.com/stagecoach-serving/stagecoach/plan"
)

// past is what a domain's allocator remembered.
type past struct{ memory any }

// memory knows for each function the past of the domain that it was in: domains come, merge and go with deployments.
type memory map[string]*past

// recall joins what the functions of d remember.
func (m memory) recall(d plan.Domain, a allocator) any {
	var seen []*past
	var out any
	for _, name := range d.Functions {
		p := m[name]
		if p == nil || slices.Contains(seen, p) {
			continue
		}
		if len(seen) == 0 {
			out = p.memory
		} else {
			out = a.merge(out, p.memory)
		}
		seen = append(seen, p)
	}
	return out
}

// held is a domain that stays as it is, and why.
type held struct {
	domain plan.Domain
	err    error
}

// decide makes a plan of s. It is a function of its arguments; m is left as it was.
func (c chosen) decide(s plan.Snapshot, m memory) (plan.Plan, memory, []held, error) {
	p := plan.Plan{Epoch: s.Epoch, Rev: s.Rev, At: s.At}
	next := make(memory, len(s.Functions))
	var all plan.Alloc
	var stay []held
	for _, d := range plan.Domains(s) {
		remembered := m.recall(d, c.allocator)
		var lines plan.Alloc
		var after any
		err := guarded(func() (err error) { lines, after, err = c.allocator.allocate(s, d, remembered); return err })
		if err != nil {
			stay = append(stay, held{d, err})
			lines, after = hold(s, d, err), remembered
		}
		all = append(all, lines...)
		here := &past{after}
		for _, name := range d.Functions {
			next[name] = here
		}
	}
	slices.SortFunc(all, func(a, b plan.Line) int { return cmp.Compare(a.Function, b.Function) })
	if err := guarded(func() (err error) { p.Wants, err = c.placer.Place(s, all); return err }); err != nil {
		return p, m, stay, fmt.Errorf("place: %w", err)
	}
	if err := guarded(func() (err error) { p.Warm, err = c.warmer.Warm(s, p.Wants); return err }); err != nil {
		return p, m, stay, fmt.Errorf("warm: %w", err)
	}
	return p, next, stay, p.Validate(s)
}

// guarded calls a policy and turns a panic into an error: a policy's fault must not take requests down with it.
func guarded(policy func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("policy panicked: %v\n%s", r, debug.Stack())
		}
	}()
	return policy()
}

// hold keeps each function of d at the count it has, within its bounds.
func hold(s plan.Snapshot, d plan.Domain, cause error) plan.Alloc {
	a := make(plan.Alloc, 0, len(d.Functions))
	for _, name := range d.Functions {
		f, _ := s.Function(name)
		ready, starting := f.Current()
		least, most := f.Bounds()
		a = append(a, plan.Line{
			Function: name, Count: min(max(ready+starting, least), most), Batch: f.Batch,
			Why: fmt.Sprintf("held, the allocator has no answer: %.200v", cause),
		})
	}
	return a
}
