package flow

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
	"net/http"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Bus carries tasks to the owners of functions and replies back; package queue implements it over
// NATS.
type Bus interface {
	// Submit sends msg to the owner of function and does not keep it. It does not call an inbox's
	// handler.
	Submit(function string, msg []byte) error
	// Inbox creates a subject and calls handler with each message sent there until stop is called.
	// Calls may overlap. The handler may keep msg. When stop returns, no handler runs or will run.
	Inbox(handler func(msg []byte)) (subject string, stop func(), err error)
}

// Graphs knows what can be invoked: pipelines, and functions as pipelines of one stage.
type Graphs interface {
	Graph(key pipeline.Key) (pipeline.Pipeline, bool)
}

// Loads reports how many tasks wait and run per function. The load of an unknown function is zero.
// Each request calls Load once per stage.
type Loads interface {
	Load(function pipeline.Key) task.Load
}

// Near hands tasks to the dispatchers of this process, without encoding them.
type Near interface {
	// Submit takes t if a dispatcher of this process owns t's function and has room for t. Otherwise
	// it returns false, and the coordinator sends t over the bus. The coordinator does not change t
	// afterwards. Submit does not call the coordinator back before it returns.
	Submit(t *task.Task) bool
	// Expect announces that a request will need a replica of a function that has none. It does not
	// wait, and does not call the coordinator back before it returns.
	Expect(function string)
	// Cancel cancels a task in the same way.
	Cancel(function string, k task.Key) bool
	// Leave announces the end of a request's tasks for a function in the same way.
	Leave(function, request string) bool
}

// Config configures a Coordinator. All fields but Near, Remote and InFlight are required.
type Config struct {
	Bus     Bus
	Near    Near   // nil: no task stays in this process
	Remote  Remote // nil: tasks for other processes go over Bus, to whoever listens
	Graphs  Graphs
	Loads   Loads
	Store   tensor.Store
	Log     *slog.Logger
	Metrics prometheus.Registerer

	// InFlight is the maximum number of concurrent requests; 0: the callers bound the number. Further
	// requests get status 429. InFlight should leave room for requests that were accepted earlier,
	// such as async requests, because a refused run counts as one of their attempts.
	InFlight int
}

// Coordinator runs requests. Its methods are safe for concurrent use.
type Coordinator struct {
	cfg    Config
	inbox  string
	stop   func()
	seed   maphash.Seed
	shards []*shard

	runs    atomic.Uint64 // source of run ids
	quit    chan struct{} // closed when Close stops waiting
	mu      sync.Mutex
	closed  bool
	pending sync.WaitGroup // Invokes in progress

	inFlight atomic.Int64 // Invokes in progress
	remote   *remote      // nil: there is no Config.Remote
	nodes    *nodeItems   // nil: Config.Store has no items of nodes

	retries, refused, convicted prometheus.Counter
	dropped                     *prometheus.CounterVec // by reason
	whole                       *prometheus.CounterVec // by direction: sent, received
}

// shard runs the requests whose ids hash to it.
type shard struct {
	mu      sync.Mutex
	core    *Core
	waiting map[string]*waiter // by run id, until the run's blobs are dropped
	timer   *time.Timer
	armed   time.Time // when the timer fires; zero: not set
	scratch []byte
	loads   []task.Load
}

// waiter is one Invoke in progress.
type waiter struct {
	end   chan Finish // has room for the run's only Finish
	blobs bool        // the store may hold blobs of the run

	fetches context.Context // of items of nodes that this process needs; nil: there were none
	stop    context.CancelFunc
}

