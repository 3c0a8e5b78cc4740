package dispatch

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
)

// CoreConfig configures a [Core]. A nil policy means [FIFO], [LeastLoaded] or [Fill].
type CoreConfig struct {
	Function   string // pipeline.Key as text
	Revision   uint64 // revision of the spec that replicas are started from
	QueueLimit int    // largest number of waiting tasks; 0: 1000
	// How long a handler may go on after its call's limit (see stuck.go); 0: 2 s.
	CancelGrace time.Duration
	// Number of ended tasks to remember, so that duplicates are dropped; 0: 4096.
	Remember int

	Orderer task.Orderer
	Router  task.Router[struct{}]
	Batcher task.Batcher
}

// Core is the dispatcher of one function, without clock, goroutines or I/O. It is not safe for
// concurrent use.
type Core struct {
	cfg         CoreConfig
	view        task.View  // Replicas is parallel to the field replicas
	replicas    []*replica // sorted by name
	line        heap       // waiting tasks that are not suspects
	suspects    []*item    // waiting suspects, in the order of the line
	reserved    int        // number of replicas reserved for suspects
	timers      heap       // all items with a due time, waiting or running
	tasks       tasks
	seq         uint64 // number of the latest arrival
	batches     uint64 // number of the latest batch
	unanswered  int    // number of calls that replicas have not answered
	pins        pins
	reviving    []uint64  // revisions for which a Revive was sent
	only        uint64    // revision of all replicas, if strict is false
	strict      bool      // tasks are bound to revisions, or all replicas drain
	draining    int       // number of draining replicas
	masked      task.View // reused by mask
	blocked     []uint64  // revisions whose tasks are held and may be passed; reused by dispatch
	held        time.Time // until when the batcher waits; zero: it does not wait
	armed       time.Time // when the requested Tick is due; zero: none requested
	fewer       bool      // this step has lost replicas
	closed      string    // why tasks are refused; empty: they are accepted
	head        []*item   // reused by load
	offer       []*task.Task
	fx          []Effect
	signals     signals
	service     services
	busy        int       // taken slots of the replicas that get new tasks
	slots       int       // all slots of these replicas
	ignoreUntil time.Time // measurements before this time are ignored; zero: none are
	ignoring    bool      // measurements are ignored as of the latest step
}

// replica is a replica that the Core knows.
type replica struct {
	name     string
	revision uint64
	batches  []*batch
	answered bool          // it has finished its first batch, which is slower than others
	timeout  time.Duration // the longest time that a call may run; 0: until its deadline
	// It gets no more tasks, because its device was out of memory or it is stuck.
	full bool
	// name of the call whose handler has not ended (see stuck.go); empty: none.
	stuck   string
	suspect *item // the suspect that it runs or is reserved for; nil: none
}

// NewCore returns the dispatcher of one function, without tasks or replicas.
func NewCore(cfg CoreConfig) *Core {
	cfg.QueueLimit = cmp.Or(cfg.QueueLimit, defaultQueueLimit)
	cfg.CancelGrace = cmp.Or(cfg.CancelGrace, defaultGrace)
	cfg.Remember = cmp.Or(cfg.Remember, 4096)
	cfg.Orderer = cmp.Or[task.Orderer](cfg.Orderer, FIFO{})
	cfg.Router = cmp.Or[task.Router[struct{}]](cfg.Router, LeastLoaded{})
	cfg.Batcher = cmp.Or[task.Batcher](cfg.Batcher, Fill{})
	return &Core{
		cfg:    cfg,
		view:   task.View{Function: cfg.Function},
		line:   heap{by: byKey},
		timers: heap{by: byDue},
		tasks:  newTasks(cfg.Remember),
		pins:   newPins(),
	}
}

const defaultQueueLimit = 1000

// SetQueueLimit sets how many tasks may wait; 0: 1000.
func (c *Core) SetQueueLimit(n int) { c.cfg.QueueLimit = cmp.Or(n, defaultQueueLimit) }

