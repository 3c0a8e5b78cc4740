package dispatch

import (
	"cmp"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// function is one function of a Shell: its Core, the connections of its replicas and its timer.
type function struct {
	shell   *Shell
	name    pipeline.Key
	metrics functionMetrics
	load    load
	wake    chan time.Time // the latest Wake; sent while mu is held
	done    chan struct{}  // closed when the function ends
	group   sync.WaitGroup // the function's goroutines
	stop    func()         // stops the bus's calls; set before the function can be closed
	intake  intake
	taken   chan struct{} // closed when the intake's goroutine has ended

	// Held while an event of the bus or of this process is applied; guards the next two fields.
	taking    sync.Mutex
	gathered  int     // number of events since unwritten was flushed
	unwritten []*link // links with frames that are not written yet

	mu     sync.Mutex
	core   *Core
	spec   Spec
	links  map[string]*link
	closed bool
	wanted time.Time     // time of the latest call of OnDemand
	waited time.Duration // how long tasks wait in the line, smoothed
}

// load is what admission reads. It is written after each step.
type load struct {
	waiting, running, servers, max, limit, service, start atomic.Int64
}

func (l *load) read() task.Load {
	return task.Load{
		Waiting: int(l.waiting.Load()), Running: int(l.running.Load()), Servers: int(l.servers.Load()),
		Max: int(l.max.Load()), Limit: int(l.limit.Load()),
		Service: time.Duration(l.service.Load()), Start: time.Duration(l.start.Load()),
	}
}

// wantedEvery is the shortest time between two calls of OnDemand for one function.
const wantedEvery = 100 * time.Millisecond

func newFunction(s *Shell, spec Spec) *function {
	f := &function{
		shell: s, name: spec.Function, metrics: s.metrics.of(spec.Function.String()),
		wake: make(chan time.Time, 1), done: make(chan struct{}), stop: func() {},
		intake: intake{wake: make(chan struct{}, 1)}, taken: make(chan struct{}),
		core: NewCore(CoreConfig{Function: spec.Function.String(), Revision: spec.Revision, QueueLimit: spec.QueueLimit}), links: map[string]*link{},
	}
	f.set(spec)
	return f
}

func (f *function) set(spec Spec) {
	spec.QueueLimit = cmp.Or(spec.QueueLimit, defaultQueueLimit)
	spec.Batch = max(spec.Batch, 1)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.spec = spec
	f.load.limit.Store(int64(spec.QueueLimit))
	f.load.max.Store(int64(spec.MaxReplicas * max(spec.Slots, 1) * spec.Batch))
}

// open starts the timer and begins to take tasks from this process and from the bus.
func (f *function) open() error {
	f.group.Go(f.ticks)
	f.group.Go(func() { defer close(f.taken); f.intake.run(f.take) })
	stop, err := f.shell.cfg.Bus.Tasks(f.name.String(), f.handle)
	if err == nil {
		f.stop = stop
	}
	return err
}

// close ends the function and waits for its goroutines.
func (f *function) close(cause string) {
	f.stop()
	f.intake.close()
	<-f.taken
	f.mu.Lock()
	f.closed = true
	f.mu.Unlock()
	f.step(Close{Cause: cause})
	close(f.done)
	for _, l := range f.all() {
		l.fail(cause, false)
	}
	f.group.Wait()
}

func (f *function) all() []*link {
	f.mu.Lock()
	defer f.mu.Unlock()
	var all []*link
	for _, l := range f.links {
		all = append(all, l)
	}
	return all
}

func (f *function) link(name string) *link {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.links[name]
}

// busy reports whether a replica has unanswered calls.
func (f *function) busy(replica string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.core.of(replica).Busy(replica)
}

// ticks turns Wakes into Ticks. It is the function's only timer.
func (f *function) ticks() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		select {
		case <-f.done:
			return
		case at := <-f.wake:
			timer.Reset(time.Until(at))
		case <-timer.C:
			f.step(Tick{})
		}
	}
}

// gatherLimit is the largest number of consecutive messages whose frames are written together.
const gatherLimit = 16

// handle takes a message from the bus.
func (f *function) handle(msg []byte, more bool) {
	ev, err := event(msg)
	if err != nil {
		f.shell.cfg.Logger.Warn("dropped a message that is neither a task nor a cancel", "function", f.name, "bytes", len(msg), "error", err)
		ev = nil
	}
	f.take(ev, more)
}

// take applies an event; nil stands for a message that was dropped. If more is set, another event
// follows at once. Then the frames of up to gatherLimit events wait, so that one system call can
// carry several tasks.
func (f *function) take(ev Event, more bool) {
	f.taking.Lock()
	defer f.taking.Unlock()
	if f.gathered++; f.gathered >= gatherLimit {
		more = false
	}
	if ev != nil {
		f.unwritten = f.advance(ev, f.unwritten, more)
	}
	if !more {
		flush(f.unwritten) // also for a dropped message
		clear(f.unwritten)
		f.gathered, f.unwritten = 0, f.unwritten[:0]
	}
}

// event decodes a message.
func event(msg []byte) (Event, error) {
	kind, err := wire.EnvelopeKind(msg)
	if err != nil {
		return nil, err
	}
	switch kind {
	case wire.KindCancel:
		key, _, err := wire.DecodeCancel(msg)
		return Cancel{Key: key}, err
	case wire.KindLeave:
		request, _, err := wire.DecodeLeave(msg)
		return Leave{Request: request}, err
	}
	t, err := wire.DecodeTask(msg) // DecodeTask refuses other kinds
	return Submit{Task: t}, err
}

