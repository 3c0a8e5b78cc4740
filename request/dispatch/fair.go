package dispatch

import (
	"cmp"
	"slices"
	"time"
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
// With n = 0, this is the bound of the paper. n is there because so many tasks can be sent before
// the first answer corrects the charge.
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
	of     *fair // nil: it was forgotten
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
func (q *fair) flow(it *item) *flow {
	if f := it.flow; f != nil && f.of == q {
		return f
	}
	f := q.apps[it.task.App]
	if f == nil {
		q.sweep()
		f = &flow{of: q, app: it.task.App, tag: q.clock, line: heap{by: byKey}}
		q.apps[f.app] = f
		q.flows = slices.Insert(q.flows, q.index(f, 0), f)
	}
	f.weight = float64(max(it.task.Weight, 1))
	it.flow = f
	return f
}

// index returns the place of f among the flows from an index on.
func (q *fair) index(f *flow, from int) int {
	to := len(q.flows)
	for from < to {
		if mid := (from + to) / 2; q.flows[mid].before(f) {
			from = mid + 1
		} else {
			to = mid
		}
	}
	return from
}

// before reports whether f goes before g. The name decides between equal tags.
func (f *flow) before(g *flow) bool {
	return f.tag < g.tag || f.tag == g.tag && f.app < g.app
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
			f.of = nil
		}
		return old
	})
}

// move gives a flow another tag and puts it in its place.
func (q *fair) move(f *flow, tag float64) {
	i := q.index(f, 0)
	later := tag >= f.tag
	f.tag = tag
	if later {
		k := q.index(f, i+1)
		copy(q.flows[i:], q.flows[i+1:k])
		q.flows[k-1] = f
		return
	}
	k := i
	for k > 0 && f.before(q.flows[k-1]) {
		q.flows[k] = q.flows[k-1]
		k--
	}
	q.flows[k] = f
}

// put adds a waiting item, or moves it if its key has changed.
func (q *fair) put(it *item) {
	f := q.flow(it)
	if f.line.len() == 0 && f.tag < q.clock {
		q.move(f, q.clock)
	}
	if it.pos[byKey] == 0 {
		q.waiting++
	}
	f.line.set(it)
}

// take removes an item, if it waits.
func (q *fair) take(it *item) {
	if it.pos[byKey] != 0 {
		q.waiting--
		it.flow.line.drop(it)
	}
}

// restore puts back an item that was taken and not sent.
func (q *fair) restore(it *item) {
	q.waiting++
	it.flow.line.set(it)
}

// less reports whether a goes before b.
func (q *fair) less(a, b *item) bool {
	f, g := q.flow(a), q.flow(b)
	if f == g {
		return a.seq < b.seq
	}
	return f.before(g)
}

// sent charges the applications of a batch. mean is the mean service time per task; 0: unknown. It
// returns the charge per task in seconds.
func (q *fair) sent(items []*item, mean time.Duration) float32 {
	charge := float32(cmp.Or(mean, firstCharge).Seconds())
	for _, it := range items {
		f := q.flow(it)
		q.clock = max(q.clock, f.tag)
		q.move(f, f.tag+float64(charge)/f.weight)
	}
	return charge
}

// served corrects the charge of a task to the service time that it took. Both are in seconds.
func (q *fair) served(it *item, took, charge float64) {
	if f := it.flow; f != nil && f.of == q {
		q.move(f, f.tag+(took-charge)/f.weight)
	}
}

// rest ends a busy period: no application has an advantage in the next one.
func (q *fair) rest() {
	if n := len(q.flows); n > 0 {
		q.clock = max(q.clock, q.flows[n-1].tag)
	}
}
