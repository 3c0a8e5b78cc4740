package policy

import (
	"cmp"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/stagecoach-serving/stagecoach/autoscaler"
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
	chosen               plan.Chosen  // the policies in force, if entry stages ask for any
	tables               []plan.Table // the latest
	tight                []tight      // of a mixer, sorted
}

// recall merges what the functions of d remember.
func (s Set) recall(m Memory, d plan.Domain) past {
	if p := m[d.Functions[0]]; p != nil && slices.Equal(p.functions, d.Functions) { // as before
		out := *p
		out.functions = d.Functions
		return out
	}
	out := past{functions: d.Functions}
	var seen []*past
	for _, name := range d.Functions {
		p := m[name]
		if p == nil || slices.Contains(seen, p) {
			continue
		}
		seen = append(seen, p)
		if len(seen) == 1 {
			out = *p
			out.functions = d.Functions
			continue
		}
		out.tables = slices.Concat(out.tables, p.tables)
		out.tight = slices.Concat(out.tight, p.tight)
		if p.chosen.Allocator == out.chosen.Allocator {
			out.allocator = s.allocatorOf(out.chosen).merge(out.allocator, p.allocator)
		}
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

// deciding is a decision under way.
type deciding struct {
	Set
	snap    plan.Snapshot // as observed
	sized   plan.Snapshot // with the demand that lanes are sized for
	lanes   []plan.Lanes
	domains []domain
	held    []Held
}

// domain is a decision about one domain.
type domain struct {
	plan.Domain
	before past
	after  *past
	ruled
	budget plan.Budget // of a mixer
	mix    *plan.Mix   // nil: the allocator does not own the mix, or has no answer
}

// Decide makes a plan for s. It is a function of its arguments and does not change m. If a policy
// fails or panics, its domain keeps its replicas. If Decide returns an error, there is no plan.
func (s Set) Decide(snap plan.Snapshot, m Memory) (plan.Plan, Memory, []Held, error) {
	p := plan.Plan{Epoch: snap.Epoch, Rev: snap.Rev, At: snap.At}
	d := deciding{Set: s, snap: snap, lanes: snap.Lanes()}
	d.sized = expecting(snap, d.lanes, m)
	if err := d.begin(m); err != nil {
		return p, m, nil, fmt.Errorf("budget: %w", err)
	}
	next := make(Memory, len(snap.Functions))
	all := make(plan.Alloc, 0, len(snap.Functions))
	for i := range d.domains {
		one := &d.domains[i]
		all = append(all, d.allocate(one)...)
		for _, name := range one.Functions {
			next[name] = one.after
		}
	}
	slices.SortFunc(all, func(a, b plan.Line) int { return cmp.Compare(a.Function, b.Function) })
	if s.sharer != nil {
		if err := guarded(func() (err error) { all, err = d.share(all); return err }); err != nil {
			return p, m, d.held, fmt.Errorf("share: %w", err)
		}
	}
	if err := guarded(func() (err error) { p.Wants, err = s.placer.Place(snap, all); return err }); err != nil {
		return p, m, d.held, fmt.Errorf("place: %w", err)
	}
	d.route(&p)
	if s.warmer != nil {
		if err := guarded(func() (err error) { p.Warm, err = s.warmer.Warm(snap, p.Wants); return err }); err != nil {
			return p, m, d.held, fmt.Errorf("warm: %w", err)
		}
	}
	return p, next, d.held, p.Validate(snap)
}

// begin finds the domains and their policies, and gives budgets to those whose allocators own the
// mix.
func (d *deciding) begin(m Memory) error {
	domains := plan.Domains(d.snap)
	d.domains = make([]domain, len(domains))
	mixes := false
	for i := range domains {
		one := &d.domains[i]
		one.Domain, one.before = domains[i], d.recall(m, domains[i])
		one.ruled = d.rule(&d.snap, one.Domain, one.before.chosen)
		had := one.before.chosen.Allocator
		one.after = &past{functions: one.Functions, tables: one.before.tables}
		if one.asked {
			one.after.chosen = one.chosen
		}
		// The memory of another allocator means nothing.
		if cmp.Or(had, d.names.Allocator) != one.chosen.Allocator {
			one.before.allocator, one.before.corrector = nil, nil
		}
		one.after.allocator, one.after.corrector = one.before.allocator, one.before.corrector
		_, owns := d.allocatorOf(one.chosen).(mixer)
		mixes = mixes || owns
	}
	if !mixes {
		return nil
	}
	budgeter, ok := d.sharer.(plan.Budgeter)
	if !ok {
		budgeter = autoscaler.Gain{}
	}
	var budgets []plan.Budget
	if err := guarded(func() (err error) { budgets, err = budgeter.Budgets(d.snap, domains); return err }); err != nil {
		return err
	}
	if len(budgets) != len(domains) {
		return fmt.Errorf("%d budgets for %d domains, want one each", len(budgets), len(domains))
	}
	for i := range budgets {
		one := &d.domains[i]
		one.budget = budgets[i]
		for _, t := range one.before.tight {
			if _, in := slices.BinarySearch(one.Functions, t.Function); in && t.holds(d.snap.At) {
				one.budget.Most = append(one.budget.Most, plan.Most{Function: t.Function, Count: t.Placed})
			}
		}
		slices.SortFunc(one.budget.Most, func(a, b plan.Most) int { return cmp.Compare(a.Function, b.Function) })
	}
	return nil
}

// allocate returns the lines of one domain: allocated and corrected, or mixed. If a policy fails,
// the domain keeps its replicas.
func (d *deciding) allocate(one *domain) plan.Alloc {
	var lines plan.Alloc
	err := guarded(func() (err error) {
		allocator := d.allocatorOf(one.chosen)
		if m, ok := allocator.(mixer); ok {
			lines, err = d.mixed(one, m)
			return err
		}
		if lines, one.after.allocator, err = allocator.decide(d.sized, one.Domain, nil, one.before.allocator); err != nil {
			return fmt.Errorf("the allocator has no answer: %w", err)
		}
		corrector := d.correctorOf(one.chosen)
		if corrector == nil {
			return nil
		}
		if lines, one.after.corrector, err = corrector.decide(d.sized, one.Domain, lines, one.before.corrector); err != nil {
			return fmt.Errorf("the corrector has no answer: %w", err)
		}
		return nil
	})
	if err == nil {
		return lines
	}
	d.held = append(d.held, Held{one.Domain, err})
	*one.after, one.mix = one.before, nil
	return hold(d.snap, one.Domain, err)
}

// mixed returns the lines of a domain whose allocator owns the mix.
func (d *deciding) mixed(one *domain, m mixer) (plan.Alloc, error) {
	mix, memory, err := m.mix(d.snap, one.Domain, one.budget, one.before.allocator)
	if err == nil {
		err = d.snap.RouteFaults(one.Domain, mix.Tables, mix.Excluded)
	}
	if err != nil {
		return nil, fmt.Errorf("the allocator has no answer: %w", err)
	}
	one.after.allocator, one.mix = memory, &mix
	lines := slices.Clone(mix.Alloc)
	for i := range lines {
		lines[i].Fixed = true
	}
	return lines, nil
}

// share calls the sharer, and checks that it has left fixed lines as they were.
func (d *deciding) share(all plan.Alloc) (plan.Alloc, error) {
	out, err := d.sharer.Share(d.sized, all)
	if err != nil {
		return nil, err
	}
	for i, l := range all {
		if l.Fixed && (i >= len(out) || out[i].Function != l.Function || out[i].Count != l.Count) {
			return nil, fmt.Errorf("the line of function %q is fixed at %d replicas, want it unchanged", l.Function, l.Count)
		}
	}
	return out, nil
}

// route adds to a plan with wants what tasks follow: routing tables, ranks, and which policies are
// in force.
func (d *deciding) route(p *plan.Plan) {
	for i := range d.domains {
		one := &d.domains[i]
		if one.asked {
			p.Ruled = append(p.Ruled, plan.Ruled{Domain: one.Functions[0], Chosen: one.chosen, Conflicts: one.conflicts})
		}
		if one.chosen.Rank != fifo {
			for _, name := range one.Functions {
				if k, ok := findWant(p.Wants, name); ok {
					p.Wants[k].Rank = one.chosen.Rank
				}
			}
		}
		var lanes []plan.Lanes
		for _, l := range d.lanes {
			if _, in := slices.BinarySearch(one.Functions, l.Functions[0]); in {
				lanes = append(lanes, l)
			}
		}
		placed := func(function string) int {
			if k, ok := findWant(p.Wants, function); ok {
				return len(p.Wants[k].Slots)
			}
			return 0
		}
		if one.mix != nil {
			one.after.tight = tightened(one.before.tight, one.mix.Alloc, placed, d.snap.At)
		}
		if len(lanes) == 0 {
			one.after.tables = nil
			continue
		}
		tables, excluded := d.tables(one, p.Wants, placed)
		one.after.tables = settled(tables, one.before.tables, d.snap.Rev)
		p.Tables, p.Excluded = append(p.Tables, one.after.tables...), append(p.Excluded, excluded...)
	}
	slices.SortFunc(p.Tables, func(a, b plan.Table) int { return cmp.Compare(a.Stage, b.Stage) })
}

// tables returns the tables of a domain with stages of several lanes.
func (d *deciding) tables(one *domain, wants []plan.Want, placed func(string) int) ([]plan.Table, []plan.Chain) {
	if one.mix != nil {
		return moved(one.mix.Tables, one.mix.Alloc, placed), one.mix.Excluded
	}
	var tables []plan.Table
	err := guarded(func() (err error) {
		if tables, err = d.routerOf(one.chosen).Route(d.snap, one.Domain, wants); err != nil {
			return err
		}
		return d.snap.RouteFaults(one.Domain, tables, nil)
	})
	if err == nil {
		return tables, nil
	}
	d.held = append(d.held, Held{one.Domain, fmt.Errorf("the router has no answer: %w", err)})
	if d.snap.RouteFaults(one.Domain, one.before.tables, nil) == nil {
		return one.before.tables, nil
	}
	// The built-in router has an answer for any snapshot. Validate would refuse a wrong one.
	tables, _ = autoscaler.Best{}.Route(d.snap, one.Domain, wants)
	return tables, nil
}

func findWant(wants []plan.Want, function string) (int, bool) {
	return slices.BinarySearchFunc(wants, function, func(w plan.Want, name string) int { return cmp.Compare(w.Function, name) })
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
