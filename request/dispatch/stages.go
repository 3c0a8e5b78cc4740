package dispatch

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// entry returns a function, even if it was removed and its replicas have not left yet.
func (s *Shell) entry(key pipeline.Key) *function { return (*s.functions.Load())[key] }

// function returns a function that takes tasks; nil: there is none.
func (s *Shell) function(key pipeline.Key) *function {
	if f := s.entry(key); f != nil && !f.removed.Load() {
		return f
	}
	return nil
}

// changes are the changes of a shell's functions, while mu is held.
type changes struct{ *Shell }

// put replaces the entry of a function; nil deletes it.
func (s changes) put(key pipeline.Key, f *function) {
	next := maps.Clone(*s.functions.Load())
	if f == nil {
		delete(next, key)
	} else {
		next[key] = f
	}
	s.functions.Store(&next)
}

// Owns reports whether this process owns a function's line.
func (s *Shell) Owns(function pipeline.Key) bool { return s.function(function) != nil }

// Ensure makes this process the owner of a function's line, or changes its limits. Slots and
// Timeout apply to replicas that attach later, and Batch from each replica's next batch on. If
// VariantOf changes, the function moves to the owner of the other stage, with its replicas and with
// the tasks that invoked it by its own name.
func (s *Shell) Ensure(spec Spec) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := changes{s}
	c.sweep()
	spec = spec.complete()
	if err := c.deploy(spec); err != nil {
		c.remove(spec.Function, "its line could not be opened")
		return fmt.Errorf("own the line of %q: %w", spec.Function, err)
	}
	return c.rearrange()
}

// deploy adds or changes a function, without a change of its stage.
func (s changes) deploy(spec Spec) error {
	f := s.entry(spec.Function)
	if f == nil {
		o := newOwner(s.Shell, spec.Function, CoreConfig{Revision: spec.Revision, QueueLimit: spec.QueueLimit})
		return s.add(newFunction(s.Shell, o, spec))
	}
	if f.removed.Load() {
		return s.revive(f, spec)
	}
	o := f.lock()
	f.spec, f.bare = spec, false
	o.change(spec.deployed())
	return nil
}

// add makes a function the first of its owner and opens it.
func (s changes) add(f *function) error {
	o := f.owner.Load()
	o.mu.Lock()
	o.functions = []*function{f}
	if !f.bare {
		o.core.Step(time.Now(), f.spec.deployed()) // has no effects, because there are no tasks
	}
	o.bound()
	o.mu.Unlock()
	s.put(f.name, f)
	return f.open()
}

// revive deploys a function again that was removed and whose replicas have not all left.
func (s changes) revive(old *function, spec Spec) error {
	o := old.lock()
	f := newFunction(s.Shell, o, spec)
	for _, g := range append(old.former, old) {
		if slices.ContainsFunc(slices.Collect(maps.Values(o.links)), func(l *link) bool { return l.f == g }) {
			f.former = append(f.former, g)
		} else {
			defer g.end(errRemoved.Error())
		}
	}
	old.former = nil
	o.functions[slices.Index(o.functions, old)] = f
	o.change(spec.deployed())
	s.put(f.name, f)
	return f.open()
}

// Remove ends a function, if it exists. If other functions serve its stage, they get the stage's
// waiting tasks. The function's running tasks go on until its replicas are drained (see
// [Shell.Drain]) or lost. Otherwise, all tasks are answered with [task.Unavailable], the replicas'
// connections are closed, and Remove returns when all goroutines have ended.
func (s *Shell) Remove(function pipeline.Key) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := changes{s}
	c.sweep()
	c.remove(function, fmt.Sprintf("function %q was removed", function))
	if err := c.rearrange(); err != nil {
		s.cfg.Logger.Error("a function has no line", "error", err)
	}
}

// Close removes all functions. All of them stop taking tasks together, because the bus may be slow.
func (s *Shell) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := changes{s}
	shut(slices.Collect(maps.Values(*s.functions.Load())))
	for _, f := range *s.functions.Load() {
		if s.entry(f.name) == f { // not removed with another function
			c.finish(f.owner.Load(), task.OwnerEnds)
		}
	}
	s.metrics.close()
}

func (s changes) remove(key pipeline.Key, cause string) {
	f := s.function(key)
	if f == nil || f.bare {
		return
	}
	o := f.owner.Load()
	if !slices.ContainsFunc(o.functions, func(g *function) bool { return g != f && g.live() }) {
		s.end(o, cause)
		return
	}
	if f.name == o.stage { // the stage's tasks still come through it
		f.lock()
		f.bare = true
	} else {
		f.shut()
		f.lock()
		f.removed.Store(true)
		s.metrics.forget(f.lane)
	}
	o.change(Removed{Lane: f.lane, Cause: cause})
}

// live reports whether a function is deployed. The caller holds the shell's mu.
func (f *function) live() bool { return !f.removed.Load() && !f.bare }

// change applies an event that changes the lanes. The caller has locked the owner; change unlocks
// it.
func (o *owner) change(ev Event) {
	var space [4]*link
	o.bound()
	o.advance(ev, space[:0], false)
	o.mu.Lock()
	o.bound() // the Core knows the stage's limit now
	o.mu.Unlock()
}

