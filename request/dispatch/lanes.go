package dispatch

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
)

// lanes are the lanes of a stage, sorted by name.
type lanes []*Lane

// Waiting returns the number of tasks that wait at the stage, suspects included.
func (all lanes) Waiting() int {
	n := 0
	for _, l := range all {
		n += l.Waiting()
	}
	return n
}

// Running returns the number of calls that the stage's replicas have not answered.
func (all lanes) Running() int {
	n := 0
	for _, l := range all {
		n += l.Running()
	}
	return n
}

// Servers returns how many tasks the stage's replicas that get new tasks can run at a time.
func (all lanes) Servers() int {
	n := 0
	for _, l := range all {
		if !l.removed {
			n += l.Servers()
		}
	}
	return n
}

// Mean returns the mean time that a slot is busy per task; 0: unknown. With several lanes it is the
// time at which all servers together finish as many tasks as they do now.
func (all lanes) Mean() time.Duration {
	if len(all) == 1 {
		return all[0].Mean()
	}
	servers, rate, known, sum := 0.0, 0.0, 0, time.Duration(0)
	for _, l := range all {
		mean := l.Mean()
		if mean <= 0 || l.removed {
			continue
		}
		n := float64(l.Servers())
		servers, rate = servers+n, rate+n/mean.Seconds()
		known, sum = known+1, sum+mean
	}
	switch {
	case rate > 0:
		return seconds(servers / rate)
	case known > 0:
		return sum / time.Duration(known)
	}
	return 0
}

func (all lanes) index(function string) (int, bool) {
	return slices.BinarySearchFunc(all, function, func(l *Lane, function string) int { return cmp.Compare(l.name, function) })
}

// of returns the lane of a replica; nil: there is none. With one lane, it does not look whether the
// replica exists.
func (all lanes) of(replica string) *Lane {
	if len(all) == 1 {
		return all[0]
	}
	for _, l := range all {
		if _, ok := l.find(replica); ok {
			return l
		}
	}
	return nil
}

// limit returns the queue limit of a stage: that of its own function, or else the largest of its
// lanes; 0: there is no lane.
func (all lanes) limit(stage string) int {
	limit := 0
	for _, l := range all {
		switch {
		case l.removed:
		case l.name == stage:
			return l.limit
		default:
			limit = max(limit, l.limit)
		}
	}
	return limit
}

// live reports whether a lane other than l gets tasks.
func (all lanes) live(l *Lane) bool {
	return slices.ContainsFunc(all, func(other *Lane) bool { return other != l && !other.removed })
}

// readFates updates the fates of the lanes. It reports whether any has changed.
func (all lanes) readFates() (changed bool) {
	for _, l := range all {
		f := asleep
		switch {
		case l.removed:
			f = down
		case l.ready():
			f = ready
		case l.failed || l.Replicas() > 0:
			f = down
		}
		changed = changed || f != l.fate
		l.fate = f
	}
	return changed
}

// deploy adds a lane, or changes it.
func (c *Core) deploy(now time.Time, ev Deployed) {
	if c.closed != "" {
		return
	}
	name := cmp.Or(ev.Lane, c.cfg.Function)
	l := c.Lane(name)
	changed := l == nil || l.removed || l.maxLength != ev.MaxLength
	if l == nil {
		l = newLane(c, name)
		c.insert(l)
	}
	if l.revision != ev.Revision {
		l.failed = false // the new revision may start
	}
	if l.revision != ev.Revision || l.batching.declared != ev.Batch {
		l.batching.survived, l.batching.doubts = 0, nil
	}
	l.revision, l.maxLength, l.removed = ev.Revision, max(ev.MaxLength, 0), false
	l.limit = cmp.Or(ev.QueueLimit, l.limit)
	if l.batching.declared, l.view.BatchWait = ev.Batch, ev.BatchWait; ev.AutoBatch && l.batching.planned == 0 {
		l.batching.planned = 1
	}
	l.batching.apply(&l.fleet)
	l.survey()
	c.cfg.QueueLimit = cmp.Or(c.lanes.limit(c.cfg.Function), c.cfg.QueueLimit)
	if changed {
		c.router.reroute(now)
	}
}

// insert adds a lane.
func (c *Core) insert(l *Lane) {
	if len(c.lanes) == 1 { // until now, all arrivals at the stage were at its lane
		c.stage = c.lanes[0].signals.arrivals()
	}
	i, _ := c.index(l.name)
	c.lanes = slices.Insert(c.lanes, i, l)
}

