package stage

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime/debug"
	"slices"
	"sync/atomic"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/stage/zygote"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Hooks has the functions and limits that the author of a stage sets.
type Hooks struct {
	// Place runs once per replica, before the first call; nil: there is nothing to do. If it returns
	// an error, the replica ends.
	Place func(ctx context.Context, r *Replica) error
	// Infer runs a batch and returns one result per call, in order. Up to Slots batches run at a time.
	// ctx ends when all calls of the batch are canceled or past their deadlines. Each call also has
	// its own context. With Each, a panic becomes the error of the call that caused it. Otherwise,
	// each half of the batch runs again, and so on, until the call that panics is alone. A function
	// that is not idempotent, and a call that has streamed, run once: then the panic becomes the
	// error of all calls. The replica continues.
	Infer func(ctx context.Context, calls []*Call) []Result
	// Slots is the maximum number of batches that run at a time. The environment variable max_inflight
	// overrides it. The default is 1.
	Slots int
	// MaxBatch is the maximum number of calls per batch. The default is 1.
	MaxBatch int

	threads func(total int) // makes this many threads compute; nil: the number cannot be changed
	// timeout bounds a call; 0: only the call's deadline does. It is exec_timeout.
	timeout time.Duration
	once    bool // no call runs twice, because the function is not idempotent
}

// Replica is this process.
type Replica struct {
	Name     string
	Function string // pipeline.Key
	Log      *slog.Logger

	model *zygote.Session
	load  time.Duration
}

// Model returns the ONNX session, which is inherited from the zygote or was opened by this process.
// It returns nil for a function without a model.
func (r *Replica) Model() *zygote.Session { return r.model }

// Call is one call of a batch.
type Call struct {
	Key         task.Key
	Deadline    time.Time // zero: none
	Traceparent string
	Header      []task.Header
	Input       tensor.Input

	ctx      context.Context
	write    func([]byte) error
	streamed atomic.Bool // it has written
	log      *slog.Logger
}

// Log returns the replica's logger with the call's id. The platform's lines about the call have the
// same id.
func (c *Call) Log() *slog.Logger {
	id := c.HeaderValue("X-Call-Id")
	if id == "" {
		id = c.Key.Request
	}
	return cmp.Or(c.log, slog.Default()).With("call", id) // a call of a test has no logger
}

// Context ends when the call is canceled, is past its deadline, or has run for longer than the
// environment's exec_timeout.
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

// Write streams a piece of the call's output before its result. It waits while the receiver is
// behind.
func (c *Call) Write(p []byte) (int, error) {
	c.streamed.Store(true)
	if err := c.write(p); err != nil {
		return 0, err
	}
	return len(p), nil
}

// Result is the end of one call: Err if it is not nil, or else Output.
type Result struct {
	Output tensor.Activation
	Header []task.Header // for the HTTP response, if this is the last stage
	Err    error
}

// badInput marks an error as caused by the client.
type badInput struct{ error }

func (b badInput) Unwrap() error { return b.error }

// BadInput marks err as caused by the call's input. The client gets 400 instead of 500, and nothing
// is retried.
func BadInput(err error) error { return badInput{err} }

// envDevices is the variable with the replica's devices. It is empty if the replica has none.
const envDevices = "CUDA_VISIBLE_DEVICES"

// outOfMemory marks an error as caused by a device's memory.
type outOfMemory struct{ error }

func (o outOfMemory) Unwrap() error { return o.error }

// OutOfMemory marks err as caused by a device that lacks memory. If a call returns such an error,
// the platform runs the call on a replica with other devices, and replaces this replica by one
// elsewhere. If Place returns one, the platform does not start the function on this device for a
// while. The message should name the device, the wanted memory and the free memory. If the replica
// has no device, the mark has no effect, because no other replica would have more memory.
func OutOfMemory(err error) error { return outOfMemory{err} }

// code returns the outcome that an error of a hook stands for.
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

// Each makes an Infer hook from a function for one call.
func Each(f func(c *Call) (tensor.Activation, error)) func(context.Context, []*Call) []Result {
	return func(_ context.Context, calls []*Call) []Result {
		out := make([]Result, len(calls))
		for i, c := range calls {
			out[i].Output, out[i].Err = one(f, c)
		}
		return out
	}
}

// one runs f unless the call has already ended. A panic becomes the call's error.
func one[T any](f func(c *Call) (T, error), c *Call) (out T, err error) {
	if err := c.ctx.Err(); err != nil {
		return out, err
	}
	defer func() {
		if p := recover(); p != nil {
			out, err = *new(T), panicked{p, debug.Stack()}
		}
	}()
	return f(c)
}

// panicked is a panic of the author's function, as an error.
type panicked struct {
	value any
	stack []byte
}

func (p panicked) Error() string { return fmt.Sprintf("the function panicked: %v", p.value) }

// bisect runs a batch and returns one result per call. If Infer panics or returns another number of
// results, each half of the batch runs on its own, and so on. So one bad call among n costs at most
// 2·log2(n) further runs, rounded up. If a call may not run twice, the fault is that of all calls.
func (h *Hooks) bisect(ctx context.Context, calls []*Call) []Result {
	out, fault := runRecovered(h.Infer, ctx, calls)
	streamed := func(c *Call) bool { return c.streamed.Load() }
	if fault == nil || len(calls) == 1 || h.once || ctx.Err() != nil || slices.ContainsFunc(calls, streamed) {
		return out
	}
	half := len(calls) / 2
	return append(h.bisect(ctx, calls[:half]), h.bisect(ctx, calls[half:])...)
}

// runRecovered runs Infer and returns one result per call. A panic, and a wrong number of results,
// is the error of every call, because the call that caused it is unknown. It is also returned.
func runRecovered(infer func(context.Context, []*Call) []Result, ctx context.Context, calls []*Call) (out []Result, fault error) {
	defer func() {
		p := recover()
		if p == nil && len(out) == len(calls) {
			return
		}
		if fault = (panicked{p, debug.Stack()}); p == nil {
			fault = fmt.Errorf("the function returned %d results for %d calls", len(out), len(calls))
		}
		out = make([]Result, len(calls))
		for i := range out {
			out[i].Err = fault
		}
	}()
	return infer(ctx, calls), nil
}