// New returns a Coordinator that listens for replies. The caller closes it.
func New(cfg Config) (*Coordinator, error) {
	c := &Coordinator{
		cfg: cfg, seed: maphash.MakeSeed(), shards: make([]*shard, 4*runtime.GOMAXPROCS(0)), quit: make(chan struct{}),
		retries:   prometheus.NewCounter(prometheus.CounterOpts{Namespace: "stagecoach", Subsystem: "flow", Name: "retries_total", Help: "Tasks tried again because their replica was lost or its device was out of memory."}),
		refused:   prometheus.NewCounter(prometheus.CounterOpts{Namespace: "stagecoach", Subsystem: "flow", Name: "refused_total", Help: "Requests refused at the entry because they could not be done in time, a line was full or too many were in flight."}),
		convicted: prometheus.NewCounter(prometheus.CounterOpts{Namespace: "stagecoach", Subsystem: "flow", Name: "convicted_total", Help: "Requests that got 502 because one of their calls ended two replicas."}),
		dropped:   prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "stagecoach", Subsystem: "flow", Name: "dropped_total", Help: "Requests that ended because a policy dropped one of their tasks, by reason."}, []string{"reason"}),
		whole:     newWhole(),
	}
	for _, reason := range task.DropReasons() {
		c.dropped.WithLabelValues(string(reason)) // a series from the start
	}
	// The time keeps run ids different from those of an earlier process.
	c.runs.Store(uint64(time.Now().UnixNano()))
	for _, m := range []prometheus.Collector{c.retries, c.refused, c.convicted, c.dropped, c.whole} {
		if err := cfg.Metrics.Register(m); err != nil {
			return nil, fmt.Errorf("flow: %w", err)
		}
	}
	for i := range c.shards {
		s := &shard{core: NewCore(), waiting: map[string]*waiter{}}
		s.timer = time.AfterFunc(time.Hour, func() { c.tick(s) })
		s.timer.Stop()
		c.shards[i] = s
	}
	c.nodes = newNodeItems(cfg.Store)
	if cfg.Remote != nil {
		c.remote = newRemote(c)
	}
	var err error
	if c.inbox, c.stop, err = cfg.Bus.Inbox(c.receive); err != nil {
		return nil, fmt.Errorf("flow: %w", err)
	}
	return c, nil
}

// ErrClosed is the cause of requests that a closing coordinator refuses.
var ErrClosed = errors.New("stagecoach is shutting down; try again")

// Close refuses new requests and waits for running ones until ctx ends. Then it cuts off the rest
// and stops listening. Its error says how many requests were cut off.
func (c *Coordinator) Close(ctx context.Context) error {
	c.mu.Lock()
	twice := c.closed
	c.closed = true
	c.mu.Unlock()
	if twice {
		return nil
	}
	done := make(chan struct{})
	go func() { c.pending.Wait(); close(done) }()
	var err error
	select {
	case <-done:
	case <-ctx.Done():
		left := 0
		for _, s := range c.shards {
			s.mu.Lock()
			left += s.core.Requests()
			s.mu.Unlock()
		}
		err = fmt.Errorf("flow: %d requests were cut off: %w", left, ctx.Err())
		close(c.quit)
		<-done // they only clean up now
	}
	c.stop()
	c.nodes.close()
	if c.remote != nil {
		c.remote.close()
	}
	for _, s := range c.shards {
		s.mu.Lock()
		s.timer.Stop()
		s.mu.Unlock()
	}
	return err
}

func closing() *task.Error {
	return &task.Error{Status: http.StatusServiceUnavailable, Internal: true, Cause: ErrClosed.Error(), RetryAfter: time.Second}
}

// Invoke runs a request until it ends or ctx ends. Exactly one of the results is set. The
// response's output has no references.
func (c *Coordinator) Invoke(ctx context.Context, r task.Request) (*task.Response, *task.Error) {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil, closing()
	}
	c.pending.Add(1)
	c.mu.Unlock()
	defer c.pending.Done()
	defer c.inFlight.Add(-1)
	if n := c.inFlight.Add(1); c.cfg.InFlight > 0 && n > int64(c.cfg.InFlight) {
		c.refused.Inc()
		return nil, &task.Error{
			Status: http.StatusTooManyRequests, RetryAfter: time.Second,
			Cause: fmt.Sprintf("%d requests are in flight, which is the limit; try again", c.cfg.InFlight),
		}
	}

	target := pipeline.ParseKey(r.Target)
	g, ok := c.cfg.Graphs.Graph(target)
	if !ok {
		return nil, &task.Error{Status: http.StatusNotFound, Internal: true, Cause: fmt.Sprintf("no function or pipeline %q in namespace %q: deploy it first", target.Name, target.Namespace)}
	}
	if len(g.Faults) > 0 {
		return nil, &task.Error{Status: http.StatusServiceUnavailable, Internal: true, Cause: fmt.Sprintf("pipeline %q cannot run: %s", g.Name, g.Faults[0])}
	}
	r.ID = c.run(r.ID)
	start, err := c.prepare(r, g)
	if err != nil {
		c.drop(r.ID)
		return nil, internal(fmt.Errorf("input: %w", err))
	}
	end := c.walk(ctx, start)
	if end.Error != nil {
		c.count(end.Error)
	} else if err := c.resolve(end.Response); err != nil {
		end.Response, end.Error = nil, internal(fmt.Errorf("output: %w", err))
	}
	if c.forget(r.ID) || end.Blobs {
		c.drop(r.ID)
	}
	return end.Response, end.Error
}

