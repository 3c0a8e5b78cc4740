package dispatch

import (
	"cmp"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
)

// fair is the order of a lane that shares its replicas between applications by weight. It is
// start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) over service time. Each application
// has a start tag: the service time that it has had, divided by its weight, on a virtual clock. The
// application with the lowest start tag goes first. Within an application, the order of arrival
// decides. The virtual clock is the highest start tag that was sent. An application that comes back
// after a pause starts at the virtual clock, so it cannot save up shares.
//
// A task's service time is not known when it is sent. So its application is charged the lane's mean
// then, and the difference when the answer is there.
//
// Between two applications that both have waiting tasks, service time divided by weight differs by
// at most the sum, over both, of (n+1)·L/weight. n is the number of tasks that the lane's replicas
// run at a time, and L the longest service time of a task, which is its share of its batch's time.
// With n = 0, this is the bound of the paper. n is there because so many tasks can be sent before the
// first answer corrects the charge.
//
// The cost per task is a search among the tags of the applications, whose number the deployed
// pipelines and functions bound.
type fair struct {
	apps    map[string]*flow
	flows   []*flow // sorted by tag, then by application
	clock   float64 // virtual time in seconds
	waiting int     // number of waiting tasks in the flows
}

// flow is an application's part of a line.
type flow struct {
	app    string
	weight float64
	tag    float64 // start tag of its next task, in seconds of virtual time
	line   heap    // its waiting tasks, except suspects
}

// firstCharge is charged per task while the mean service time is not known.
const firstCharge = time.Millisecond

// idleFlows is how many applications without waiting tasks are kept at least.
const idleFlows = 64

func newFair() *fair { return &fair{apps: map[string]*flow{}} }

// flow returns the flow of a task's application.
func (q *fair) flow(t *task.Task) *flow {
	f := q.apps[t.App]
	if f == nil {
		q.sweep()
		f = &flow{app: t.App, tag: q.clock, line: heap{by: byKey}}
		q.apps[t.App] = f
		q.flows = slices.Insert(q.flows, q.index(f), f)
	}
	f.weight = float64(max(t.Weight, 1))
	return f
}

func (q *fair) index(f *flow) int {
	i, _ := slices.BinarySearchFunc(q.flows, f, compareFlows)
	return i
}

func compareFlows(a, b *flow) int {
	return cmp.Or(cmp.Compare(a.tag, b.tag), cmp.Compare(a.app, b.app))
}

// sweep forgets flows without tasks whose tags the clock has passed, if there are many.
func (q *fair) sweep() {
	if len(q.flows) < idleFlows {
		return
	}
	q.flows = slices.DeleteFunc(q.flows, func(f *flow) bool {
		old := f.line.len() == 0 && f.tag <= q.clock
		if old {
			delete(q.apps, f.app)
		}
		return old
	})
}

// move gives a flow another tag and puts it in its place.
func (q *fair) move(f *flow, tag float64) {
	if tag == f.tag {
		return
	}
	i := q.index(f)
	f.tag = tag
	if i+1 < len(q.flows) && compareFlows(q.flows[i+1], f) < 0 || i > 0 && compareFlows(f, q.flows[i-1]) < 0 {
		q.flows = slices.Delete(q.flows, i, i+1)
		q.flows = slices.Insert(q.flows, q.index(f), f)
	}
}

// wake moves the tag of a flow that had no waiting tasks up to the clock.
func (q *fair) wake(t *task.Task) *flow {
	f := q.flow(t)
	if f.line.len() == 0 {
		q.move(f, max(f.tag, q.clock))
	}
	return f
}

// put adds a waiting item, or moves it if its key has changed.
func (q *fair) put(it *item) {
	f := q.wake(it.task)
	if it.pos[byKey] == 0 {
		q.waiting++
	}
	f.line.set(it)
}

// take removes an item, if it waits.
func (q *fair) take(it *item) {
	if it.pos[byKey] != 0 {
		q.waiting--
		q.apps[it.task.App].line.drop(it)
	}
}

// restore puts back an item that was taken and not sent.
func (q *fair) restore(it *item) {
	q.waiting++
	q.apps[it.task.App].line.set(it)
}

// less reports whether a goes before b.
func (q *fair) less(a, b *item) bool {
	if a.task.App == b.task.App {
		return a.seq < b.seq
	}
	return compareFlows(q.flow(a.task), q.flow(b.task)) < 0
}

// sent charges the applications of a batch. mean is the mean service time per task; 0: unknown. It
// returns the charge per task in seconds.
func (q *fair) sent(items []*item, mean time.Duration) float32 {
	charge := float32(cmp.Or(mean, firstCharge).Seconds())
	for _, it := range items {
		f := q.flow(it.task)
		q.clock = max(q.clock, f.tag)
		q.move(f, f.tag+float64(charge)/f.weight)
	}
	return charge
}

// rest ends a busy period: no application has an advantage in the next one.
func (q *fair) rest() {
	if n := len(q.flows); n > 0 {
		q.clock = max(q.clock, q.flows[n-1].tag)
	}
}

// served corrects the charge of a task to the service time that it took. Both are in seconds.
func (q *fair) served(t *task.Task, took, charge float64) {
	if f := q.apps[t.App]; f != nil {
		q.move(f, f.tag+(took-charge)/f.weight)
	}
}
