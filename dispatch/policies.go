package dispatch

import (
	"time"

	"github.com/stagecoach-serving/stagecoach/task"
)

// FIFO is a task.Orderer: first come, first served.
type FIFO struct{}

// Key is the same for all, so that arrival decides.
func (FIFO) Key(*task.View, *task.Task) (key float64, until time.Time) { return 0, time.Time{} }

// LeastLoaded is a task.Router: the replica with the most free slots, ties by name; hold while there is none.
type LeastLoaded struct{}

// Route binds t to the replica with the most free slots.
func (LeastLoaded) Route(_ struct{}, v *task.View, _ *task.Task) task.Choice {
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

// Fill is a task.Batcher that waits for nobody: what waits when a slot frees up runs together, up to the replica's largest
// batch. With a largest batch of 1, the default, tasks run one by one.
type Fill struct{}

// Batch takes all of head.
func (Fill) Batch(_ *task.View, _ *task.Replica, head []*task.Task) (n int, wait time.Duration) {
	return len(head), 0
}