// count counts a failed request.
func (c *Coordinator) count(e *task.Error) {
	if e.Status == http.StatusTooManyRequests {
		c.refused.Inc()
	}
	if e.Convicted {
		c.convicted.Inc()
	}
	if e.Dropped != "" {
		c.dropped.WithLabelValues(string(e.Dropped)).Inc()
	}
}

func internal(err error) *task.Error {
	if errors.Is(err, tensor.ErrFull) {
		return &task.Error{Status: http.StatusServiceUnavailable, Internal: true, Cause: err.Error(), RetryAfter: time.Second}
	}
	return &task.Error{Status: http.StatusInternalServerError, Internal: true, Cause: err.Error()}
}

// run returns the id of one run of a request. A request's own id is not enough, because it may
// repeat: a client may send one X-Call-Id twice, or the journal may run the request again.
// Dispatchers would drop the tasks of the second run as duplicates.
func (c *Coordinator) run(request string) string {
	return request + "~" + strconv.FormatUint(c.runs.Add(1), 36)
}

// walk starts the request in its shard and waits for its end.
func (c *Coordinator) walk(ctx context.Context, start Start) Finish {
	id := start.Request.ID
	s, w := c.shard(id), &waiter{end: make(chan Finish, 1)}
	s.mu.Lock()
	s.waiting[id] = w
	s.loads = s.loads[:0]
	for i := range start.Graph.Stages {
		s.loads = append(s.loads, c.cfg.Loads.Load(start.Graph.Stages[i].Key()))
	}
	start.Loads = s.loads
	c.step(s, start)
	s.mu.Unlock()
	select {
	case f := <-w.end:
		return f
	case <-ctx.Done():
		return c.cut(s, w, id)
	case <-c.quit:
		f := c.cut(s, w, id)
		if f.Error != nil {
			f.Error = closing()
		}
		return f
	}
}

// cut ends a request that nobody waits for, unless it has ended already.
func (c *Coordinator) cut(s *shard, w *waiter, id string) Finish {
	s.mu.Lock()
	c.step(s, Canceled{id})
	s.mu.Unlock()
	return <-w.end
}

// forget removes a request's waiter and reports whether the store may hold blobs of it.
func (c *Coordinator) forget(id string) bool {
	s := c.shard(id)
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.waiting[id]
	delete(s.waiting, id)
	if w.stop != nil {
		w.stop()
	}
	return w.blobs
}

func (c *Coordinator) shard(request string) *shard {
	return c.shards[maphash.String(c.seed, request)%uint64(len(c.shards))]
}

// receive handles a message to the inbox.
func (c *Coordinator) receive(msg []byte) {
	r, err := wire.DecodeReply(msg)
	if err != nil {
		c.cfg.Log.Error("failed to decode a reply", "bytes", len(msg), "error", err)
		return
	}
	if c.remote != nil {
		c.whole.WithLabelValues("received").Add(float64(large(r.Output)))
		if !c.remote.end(r) {
			return
		}
	}
	c.replied(r)
}

// Elsewhere reports whether replies to an inbox are for another coordinator.
func (c *Coordinator) Elsewhere(inbox string) bool { return inbox != c.inbox }

