package policy

import (
	"cmp"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// Memory is what policies remember between decisions. All functions of a domain share one past. The
// key is the function because domains appear, merge and disappear with deployments. A Memory is nil
// before the first decision. It is never modified, and can be encoded (see [Set.DecodeMemory]).
type Memory map[string]*past

// past is what the policies of a domain remember.
type past struct {
	functions            []string // functions that share it, sorted
	allocator, corrector any
}

// recall merges what the functions of d remember.
func (s Set) recall(m Memory, d plan.Domain) past {
	out := past{functions: d.Functions}
	if p := m[d.Functions[0]]; p != nil && slices.Equal(p.functions, d.Functions) { // as before
		return past{d.Functions, p.allocator, p.corrector}
	}
	var seen []*past
	for _, name := range d.Functions {
		p := m[name]
		if p == nil || slices.Contains(seen, p) {
			continue
		}
		seen = append(seen, p)
		if len(seen) == 1 {
			out.allocator, out.corrector = p.allocator, p.corrector
			continue
		}
		out.allocator = s.allocator.merge(out.allocator, p.allocator)
		if s.corrector != nil {
			out.corrector = s.corrector.merge(out.corrector, p.corrector)
		}
	}
	return out
}

// Held is a domain that keeps its replicas, and why.
type Held struct {
	Domain plan.Domain
	Err    error
}

// Decide makes a plan for s. It is a function of its arguments and does not change m. If a policy
// fails or panics, its domain keeps its replicas. If Decide returns an error, there is no plan.
func (s Set) Decide(snap plan.Snapshot, m Memory) (plan.Plan, Memory, []Held, error) {
	p := plan.Plan{Epoch: snap.Epoch, Rev: snap.Rev, At: snap.At}
	next := make(Memory, len(snap.Functions))
	all := make(plan.Alloc, 0, len(snap.Functions))
	var held []Held
	for _, d := range plan.Domains(snap) {
		before := s.recall(m, d)
		after := &past{functions: d.Functions, allocator: before.allocator, corrector: before.corrector}
		lines, err := s.decide(snap, d, before, after)
		if err != nil {
			held = append(held, Held{d, err})
			lines, *after = hold(snap, d, err), before
		}
		all = append(all, lines...)
		for _, name := range d.Functions {
			next[name] = after
		}
	}
	slices.SortFunc(all, func(a, b plan.Line) int { return cmp.Compare(a.Function, b.Function) })
	if s.sharer != nil {
		if err := guarded(func() (err error) { all, err = s.sharer.Share(snap, all); return err }); err != nil {
			return p, m, held, fmt.Errorf("share: %w", err)
		}
	}
	if err := guarded(func() (err error) { p.Wants, err = s.placer.Place(snap, all); return err }); err != nil {
		return p, m, held, fmt.Errorf("place: %w", err)
	}
	if s.warmer != nil {
		if err := guarded(func() (err error) { p.Warm, err = s.warmer.Warm(snap, p.Wants); return err }); err != nil {
			return p, m, held, fmt.Errorf("warm: %w", err)
		}
	}
	return p, next, held, p.Validate(snap)
}

// decide allocates and corrects one domain.
func (s Set) decide(snap plan.Snapshot, d plan.Domain, before past, after *past) (lines plan.Alloc, err error) {
	err = guarded(func() (err error) {
		if lines, after.allocator, err = s.allocator.decide(snap, d, nil, before.allocator); err != nil {
			return fmt.Errorf("the allocator has no answer: %w", err)
		}
		if s.corrector == nil {
			return nil
		}
		if lines, after.corrector, err = s.corrector.decide(snap, d, lines, before.corrector); err != nil {
			return fmt.Errorf("the corrector has no answer: %w", err)
		}
		return nil
	})
	return lines, err
}

// guarded calls a policy and turns a panic into an error, so that a policy's fault does not end
// requests.
func guarded(policy func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("policy panicked: %v\n%s", r, debug.Stack())
		}
	}()
	return policy()
}

// hold keeps each function of d at its present count, within its bounds. Of the cause, it uses only
// the first line, because a panic's stack differs in each run.
func hold(s plan.Snapshot, d plan.Domain, cause error) plan.Alloc {
	first, _, _ := strings.Cut(cause.Error(), "\n")
	a := make(plan.Alloc, 0, len(d.Functions))
	for _, name := range d.Functions {
		f, _ := s.Function(name)
		ready, starting := f.Current()
		least, most := f.Bounds()
		a = append(a, plan.Line{
			Function: name, Count: min(max(ready+starting, least), most), CPUMilli: f.CPUNow, Batch: f.Batch,
			Why: fmt.Sprintf("held: %.200s", first),
		})
	}
	return a
}