// remove ends a lane whose function was removed. Its tasks go to the other lanes.
func (c *Core) remove(now time.Time, ev Removed) {
	l := c.Lane(ev.Lane)
	if l == nil {
		return
	}
	if !c.live(l) {
		c.close(now, ev.Cause)
		return
	}
	l.removed = true
	c.cfg.QueueLimit = cmp.Or(c.lanes.limit(c.cfg.Function), c.cfg.QueueLimit)
	for _, it := range l.waitingFor() {
		if c.router.direct(it) {
			c.end(now, it, task.Unavailable, ev.Cause)
		}
	}
	c.router.reroute(now)
}

// routed follows a routing table and a rank.
func (c *Core) routed(now time.Time, ev Routed) {
	if ev.Rank != c.rank {
		c.setRank(now, ev.Rank)
	}
	if was := c.router.wanted; was == nil && ev.Table == nil || was != nil && ev.Table != nil && was.Equal(*ev.Table) {
		return
	}
	c.router.wanted = cloneTable(ev.Table)
	if len(c.lanes) > 1 {
		c.router.reroute(now)
	}
}

// setRank changes the order of all lines. An unknown rank changes nothing.
func (c *Core) setRank(now time.Time, rank string) {
	o, shares, ok := orderer(rank)
	if !ok {
		return
	}
	c.rank, c.cfg.Orderer, c.fair = rank, o, shares
	for _, l := range c.lanes {
		c.router.reorder(now, l)
	}
}

// Detached is a lane on its way from one Core to another (see [Core.Detach]).
type Detached struct {
	lane    *Lane
	waiting []*item
	ended   []task.Key // tasks of the former Core that have ended
}

// Detach takes a lane out of the Core, with its replicas, its running tasks, and the waiting tasks
// of clients that invoked its function by its own name. The stage's other waiting tasks go to the
// other lanes. If there are none, they are answered with [task.Unavailable]. Detach returns nil if
// there is no such lane.
func (c *Core) Detach(now time.Time, function string) (*Detached, []Effect) {
	c.begin(now)
	i, ok := c.index(function)
	if !ok {
		return nil, c.finish(now, false)
	}
	l := c.lanes[i]
	all := l.waitingFor()
	for _, it := range all {
		l.exit(now, it)
	}
	c.lanes = slices.Delete(c.lanes, i, i+1)
	c.cfg.QueueLimit = cmp.Or(c.lanes.limit(c.cfg.Function), c.cfg.QueueLimit)
	if len(c.lanes) <= 1 {
		c.stage = nil
	}
	c.router.reroute(now)
	d := &Detached{lane: l, ended: slices.Clone(c.tasks.ended)}
	l.line = line{sorted: heap{by: byKey}}
	for _, it := range all {
		switch {
		case it.task.Function == l.name:
			c.tasks.end(it.task.Key)
			d.waiting = append(d.waiting, it)
		case !c.live(l):
			it.lane = nil
			c.end(now, it, task.Unavailable, fmt.Sprintf("no function serves stage %q any more", c.cfg.Function))
		default:
			c.router.settle(now, it)
		}
	}
	for it := range l.calls {
		c.timers.drop(it)
		if it.state == running {
			c.tasks.end(it.task.Key) // so that a duplicate is dropped here too
		}
	}
	return d, c.finish(now, false)
}

// Attach adds a lane that another Core has detached. Its waiting tasks queue behind those that the
// Core has.
func (c *Core) Attach(now time.Time, d *Detached) []Effect {
	c.begin(now)
	l := d.lane
	l.core = c
	if c.fair {
		l.line.fair = newFair()
	}
	c.insert(l)
	c.cfg.QueueLimit = cmp.Or(c.lanes.limit(c.cfg.Function), c.cfg.QueueLimit)
	for _, k := range d.ended {
		if !c.tasks.known(k) {
			c.tasks.end(k)
		}
	}
	for it := range l.calls {
		c.timers.schedule(it)
		if it.state == running {
			c.tasks.add(it)
		}
	}
	c.router.reroute(now)
	for _, it := range d.waiting {
		c.seq++
		it.seq = c.seq
		c.tasks.add(it)
		c.router.settle(now, it)
	}
	return c.finish(now, false)
}
