package dispatch

import (
	"cmp"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// owner is the dispatcher of one stage: its Core, the connections of its replicas and its timer.
type owner struct {
	shell *Shell
	stage pipeline.Key
	wake  chan time.Time // the latest Wake; sent while mu is held
	done  chan struct{}  // closed when the owner ends
	group sync.WaitGroup // the timer's goroutine

	mu        sync.Mutex
	core      *Core
	functions []*function      // the stage's own function first
	links     map[string]*link // by replica
}

func newOwner(s *Shell, stage pipeline.Key, cfg CoreConfig) *owner {
	cfg.Function = stage.String()
	o := &owner{
		shell: s, stage: stage, wake: make(chan time.Time, 1), done: make(chan struct{}),
		core: NewCore(cfg), links: map[string]*link{},
	}
	o.group.Go(o.ticks)
	return o
}

// end stops the timer.
func (o *owner) end() {
	close(o.done)
	o.group.Wait()
}

// ticks turns Wakes into Ticks. It is the owner's only timer.
func (o *owner) ticks() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		select {
		case <-o.done:
			return
		case at := <-o.wake:
			timer.Reset(time.Until(at))
		case <-timer.C:
			o.step(Tick{})
		}
	}
}

// step applies an event that belongs to no lane.
func (o *owner) step(ev Event) {
	o.mu.Lock()
	var space [4]*link
	o.advance(ev, space[:0], false)
}

// function returns the function of a lane; nil: there is none.
func (o *owner) function(lane string) *function {
	if len(o.functions) == 1 {
		return o.functions[0]
	}
	for _, f := range o.functions {
		if f.lane == lane {
			return f
		}
	}
	return nil
}

// publish writes what admission reads. The load of the stage's own function is that of all lanes.
func (o *owner) publish() {
	if len(o.functions) == 1 {
		f := o.functions[0]
		f.load.set(o.core.Waiting(), o.core.Running(), o.core.Servers(), o.core.Mean())
		return
	}
	for _, f := range o.functions {
		if f.name == o.stage {
			f.load.set(o.core.Waiting(), o.core.Running(), o.core.Servers(), o.core.Mean())
		} else if l := o.core.Lane(f.lane); l != nil {
			f.load.set(l.Waiting(), l.Running(), l.Servers(), l.Mean())
		}
	}
}

// bound writes the limits that admission reads.
func (o *owner) bound() {
	sum := int64(0)
	for _, f := range o.functions {
		if !f.bare && !f.removed.Load() {
			batch := f.spec.Batch
			if l := o.core.Lane(f.lane); l != nil {
				batch = l.batching.limit(batch)
			}
			most := f.spec.most(batch)
			f.load.limit.Store(int64(f.spec.QueueLimit))
			f.load.max.Store(most)
			sum += most
		}
	}
	if f := o.function(o.stage.String()); f != nil && f.name == o.stage {
		f.load.limit.Store(int64(o.core.cfg.QueueLimit))
		f.load.max.Store(sum)
	}
}

// waited adds how long a task waited to the smoothed waits of its function and its stage.
func (o *owner) waited(lane string, wait time.Duration) {
	for _, f := range o.functions {
		if f.name == o.stage || f.lane == lane {
			f.waited += (wait - f.waited) / 16
		}
	}
}

// step applies an event to the Core and carries out the effects.
func (f *function) step(ev Event) {
	var space [4]*link
	f.advance(ev, space[:0], false)
}

// orders are what a step leaves to do once the owner is unlocked.
type orders struct {
	wanted    []*function
	exhausted []trouble
	stuck     []trouble
	revive    []Revive
	unknown   *Unknown
	halved    []Halved
}

// advance is step for callers that gather frames over several events. links has the replicas with
// unwritten frames. advance adds the replicas that got frames now, and returns the result. It
// writes the frames unless more is set.
//
// Frames are queued in the order of the Core's decisions, because f.mu is held meanwhile, and
// written after f.mu is released. Replies are sent after that. So a replica has its next batch
// before the outputs of the previous batch are stored and sent.
func (f *function) advance(ev Event, links []*link, more bool) []*link {
	return f.lock().advance(ev, links, more)
}

// answered is a reply, and the function that it counts for.
type answered struct {
	Reply
	f *function
}

// trouble is a replica that gets no more calls.
type trouble struct {
	function       pipeline.Key
	replica, cause string
}

// advance is the advance of the function that has locked the owner. It unlocks the owner.
func (o *owner) advance(ev Event, links []*link, more bool) []*link {
	var space [8]answered
	now := time.Now()
	replies, links, left := o.carry(now, o.core.Step(now, ev), space[:0], links)
	o.publish()
	o.mu.Unlock()
	if !more {
		flush(links)
	}
	o.finish(replies, left)
	return links
}

// carry carries out effects as far as that is possible while the owner is locked. It adds replies,
// and the replicas that got frames to links. left has the rest; nil: there is none.
func (o *owner) carry(now time.Time, effects []Effect, replies []answered, links []*link) (_ []answered, _ []*link, left *orders) {
	rest := func() *orders {
		if left == nil {
			left = &orders{}
		}
		return left
	}
	for _, e := range effects {
		switch e := e.(type) {
		case Send:
			links = o.queue(links, e.Replica, e)
		case CancelCall:
			links = o.queue(links, e.Replica, e)
		case Reply:
			replies = append(replies, answered{e, cmp.Or(o.function(e.Lane), o.functions[0])})
			if e.Reply.Code == task.OK {
				o.waited(e.Lane, e.Reply.Wait)
			}
		case Idle:
			close(o.links[e.Replica].idle)
		case Evict:
			if l := o.links[e.Replica]; l != nil {
				l.fail(e.Cause, true) // the Core has answered its calls
			}
		case Exhausted:
			r := rest()
			r.exhausted = append(r.exhausted, trouble{o.links[e.Replica].f.name, e.Replica, e.Cause})
		case Stuck:
			r := rest()
			r.stuck = append(r.stuck, trouble{o.links[e.Replica].f.name, e.Replica, e.Cause})
		case Halved:
			r := rest()
			r.halved = append(r.halved, e)
		case Revive:
			r := rest()
			r.revive = append(r.revive, e)
		case Unknown:
			rest().unknown = &e
		case Wake:
			select { // replaces an earlier Wake that the timer has not seen
			case <-o.wake:
			default:
			}
			o.wake <- e.At
		case Wanted:
			if f := o.function(e.Lane); f != nil && now.Sub(f.wanted) >= wantedEvery {
				f.wanted = now
				r := rest()
				r.wanted = append(r.wanted, f)
			}
		}
	}
	return replies, links, left
}