// end ends an owner with all its functions.
func (s changes) end(o *owner, cause string) {
	shut(o.functions)
	s.finish(o, cause)
}

// shut ends the intake of tasks of all these functions at the same time. Removed functions take
// none.
func shut(functions []*function) {
	var all sync.WaitGroup
	for _, f := range functions {
		if !f.removed.Load() {
			all.Go(f.shut)
		}
	}
	all.Wait()
}

// finish ends an owner whose functions take no more tasks.
func (s changes) finish(o *owner, cause string) {
	o.mu.Lock()
	for _, f := range o.functions {
		f.closed = true
		for _, old := range f.former {
			old.closed = true
		}
	}
	o.mu.Unlock()
	o.step(Close{Cause: cause})
	for _, f := range o.functions {
		f.end(cause)
		s.put(f.name, nil)
		s.metrics.forget(f.lane)
	}
	o.end()
}

// sweep forgets removed functions whose replicas have left.
func (s changes) sweep() {
	for key, f := range *s.functions.Load() {
		if !f.removed.Load() {
			continue
		}
		o := f.lock()
		gone := o.core.Lane(f.lane) == nil
		if gone {
			o.functions = slices.DeleteFunc(o.functions, func(g *function) bool { return g == f })
		}
		o.mu.Unlock()
		if gone {
			f.end(errRemoved.Error())
			s.put(key, nil)
		}
	}
}

// stageOf returns the stage that a function serves. A variant of a variant, and a variant of
// itself, serves no stage but its own. The stage need not be deployed.
func (s changes) stageOf(spec Spec) pipeline.Key {
	stage := spec.VariantOf
	if stage == (pipeline.Key{}) {
		return spec.Function
	}
	if f := s.function(stage); f != nil && !f.bare && f.spec.VariantOf != (pipeline.Key{}) {
		return spec.Function
	}
	return stage
}

// rearrange moves each function to the owner of its stage.
func (s changes) rearrange() error {
	var away, home []*function
	for _, f := range *s.functions.Load() {
		if !f.live() {
			continue
		}
		switch to := s.stageOf(f.spec); to {
		case f.owner.Load().stage:
		case f.name:
			home = append(home, f)
		default:
			away = append(away, f)
		}
	}
	byName := func(a, b *function) int { return cmp.Compare(a.lane, b.lane) }
	slices.SortFunc(home, byName)
	slices.SortFunc(away, byName)
	var errs []error
	for _, f := range append(home, away...) { // first those that others may follow
		if err := s.move(f, s.stageOf(f.spec)); err != nil {
			errs = append(errs, fmt.Errorf("own the line of %q: %w", f.name, err))
		}
	}
	return errors.Join(errs...)
}

// ownerOf returns the owner of a stage. It makes one if there is none. own is set if the stage's
// own function is about to move there.
func (s changes) ownerOf(stage pipeline.Key, own bool) (*owner, error) {
	if f := s.function(stage); f != nil && f.owner.Load().stage == stage {
		return f.owner.Load(), nil
	}
	o := newOwner(s.Shell, stage, CoreConfig{Bare: true})
	if own {
		return o, nil
	}
	f := newFunction(s.Shell, o, Spec{Function: stage}.complete())
	f.bare = true
	return o, s.add(f)
}

// move moves a function to the owner of a stage.
func (s changes) move(f *function, stage pipeline.Key) error {
	from := f.owner.Load()
	to, err := s.ownerOf(stage, stage == f.name)
	if err != nil {
		s.end(to, "its line could not be opened")
		return err
	}
	first, second := from, to
	if cmp.Compare(first.stage.String(), second.stage.String()) > 0 {
		first, second = second, first
	}
	first.mu.Lock()
	second.mu.Lock()
	now := time.Now()
	lane, effects := from.core.Detach(now, f.lane)
	ended, links, left := from.carry(now, effects, nil, nil)
	from.functions = slices.DeleteFunc(from.functions, func(g *function) bool { return g == f })
	for name, l := range from.links {
		if l.f.lane == f.lane {
			delete(from.links, name)
			to.links[name] = l
		}
	}
	to.functions = append(to.functions, f)
	slices.SortStableFunc(to.functions, func(a, b *function) int { // the stage's own first
		return cmp.Compare(boolInt(a.name != to.stage), boolInt(b.name != to.stage))
	})
	f.owner.Store(to)
	for _, old := range f.former {
		old.owner.Store(to)
	}
	moved, links, right := to.carry(now, to.core.Attach(now, lane), nil, links)
	for _, o := range []*owner{from, to} {
		o.bound()
		o.publish()
	}
	empty := !slices.ContainsFunc(from.functions, (*function).live)
	second.mu.Unlock()
	first.mu.Unlock()
	flush(links)
	from.finish(ended, left)
	to.finish(moved, right)
	if empty {
		s.end(from, fmt.Sprintf("no function serves %q any more", from.stage))
	}
	return nil
}

func boolInt(b bool) int {
	if b {
		return 1
	}
	return 0
}

// signals returns the measurements of a lane. The owner is locked. The stage's own function has its
// stage's demand even if it has no lane.
func (o *owner) signals(lane string, now time.Time) (is plan.Signals) {
	if l := o.core.Lane(lane); l != nil {
		return l.Signals(now)
	}
	return is
}
