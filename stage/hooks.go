package stage

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime/debug"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/stage/zygote"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Hooks is what an author writes.
type Hooks struct {
	// Place runs once in each replica, before it takes calls; nil: nothing to do. An error ends the replica.
	Place func(ctx context.Context, r *Replica) error
	// Infer runs a batch and returns one result a call, in order. Up to Slots batches run at a time. ctx ends when all calls
	// of the batch are canceled or past their deadlines; each call has its own context besides. A panic is every call's
	// error, or, with Each, that of the call that caused it, and the replica goes on.
	Infer func(ctx context.Context, calls []*Call) []Result
	// Slots is how many batches run at a time; the environment's max_inflight overrides it. Default 1.
	Slots int
	// MaxBatch is how many calls Infer takes at a time. Default 1.
	MaxBatch int

	threads func(total int) // makes that many compute; nil: nobody can
	timeout time.Duration   // of a call, the environment's exec_timeout; 0: its deadline alone
}

// Replica is this process.
type Replica struct {
	Name     string
	Function string // pipeline.Key
	Log      *slog.Logger

	model *zygote.Session
	load  time.Duration
}

// Model returns the ONNX session, inherited from the zygote or opened by this process; nil for a function without one.
func (r *Replica) Model() *zygote.Session { return r.model }

// Call is one call of a batch.
type Call struct {
	Key         task.Key
	Deadline    time.Time // zero: none
	Traceparent string
	Header      []task.Header
	Input       tensor.Input

	ctx   context.Context
	write func([]byte) error
	log   *slog.Logger
}

// Log returns the replica's logger with the call's id, by which its lines are found together with the platform's.
func (c *Call) Log() *slog.Logger {
	id := c.HeaderValue("X-Call-Id")
	if id == "" {
		id = c.Key.Request
	}
	return cmp.Or(c.log, slog.Default()).With("call", id) // a test's call has none
}

// Context ends when the call is canceled, past its deadline or running for longer than the environment's exec_timeout.
func (c *Call) Context() context.Context { return c.ctx }

// Items returns the items of all parts of the input, in the parts' order.
func (c *Call) Items() tensor.Activation {
	if len(c.Input) == 1 {
		return c.Input[0].Items
	}
	var all tensor.Activation
	for _, p := range c.Input {
		all = append(all, p.Items...)
	}
	return all
}

// HeaderValue returns the first header field of that name, or "".
func (c *Call) HeaderValue(name string) string {
	for _, h := range c.Header {
		if h.Name == name {
			return h.Value
		}
	}
	return ""
}

// Write streams a piece of the call's output ahead of its result. It waits while the receiver is behind.
func (c *Call) Write(p []byte) (int, error) {
	if err := c.write(p); err != nil {
		return 0, err
	}
	return len(p), nil
}

// Result is the end of one call: Err, or else Output.
type Result struct {
	Output tensor.Activation
	Header []task.Header // for the HTTP response, when this is the last stage
	Err    error
}

// badInput marks an error as the client's.
type badInput struct{ error }

func (b badInput) Unwrap() error { return b.error }

// BadInput marks err as caused by the call's input: the client gets 400 instead of 500, and nothing is retried.
func BadInput(err error) error { return badInput{err} }

// envDevices names the replica's devices; empty: it has none.
const envDevices = "CUDA_VISIBLE_DEVICES"

// outOfMemory marks an error as the device's.
type outOfMemory struct{ error }

func (o outOfMemory) Unwrap() error { return o.error }

// OutOfMemory marks err as caused by a device that has not the memory that the call takes: it is tried again by a replica on other
// devices, and this replica is replaced by one elsewhere. Of Place, the function is not started on this device again for a while.
// The message should say which device, how much was wanted and how much is free. Without a device it is an error like any other: no
// replica would have more memory.
func OutOfMemory(err error) error { return outOfMemory{err} }

// code says which outcome an error of a hook is.
func code(err error) task.Code {
	switch {
	case os.Getenv(envDevices) != "" && errors.As(err, new(outOfMemory)):
		return task.OutOfMemory
	case errors.As(err, new(badInput)):
		return task.BadInput
	case errors.Is(err, context.Canceled):
		return task.Canceled
	case errors.Is(err, context.DeadlineExceeded):
		return task.Expired
	}
	return task.Failed
}

// Each makes an Infer hook of a function for one call.
func Each(f func(c *Call) (tensor.Activation, error)) func(context.Context, []*Call) []Result {
	return func(_ context.Context, calls []*Call) []Result {
		out := make([]Result, len(calls))
		for i, c := range calls {
			out[i].Output, out[i].Err = one(f, c)
		}
		return out
	}
}

// one runs f, unless the call is over already. A panic is that call's error.
func one(f func(c *Call) (tensor.Activation, error), c *Call) (out tensor.Activation, err error) {
	if err := c.ctx.Err(); err != nil {
		return nil, err
	}
	defer func() {
		if p := recover(); p != nil {
			out, err = nil, panicked{p, debug.Stack()}
		}
	}()
	return f(c)
}

// panicked is a panic of the function, as an error.
type panicked struct {
	value any
	stack []byte
}

func (p panicked) Error() string { return fmt.Sprintf("the function panicked: %v", p.value) }

// safely runs Infer and returns a result for each call. A panic becomes the error of every call, because it is not known
// which one caused it.
func safely(infer func(context.Context, []*Call) []Result, ctx context.Context, calls []*Call) (out []Result) {
	defer func() {
		p := recover()
		if p == nil && len(out) == len(calls) {
			return
		}
		var err error = panicked{p, debug.Stack()}
		if p == nil {
			err = fmt.Errorf("the function returned %d results for %d calls", len(out), len(calls))
		}
		out = make([]Result, len(calls))
		for i := range out {
			out[i].Err = err
		}
	}()
	return infer(ctx, calls)
}
