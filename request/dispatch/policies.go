package dispatch

import (
	"math"
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// FIFO is a task.Orderer: first come, first served.
type FIFO struct{}

// Key returns the same key for all tasks, so that the order of arrival decides.
func (FIFO) Key(*task.View, *task.Task) (key float64, until time.Time) { return 0, time.Time{} }

// LeastSlack is a task.Orderer: the task that must begin first goes first. The key is the task's
// rank, in seconds since 1970. A task without a rank has the instant at which its request is due,
// else its deadline, else the instant at which it entered the line.
//
// The key is at most a [Horizon] before and at most a Horizon after the task entered the line. So a
// task is overtaken only by tasks that enter the line less than two Horizons after it, and no task
// starves.
type LeastSlack struct{}

// Horizon bounds how far a task's urgency moves it in a line (see [LeastSlack]).
const Horizon = 30 * time.Second

// Key returns the instant at which t should begin at the latest. When a rank expires, the key is
// the earlier of the rank and the due instant, so that waiting never moves a task back.
func (LeastSlack) Key(v *task.View, t *task.Task) (key float64, until time.Time) {
	rest := t.Due
	if rest.IsZero() {
		rest = t.Deadline
	}
	key = instant(t.Entered)
	if !rest.IsZero() {
		key = instant(rest)
	}
	if t.Rank != 0 && !math.IsNaN(t.Rank) {
		if valid := t.RankUntil.IsZero() || v.Now.Before(t.RankUntil); valid && t.Rank > key {
			key, until = t.Rank, t.RankUntil
		} else if valid || t.Rank < key {
			key = t.Rank
		}
	}
	entered := instant(t.Entered)
	return min(max(key, entered-Horizon.Seconds()), entered+Horizon.Seconds()), until
}

// instant returns an instant in seconds since 1970. It is exact to a microsecond for centuries.
func instant(t time.Time) float64 { return float64(t.UnixMicro()) / 1e6 }

// orderer returns the Orderer of a rank, as in plan.Want. fair says that applications share the
// replicas, and the order within an application is that of arrival. ok is false if there is no such
// rank.
func orderer(rank string) (o task.Orderer, fair, ok bool) {
	switch rank {
	case "", pipeline.RankFIFO:
		return FIFO{}, false, true
	case pipeline.RankFair:
		return FIFO{}, true, true
	case pipeline.RankLeastSlack:
		return LeastSlack{}, false, true
	}
	return nil, false, false
}

// LeastLoaded is a task.Binder. It picks the replica with the most free slots; ties go to the first
// name. It holds the task if no slot is free.
type LeastLoaded struct{}

// Bind binds t to the replica with the most free slots.
func (LeastLoaded) Bind(v *task.View, _ *task.Task) task.Choice {
	best, most := 0, 0
	for i := range v.Replicas {
		r := &v.Replicas[i]
		if free := r.Slots - r.Busy; !r.Draining && free > most {
			best, most = i, free
		}
	}
	if most == 0 {
		return task.Choice{Action: task.Hold}
	}
	return task.Choice{Action: task.Bind, Replica: best}
}
