package stage

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// welcomeTimeout bounds the wait for a dispatcher's answer to Hello.
const welcomeTimeout = 30 * time.Second

// server is a replica's side of the stage protocol.
type server struct {
	conn  *wire.Conn
	hooks Hooks
	log   *slog.Logger

	drain    chan struct{}  // closed when the dispatcher wants nothing more
	flushing atomic.Bool    // a goroutine will send the gathered answers
	running  sync.WaitGroup // the running batches
	workers  sync.WaitGroup
	jobs     chan job // for the workers; closed after the connection has ended
	mu       sync.Mutex
	leaving  bool // no new batch starts
	batches  map[uint64]*running
	credit   chunkCredit
}

// running is a batch that runs.
type running struct {
	cancel []context.CancelFunc // one per call
	all    context.CancelFunc   // ends the batch's context
}

// serve sends Hello and answers batches. After ctx has ended or the dispatcher has drained the
// replica, serve answers all accepted calls and returns nil. If the dispatcher closes the
// connection, serve cancels the calls and returns nil, too.
func serve(ctx context.Context, conn *wire.Conn, hello wire.Hello, hooks Hooks, log *slog.Logger) error {
	s := &server{conn: conn, hooks: hooks, log: log, drain: make(chan struct{}), jobs: make(chan job), batches: map[uint64]*running{}}
	s.credit.init()
	defer conn.Close()
	if err := s.greet(ctx, hello); err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	ended, finished := make(chan struct{}), make(chan bool, 1)
	go func() { finished <- s.finish(ctx, ended) }()
	err := s.read()
	close(ended)
	close(s.jobs)
	// No caller is left: running calls can stop, and writes fail instead of waiting.
	_ = conn.Close()
	s.cancelAll()
	s.credit.close()
	s.workers.Wait()
	// ECONNRESET means that the dispatcher has closed the connection with unread answers.
	if <-finished || errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) {
		return nil
	}
	return err
}

// finish waits until ctx ends or the replica is drained, and then until all accepted calls are
// answered. The reader receives cancels and credits until then. Finally, finish stops the reader.
// finish returns false if the connection ended first.
func (s *server) finish(ctx context.Context, ended <-chan struct{}) bool {
	select {
	case <-ended:
		return false
	case <-s.drain:
	case <-ctx.Done():
	}
	s.mu.Lock()
	s.leaving = true
	s.mu.Unlock()
	// The replica wants to leave, which the dispatcher does not know yet. If this message fails,
	// the reader reports the cause.
	if ctx.Err() != nil {
		_ = s.conn.Write(wire.Frame{Type: wire.FrameCredit, Payload: wire.Credit{Amount: 0}.Append(nil)})
	}
	s.running.Wait()
	select {
	case <-ended:
		return false
	default:
		_ = s.conn.SetReadDeadline(time.Unix(1, 0)) // fails if it has just ended
		return true
	}
}

func (s *server) greet(ctx context.Context, hello wire.Hello) error {
	if err := s.conn.Write(wire.Frame{Type: wire.FrameHello, Payload: hello.Append(nil)}); err != nil {
		return err
	}
	if err := s.conn.SetReadDeadline(time.Now().Add(welcomeTimeout)); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = s.conn.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	f, err := s.conn.Read()
	if err != nil {
		return fmt.Errorf("welcome: %w", err)
	}
	if f.Type != wire.FrameWelcome {
		return fmt.Errorf("frame %v, want Welcome", f.Type)
	}
	w, err := wire.DecodeWelcome(f.Payload)
	if err != nil {
		return err
	}
	if w.Version < hello.Oldest || w.Version > hello.Newest {
		return fmt.Errorf("welcome to version %d of the stage protocol, want %d to %d: %w", w.Version, hello.Oldest, hello.Newest, wire.ErrVersion)
	}
	s.credit.add(w.Credit)
	return s.conn.SetReadDeadline(time.Time{})
}

