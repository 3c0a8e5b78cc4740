package stage

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/tensor"
	"github.com/stagecoach-serving/stagecoach/wire"
)

// welcomeTimeout bounds the wait for a dispatcher's answer to Hello.
const welcomeTimeout = 30 * time.Second

// server is a replica's side of the stage protocol.
type server struct {
	conn  *wire.Conn
	hooks Hooks
	log   *slog.Logger

	running sync.WaitGroup
	mu      sync.Mutex
	batches map[uint64]*running
	credit  chunkCredit
}

// running is a batch at work.
type running struct{ cancel []context.CancelFunc }

// serve says hello, then answers batches until ctx ends, the dispatcher drains it or closes. It returns nil for all of
// these once what it had taken is answered.
func serve(ctx context.Context, conn *wire.Conn, hello wire.Hello, hooks Hooks, log *slog.Logger) error {
	s := &server{conn: conn, hooks: hooks, log: log, batches: map[uint64]*running{}}
	s.credit.init()
	defer conn.Close()
	if err := s.greet(hello); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetReadDeadline(time.Now()) })
	defer stop()
	err := s.read(hello.Slots)
	if errors.Is(err, errDrained) || ctx.Err() != nil {
		s.running.Wait()
		return nil
	}
	s.cancelAll() // nobody is left to answer
	s.credit.close()
	s.running.Wait()
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

func (s *server) greet(hello wire.Hello) error {
	if err := s.conn.Write(wire.Frame{Type: wire.FrameHello, Payload: hello.Append(nil)}); err != nil {
		return err
	}
	if err := s.conn.SetReadDeadline(time.Now().Add(welcomeTimeout)); err != nil {
		return err
	}
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

// errDrained says that the dispatcher wants nothing more.
var errDrained = errors.New("stage: drained")

func (s *server) read(slots int) error {
	defer s.conn.Release()
	for {
		f, err := s.conn.Read()
		if err != nil {
			return err
		}
		switch f.Type {
		case wire.FrameBatch:
			err = s.start(f, slots)
		case wire.FrameCancel:
			err = s.cancel(f)
		case wire.FrameCredit:
			var c wire.Credit
			if c, err = wire.DecodeCredit(f.Payload); err == nil {
				s.credit.add(c.Amount)
			}
		case wire.FrameDrain:
			return errDrained
		default:
			err = fmt.Errorf("frame %v, want Batch, Cancel, Credit or Drain", f.Type)
		}
		for _, file := range f.Files {
			_ = file.Close() // read-only
		}
		if err != nil {
			return err
		}
	}
}

// start decodes a batch and runs it beside the others.
func (s *server) start(f wire.Frame, slots int) error {
	b, err := wire.DecodeBatch(f.Payload)
	if err != nil {
		return err
	}
	for i := range b.Calls {
		for k := range b.Calls[i].Input {
			if _, err := wire.Detach(b.Calls[i].Input[k].Items, f.Files); err != nil {
				return fmt.Errorf("call %d: %w", i, err)
			}
		}
	}
	r := &running{cancel: make([]context.CancelFunc, len(b.Calls))}
	calls := make([]*Call, len(b.Calls))
	ctx, cancel := context.WithCancel(context.Background())
	for i, c := range b.Calls {
		calls[i] = &Call{Key: c.Key, Deadline: c.Deadline, Traceparent: c.Traceparent, Header: c.Header, Input: c.Input}
		calls[i].ctx, r.cancel[i] = callContext(ctx, c.Deadline)
		calls[i].write = func(p []byte) error { return s.chunk(calls[i].ctx, f.Batch, i, p) }
	}
	s.mu.Lock()
	if _, twice := s.batches[f.Batch]; twice || len(s.batches) >= slots {
		s.mu.Unlock()
		cancel()
		return fmt.Errorf("batch %d while %d run, want at most %d and each once", f.Batch, len(s.batches), slots)
	}
	s.batches[f.Batch] = r
	s.mu.Unlock()
	s.running.Go(func() {
		defer cancel()
		s.run(ctx, f.Batch, r, calls)
	})
	return nil
}

func callContext(ctx context.Context, deadline time.Time) (context.Context, context.CancelFunc) {
	if deadline.IsZero() {
		return context.WithCancel(ctx)
	}
	return context.WithDeadline(ctx, deadline)
}

func (s *server) run(ctx context.Context, batch uint64, r *running, calls []*Call) {
	begin := time.Now()
	results := safely(s.hooks.Infer, ctx, calls, s.log)
	service := time.Since(begin)
	s.mu.Lock()
	delete(s.batches, batch) // before the last result leaves: it frees the slot on the other side
	s.mu.Unlock()
	for i, res := range results {
		r.cancel[i]()
		if err := s.answer(batch, i, service, res); err != nil {
			s.log.Debug("result not sent", "batch", batch, "call", i, "error", err) // the reader sees the end of the connection too
			return
		}
	}
}

func (s *server) answer(batch uint64, i int, service time.Duration, res Result) error {
	if res.Err != nil {
		m := wire.Error{Index: i, Service: service, Code: code(res.Err), Message: res.Err.Error()}
		return s.conn.Write(wire.Frame{Type: wire.FrameError, Batch: batch, Payload: m.Append(nil)})
	}
	out, files, err := wire.Attach(res.Output, 0, refuseRefs)
	defer func() {
		for _, f := range files {
			_ = f.Close() // the other side has its own
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
	return s.conn.Write(wire.Frame{Type: wire.FrameResult, Batch: batch, Payload: payload, Files: files})
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
	r := s.batches[f.Batch] // nil: it has just ended
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

// maxChunk is the largest piece of a stream in one frame.
const maxChunk = 64 << 10

func (s *server) chunk(ctx context.Context, batch uint64, i int, p []byte) error {
	for len(p) > 0 {
		n, err := s.credit.take(ctx, min(len(p), maxChunk))
		if err != nil {
			return err
		}
		m := wire.Chunk{Index: i, Data: p[:n]}
		if err := s.conn.Write(wire.Frame{Type: wire.FrameChunk, Batch: batch, Payload: m.Append(nil)}); err != nil {
			return err
		}
		p = p[n:]
	}
	return nil
}

// chunkCredit is how many bytes of chunks the dispatcher will take.
type chunkCredit struct {
	mu     sync.Mutex
	more   *sync.Cond
	left   uint64
	closed bool
}

func (c *chunkCredit) init() { c.more = sync.NewCond(&c.mu) }

func (c *chunkCredit) add(n uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.left += n
	c.more.Broadcast()
}

func (c *chunkCredit) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	c.more.Broadcast()
}

// take waits for credit and takes up to n bytes of it.
func (c *chunkCredit) take(ctx context.Context, n int) (int, error) {
	stop := context.AfterFunc(ctx, func() { c.mu.Lock(); defer c.mu.Unlock(); c.more.Broadcast() })
	defer stop()
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.left == 0 {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		if c.closed {
			return 0, io.ErrClosedPipe
		}
		c.more.Wait()
	}
	n = int(min(uint64(n), c.left))
	c.left -= uint64(n)
	return n, nil
}
