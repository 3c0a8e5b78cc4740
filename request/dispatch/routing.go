package dispatch

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// fate is whether a lane can run tasks.
type fate uint8

const (
	// asleep: it has no replica that gets tasks, but nothing says that it cannot get one. So tasks
	// wait in it, and [Wanted] asks for a replica.
	asleep fate = iota
	ready       // it has replicas that get tasks
	// down: its last replica crashed, no replica can be started, or its replicas take no tasks.
	down
)

// router chooses the lanes of a stage's tasks by its routing table.
//
// The table's shares decide a task's home. They hold exactly: after n tasks, a lane of a level has
// had its share of n, give or take the number of the level's lanes (smooth weighted round robin).
// The task waits in its home, with two exceptions:
//
//   - If the home is down, the task waits in the first backup that has replicas, until the home is
//     up again. If no backup has replicas, it waits at home.
//   - If the home is full when the task comes, it waits in the level's overflow lane, if that has
//     replicas and is not full. A home is full if as many tasks wait in it as its share of the
//     stage's queue limit, or as its own limit.
type router struct {
	core   *Core
	wanted *plan.Table // the latest one; nil: none yet
	table  *plan.Table // the one that rows come from
	rows   [][]level   // parallel to the table's rows; without a table, one row with one level
	warned uint64      // latest version for which Unknown was returned
	tasked bool        // warned is set
	// how long the inputs of the stage's arrivals are
	lengths lengths
}

// level is a plan.Level with the lanes that exist.
type level struct {
	maxLength int
	shares    []share
	backups   []*Lane
	overflow  *Lane
}

// share is a lane's part of the tasks of a level.
type share struct {
	lane   *Lane
	part   float64
	credit float64 // the tasks that it has had too few; below 0: too many
}

// enter chooses the home and the lane of a new task. If no lane takes the task, it returns why.
func (r *router) enter(it *item) task.DropReason {
	if lanes := r.core.lanes; len(lanes) == 1 && (len(it.task.Pins) == 0 || it.task.Only() == "") {
		it.lane, it.home = lanes[0], lanes[0]
		if !takes(it.home, it.task) {
			return task.DropLength
		}
		return ""
	}
	return r.choose(it)
}

// choose does what enter does, for stages that have no lane or several.
func (r *router) choose(it *item) task.DropReason {
	if l, named := r.named(it.task); named {
		switch it.lane, it.home = l, l; {
		case l == nil:
			return task.DropNoLane
		case !takes(l, it.task):
			return task.DropLength
		}
		return ""
	}
	v := r.level(it.task)
	if v == nil {
		return task.DropLength
	}
	if it.home = v.pick(it.task); it.home == nil {
		if len(v.shares)+len(v.backups) == 0 {
			return task.DropNoLane
		}
		return task.DropLength
	}
	it.lane = it.home
	if o := v.overflow; it.home.fate != down && o != nil && o != it.home && v.full(it.home, r.core.cfg.QueueLimit) &&
		o.fate == ready && takes(o, it.task) && o.Waiting() < o.limit {
		it.lane = o
		return ""
	}
	it.lane = r.place(it)
	return ""
}

// named returns the lane of the function that has to run a task, because the client or the task's
// request names it. The lane is nil if that function does not serve the stage. named is false if
// the table decides.
func (r *router) named(t *task.Task) (l *Lane, named bool) {
	if t.Function != r.core.cfg.Function {
		if l = r.core.Lane(t.Function); l != nil {
			return l, true
		}
	}
	if len(t.Pins) == 0 {
		return nil, false
	}
	only := t.Only()
	if only == "" {
		return nil, false
	}
	if l = r.core.Lane(only); l != nil && l.removed {
		l = nil
	}
	return l, true
}

// place returns the lane in which a task waits whose home is known.
func (r *router) place(it *item) *Lane {
	if r.direct(it) {
		return it.home
	}
	v := r.level(it.task)
	switch {
	case v == nil:
		return it.home
	case it.home.fate != down:
		if it.lane == v.overflow && it.lane != nil && it.lane.fate == ready {
			return it.lane
		}
		return it.home
	}
	for _, b := range v.backups {
		if b.fate == ready && takes(b, it.task) {
			return b
		}
	}
	return it.home
}

