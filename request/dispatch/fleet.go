package dispatch

import (
	"cmp"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
)

// fleet is the replicas of a lane.
type fleet struct {
	view       task.View  // Replicas is parallel to the field replicas
	replicas   []*replica // sorted by name
	batching   batching
	draining   int       // number of draining replicas
	reserved   int       // number of replicas reserved for suspects
	unanswered int       // number of calls that replicas have not answered
	busy       int       // taken slots of the replicas that get new tasks
	slots      int       // all slots of these replicas
	masked     task.View // reused by mask
}

// replica is a replica that the Core knows.
type replica struct {
	name     string
	revision uint64
	most     int // the largest batch that it takes
	batches  []*batch
	answered bool          // it has finished its first batch, which is slower than others
	timeout  time.Duration // the longest time that a call may run; 0: until its deadline
	// It gets no more tasks, because its device was out of memory or it is stuck.
	full bool
	// name of the call whose handler has not ended (see stuck.go); empty: none.
	stuck   string
	suspect *item // the suspect that it runs or is reserved for; nil: none
}

// Running returns the number of calls that replicas have not answered.
func (f *fleet) Running() int { return f.unanswered }

// Servers returns how many tasks the replicas that get new tasks can run at a time.
func (f *fleet) Servers() int {
	n := 0
	for i := range f.view.Replicas {
		if r := &f.view.Replicas[i]; !r.Draining {
			n += r.Slots * r.MaxBatch
		}
	}
	return n
}

// Replicas returns how many replicas get new tasks.
func (f *fleet) Replicas() int { return len(f.replicas) - f.draining }

// ready reports whether a replica may get new tasks now or when its calls have ended.
func (f *fleet) ready() bool {
	for i := range f.view.Replicas {
		if r := &f.view.Replicas[i]; !r.Draining && r.Slots > 0 && !f.replicas[i].full {
			return true
		}
	}
	return false
}

// Busy reports whether a replica has unanswered calls.
func (f *fleet) Busy(replica string) bool {
	i, ok := f.find(replica)
	return ok && len(f.replicas[i].batches) > 0
}

// hasCall reports whether a replica has not answered a call.
func (f *fleet) hasCall(name string, batch uint64, call int) bool {
	i, ok := f.find(name)
	return ok && f.replicas[i].batchIndex(batch, call) >= 0
}

func (f *fleet) find(name string) (int, bool) {
	return slices.BinarySearchFunc(f.replicas, name, func(r *replica, name string) int { return cmp.Compare(r.name, name) })
}

func (f *fleet) insert(r *replica, v task.Replica) {
	i, _ := f.find(r.name)
	f.replicas = slices.Insert(f.replicas, i, r)
	f.view.Replicas = slices.Insert(f.view.Replicas, i, v)
	f.countSlots()
}

func (f *fleet) forget(i int) {
	if f.view.Replicas[i].Draining {
		f.draining--
	}
	f.unreserve(i)
	f.replicas = slices.Delete(f.replicas, i, i+1)
	f.view.Replicas = slices.Delete(f.view.Replicas, i, i+1)
	f.countSlots()
}

// credit sets how many batches a replica takes at a time.
func (f *fleet) credit(name string, slots int) {
	if i, ok := f.find(name); ok {
		f.view.Replicas[i].Slots = max(slots, 0)
		f.countSlots()
	}
}

// countSlots counts the slots again after replicas or their slots have changed.
func (f *fleet) countSlots() {
	f.busy, f.slots = 0, 0
	for i := range f.view.Replicas {
		if r := &f.view.Replicas[i]; !r.Draining {
			f.busy += r.Busy
			f.slots += r.Slots
		}
	}
}

// has reports whether a replica is of a revision, draining or not.
func (f *fleet) has(revision uint64) bool {
	return slices.ContainsFunc(f.replicas, func(r *replica) bool { return r.revision == revision })
}

// serving reports whether a revision has a replica that does not drain.
func (f *fleet) serving(revision uint64) bool {
	for i, r := range f.replicas {
		if r.revision == revision && !f.view.Replicas[i].Draining {
			return true
		}
	}
	return false
}

// free reports whether the i-th replica may get a batch of tasks for a revision. So no policy can
// overload a replica or mix revisions.
func (f *fleet) free(i int, revision uint64) bool {
	if i < 0 || i >= len(f.replicas) {
		return false
	}
	r := &f.view.Replicas[i]
	return r.Busy < r.Slots && f.fits(revision, i)
}

// fits reports whether a task that is not a suspect may go to the i-th replica. revision is the
// revision that the task needs; 0: any.
func (f *fleet) fits(revision uint64, i int) bool {
	return f.replicas[i].suspect == nil && f.suits(revision, i)
}

// suits reports whether the i-th replica may run tasks that need the given revision; 0: any. A
// draining replica takes only tasks that no other replica can run.
func (f *fleet) suits(revision uint64, i int) bool {
	if f.replicas[i].full {
		return false
	}
	draining := f.view.Replicas[i].Draining
	if revision == 0 {
		return !draining
	}
	return f.replicas[i].revision == revision && (!draining || !f.serving(revision))
}

// vacant reports whether some replica has a free slot.
func vacant(replicas []task.Replica) bool {
	return slices.ContainsFunc(replicas, func(r task.Replica) bool { return r.Busy < r.Slots })
}

// mask returns the view for a task that needs a revision: replicas that do not fit look as if they
// drained, and all others as if they did not.
func (f *fleet) mask(revision uint64) *task.View {
	replicas := append(f.masked.Replicas[:0], f.view.Replicas...)
	f.masked = f.view
	for i := range replicas {
		replicas[i].Draining = !f.fits(revision, i)
	}
	f.masked.Replicas = replicas
	return &f.masked
}

// works reports whether the i-th replica has calls to wait for. On a stuck replica, only unanswered
// calls count.
func (f *fleet) works(i int) bool {
	r := f.replicas[i]
	if r.stuck == "" {
		return f.view.Replicas[i].Busy > 0
	}
	for _, b := range r.batches {
		for _, it := range b.items {
			if it != nil && it.state == running {
				return true
			}
		}
	}
	return false
}

// calls are the calls that the replicas have not answered.
func (f *fleet) calls(yield func(*item) bool) {
	for _, r := range f.replicas {
		for _, b := range r.batches {
			for _, it := range b.items {
				if it != nil && !yield(it) {
					return
				}
			}
		}
	}
}

// batchIndex returns the index of the batch with this id. It returns -1 if the replica does not
// have the batch, or has already answered the given call of the batch.
func (r *replica) batchIndex(id uint64, call int) int {
	at := slices.IndexFunc(r.batches, func(b *batch) bool { return b.id == id })
	if at < 0 || call < 0 || call >= len(r.batches[at].items) || r.batches[at].items[call] == nil {
		return -1
	}
	return at
}
