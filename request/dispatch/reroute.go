package dispatch

import (
	"cmp"
	"slices"
	"time"
)

// reroute chooses the homes and lanes of all waiting tasks again, in the order of their arrival,
// because the table or the lanes have changed.
func (r *router) reroute(now time.Time) {
	c := r.core
	r.install(r.wanted)
	r.lengths.cut(c.lanes)
	c.readFates()
	var all []*item
	for _, l := range c.lanes {
		for _, it := range l.waitingFor() {
			if !r.direct(it) || !takes(l, it.task) {
				l.exit(now, it)
				all = append(all, it)
			}
		}
	}
	slices.SortFunc(all, func(a, b *item) int { return cmp.Compare(a.seq, b.seq) })
	for _, it := range all {
		r.settle(now, it)
	}
}

// settle puts a task that has left its lane into a lane.
func (r *router) settle(now time.Time, it *item) {
	if drop := r.choose(it); drop != "" {
		r.core.drop(now, it, drop, r.why(it, drop))
		return
	}
	it.lane.enter(now, it)
	it.lane.fewer = true // it may need replicas for the task
}

// follow moves waiting tasks if a lane has gone down or come up since the latest step.
func (r *router) follow(now time.Time) {
	c := r.core
	if len(c.lanes) == 1 || !c.readFates() {
		return
	}
	var moved []*item
	for _, l := range c.lanes {
		for _, it := range l.waitingFor() {
			if r.place(it) != l {
				moved = append(moved, it)
			}
		}
	}
	slices.SortFunc(moved, func(a, b *item) int { return cmp.Compare(a.seq, b.seq) })
	for _, it := range moved {
		it.lane.exit(now, it)
		to := r.place(it)
		to.enter(now, it)
		to.fewer = true
	}
}

// forgetRemoved forgets removed lanes without replicas.
func (r *router) forgetRemoved() {
	c := r.core
	for i := 0; i < len(c.lanes); {
		l := c.lanes[i]
		if !l.removed || len(l.replicas) > 0 || l.Waiting() > 0 {
			i++
			continue
		}
		c.lanes = slices.Delete(c.lanes, i, i+1)
		c.do(Gone{Lane: l.name})
	}
	if len(c.lanes) <= 1 {
		c.stage = nil
	}
}

// direct reports whether the task has to wait in its home, because its client invoked a variant by
// its own name, or its request names the function.
func (r *router) direct(it *item) bool {
	if it.home == nil {
		return false
	}
	return it.task.Function != r.core.cfg.Function && it.task.Function == it.home.name || len(it.task.Pins) > 0 && it.task.Only() == it.home.name
}

// reorder gives all waiting tasks of a lane new places, because the order has changed.
func (r *router) reorder(now time.Time, l *Lane) {
	all := l.waitingFor()
	for _, it := range all {
		if !it.task.Alone {
			l.take(it)
		}
	}
	l.suspects = l.suspects[:0]
	l.line.fair = nil
	if l.core.fair {
		l.line.fair = newFair()
	}
	for _, it := range all {
		l.rank(now, it)
	}
}