// finish does what is left of a step. The owner is unlocked.
func (o *owner) finish(replies []answered, left *orders) {
	if left == nil {
		left = &orders{}
	}
	for _, e := range left.exhausted {
		o.tellExhausted(e)
	}
	for _, e := range left.stuck {
		o.tellStuck(e)
	}
	for _, e := range left.halved {
		o.shell.cfg.Logger.Warn("batches of this function are smaller until its next deploy, because replicas ended under a batch and not under its calls alone; "+
			"raise limits.memory, or lower stagecoach.dev/batch", "function", e.Lane, "ended", e.Size, "largest", e.Most)
	}
	for i := range replies {
		o.reply(&replies[i])
	}
	for _, e := range left.revive {
		o.shell.cfg.Revive(pipeline.ParseKey(e.Lane), e.Revision)
	}
	if e := left.unknown; e != nil {
		o.shell.cfg.Logger.Warn("a routing table names functions that do not serve the stage; the rest of it holds", "stage", o.stage, "version", e.Version, "functions", e.Lanes)
	}
	if o.shell.cfg.OnDemand != nil {
		for _, f := range left.wanted {
			o.shell.cfg.OnDemand(f.name)
		}
	}
}

// tellExhausted reports that a replica's device was out of memory.
func (o *owner) tellExhausted(e trouble) {
	o.shell.cfg.Logger.Warn("a device is out of memory", "function", e.function, "replica", e.replica, "cause", e.cause)
	if tell := o.shell.cfg.OutOfMemory; tell != nil {
		tell(e.function, e.replica, wire.NewMemoryError(e.cause))
	}
}

// tellStuck reports that a replica's handler does not end.
func (o *owner) tellStuck(e trouble) {
	o.shell.cfg.Logger.Warn("a replica gets no more calls: a handler does not end", "function", e.function, "replica", e.replica, "cause", e.cause)
	if tell := o.shell.cfg.Stuck; tell != nil {
		tell(e.function, e.replica, e.cause)
	}
}

func flush(links []*link) {
	for _, l := range links {
		l.out.flush()
	}
}

// queue adds a frame to a replica's outbox and notes that the outbox must be flushed.
func (o *owner) queue(links []*link, replica string, e Effect) []*link {
	l := o.links[replica]
	l.out.push(e)
	if slices.Contains(links, l) {
		return links
	}
	return append(links, l)
}

// reply counts a reply and sends it, with large items by reference.
func (o *owner) reply(e *answered) {
	r, f := e.Reply.Reply, e.f
	f.metrics.wait().Observe(r.Wait.Seconds())
	switch r.Code {
	case task.OK:
		f.metrics.service().Observe(r.Service.Seconds())
	case task.Expired:
		f.metrics.expired().Inc()
	case task.Dropped:
		o.shell.metrics.dropped.WithLabelValues(f.lane, string(r.Reason)).Inc()
	}
	if e.To == "" {
		return
	}
	if err := owned(r); err != nil {
		o.shell.cfg.Logger.Error("a node answers with an item of another request", "function", f.name, "replica", r.Replica, "error", err)
		r.Code, r.Message, r.Output = task.Unavailable, err.Error(), nil
	}
	near := o.shell.cfg.Near
	// The gateway writes the response from it at once, so nothing is stored.
	if e.Last && near != nil && near(e.To, r) {
		return
	}
	if apart := o.shell.cfg.Apart; apart != nil && apart(e.To) { // it has items of nodes by reference
		o.send(e, o.shell.cfg.Most)
		return
	}
	var err error
	if r.Output, err = tensor.Externalise(o.shell.cfg.Store, r.Request, r.Output); err != nil {
		r.Code, r.Message, r.Output = task.Unavailable, "output: "+err.Error(), nil
	}
	if near != nil && near(e.To, r) {
		return
	}
	o.send(e, 0)
}

// send sends a reply over the bus. If it is larger than most bytes, a fault is sent instead; 0: any
// size will do.
func (o *owner) send(e *answered, most int) {
	r, f := e.Reply.Reply, e.f
	r.SignBack(o.shell.cfg.Me)
	buf := o.shell.buffers.Get().(*[]byte)
	*buf = wire.AppendReply((*buf)[:0], r)
	if n := len(*buf); most > 0 && n > most {
		r.Code, r.Output = task.Failed, nil
		r.Message = fmt.Sprintf("output of %d bytes, want at most %d: the request came to another process, and the NATS cluster takes no larger messages (max_payload)", n, most)
		*buf = wire.AppendReply((*buf)[:0], r)
	}
	if err := o.shell.cfg.Bus.Reply(e.To, *buf); err != nil {
		o.shell.cfg.Logger.Warn("failed to send a reply; its coordinator will try again", "function", f.name, "call", r.Request, "error", err)
	}
	o.shell.buffers.Put(buf)
}
