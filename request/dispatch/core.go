package dispatch

import (
	"cmp"
	"fmt"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
)

// CoreConfig configures a [Core]. A nil policy means [FIFO], [LeastLoaded] or [Fill].
type CoreConfig struct {
	Function string // the stage: pipeline.Key of its own function, as text
	// The stage's own function is not deployed, so the Core has no lane until [Deployed] adds one.
	Bare       bool
	Revision   uint64 // revision of the own function's spec
	QueueLimit int    // largest number of waiting tasks; 0: 1000
	// How long a handler may go on after its call's limit (see stuck.go); 0: 2 s.
	CancelGrace time.Duration
	// Number of ended tasks to remember, so that duplicates are dropped; 0: 4096.
	Remember int

	Orderer task.Orderer
	Binder  task.Binder
	Batcher task.Batcher
}

// Core is the dispatcher of one stage, without clock, goroutines or I/O. It has a [Lane] per
// function that serves the stage. It is not safe for concurrent use.
type Core struct {
	lanes   // includes removed ones that still have replicas
	effects // of the latest step

	cfg    CoreConfig
	router router
	timers heap // all items with a due time, waiting or running
	tasks  tasks
	seq    uint64    // number of the latest arrival
	stage  *signals  // arrivals at the stage, whatever the lane; nil: it has one lane
	armed  time.Time // when the requested Tick is due; zero: none requested
	closed string    // why tasks are refused; empty: they are accepted
	rank   string    // as in plan.Want
	fair   bool      // lines share their replicas between applications
}

// NewCore returns the dispatcher of one stage, without tasks or replicas.
func NewCore(cfg CoreConfig) *Core {
	cfg.QueueLimit = cmp.Or(cfg.QueueLimit, defaultQueueLimit)
	cfg.CancelGrace = cmp.Or(cfg.CancelGrace, defaultGrace)
	cfg.Remember = cmp.Or(cfg.Remember, 4096)
	cfg.Orderer = cmp.Or[task.Orderer](cfg.Orderer, FIFO{})
	cfg.Binder = cmp.Or[task.Binder](cfg.Binder, LeastLoaded{})
	cfg.Batcher = cmp.Or[task.Batcher](cfg.Batcher, Fill{})
	c := &Core{cfg: cfg, timers: heap{by: byDue}, tasks: newTasks(cfg.Remember)}
	if !cfg.Bare {
		l := newLane(c, cfg.Function)
		l.revision, l.limit = cfg.Revision, cfg.QueueLimit
		c.lanes = []*Lane{l}
	}
	c.router.core = c
	c.router.install(nil)
	return c
}

const defaultQueueLimit = 1000

// Step applies an event and returns the effects to carry out. The time now must not be before that
// of the previous step. The next Step overwrites the slice, but the effects may be kept.
func (c *Core) Step(now time.Time, ev Event) []Effect {
	c.begin(now)
	_, submitted := ev.(Submit)
	c.apply(now, ev)
	return c.finish(now, submitted)
}

// begin starts a step.
func (c *Core) begin(now time.Time) {
	clear(c.fx)
	c.fx = c.fx[:0]
	for _, l := range c.lanes {
		l.tick(now, l.busy, l.slots)
	}
	if c.stage != nil {
		c.stage.tick(now, 0, 0)
	}
}

// apply changes the state as the event says.
func (c *Core) apply(now time.Time, ev Event) {
	switch ev := ev.(type) {
	case Submit:
		c.submit(now, ev.Task)
	case Expect:
		c.router.expect()
	case Cancel:
		c.cancel(now, ev.Key)
	case Leave:
		for _, l := range c.lanes {
			l.pins.leave(ev.Request)
		}
	case Ask:
		asked(c, ev)
	case Deployed:
		c.deploy(now, ev)
	case Removed:
		c.remove(now, ev)
	case Routed:
		c.routed(now, ev)
	case Batched:
		if l := c.Lane(ev.Lane); l != nil {
			l.batching.planned = ev.Most
			l.batching.apply(&l.fleet)
		}
	case Tick:
		c.armed = time.Time{}
	case Close:
		c.close(now, ev.Cause)
	case ReplicaUp:
		c.up(now, ev)
	case ReplicaDrain:
		if l := c.of(ev.Name); l != nil {
			l.drain(ev.Name)
		}
	case ReplicaDown:
		if l := c.of(ev.Name); l != nil {
			l.lose(now, ev.Name, task.ReplicaLost, task.Death{Cause: ev.Cause, End: ev.End})
		}
	case Result:
		if l := c.of(ev.Replica); l != nil {
			l.result(now, ev)
		}
	case Credit:
		if l := c.of(ev.Replica); l != nil {
			l.credit(ev.Replica, ev.Slots)
		}
	case NoReplica:
		if l := c.Lane(ev.Lane); l != nil {
			l.none(now, ev)
		}
	case Fail:
		if l := c.Lane(ev.Lane); l != nil && ev.Revision == l.revision {
			l.fail(now, ev.Cause)
		}
	}
}

// finish lets the lanes act on a changed state, and returns the step's effects.
func (c *Core) finish(now time.Time, submitted bool) []Effect {
	c.expire(now)
	if len(c.lanes) > 1 {
		c.router.follow(now)
	}
	for _, l := range c.lanes {
		l.act(now, submitted)
	}
	if len(c.lanes) > 1 {
		c.router.forgetRemoved()
	}
	c.arm()
	return c.fx
}

