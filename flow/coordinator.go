package flow

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
	"net/http"
	"runtime"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
	"github.com/stagecoach-serving/stagecoach/wire"
)

// Bus takes tasks to the owners of functions and brings replies; package queue has one over NATS.
type Bus interface {
	// Submit sends msg to the owner of function, and does not keep it.
	Submit(function string, msg []byte) error
	// Inbox makes a subject and calls handler with each message sent there, in order, until stop is called. The handler may
	// keep msg. When stop returns, handler is not running and will not be called again.
	Inbox(handler func(msg []byte)) (subject string, stop func(), err error)
}

// Graphs knows what can be invoked: a pipeline, or a function as a pipeline of one stage.
type Graphs interface {
	Graph(key string) (pipeline.Pipeline, bool)
}

// Loads knows what waits and runs for a function; an unknown function's load is zero. It is asked for each request.
type Loads interface {
	Load(function string) task.Load
}

// Config is what a Coordinator is made of. All fields are needed.
type Config struct {
	Bus     Bus
	Graphs  Graphs
	Loads   Loads
	Store   tensor.Store
	Log     *slog.Logger
	Metrics prometheus.Registerer
}

// Coordinator runs requests. Its methods are safe for concurrent use.
type Coordinator struct {
	cfg    Config
	inbox  string
	stop   func()
	seed   maphash.Seed
	shards []*shard

	mu      sync.Mutex
	closed  bool
	pending sync.WaitGroup // Invokes

	retries, refused prometheus.Counter
}

// shard is the part of the requests whose ids fall to it.
type shard struct {
	mu      sync.Mutex
	core    *Core
	waiting map[string]chan Finish
	timer   *time.Timer
	armed   time.Time // when the timer fires; zero: it does not
	scratch []byte
	loads   []task.Load
}

// New returns a Coordinator that listens for replies. The caller closes it.
func New(cfg Config) (*Coordinator, error) {
	c := &Coordinator{
		cfg: cfg, seed: maphash.MakeSeed(), shards: make([]*shard, 4*runtime.GOMAXPROCS(0)),
		retries: prometheus.NewCounter(prometheus.CounterOpts{Namespace: "stagecoach", Subsystem: "flow", Name: "retries_total", Help: "Tasks tried again because their replica was lost."}),
		refused: prometheus.NewCounter(prometheus.CounterOpts{Namespace: "stagecoach", Subsystem: "flow", Name: "refused_total", Help: "Requests refused at the entry because they could not be done in time or a line was full."}),
	}
	for _, m := range []prometheus.Collector{c.retries, c.refused} {
		if err := cfg.Metrics.Register(m); err != nil {
			return nil, fmt.Errorf("flow: %w", err)
		}
	}
	for i := range c.shards {
		s := &shard{core: NewCore(), waiting: map[string]chan Finish{}}
		s.timer = time.AfterFunc(time.Hour, func() { c.tick(s) })
		s.timer.Stop()
		c.shards[i] = s
	}
	var err error
	if c.inbox, c.stop, err = cfg.Bus.Inbox(c.receive); err != nil {
		return nil, fmt.Errorf("flow: %w", err)
	}
	return c, nil
}

// ErrClosed is the cause of what a closing coordinator refuses.
var ErrClosed = errors.New("stagecoach is shutting down; try again")

// Close refuses what comes from now on, waits for what runs until ctx ends, and stops listening. The caller ends what still
// runs then, by the contexts of its Invokes.
func (c *Coordinator) Close(ctx context.Context) error {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	done := make(chan struct{})
	go func() { c.pending.Wait(); close(done) }()
	var err error
	select {
	case <-done:
	case <-ctx.Done():
		err = fmt.Errorf("flow: requests still run: %w", ctx.Err())
	}
	c.stop()
	for _, s := range c.shards {
		s.mu.Lock()
		s.timer.Stop()
		s.mu.Unlock()
	}
	return err
}

// Invoke runs a request to its end, or until ctx ends. Exactly one of the results is set. The response's output has no
// references.
func (c *Coordinator) Invoke(ctx context.Context, r task.Request) (*task.Response, *task.Error) {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil, &task.Error{Status: http.StatusServiceUnavailable, Internal: true, Cause: ErrClosed.Error(), RetryAfter: time.Second}
	}
	c.pending.Add(1)
	c.mu.Unlock()
	defer c.pending.Done()

	g, ok := c.cfg.Graphs.Graph(r.Target)
	if !ok {
		name, namespace := pipeline.SplitKey(r.Target)
		return nil, &task.Error{Status: http.StatusNotFound, Internal: true, Cause: fmt.Sprintf("no function or pipeline %q in namespace %q: deploy it first", name, namespace)}
	}
	if len(g.Faults) > 0 {
		return nil, &task.Error{Status: http.StatusServiceUnavailable, Internal: true, Cause: fmt.Sprintf("pipeline %q cannot run: %s", g.Name, g.Faults[0])}
	}
	input, err := tensor.Externalise(c.cfg.Store, r.ID, r.Input)
	if err != nil {
		c.drop(r.ID)
		return nil, internal(fmt.Errorf("input: %w", err))
	}
	r.Input = input
	end := c.run(ctx, r, g)
	if end.Error != nil {
		if end.Error.Status == http.StatusTooManyRequests {
			c.refused.Inc()
		}
	} else if err := c.resolve(end.Response); err != nil {
		end.Response, end.Error = nil, internal(fmt.Errorf("output: %w", err))
	}
	if end.Blobs {
		c.drop(r.ID)
	}
	return end.Response, end.Error
}

