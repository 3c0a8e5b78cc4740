package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/stagecoach-serving/stagecoach/internal/disk"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider"
	"github.com/stagecoach-serving/stagecoach/provider/admin"
	"github.com/stagecoach-serving/stagecoach/request/gateway"
	"github.com/stagecoach-serving/stagecoach/request/queue"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// asyncJournal is the gateway's journal in NATS.
type asyncJournal struct {
	heldJournal
	calls *admin.Calls
}

// Append implements gateway.Journal.
func (j asyncJournal) Append(_ context.Context, e gateway.Entry) error {
	b, err := e.MarshalBinary()
	if err != nil {
		return err
	}
	var value any // a run that begins at once need not decode b
	if len(b) <= tensor.InlineLimit {
		value = e
	}
	j.calls.Accept(e) // first: the call may have ended before Append returns
	if err = j.AppendValue(e.Request.Target, e.Request.ID, b, value); err != nil {
		j.calls.Refuse(e.Request.ID)
	}
	switch {
	case errors.Is(err, queue.ErrTooLarge):
		return fmt.Errorf("%w (journal.bytes): %w", gateway.ErrTooLarge, err)
	case errors.Is(err, queue.ErrQueueFull):
		return fmt.Errorf("%w (annotation %sasync-queue-limit): %w", gateway.ErrQueueFull, pipeline.Prefix, err)
	case errors.Is(err, queue.ErrShare):
		return fmt.Errorf("%w (journal.bytes): %w", gateway.ErrQueueFull, err)
	case errors.Is(err, queue.ErrFull):
		return fmt.Errorf("%w (journal.bytes): %w", gateway.ErrFull, err)
	case disk.IsFull(err), errors.Is(err, queue.ErrStopped):
		return fmt.Errorf("%w: %w", gateway.ErrFull, err)
	}
	return err
}

// asyncRules are the rules for async requests, from annotations.
type asyncRules struct{ *provider.Registry }

// undeployed has the rules of a function that is not deployed. They are parsed only once, because
// rules are read several times per request.
var undeployed, _ = pipeline.Parse("none", pipeline.DefaultNamespace, nil, nil)

// entry returns the rules of the function or pipeline with a key, and whether all stages of the
// request may run twice. The rules of a pipeline are those of its first stage.
func (r asyncRules) entry(key pipeline.Key) (rules pipeline.Async, idempotent bool) {
	rules, idempotent = undeployed.Async, true
	g, _ := r.Graph(key)
	for i := range g.Stages { // stages are large: none is copied
		s := &g.Stages[i]
		if s.Name == g.Entry {
			rules = s.Async
		}
		idempotent = idempotent && s.Idempotent
	}
	return rules, idempotent
}

func (r asyncRules) limits(key string) queue.Limits {
	rules, _ := r.entry(pipeline.ParseKey(key))
	return queue.Limits{Concurrency: rules.Concurrency, Queue: rules.QueueLimit}
}

// retry returns how often and for which failures a request is run again, and how long it waits in
// between. A request that must not run twice is run again only if it has not begun.
func (r asyncRules) retry(key pipeline.Key) gateway.Retry {
	rules, idempotent := r.entry(key)
	a := rules.Retry
	out := gateway.Retry{Attempts: a.Attempts, Codes: a.Codes, Faults: idempotent, Dropped: rules.RetryDropped, MinWait: a.MinWait, MaxWait: a.MaxWait}
	if out.Codes == nil {
		out.Codes = pipeline.DefaultRetryCodes()
		if !idempotent {
			out.Codes = []int{429, 503}
		}
	}
	return out
}

func (u *up) journalConfig() queue.JournalConfig {
	cfg := queue.JournalConfig{
		Disk: u.nats.Disk(), Blobs: filepath.Join(u.cfg.State, "journal"), Bytes: int64(u.cfg.Journal.Bytes), Window: u.cfg.Journal.Window,
		Limits: asyncRules{u.registry}.limits, Died: u.deadLetter, Found: u.calls.Found,
	}
	if u.leading.outside() {
		cfg.Held = heldJournal{u.leading}.stillHeld
	}
	return cfg
}

// async runs the requests that the journal keeps.
func (u *up) async(ctx context.Context) error {
	rules := asyncRules{u.registry}
	u.leading.journal.Load().Run(ctx, func(ctx context.Context, r queue.Record) queue.End {
		try := gateway.Try{Attempt: r.Attempt, Redelivered: r.Redelivered}
		if r.Kind == queue.Callback {
			var n gateway.Notice
			if err := n.UnmarshalBinary(r.Data); err != nil {
				return queue.End{Err: err}
			}
			u.calls.Begin(r, gateway.SafeURL(n.URL))
			end := u.callbacks.Deliver(ctx, n, try)
			if ctx.Err() == nil {
				u.calls.Told(r, n.Result, end)
			}
			return ended(end)
		}
		e, ok := r.Value.(gateway.Entry)
		if !ok {
			if err := e.UnmarshalBinary(r.Data); err != nil {
				return queue.End{Err: err}
			}
		}
		u.calls.Begin(r, gateway.SafeURL(e.Callback))
		end := u.gateway.Work(ctx, e, try, rules.retry(pipeline.ParseKey(e.Request.Target)))
		if ctx.Err() == nil {
			u.calls.Ran(r, end)
		}
		return ended(end)
	})
	return nil
}

// ended converts the result of a gateway's run to the journal's type.
func ended(e gateway.Ending) queue.End {
	out := queue.End{Err: e.Err, Again: e.Again, After: e.After, Busy: e.Busy, Dropped: string(e.Dropped)}
	if e.Notice != nil {
		b, err := e.Notice.MarshalBinary()
		if err != nil { // a time that JSON cannot encode
			out.Err = errors.Join(out.Err, err)
			return out
		}
		out.Callback, out.To = b, e.Notice.Host()
	}
	return out
}
