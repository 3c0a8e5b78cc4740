package dispatch

import (
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// Lane is the part of a stage that one function serves: its waiting tasks, and the replicas that
// may take them. A replica takes from its own lane only, so a task that is held in one lane never
// blocks another lane. Callers read a Lane between the steps of its [Core].
type Lane struct {
	fleet // its replicas
	line  // its waiting tasks
	measure

	core      *Core
	name      string // pipeline.Key of its function, as text
	revision  uint64 // revision of the spec that replicas are started from
	maxLength int    // of inputs; 0: any
	limit     int    // largest number of waiting tasks
	fate      fate   // as of the latest step
	// It cannot serve: its last replica crashed, or no replica can be started. The next replica
	// ends that.
	failed  bool
	removed bool // its function was removed, and its replicas drain

	batches  uint64 // number of the latest batch
	pins     pins
	reviving []uint64  // revisions for which a Revive was sent
	only     uint64    // revision of all replicas, if strict is false
	strict   bool      // tasks are bound to revisions, or all replicas drain
	held     time.Time // until when the batcher waits; zero: it does not wait
	fewer    bool      // this step has lost replicas
	loading  loading   // reused by load
	wanted   Effect    // the lane's Wanted
}

// loading is a batch that is being put together.
type loading struct {
	head  []*item
	offer []*task.Task
}

// newLane returns a lane without tasks or replicas.
func newLane(c *Core, function string) *Lane {
	l := &Lane{core: c, name: function, pins: newPins(), wanted: Wanted{Lane: function}, limit: defaultQueueLimit}
	l.view.Function = function
	l.line.sorted.by = byKey
	if c.fair {
		l.line.fair = newFair()
	}
	return l
}

// enter puts a task into the lane.
func (l *Lane) enter(now time.Time, it *item) {
	it.lane = l
	l.join(it)
	l.miss(it)
	l.rank(now, it)
}

// exit takes a waiting task out of the lane without an answer.
func (l *Lane) exit(now time.Time, it *item) {
	l.unqueue(&l.fleet, it)
	l.core.timers.drop(it)
	if it.pin != nil {
		l.part(now, it, task.Canceled)
	}
}

// rank gives a waiting item its place in the line.
func (l *Lane) rank(now time.Time, it *item) {
	it.key, it.until = l.core.cfg.Orderer.Key(l.look(now), it.task)
	if !it.until.IsZero() && !it.until.After(now) {
		it.until = time.Time{} // a key that has already expired must not cause endless ranking
	}
	it.due = earlier(it.task.Deadline, it.until)
	l.queue(it)
	l.core.timers.schedule(it)
}

func (l *Lane) look(now time.Time) *task.View {
	l.view.Now, l.view.Waiting, l.view.Service = now, l.Waiting(), l.service.perBatch()
	return &l.view
}

// act sends what can be sent, lets drained replicas go and asks for more.
func (l *Lane) act(now time.Time, submitted bool) {
	l.pins.expire(now)
	if len(l.batching.doubts) > 0 {
		l.batching.forget(now, &l.fleet)
	}
	l.dispatch(now)
	if l.draining > 0 {
		l.release()
	}
	if n := l.Waiting(); (submitted || l.fewer) && n > 0 && n > l.Servers() {
		l.want()
	}
	l.fewer = false
}

// want asks for more replicas.
func (l *Lane) want() {
	if !l.removed {
		l.core.do(l.wanted)
	}
}

// dispatch sends waiting tasks to replicas, in the order of the line, until the Binder or the
// Batcher holds a task. If tasks are bound to revisions, tasks of other revisions may overtake a
// held task. Before each task, dispatch isolates the suspects that come before it.
func (l *Lane) dispatch(now time.Time) {
	l.held = time.Time{}
	l.blocked = l.blocked[:0]
	for {
		it := l.first(&l.fleet, -1)
		if len(l.suspects) > 0 && l.isolate(now, it) {
			continue // the head of the line may have changed
		}
		if it == nil {
			return
		}
		v, revision := l.look(now), it.revision()
		if l.strict || l.reserved > 0 {
			v = l.mask(revision)
		}
		switch choice := l.core.cfg.Binder.Bind(v, it.task); {
		case choice.Action == task.Drop:
			l.left(now.Sub(it.task.Entered))
			l.core.drop(now, it, choice.Reason, "a policy dropped it: "+string(choice.Reason))
		case choice.Action == task.Bind && l.free(choice.Replica, revision) && l.load(now, choice.Replica):
		case l.strict && len(l.pins.requests) > 0 && vacant(l.view.Replicas):
			l.blocked = append(l.blocked, revision)
		default:
			return
		}
	}
}

// load sends the i-th replica a batch from the head of the line, as large as the batcher says. It
// reports whether it sent anything.
func (l *Lane) load(now time.Time, i int) bool {
	r, b := &l.view.Replicas[i], &l.loading
	b.head, b.offer = b.head[:0], b.offer[:0]
	size, full := int64(0), false // size is in bytes
	for len(b.head) < r.MaxBatch {
		it := l.first(&l.fleet, i)
		if it == nil {
			break
		}
		if r.MaxBatch > 1 {
			if size += inputSize(it.task.Input); size > maxBatchBytes && len(b.head) > 0 {
				full = true
				break
			}
		}
		l.take(it)
		b.head, b.offer = append(b.head, it), append(b.offer, it.task)
	}
	n, wait := l.core.cfg.Batcher.Batch(&l.view, r, b.offer)
	if n <= 0 && (full || len(l.suspects) > 0) { // no more fits, or a suspect waits behind it
		n = len(b.head)
	}
	if n <= 0 && wait > 0 {
		l.held = earlier(l.held, now.Add(wait))
	} else {
		n = min(max(n, 1), len(b.head))
	}
	for _, it := range b.head[max(n, 0):] {
		l.restore(it)
	}
	if n > 0 {
		l.send(now, i, b.head[:n])
	}
	clear(b.head)
	clear(b.offer)
	return n > 0
}

func (l *Lane) send(now time.Time, i int, items []*item) {
	l.batches++
	r := l.replicas[i]
	b := &batch{id: l.batches, replica: r, left: int32(len(items)), sent: now, whole: !l.ignoring}
	tasks := b.oneTask[:]
	if b.items = append(b.oneItem[:0], items...); len(items) > 1 {
		tasks = make([]*task.Task, len(items))
	}
	if l.fair != nil {
		b.charge = l.fair.sent(items, l.service.mean())
	}
	for call, it := range items {
		l.left(now.Sub(it.task.Entered))
		tasks[call] = it.task
		it.state, it.batch, it.call, it.limit = running, b, int32(call), it.task.Deadline
		if r.timeout > 0 {
			it.limit = earlier(it.limit, now.Add(r.timeout))
		}
		it.due = it.limit
		if it.pin != nil && it.pin.revision == 0 {
			l.pins.fix(it.pin, r.revision)
		}
		l.core.timers.schedule(it)
	}
	r.batches = append(r.batches, b)
	l.view.Replicas[i].Busy++
	if !l.view.Replicas[i].Draining {
		l.busy++
	}
	l.unanswered += len(items)
	l.core.do(Send{Replica: r.name, Batch: b.id, Tasks: tasks})
}

// Signals returns all measurements of the lane as of now.
func (l *Lane) Signals(now time.Time) plan.Signals {
	is := l.measure.read(now, l.busy, l.slots)
	is.Waiting, is.Running, is.Survived = l.Waiting(), l.Running(), l.batching.survived
	_, fifo := l.core.cfg.Orderer.(FIFO)
	if since := l.oldest(fifo && l.fair == nil); !since.IsZero() {
		is.Wait.Oldest = max(now.Sub(since), 0)
	}
	if l.core.stage != nil {
		is.Stage, _, _ = l.core.stage.read(now, 0, 0)
		is.Lengths = l.core.router.lengths.read(now)
	}
	return is
}