// step applies an event to the Core and carries out the effects.
func (f *function) step(ev Event) {
	var space [4]*link
	f.advance(ev, space[:0], false)
}

// advance is step for callers that gather frames over several events. links has the replicas with
// unwritten frames. advance adds the replicas that got frames now, and returns the result. It
// writes the frames unless more is set.
//
// Frames are queued in the order of the Core's decisions, because f.mu is held meanwhile, and
// written after f.mu is released. Replies are sent after that. So a replica has its next batch
// before the outputs of the previous batch are stored and sent.
func (f *function) advance(ev Event, links []*link, more bool) []*link {
	var replySpace [8]Reply
	replies, wanted := replySpace[:0], false
	var exhausted *Exhausted // a step has one result, so there is at most one of each
	var stuck []Stuck
	var revive []uint64
	f.mu.Lock()
	now := time.Now()
	for _, e := range f.core.Step(now, ev) {
		switch e := e.(type) {
		case Send:
			links = f.queue(links, e.Replica, e)
		case CancelCall:
			links = f.queue(links, e.Replica, e)
		case Reply:
			replies = append(replies, e)
			if e.Reply.Code == task.OK {
				f.waited += (e.Reply.Wait - f.waited) / 16
			}
		case Idle:
			close(f.links[e.Replica].idle)
		case Evict:
			if l := f.links[e.Replica]; l != nil {
				l.fail(e.Cause, true) // the Core has answered its calls
			}
		case Exhausted:
			exhausted = &e
		case Stuck:
			stuck = append(stuck, e)
		case Revive:
			revive = append(revive, e.Revision)
		case Wake:
			select { // replaces an earlier Wake that the timer has not seen
			case <-f.wake:
			default:
			}
			f.wake <- e.At
		case Wanted:
			if wanted = now.Sub(f.wanted) >= wantedEvery; wanted {
				f.wanted = now
			}
		}
	}
	f.load.waiting.Store(int64(f.core.Waiting()))
	f.load.running.Store(int64(f.core.Running()))
	f.load.servers.Store(int64(f.core.Servers()))
	f.load.service.Store(int64(f.core.Mean()))
	f.mu.Unlock()
	if !more {
		flush(links)
	}
	if exhausted != nil {
		f.tellExhausted(*exhausted)
	}
	for _, e := range stuck {
		f.tellStuck(e)
	}
	for i := range replies {
		f.reply(&replies[i])
	}
	for _, revision := range revive {
		f.revive(revision)
	}
	if wanted && f.shell.cfg.OnDemand != nil {
		f.shell.cfg.OnDemand(f.name)
	}
	return links
}

// tellExhausted reports that a replica's device was out of memory.
func (f *function) tellExhausted(e Exhausted) {
	f.shell.cfg.Logger.Warn("a device is out of memory", "function", f.name, "replica", e.Replica, "cause", e.Cause)
	if tell := f.shell.cfg.OutOfMemory; tell != nil {
		tell(f.name, e.Replica, wire.NewMemoryError(e.Cause))
	}
}

// tellStuck reports that a replica's handler does not end.
func (f *function) tellStuck(e Stuck) {
	f.shell.cfg.Logger.Warn("a replica gets no more calls: a handler does not end", "function", f.name, "replica", e.Replica, "cause", e.Cause)
	if tell := f.shell.cfg.Stuck; tell != nil {
		tell(f.name, e.Replica, e.Cause)
	}
}

// revive asks for a replica of a revision that is not deployed any more.
func (f *function) revive(revision uint64) {
	if ask := f.shell.cfg.Revive; ask != nil {
		ask(f.name, revision)
		return
	}
	f.step(NoReplica{Revision: revision, Cause: "replicas of old revisions are not started here"})
}

func flush(links []*link) {
	for _, l := range links {
		l.out.flush()
	}
}

// queue adds a frame to a replica's outbox and notes that the outbox must be flushed.
func (f *function) queue(links []*link, replica string, e Effect) []*link {
	l := f.links[replica]
	l.out.push(e)
	if slices.Contains(links, l) {
		return links
	}
	return append(links, l)
}

// reply counts a reply and sends it, with large items by reference.
func (f *function) reply(e *Reply) {
	r := e.Reply
	f.metrics.wait().Observe(r.Wait.Seconds())
	switch r.Code {
	case task.OK:
		f.metrics.service().Observe(r.Service.Seconds())
	case task.Expired:
		f.metrics.expired().Inc()
	}
	if e.To == "" {
		return
	}
	near := f.shell.cfg.Near
	// The gateway writes the response from it at once, so nothing is stored.
	if e.Last && near != nil && near(e.To, r) {
		return
	}
	var err error
	if r.Output, err = tensor.Externalise(f.shell.cfg.Store, r.Request, r.Output); err != nil {
		r.Code, r.Message, r.Output = task.Unavailable, "output: "+err.Error(), nil
	}
	if near != nil && near(e.To, r) {
		return
	}
	buf := f.shell.buffers.Get().(*[]byte)
	*buf = wire.AppendReply((*buf)[:0], r)
	if err := f.shell.cfg.Bus.Reply(e.To, *buf); err != nil {
		f.shell.cfg.Logger.Warn("failed to send a reply; its coordinator will try again", "function", f.name, "call", r.Request, "error", err)
	}
	f.shell.buffers.Put(buf)
}