func internal(err error) *task.Error {
	return &task.Error{Status: http.StatusInternalServerError, Internal: true, Cause: err.Error()}
}

// run starts the request in its shard and waits for its end.
func (c *Coordinator) run(ctx context.Context, r task.Request, g pipeline.Pipeline) Finish {
	s := c.shard(r.ID)
	end := make(chan Finish, 1)
	s.mu.Lock()
	if _, twice := s.waiting[r.ID]; !twice {
		s.waiting[r.ID] = end
	} else {
		s.mu.Unlock()
		return Finish{Error: &task.Error{Status: http.StatusConflict, Cause: fmt.Sprintf("request %q is already running, want an id that is unique", r.ID)}}
	}
	s.loads = s.loads[:0]
	for i := range g.Stages {
		s.loads = append(s.loads, c.cfg.Loads.Load(pipeline.Key(g.Stages[i].Name, g.Namespace)))
	}
	c.step(s, Start{Request: r, Graph: g, Loads: s.loads})
	s.mu.Unlock()
	select {
	case f := <-end:
		return f
	case <-ctx.Done():
		s.mu.Lock()
		c.step(s, Canceled{r.ID})
		s.mu.Unlock()
		return <-end // Canceled ends it, unless it had ended already
	}
}

func (c *Coordinator) shard(request string) *shard {
	return c.shards[maphash.String(c.seed, request)%uint64(len(c.shards))]
}

// receive handles a message to the inbox.
func (c *Coordinator) receive(msg []byte) {
	r, err := wire.DecodeReply(msg)
	if err != nil {
		c.cfg.Log.Error("reply not understood", "bytes", len(msg), "error", err)
		return
	}
	s := c.shard(r.Request)
	s.mu.Lock()
	c.step(s, Replied{r})
	s.mu.Unlock()
}

func (c *Coordinator) tick(s *shard) {
	s.mu.Lock()
	s.armed = time.Time{}
	c.step(s, Tick{})
	s.mu.Unlock()
}

// step runs the core and carries its effects out, with s.mu held. A task that cannot be sent comes back at once as
// unavailable.
func (c *Coordinator) step(s *shard, ev Event) {
	var unsent []*task.Reply
	for {
		for _, e := range s.core.Step(time.Now(), ev) {
			switch e := e.(type) {
			case Submit:
				if err := c.submit(s, e.Task); err != nil {
					unsent = append(unsent, &task.Reply{Key: e.Task.Key, Code: task.Unavailable, Message: err.Error()})
				}
			case Cancel:
				s.scratch = wire.AppendCancel(s.scratch[:0], e.Key, e.Function)
				if err := c.cfg.Bus.Submit(e.Function, s.scratch); err != nil {
					c.cfg.Log.Warn("cancel not sent, the task runs to its deadline", "function", e.Function, "error", err)
				}
			case Finish:
				if end, ok := s.waiting[e.Request]; ok {
					delete(s.waiting, e.Request)
					end <- e // has room for the one end
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

// largeTask is the size in bytes of an encoded task above which its inline items are put into the store too. NATS takes
// somewhat more.
const largeTask = 4 << 20

func (c *Coordinator) submit(s *shard, t *task.Task) error {
	if t.Attempt > 1 {
		c.retries.Inc()
	}
	t.ReplyTo = c.inbox
	s.scratch = wire.AppendTask(s.scratch[:0], t)
	if len(s.scratch) > largeTask {
		for i := range t.Input {
			items, err := tensor.Externalise(c.cfg.Store, t.Request, t.Input[i].Items)
			if err != nil {
				return err
			}
			t.Input[i].Items = items
		}
		s.scratch = wire.AppendTask(s.scratch[:0], t)
	}
	err := c.cfg.Bus.Submit(t.Function, s.scratch)
	if cap(s.scratch) > largeTask {
		s.scratch = nil
	}
	return err
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
		c.cfg.Log.Warn("blobs stay until the next start", "request", request, "error", err)
	}
}