// Step applies an event and returns the effects to carry out. The time now must not be before that
// of the previous step. The next Step overwrites the slice, but the effects may be kept.
func (c *Core) Step(now time.Time, ev Event) []Effect {
	clear(c.fx)
	c.fx = c.fx[:0]
	c.tickSignals(now)
	switch ev := ev.(type) {
	case Submit:
		c.submit(now, ev.Task)
	case Expect:
		if c.Servers() == 0 {
			c.do(Wanted{})
		}
	case Cancel:
		c.cancel(now, ev.Key)
	case Leave:
		c.pins.leave(ev.Request)
	case ReplicaUp:
		c.up(now, ev)
	case ReplicaDrain:
		c.drain(ev.Name)
	case ReplicaDown:
		c.down(now, ev.Name, task.Death{Cause: ev.Cause, End: ev.End})
	case Result:
		c.result(now, ev)
	case Credit:
		if i, ok := c.find(ev.Replica); ok {
			c.view.Replicas[i].Slots = max(ev.Slots, 0)
			c.countSlots()
		}
	case Deployed:
		c.cfg.Revision = ev.Revision
		c.survey()
	case NoReplica:
		c.none(now, ev)
	case Fail:
		if ev.Revision == c.cfg.Revision {
			c.fail(now, ev.Cause)
		}
	case Tick:
		c.armed = time.Time{}
	case Close:
		c.close(now, ev.Cause)
	}
	c.expire(now)
	c.pins.expire(now)
	c.dispatch(now)
	if c.draining > 0 {
		c.release()
	}
	_, more := ev.(Submit)
	if n := c.Waiting(); (more || c.fewer) && n > 0 && n > c.Servers() {
		c.do(Wanted{})
	}
	c.fewer = false
	c.arm()
	return c.fx
}

func (c *Core) do(e Effect) { c.fx = append(c.fx, e) }

func (c *Core) find(name string) (int, bool) {
	return slices.BinarySearchFunc(c.replicas, name, func(r *replica, name string) int { return cmp.Compare(r.name, name) })
}

func (c *Core) submit(now time.Time, t *task.Task) {
	if c.tasks.known(t.Key) {
		return
	}
	if !c.ignoring {
		c.signals.arrive()
	}
	c.expire(now) // expired tasks must not take room in the line
	t.Entered = now
	c.seq++
	it := &item{task: t, seq: c.seq}
	switch {
	case c.closed != "":
		c.end(now, it, task.Unavailable, c.closed)
	case !t.Deadline.IsZero() && !t.Deadline.After(now):
		c.end(now, it, task.Expired, "the deadline had passed when the task came")
	case t.Attempt <= 1 && c.Waiting() >= c.cfg.QueueLimit:
		// An earlier attempt was accepted, so later ones are exempt.
		c.end(now, it, task.Overloaded, fmt.Sprintf("function %q: %d tasks wait, the limit is %d", c.cfg.Function, c.Waiting(), c.cfg.QueueLimit))
	default:
		c.tasks.add(it)
		c.join(it)
		c.miss(it)
		c.rank(now, it)
	}
}

// rank gives a waiting item its place in the line.
func (c *Core) rank(now time.Time, it *item) {
	it.key, it.until = c.cfg.Orderer.Key(c.look(now), it.task)
	if !it.until.IsZero() && !it.until.After(now) {
		it.until = time.Time{} // a key that has already expired must not cause endless ranking
	}
	it.due = earlier(it.task.Deadline, it.until)
	c.queue(it)
	c.schedule(it)
}

// schedule puts the item into timers under its due time.
func (c *Core) schedule(it *item) {
	if it.due.IsZero() {
		c.timers.drop(it)
		return
	}
	c.timers.set(it)
}

func (c *Core) look(now time.Time) *task.View {
	c.view.Now, c.view.Waiting, c.view.Service = now, c.Waiting(), c.service.perBatch()
	return &c.view
}

func (c *Core) cancel(now time.Time, k task.Key) {
	it := c.tasks.get(k)
	if it == nil {
		return
	}
	if it.state == running {
		c.cut(now, it)
	}
	c.end(now, it, task.Canceled, "canceled by the caller")
}

// cut tells the replica to cancel a running call. The handler has until it.due to end.
func (c *Core) cut(now time.Time, it *item) {
	it.batch.whole = false
	it.due = c.graceEnd(now, it)
	c.schedule(it)
	c.do(CancelCall{Replica: it.batch.replica.name, Batch: it.batch.id, Call: it.call})
}

// end replies to a task with a failure.
func (c *Core) end(now time.Time, it *item, code task.Code, message string) {
	c.reply(now, it, &task.Reply{Code: code, Message: message})
}

// reply completes r and sends it as the task's only reply.
func (c *Core) reply(now time.Time, it *item, r *task.Reply) {
	r.Key = it.task.Key
	if b := it.batch; b != nil {
		r.Replica, r.Revision = b.replica.name, b.replica.revision
		r.Wait = b.sent.Sub(it.task.Entered)
		r.Service = cmp.Or(r.Service, now.Sub(b.sent))
		r.Batch, r.BatchSize = b.id, len(b.items)
	} else {
		r.Wait = now.Sub(it.task.Entered)
	}
	if it.state == waiting {
		c.unqueue(it)
		c.timers.drop(it)
	}
	it.state = ended
	if it.pin != nil {
		c.part(now, it, r.Code)
	}
	c.tasks.end(it.task.Key)
	c.do(Reply{To: it.task.ReplyTo, Reply: r, Last: it.task.Last})
}