func (s *server) read() error {
	defer s.conn.Release()
	draining := false
	for {
		f, err := s.conn.Read()
		if err != nil {
			return err
		}
		switch f.Type {
		case wire.FrameBatch:
			err = s.start(f)
		case wire.FrameCancel:
			err = s.cancel(f)
		case wire.FrameCredit:
			var c wire.Credit
			if c, err = wire.DecodeCredit(f.Payload); err == nil {
				s.credit.add(c.Amount)
			}
		case wire.FrameThreads:
			var m wire.Threads
			if m, err = wire.DecodeThreads(f.Payload); err == nil && s.hooks.threads != nil {
				s.hooks.threads(int(m.Total))
			}
		case wire.FrameDrain:
			if !draining {
				draining = true
				close(s.drain)
			}
		default:
			err = fmt.Errorf("frame %v, want Batch, Cancel, Credit, Threads or Drain", f.Type)
		}
		for _, file := range f.Files {
			_ = file.Close() // read-only
		}
		if err != nil {
			return err
		}
	}
}

// start decodes a batch and starts it beside the running ones.
func (s *server) start(f wire.Frame) error {
	b, err := wire.DecodeBatch(f.Payload)
	if err != nil {
		return err
	}
	if len(b.Calls) > s.hooks.MaxBatch {
		return fmt.Errorf("batch %d of %d calls, want at most %d", f.Batch, len(b.Calls), s.hooks.MaxBatch)
	}
	for i := range b.Calls {
		for k := range b.Calls[i].Input {
			if _, err := wire.Detach(b.Calls[i].Input[k].Items, f.Files); err != nil {
				return fmt.Errorf("call %d of batch %d: %w", i, f.Batch, err)
			}
		}
	}
	s.mu.Lock()
	_, twice := s.batches[f.Batch]
	n, leaving := len(s.batches), s.leaving
	if !twice && n < s.hooks.Slots && !leaving {
		ctx, r, calls := s.calls(f.Batch, b)
		s.batches[f.Batch] = r
		s.running.Add(1)
		s.begin(job{ctx, f.Batch, r, calls})
	}
	s.mu.Unlock()
	switch {
	case twice || n >= s.hooks.Slots:
		return fmt.Errorf("batch %d while %d run, want at most %d and each once", f.Batch, n, s.hooks.Slots)
	case leaving:
		return s.refuse(f.Batch, len(b.Calls))
	}
	return nil
}

// refuse answers a batch that arrived after the replica decided to leave. The calls will run
// elsewhere.
func (s *server) refuse(batch uint64, calls int) error {
	for i := range calls {
		m := wire.Error{Index: i, Code: task.ReplicaLost, Message: "the replica was told to end"}
		if err := s.conn.Write(wire.Frame{Type: wire.FrameError, Batch: batch, Payload: m.Append(nil)}); err != nil {
			return err
		}
	}
	return nil
}

// calls makes the calls of a batch and its context. The context ends when the contexts of all calls
// have ended.
func (s *server) calls(batch uint64, b wire.Batch) (context.Context, *running, []*Call) {
	r := &running{cancel: make([]context.CancelFunc, len(b.Calls))}
	out := make([]*Call, len(b.Calls))
	for i, c := range b.Calls {
		var ctx context.Context
		ctx, r.cancel[i] = callContext(c.Deadline, s.hooks.timeout)
		out[i] = &Call{Key: c.Key, Deadline: c.Deadline, Traceparent: c.Traceparent, Header: c.Header, Input: c.Input, ctx: ctx, log: s.log}
		out[i].write = func(p []byte) error { return s.chunk(ctx, batch, i, p) }
	}
	if len(out) == 1 {
		r.all = r.cancel[0]
		return out[0].ctx, r, out
	}
	var all context.Context
	all, r.all = context.WithCancel(context.Background())
	left := new(atomic.Int64)
	left.Store(int64(len(out)))
	for _, c := range out {
		context.AfterFunc(c.ctx, func() {
			if left.Add(-1) == 0 {
				r.all()
			}
		})
	}
	return all, r, out
}

// execTimeoutError is the cause of a canceled call that ran for longer than the environment's
// exec_timeout.
type execTimeoutError time.Duration

func (o execTimeoutError) Error() string {
	return fmt.Sprintf("it ran for longer than exec_timeout, %v", time.Duration(o))
}

func (execTimeoutError) Unwrap() error { return context.DeadlineExceeded }

func callContext(deadline time.Time, timeout time.Duration) (context.Context, context.CancelFunc) {
	switch {
	case timeout > 0 && (deadline.IsZero() || time.Until(deadline) > timeout):
		return context.WithTimeoutCause(context.Background(), timeout, execTimeoutError(timeout))
	case deadline.IsZero():
		return context.WithCancel(context.Background())
	}
	return context.WithDeadline(context.Background(), deadline)
}