// Reply takes a reply from a dispatcher in this process. The dispatcher must not change r
// afterwards. Reply returns false if the reply is for another coordinator.
func (c *Coordinator) Reply(to string, r *task.Reply) bool {
	if to == c.inbox {
		c.replied(r)
	}
	return to == c.inbox
}

func (c *Coordinator) replied(r *task.Reply) {
	s := c.shard(r.Request)
	if !hasRefs(r.Output) {
		c.take(s, Replied{r})
		return
	}
	if c.nodes != nil {
		c.nodes.Adopt(r.Output)
	}
	s.mu.Lock()
	w := s.waiting[r.Request]
	if w != nil {
		w.blobs = true
	}
	fetch := w != nil && c.nodes != nil && s.core.needs(r)
	var ctx context.Context
	if fetch {
		if w.fetches == nil {
			w.fetches, w.stop = context.WithCancel(c.nodes.ctx)
		}
		ctx = w.fetches
	}
	s.mu.Unlock()
	switch {
	case w == nil: // the reply has come after the request's blobs were dropped
		c.drop(r.Request)
	case fetch:
		c.nodes.work.Go(func() { c.take(s, Replied{c.nodes.fetched(ctx, r)}) })
	default:
		c.take(s, c.outlined(s, r))
	}
}

// take applies an event to the core of a shard.
func (c *Coordinator) take(s *shard, ev Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c.step(s, ev)
}

func (c *Coordinator) tick(s *shard) {
	s.mu.Lock()
	s.armed = time.Time{}
	c.step(s, Tick{})
	s.mu.Unlock()
}

// step runs the core and carries out its effects. The caller holds s.mu. A task that cannot be sent
// is answered at once.
func (c *Coordinator) step(s *shard, ev Event) {
	var unsent []*task.Reply
	for {
		for _, e := range s.core.Step(time.Now(), ev) {
			switch e := e.(type) {
			case Submit:
				if r := c.submit(s, e.Task); r != nil {
					unsent = append(unsent, r)
				}
			case Expect:
				if c.cfg.Near != nil { // in another process, the task itself wakes the function
					c.cfg.Near.Expect(e.Function)
				}
			case Cancel:
				if c.cfg.Near != nil && c.cfg.Near.Cancel(e.Function, e.Key) {
					continue
				}
				if c.remote != nil {
					c.remote.cancel(e.Key, e.Function)
					continue
				}
				s.scratch = wire.AppendCancel(s.scratch[:0], e.Key, e.Function)
				if err := c.cfg.Bus.Submit(e.Function, s.scratch); err != nil {
					c.cfg.Log.Warn("failed to send a cancel; the task runs until its deadline", "function", e.Function, "error", err)
				}
			case Leave:
				if c.cfg.Near != nil && c.cfg.Near.Leave(e.Function, e.Request) {
					continue
				}
				if c.remote != nil {
					c.remote.leave(e.Function, e.Request)
					continue
				}
				s.scratch = wire.AppendLeave(s.scratch[:0], e.Request, e.Function)
				if err := c.cfg.Bus.Submit(e.Function, s.scratch); err != nil {
					c.cfg.Log.Warn("failed to announce that a request has no more tasks; replicas may be kept for it until its deadline", "function", e.Function, "error", err)
				}
			case Finish:
				if w := s.waiting[e.Request]; w != nil {
					w.end <- e
				}
			}
		}
		if len(unsent) == 0 {
			break
		}
		ev, unsent = Replied{unsent[0]}, unsent[1:]
	}
	if at, ok := s.core.Next(); ok && (s.armed.IsZero() || at.Before(s.armed)) {
		s.armed = at
		s.timer.Reset(time.Until(at))
	}
}

func (c *Coordinator) resolve(r *task.Response) error {
	for i := range r.Output {
		items, err := tensor.Resolve(c.cfg.Store, r.Output[i].Items)
		if err != nil {
			return err
		}
		r.Output[i].Items = items
	}
	return nil
}

func (c *Coordinator) drop(request string) {
	if err := c.cfg.Store.Drop(request); err != nil {
		c.cfg.Log.Warn("failed to delete blobs; the next start deletes them", "call", request, "error", err)
	}
}
