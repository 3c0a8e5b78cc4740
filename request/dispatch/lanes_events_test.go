package dispatch

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

func pick[T any](rnd *rand.Rand, from []T) T { return from[rnd.IntN(len(from))] }

func (w *lanesWorld) event() Event {
	some := pick(w.rnd, w.names)
	switch n := w.rnd.IntN(100); {
	case n < 40:
		return w.submit(some)
	case n < 45 && len(w.all) > 0:
		return Cancel{pick(w.rnd, w.all).Key}
	case n < 53:
		l := w.core.Lane(some)
		if l == nil || l.removed || len(l.replicas) > 3 {
			return nil
		}
		w.number++
		revision := l.revision
		if w.rnd.IntN(5) == 0 {
			revision = max(revision-1, 1)
		}
		return ReplicaUp{Lane: some, Name: fmt.Sprint("r", w.number), Slots: 1 + w.rnd.IntN(2), MaxBatch: 1 + w.rnd.IntN(4), Revision: revision}
	case n < 57 && len(w.order) > 0:
		return ReplicaDown{Name: pick(w.rnd, w.order), Cause: "chance", End: task.EndItself}
	case n < 60 && len(w.order) > 0:
		return ReplicaDrain{Name: pick(w.rnd, w.order)}
	case n < 62 && len(w.order) > 0:
		return Credit{Replica: pick(w.rnd, w.order), Slots: w.rnd.IntN(3)}
	case n < 66:
		revision := uint64(1)
		if l := w.core.Lane(some); l != nil {
			revision = l.revision + uint64(w.rnd.IntN(2))
		}
		return Deployed{
			Lane: some, Revision: revision, MaxLength: pick(w.rnd, []int{0, 0, 10, 20}), QueueLimit: 5 + w.rnd.IntN(20),
			Batch: pick(w.rnd, []int{0, 0, 1, 3}), BatchWait: pick(w.rnd, []time.Duration{0, 0, 3 * ms}),
		}
	case n < 68:
		live := 0
		for _, l := range w.core.lanes {
			if !l.removed {
				live++
			}
		}
		if live < 2 {
			return nil
		}
		return Removed{Lane: some, Cause: "removed by chance"}
	case n < 70:
		if l := w.core.Lane(some); l != nil {
			return Fail{Lane: some, Revision: l.revision, Cause: "it does not start"}
		}
		return nil
	case n < 74:
		return Routed{Table: w.table(), Rank: pick(w.rnd, []string{"", "fifo", "fair", "least-slack"})}
	case n < 75:
		return NoReplica{Lane: some, Revision: 1, Cause: "no room"}
	case n < 76 && len(w.all) > 0:
		return Leave{Request: pick(w.rnd, w.all).Request}
	case n < 77:
		return Expect{}
	case n < 79:
		return Batched{Lane: some, Most: 1 + w.rnd.IntN(4)}
	}
	return w.answer()
}

func (w *lanesWorld) answer() Event {
	if len(w.order) == 0 {
		return nil
	}
	name := pick(w.rnd, w.order)
	ids := slices.Sorted(func(yield func(uint64) bool) {
		for id := range w.batches[name] {
			if !yield(id) {
				return
			}
		}
	})
	for _, id := range ids {
		for i, t := range w.batches[name][id] {
			if t != nil {
				return Result{name, id, i, &task.Reply{Code: pick(w.rnd, []task.Code{task.OK, task.OK, task.OK, task.Failed, task.OutOfMemory})}}
			}
		}
	}
	return nil
}

func (w *lanesWorld) submit(some string) Event {
	if len(w.all) > 0 && w.rnd.IntN(15) == 0 {
		again := *pick(w.rnd, w.all)
		return Submit{&again}
	}
	w.number++
	t := newTask(fmt.Sprint("q", w.number/4), 0)
	t.Task = uint32(w.number)
	t.App, t.Weight = fmt.Sprint("app", w.rnd.IntN(3)), w.rnd.IntN(4)
	t.Length, t.Variant = w.rnd.IntN(25), pick(w.rnd, []string{plan.FromClient, plan.FromJoin, "x.ns"})
	t.Together = w.rnd.IntN(3) == 0
	if w.rnd.IntN(8) == 0 {
		t.Function = some
	}
	if w.rnd.IntN(8) == 0 {
		t.Attempt, t.Alone = 2, true
	}
	if w.rnd.IntN(2) == 0 {
		t.Deadline = w.now.Add(time.Duration(w.rnd.IntN(80)) * ms)
	}
	if w.rnd.IntN(2) == 0 {
		t.Rank, t.RankUntil = instant(w.now)+w.rnd.Float64(), w.now.Add(time.Duration(w.rnd.IntN(10))*ms)
	}
	if revisions := w.pins[t.Request]; t.Together {
		for _, lane := range w.names {
			if r := revisions[lane]; r != 0 {
				t.Pins = append(t.Pins, task.Pin{Function: lane, Revision: r})
			}
		}
	}
	return Submit{t}
}

// table returns a valid table over random lanes, some of which do not exist.
func (w *lanesWorld) table() *plan.Table {
	if w.rnd.IntN(8) == 0 {
		return nil
	}
	w.version++
	row := func() (r plan.Row) {
		for _, m := range [][]int{{0}, {12, 0}, {15}}[w.rnd.IntN(3)] {
			l := plan.Level{MaxLength: m}
			lanes := slices.Clone(w.names)
			w.rnd.Shuffle(len(lanes), func(i, k int) { lanes[i], lanes[k] = lanes[k], lanes[i] })
			n := 1 + w.rnd.IntN(3)
			for _, lane := range slices.Sorted(slices.Values(lanes[:n])) {
				l.Shares = append(l.Shares, plan.Share{Lane: lane, Part: 1 / float64(n)})
			}
			l.Backups = lanes[n:]
			if w.rnd.IntN(2) == 0 {
				l.Overflow = pick(w.rnd, w.names)
			}
			r.Levels = append(r.Levels, l)
		}
		return r
	}
	t := plan.NewTable("f.ns", w.version, map[string]plan.Row{plan.FromClient: row(), plan.FromJoin: row()})
	return &t
}