// job is a batch to run.
type job struct {
	ctx   context.Context
	batch uint64
	*running
	calls []*Call
}

// begin gives a batch to an idle worker, or starts a worker if none is idle. There may be a few
// more workers than slots, because a worker that still sends its results takes no other batch.
func (s *server) begin(j job) {
	select {
	case s.jobs <- j:
	default:
		s.workers.Go(s.work)
		s.jobs <- j
	}
}

// work runs batches until the connection ends. Workers are kept, because each new goroutine would
// have to grow its small stack again: with no-op calls, that took 8 % of a replica's processor
// time.
func (s *server) work() {
	for j := range s.jobs {
		s.run(j)
	}
}

func (s *server) run(j job) {
	defer s.running.Done()
	batch, calls := j.batch, j.calls
	begin := time.Now()
	results := s.hooks.bisect(j.ctx, calls)
	service := time.Since(begin)
	for i := range results {
		if late := execTimeoutError(0); errors.Is(results[i].Err, context.DeadlineExceeded) && errors.As(context.Cause(calls[i].ctx), &late) {
			results[i].Err = late
		}
	}
	s.mu.Lock()
	// Delete the batch before its last result is sent: with that result, the dispatcher counts the
	// slot as free.
	delete(s.batches, batch)
	others := len(s.batches)
	s.mu.Unlock()
	for _, cancel := range j.cancel {
		cancel() // a call that has ended must not stream
	}
	j.all()
	for i, res := range results {
		if p := (panicked{}); errors.As(res.Err, &p) {
			s.log.Error("the function panicked", "call", calls[i].Key.Request, "panic", p.value, "stack", string(p.stack))
		}
		_ = s.answer(batch, i, service, res) // Flush returns the error, too
	}
	if err := s.flush(others > 0 && service < quick); err != nil {
		// The reader also sees the end of the connection.
		s.log.Debug("results not sent", "batch", batch, "error", err)
	}
}

// quick is the bound of short service times. The result of a shorter batch waits for others,
// because a system call for it alone would take about as long as the batch.
const quick = 100 * time.Microsecond

// flush sends the gathered answers. If patient is set, it first calls Gosched, so that other
// goroutines that are ready can add their answers. Then one system call sends the answers of
// several quick batches. flush does not wait for batches that still run.
func (s *server) flush(patient bool) error {
	if patient {
		if !s.flushing.CompareAndSwap(false, true) {
			return nil // the goroutine that set it will send
		}
		runtime.Gosched()
		s.flushing.Store(false)
	}
	return s.conn.Flush()
}

// answer adds the end of a call to the gathered answers.
func (s *server) answer(batch uint64, i int, service time.Duration, res Result) error {
	if res.Err != nil {
		m := wire.Error{Index: i, Service: service, Code: code(res.Err), Message: res.Err.Error()}
		return s.conn.Gather(wire.Frame{Type: wire.FrameError, Batch: batch, Payload: m.Append(nil)})
	}
	out, files, err := wire.Attach(res.Output, 0, refuseRefs)
	defer func() {
		for _, f := range files {
			_ = f.Close() // the other side has its own copy
		}
	}()
	if err != nil {
		return s.answer(batch, i, service, Result{Err: fmt.Errorf("output: %w", err)})
	}
	m := wire.Result{Index: i, Service: service, Header: res.Header, Output: out}
	payload := m.Append(nil)
	if len(payload) > wire.MaxFrame {
		return s.answer(batch, i, service, Result{Err: fmt.Errorf("output of %d bytes in small items, want at most %d", len(payload), wire.MaxFrame)})
	}
	return s.conn.Gather(wire.Frame{Type: wire.FrameResult, Batch: batch, Payload: payload, Files: files})
}

func refuseRefs(r tensor.Ref) (*os.File, error) {
	return nil, fmt.Errorf("a reference to blob %q of %q, want tensors or bytes", r.Blob, r.Owner)
}

func (s *server) cancel(f wire.Frame) error {
	m, err := wire.DecodeCancelFrame(f.Payload)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.batches[f.Batch] // nil: the batch has just ended
	if r == nil {
		return nil
	}
	for i, cancel := range r.cancel {
		if i == m.Index || m.Index == wire.CancelAll {
			cancel()
		}
	}
	return nil
}

func (s *server) cancelAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.batches {
		for _, cancel := range r.cancel {
			cancel()
		}
	}
}
