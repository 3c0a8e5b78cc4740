package dispatch

import (
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// batching says how large the batches of a lane may be. The smallest of these limits holds: the
// replica's own, the declared one, that of the plan, and those that ends of replicas have set.
type batching struct {
	declared int      // 0: no limit
	planned  int      // of the plan in force; 0: there is none yet
	survived int      // half of the smallest batch that was too large for a replica; 0: there is none
	doubts   []*doubt // in order of time
}

// limit returns the largest batch of a replica that takes up to most calls.
func (b batching) limit(most int) int {
	for _, n := range []int{b.declared, b.planned, b.survived} {
		if n > 0 {
			most = min(most, n)
		}
	}
	for _, d := range b.doubts {
		most = min(most, d.size/2)
	}
	return max(most, 1)
}

// maxBatchBytes is the most that the inputs of a batch of several calls may have together, so that
// one frame can carry them, with headers.
const maxBatchBytes = wire.MaxFrame / 2

// inputSize returns the bytes of an input, wherever they are.
func inputSize(in tensor.Input) (n int64) {
	for _, p := range in {
		for i := range p.Items {
			if n += int64(p.Items[i].Size()); p.Items[i].Ref != nil {
				n += p.Items[i].Ref.Size
			}
		}
	}
	return n
}

// apply sets the largest batch of each replica after a limit has changed.
func (b batching) apply(f *fleet) {
	for i, r := range f.replicas {
		f.view.Replicas[i].MaxBatch = b.limit(r.most)
	}
}

// Fill is a task.Batcher. A batch has all waiting tasks, up to the replica's MaxBatch. If the lane
// has a BatchWait, a batch that is not full waits until its first task has waited that long.
// MaxBatch is 1 by default, so tasks run one by one.
type Fill struct{}

// Batch takes all of head, or waits for more.
func (Fill) Batch(v *task.View, r *task.Replica, head []*task.Task) (n int, wait time.Duration) {
	if v.BatchWait <= 0 || len(head) >= r.MaxBatch {
		return len(head), 0
	}
	first := slices.MinFunc(head, func(a, b *task.Task) int { return a.Entered.Compare(b.Entered) })
	if wait = first.Entered.Add(v.BatchWait).Sub(v.Now); wait > 0 {
		return 0, wait
	}
	return len(head), 0
}