// takes reports whether an input of the task's length is not too long for the lane.
func takes(l *Lane, t *task.Task) bool { return l.maxLength == 0 || t.Length <= l.maxLength }

// level returns the level for a task; nil: its length is above those of all levels.
func (r *router) level(t *task.Task) *level {
	row := 0
	if r.table != nil {
		sources := r.table.Sources
		i, ok := slices.BinarySearchFunc(sources, t.Variant, func(s plan.Source, from string) int { return cmp.Compare(s.From, from) })
		if !ok {
			i = 0 // FromClient
		}
		row = sources[i].Row
	}
	levels := r.rows[row]
	if t.Length == 0 {
		return &levels[len(levels)-1]
	}
	for i := range levels {
		if m := levels[i].maxLength; m == 0 || t.Length <= m {
			return &levels[i]
		}
	}
	return nil
}

// pick returns the lane whose share is due, and counts the task. Lanes that do not take the task's
// length are left out. If the task is pinned to revisions of lanes that still serve them, only
// these lanes count. If no lane with a share is left, pick returns the first backup that takes the
// task, or nil.
func (v *level) pick(t *task.Task) *Lane {
	pinned := false
	if len(t.Pins) > 0 {
		pinned = slices.ContainsFunc(v.shares, func(s share) bool { return s.pinned(t) })
	}
	var best *share
	sum := 0.0
	for i := range v.shares {
		s := &v.shares[i]
		if !takes(s.lane, t) || pinned && !s.pinned(t) {
			continue
		}
		s.credit += s.part
		sum += s.part
		if best == nil || s.credit > best.credit {
			best = s
		}
	}
	if best != nil {
		best.credit -= sum
		return best.lane
	}
	for _, b := range v.backups {
		if takes(b, t) {
			return b
		}
	}
	return nil
}

// pinned reports whether the task needs a revision of the lane, and the lane serves it.
func (s *share) pinned(t *task.Task) bool {
	r := t.Pinned(s.lane.name)
	return r != 0 && takes(s.lane, t) && (s.lane.has(r) || r == s.lane.revision && s.lane.fate != down)
}

// full reports whether as many tasks wait in a lane as its share of the stage's limit, or as its
// own limit.
func (v *level) full(l *Lane, limit int) bool {
	part := 1.0
	for i := range v.shares {
		if v.shares[i].lane == l {
			part = v.shares[i].part
		}
	}
	return l.Waiting() >= min(l.limit, max(int(math.Ceil(part*float64(limit))), 1))
}

// install follows a table; nil: there is none.
func (r *router) install(t *plan.Table) {
	old, was := r.rows, r.table
	r.table, r.rows = t, nil
	var unknown []string
	switch {
	case t == nil || len(t.Rows) == 0 || len(t.Sources) == 0:
		r.table, r.rows = nil, [][]level{{r.initial()}}
	default:
		for i := range t.Rows {
			levels := make([]level, len(t.Rows[i].Levels))
			for k := range levels {
				levels[k] = r.resolve(&t.Rows[i].Levels[k], &unknown)
			}
			r.rows = append(r.rows, levels)
		}
	}
	r.keepCredit(old, was)
	if len(unknown) > 0 && !(r.tasked && r.warned == t.Version) {
		r.warned, r.tasked = t.Version, true
		slices.Sort(unknown)
		r.core.do(Unknown{Version: t.Version, Lanes: slices.Compact(unknown)})
	}
}

// initial returns the level for all tasks of a stage without a table. The stage's own function is
// their home, else the first variant by name. The other lanes are backups, by name.
func (r *router) initial() level {
	var v level
	for _, l := range r.core.lanes {
		switch {
		case l.removed:
		case l.name == r.core.cfg.Function:
			v.shares = []share{{lane: l, part: 1}}
		default:
			v.backups = append(v.backups, l)
		}
	}
	if len(v.shares) == 0 && len(v.backups) > 0 {
		v.shares, v.backups = []share{{lane: v.backups[0], part: 1}}, v.backups[1:]
	}
	return v
}