// effects are the effects of a step.
type effects struct{ fx []Effect }

func (x *effects) do(e Effect) { x.fx = append(x.fx, e) }

// Lane returns the lane of a function, or nil. An empty name means the stage's own function.
func (c *Core) Lane(function string) *Lane {
	if i, ok := c.index(cmp.Or(function, c.cfg.Function)); ok {
		return c.lanes[i]
	}
	return nil
}

func (c *Core) submit(now time.Time, t *task.Task) {
	if c.tasks.known(t.Key) {
		return
	}
	c.seq++
	it := &item{task: t, seq: c.seq}
	drop := c.router.enter(it)
	c.router.arrive(now, it)
	c.expire(now) // expired tasks must not take room in the line
	t.Entered = now
	switch {
	case c.closed != "":
		c.end(now, it, task.Unavailable, c.closed)
	case drop != "":
		c.drop(now, it, drop, c.router.why(it, drop))
	case it.lane.removed:
		c.end(now, it, task.Unavailable, fmt.Sprintf("function %q was removed", it.lane.name))
	case !t.Deadline.IsZero() && !t.Deadline.After(now):
		c.end(now, it, task.Expired, "the deadline had passed when the task came")
	case t.Attempt <= 1 && c.full(now, it):
		// An earlier attempt was accepted, so later ones are exempt.
	default:
		c.tasks.add(it)
		if it.lane != it.home {
			it.home.want() // only its replicas can take the tasks back
		}
		it.lane.enter(now, it)
	}
}

// full answers a task if the stage, or the function that the client invoked by its own name, has as
// many waiting tasks as it may have.
func (c *Core) full(now time.Time, it *item) bool {
	function, n, limit := c.cfg.Function, c.Waiting(), c.cfg.QueueLimit
	if len(c.lanes) > 1 && c.router.direct(it) && it.lane.Waiting() >= it.lane.limit {
		function, n, limit = it.lane.name, it.lane.Waiting(), it.lane.limit
	}
	if n < limit {
		return false
	}
	c.end(now, it, task.Overloaded, fmt.Sprintf("function %q: %d tasks wait, the limit is %d", function, n, limit))
	return true
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

// asked replies to an Ask about a task that the Core does not have.
func asked(c *Core, ev Ask) {
	if c.tasks.get(ev.Key) == nil {
		c.do(Reply{To: ev.ReplyTo, Reply: &task.Reply{
			Key: ev.Key, Code: task.ReplicaLost, Replica: "unknown", // a replica may have run it
			Message: "the function's owner does not have the task: a message about it was lost",
		}})
	}
}

// cut tells the replica to cancel a running call. The handler has until it.due to end.
func (c *Core) cut(now time.Time, it *item) {
	it.batch.whole = false
	it.due = it.graceEnd(now, c.cfg.CancelGrace)
	c.timers.schedule(it)
	c.do(CancelCall{Replica: it.batch.replica.name, Batch: it.batch.id, Call: int(it.call)})
}

// end replies to a task with a failure.
func (c *Core) end(now time.Time, it *item, code task.Code, message string) {
	c.reply(now, it, &task.Reply{Code: code, Message: message})
}

// drop replies to a task that a policy dropped.
func (c *Core) drop(now time.Time, it *item, reason task.DropReason, message string) {
	c.reply(now, it, &task.Reply{Code: task.Dropped, Reason: reason, Message: message})
}

// reply completes r and sends it as the task's only reply.
func (c *Core) reply(now time.Time, it *item, r *task.Reply) {
	r.Key = it.task.Key
	lane := ""
	if it.lane != nil {
		lane = it.lane.name
	}
	if b := it.batch; b != nil {
		r.Replica, r.Variant, r.Revision = b.replica.name, lane, b.replica.revision
		r.Wait = b.sent.Sub(it.task.Entered)
		r.Service = cmp.Or(r.Service, now.Sub(b.sent))
		r.Batch, r.BatchSize = b.id, len(b.items)
	} else {
		r.Wait = now.Sub(it.task.Entered)
	}
	if it.state == waiting && it.lane != nil {
		it.lane.unqueue(&it.lane.fleet, it)
		c.timers.drop(it)
	}
	it.state = ended
	if it.pin != nil {
		it.lane.part(now, it, r.Code)
	}
	c.tasks.end(it.task.Key)
	c.do(Reply{To: it.task.ReplyTo, Reply: r, Lane: lane, Last: it.task.Last})
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
			it.lane.left(now.Sub(it.task.Entered))
			c.end(now, it, task.Expired, "the deadline passed while it waited for a replica")
		default:
			it.lane.rank(now, it)
		}
	}
}

func (c *Core) close(now time.Time, cause string) {
	c.closed = cause
	for _, l := range c.lanes {
		for _, it := range l.waitingFor() {
			c.end(now, it, task.Unavailable, cause)
		}
		for len(l.replicas) > 0 {
			l.lose(now, l.replicas[0].name, task.Unavailable, task.Death{Cause: cause})
		}
	}
}

// arm asks for a Tick if something is due before the Tick that is already due.
func (c *Core) arm() {
	var next time.Time
	for _, l := range c.lanes {
		next = earlier(next, l.held)
		if l.draining > 0 {
			next = earlier(next, l.pins.nextExpiry)
		}
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
