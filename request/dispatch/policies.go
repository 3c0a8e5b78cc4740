package dispatch

import (
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
)

// FIFO is a task.Orderer: first come, first served.
type FIFO struct{}

// Key returns the same key for all tasks, so that the order of arrival decides.
func (FIFO) Key(*task.View, *task.Task) (key float64, until time.Time) { return 0, time.Time{} }

// LeastLoaded is a task.Router. It picks the replica with the most free slots; ties go to the first
// name. It holds the task if no slot is free.
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

// Fill is a task.Batcher that never waits for more tasks. A batch has all waiting tasks, up to the
// replica's MaxBatch. MaxBatch is 1 by default, so tasks run one by one.
type Fill struct{}

// Batch takes all of head.
func (Fill) Batch(_ *task.View, _ *task.Replica, head []*task.Task) (n int, wait time.Duration) {
	return len(head), 0
}