// expire ends calls at their limit, and ranks items whose keys have expired. It also marks a
// replica stuck if one of its handlers goes on for too long after the handler's call was cut.
func (c *Core) expire(now time.Time) {
	for c.timers.len() > 0 {
		it := c.timers.items[0]
		if it.due.After(now) {
			return
		}
		late := !it.task.Deadline.IsZero() && !it.task.Deadline.After(now)
		switch {
		case it.state == ended:
			c.markStuck(now, it)
		case it.state == running:
			c.cut(now, it)
			c.end(now, it, task.Expired, it.limitCause())
		case late:
			c.waited(now, it)
			c.end(now, it, task.Expired, "the deadline passed while it waited for a replica")
		default:
			c.rank(now, it)
		}
	}
}

// dispatch sends waiting tasks to replicas, in the order of the line, until the Router or the
// Batcher holds a task. If tasks are bound to revisions, tasks of other revisions may overtake a
// held task. Before each task, dispatch isolates the suspects that come before it.
func (c *Core) dispatch(now time.Time) {
	c.held = time.Time{}
	c.blocked = c.blocked[:0]
	for {
		it := c.first(-1)
		if len(c.suspects) > 0 && c.isolate(now, it) {
			continue // the head of the line may have changed
		}
		if it == nil {
			return
		}
		v, revision := c.look(now), it.revision()
		if c.strict || c.reserved > 0 {
			v = c.mask(revision)
		}
		switch choice := c.cfg.Router.Route(struct{}{}, v, it.task); {
		case choice.Action == task.Drop:
			c.end(now, it, task.Overloaded, choice.Reason)
		case choice.Action == task.Bind && c.free(choice.Replica, revision) && c.load(now, choice.Replica):
		case c.strict && len(c.pins.requests) > 0 && c.vacant():
			c.blocked = append(c.blocked, revision)
		default:
			return
		}
	}
}

// free reports whether the i-th replica may get a batch of tasks for a revision. So no policy can
// overload a replica or mix revisions.
func (c *Core) free(i int, revision uint64) bool {
	if i < 0 || i >= len(c.replicas) {
		return false
	}
	r := &c.view.Replicas[i]
	return r.Busy < r.Slots && c.fits(revision, i)
}

// load sends the i-th replica a batch from the head of the line, as large as the batcher says. It
// reports whether it sent anything.
func (c *Core) load(now time.Time, i int) bool {
	r := &c.view.Replicas[i]
	c.head, c.offer = c.head[:0], c.offer[:0]
	for len(c.head) < r.MaxBatch {
		it := c.first(i)
		if it == nil {
			break
		}
		c.line.drop(it)
		c.head, c.offer = append(c.head, it), append(c.offer, it.task)
	}
	n, wait := c.cfg.Batcher.Batch(&c.view, r, c.offer)
	if n <= 0 && wait > 0 {
		c.held = earlier(c.held, now.Add(wait))
	} else {
		n = min(max(n, 1), len(c.head))
	}
	for _, it := range c.head[max(n, 0):] {
		c.line.set(it)
	}
	if n > 0 {
		c.send(now, i, c.head[:n])
	}
	clear(c.head)
	clear(c.offer)
	return n > 0
}

func (c *Core) send(now time.Time, i int, items []*item) {
	c.batches++
	r := c.replicas[i]
	b := &batch{id: c.batches, replica: r, left: len(items), sent: now, whole: !c.ignoring}
	tasks := b.oneTask[:]
	if b.items = append(b.oneItem[:0], items...); len(items) > 1 {
		tasks = make([]*task.Task, len(items))
	}
	for call, it := range items {
		c.waited(now, it)
		tasks[call] = it.task
		it.state, it.batch, it.call, it.limit = running, b, call, it.task.Deadline
		if r.timeout > 0 {
			it.limit = earlier(it.limit, now.Add(r.timeout))
		}
		it.due = it.limit
		if it.pin != nil && it.pin.revision == 0 {
			c.pins.fix(it.pin, r.revision)
		}
		c.schedule(it)
	}
	r.batches = append(r.batches, b)
	c.view.Replicas[i].Busy++
	if !c.view.Replicas[i].Draining {
		c.busy++
	}
	c.unanswered += len(items)
	c.do(Send{Replica: r.name, Batch: b.id, Tasks: tasks})
}

// arm asks for a Tick if something is due before the Tick that is already due.
func (c *Core) arm() {
	next := c.held
	if c.draining > 0 {
		next = earlier(next, c.pins.nextExpiry)
	}
	if c.timers.len() > 0 {
		next = earlier(next, c.timers.items[0].due)
	}
	if !next.IsZero() && (c.armed.IsZero() || next.Before(c.armed)) {
		c.armed = next
		c.do(Wake{At: next})
	}
}

// earlier returns the earlier of two instants. Zero means never.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}