// resolve finds the lanes of a table's level, and adds the names of those that do not exist to
// unknown. The parts of the other lanes grow in proportion. If no lane is left, all tasks of the
// level go where they would go without a table.
func (r *router) resolve(from *plan.Level, unknown *[]string) level {
	v := level{maxLength: from.MaxLength}
	find := func(name string) *Lane {
		l := r.core.Lane(name)
		if l == nil || l.removed {
			*unknown = append(*unknown, name)
			return nil
		}
		return l
	}
	sum := 0.0
	for _, s := range from.Shares {
		if l := find(s.Lane); l != nil {
			v.shares = append(v.shares, share{lane: l, part: s.Part})
			sum += s.Part
		}
	}
	for i := range v.shares {
		v.shares[i].part /= sum
	}
	for _, b := range from.Backups {
		if l := find(b); l != nil {
			v.backups = append(v.backups, l)
		}
	}
	if from.Overflow != "" {
		v.overflow = find(from.Overflow)
	}
	if len(v.shares) == 0 {
		rest := r.initial()
		v.shares = rest.shares
		if len(v.backups) == 0 {
			v.backups = rest.backups
		}
	}
	return v
}

// keepCredit carries the credit of each lane over to the new rows, so that a table that changes
// often keeps its shares too. A row takes the credit of the row that held for the same source.
func (r *router) keepCredit(old [][]level, was *plan.Table) {
	if r.table == nil || was == nil {
		return
	}
	for _, s := range slices.Backward(r.table.Sources) { // so the first source of a row decides
		i, ok := slices.BinarySearchFunc(was.Sources, s.From, func(s plan.Source, from string) int { return cmp.Compare(s.From, from) })
		if !ok {
			continue
		}
		for k := range min(len(r.rows[s.Row]), len(old[was.Sources[i].Row])) {
			sameShares(r.rows[s.Row][k].shares, old[was.Sources[i].Row][k].shares)
		}
	}
}

// sameShares gives each lane the credit that it had, and makes the sum of the credits 0.
func sameShares(shares, old []share) {
	sum := 0.0
	for i := range shares {
		shares[i].credit = 0
		for _, o := range old {
			if o.lane == shares[i].lane {
				shares[i].credit = min(max(o.credit, -1), 1)
			}
		}
		sum += shares[i].credit
	}
	for i := range shares {
		shares[i].credit -= sum / float64(len(shares))
	}
}

// expect asks for a replica of each lane that may get the task of a request that is still in an
// earlier stage.
func (r *router) expect() {
	lanes := r.core.lanes
	if len(lanes) == 1 {
		if lanes[0].Servers() == 0 {
			lanes[0].want()
		}
		return
	}
	for _, l := range lanes {
		if l.Servers() == 0 && r.gives(l) {
			l.want()
		}
	}
}

// arrive counts an arrival in the lane that the table chose, and at the stage.
func (r *router) arrive(now time.Time, it *item) {
	if it.home == nil || it.home.ignoring {
		return
	}
	it.home.signals.arrive()
	if r.core.stage != nil && it.task.Function == r.core.cfg.Function && it.task.Only() == "" {
		r.core.stage.arrive()
		r.lengths.add(now, it.task.Length)
	}
}

// gives reports whether a lane has a share of some level.
func (r *router) gives(l *Lane) bool {
	for _, levels := range r.rows {
		for i := range levels {
			if slices.ContainsFunc(levels[i].shares, func(s share) bool { return s.lane == l }) {
				return true
			}
		}
	}
	return false
}

// why returns the message for a task that no lane takes.
func (r *router) why(it *item, reason task.DropReason) string {
	t := it.task
	if only := t.Only(); reason == task.DropNoLane && only != "" {
		return fmt.Sprintf("function %q does not serve stage %q now, and the request asks for it (X-Variants)", only, r.core.cfg.Function)
	}
	if reason == task.DropNoLane {
		return fmt.Sprintf("no function serves stage %q now, want one: deploy it again, or a variant of it", r.core.cfg.Function)
	}
	longest := 0
	for _, l := range r.core.lanes {
		longest = max(longest, l.maxLength)
	}
	return fmt.Sprintf("the input of stage %q has the length %d, want at most %d: make it shorter, or deploy a variant with a larger stagecoach.dev/max-length",
		r.core.cfg.Function, t.Length, longest)
}
