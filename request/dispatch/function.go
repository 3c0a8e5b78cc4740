package dispatch

import (
	"cmp"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// function is one function of a Shell: where its tasks come from, and its lane in the owner of its
// stage. A stage whose own function is not deployed has a function too as long as it has variants,
// so that the stage's tasks find their owner; such a function has no lane.
type function struct {
	shell   *Shell
	name    pipeline.Key
	lane    string                // name as text
	owner   atomic.Pointer[owner] // changed while both owners are locked
	metrics functionMetrics
	load    load
	done    chan struct{}  // closed when the function ends
	group   sync.WaitGroup // goroutines of its replicas' connections
	stop    func()         // stops the bus's calls; set before the function can be closed
	intake  intake
	taken   chan struct{} // closed when the intake's goroutine has ended
	removed atomic.Bool   // it gets no more tasks, but its replicas may not have left yet

	taking taking

	// guarded by the mu of its owner
	spec   Spec
	bare   bool          // the stage's own function is not deployed
	closed bool          // its owner ends
	wanted time.Time     // time of the latest call of OnDemand
	waited time.Duration // how long tasks wait in the line, smoothed
	former []*function   // earlier deployments whose replicas may not have left yet
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

func (l *load) set(waiting, running, servers int, mean time.Duration) {
	l.waiting.Store(int64(waiting))
	l.running.Store(int64(running))
	l.servers.Store(int64(servers))
	l.service.Store(int64(mean))
}

// wantedEvery is the shortest time between two calls of OnDemand for one function.
const wantedEvery = 100 * time.Millisecond

func newFunction(s *Shell, o *owner, spec Spec) *function {
	f := &function{
		shell: s, name: spec.Function, lane: spec.Function.String(), metrics: s.metrics.of(spec.Function.String()),
		done: make(chan struct{}), stop: func() {},
		intake: intake{wake: make(chan struct{}, 1)}, taken: make(chan struct{}), spec: spec,
	}
	f.owner.Store(o)
	return f
}

// complete returns the spec with its defaults.
func (s Spec) complete() Spec {
	s.QueueLimit = cmp.Or(s.QueueLimit, defaultQueueLimit)
	s.Batch = max(s.Batch, 1)
	return s
}

// most returns how many tasks can run at a time at the largest scale, in batches of up to batch.
func (s Spec) most(batch int) int64 { return int64(s.MaxReplicas * max(s.Slots, 1) * batch) }

// deployed returns the event for the function's spec.
func (s Spec) deployed() Deployed {
	return Deployed{Lane: s.Function.String(), Revision: s.Revision, MaxLength: s.MaxLength, QueueLimit: s.QueueLimit, Batch: s.Batch, AutoBatch: s.AutoBatch, BatchWait: s.BatchWait}
}

// open begins to take tasks from this process and from the bus.
func (f *function) open() error {
	go func() { defer close(f.taken); f.intake.run(f.take) }() // shut waits for it
	stop, err := f.shell.cfg.Bus.Tasks(f.lane, f.handle)
	if err == nil {
		f.stop = stop
	}
	return err
}

// shut ends the intake of tasks, and waits until the tasks that came are in the Core.
func (f *function) shut() {
	f.stop()
	f.intake.close()
	<-f.taken
}

// end closes the connections of the function's replicas, and waits for their goroutines. The
// function is closed, or has no replicas left.
func (f *function) end(cause string) {
	close(f.done)
	for _, l := range f.links() {
		l.fail(cause, false)
	}
	f.group.Wait()
	for _, old := range f.former {
		old.end(cause)
	}
}

// links returns the connections of the function's replicas.
func (f *function) links() []*link {
	o := f.lock()
	defer o.mu.Unlock()
	var all []*link
	for _, l := range o.links {
		if l.f == f {
			all = append(all, l)
		}
	}
	return all
}

// lock locks the function's owner and returns it.
func (f *function) lock() *owner {
	for {
		o := f.owner.Load()
		o.mu.Lock()
		if f.owner.Load() == o {
			return o
		}
		o.mu.Unlock() // its lane has moved meanwhile
	}
}

func (f *function) link(name string) *link {
	o := f.lock()
	defer o.mu.Unlock()
	return o.links[name]
}

// busy reports whether a replica has unanswered calls.
func (f *function) busy(replica string) bool {
	o := f.lock()
	defer o.mu.Unlock()
	l := o.core.of(replica)
	return l != nil && l.Busy(replica)
}

// started records how long a replica took to start, for the function and its stage.
func (f *function) started(took time.Duration) {
	f.load.start.Store(int64(took))
	o := f.lock()
	defer o.mu.Unlock()
	if stage := o.function(o.stage.String()); stage != nil {
		stage.load.start.Store(int64(took))
	}
}

// taking is held while an event of the bus or of this process is applied.
type taking struct {
	sync.Mutex
	gathered  int     // number of events since unwritten was flushed
	unwritten []*link // links with frames that are not written yet
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
	if f.taking.gathered++; f.taking.gathered >= gatherLimit {
		more = false
	}
	if ev != nil {
		f.taking.unwritten = f.advance(ev, f.taking.unwritten, more)
	}
	if !more {
		flush(f.taking.unwritten) // also for a dropped message
		clear(f.taking.unwritten)
		f.taking.gathered, f.taking.unwritten = 0, f.taking.unwritten[:0]
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
	case wire.KindAsk:
		key, _, to, err := wire.DecodeAsk(msg)
		return Ask{Key: key, ReplyTo: to}, err
	}
	t, err := wire.DecodeTask(msg) // DecodeTask refuses other kinds
	return Submit{Task: t}, err
}
