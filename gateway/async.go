package gateway

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"time"

	"github.com/stagecoach-serving/stagecoach/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Entry is an accepted async request.
type Entry struct {
	Request  task.Request  // its Deadline is not set: each run has Timeout from its own start
	CallID   string        // what the client knows it by
	Name     string        // of the function, as the client wrote it
	Timeout  time.Duration // of a run
	Callback string        // URL; empty: nobody wants to know
	Accepted time.Time
}

// entryVersion is the version of an entry's binary form.
const entryVersion = 1

// entryHead is an entry without its input.
type entryHead struct {
	ID          string        `json:"id"`
	Target      string        `json:"target"`
	Traceparent string        `json:"traceparent,omitempty"`
	Header      []task.Header `json:"header"`
	CallID      string        `json:"callId"`
	Name        string        `json:"name"`
	Timeout     time.Duration `json:"timeout"`
	Callback    string        `json:"callback,omitempty"`
	Accepted    time.Time     `json:"accepted"`
}

// MarshalBinary gives the form in which a journal keeps e: the version, the length of the head (uvarint), the head as JSON,
// the input as package tensor encodes it.
func (e Entry) MarshalBinary() ([]byte, error) {
	r := e.Request
	head, err := json.Marshal(entryHead{
		r.ID, r.Target, r.Traceparent, r.Header, e.CallID, e.Name, e.Timeout, e.Callback, e.Accepted,
	})
	if err != nil {
		return nil, fmt.Errorf("async request %q: %w", r.ID, err)
	}
	b := binary.AppendUvarint([]byte{entryVersion}, uint64(len(head)))
	return tensor.AppendActivation(append(b, head...), r.Input), nil
}

// UnmarshalBinary undoes [Entry.MarshalBinary]. The entry keeps parts of b.
func (e *Entry) UnmarshalBinary(b []byte) error {
	if len(b) == 0 || b[0] != entryVersion {
		return fmt.Errorf("async request of %d bytes: want version %d first", len(b), entryVersion)
	}
	n, k := binary.Uvarint(b[1:])
	b = b[1+max(k, 0):]
	if k <= 0 || n > uint64(len(b)) {
		return fmt.Errorf("async request: head of %d bytes, %d are there", n, len(b))
	}
	var h entryHead
	if err := json.Unmarshal(b[:n], &h); err != nil {
		return fmt.Errorf("async request: head: %w", err)
	}
	input, err := tensor.DecodeActivation(b[n:])
	if err != nil {
		return fmt.Errorf("async request %q: input: %w", h.ID, err)
	}
	*e = Entry{
		Request: task.Request{ID: h.ID, Target: h.Target, Traceparent: h.Traceparent, Header: h.Header, Input: input},
		CallID:  h.CallID, Name: h.Name, Timeout: h.Timeout, Callback: h.Callback, Accepted: h.Accepted,
	}
	return nil
}

// appendTimeout bounds how long a client waits for the journal's disk.
const appendTimeout = 10 * time.Second

// accept puts a request into the journal and answers 202.
func (g *Gateway) accept(w http.ResponseWriter, r *http.Request, c *call) int {
	if r.Method != http.MethodPost {
		w.Header()["Allow"] = []string{http.MethodPost}
		return fail(w, c, &task.Error{Status: http.StatusMethodNotAllowed, Cause: "async: got " + r.Method + ", want POST"})
	}
	callback := r.Header.Get("X-Callback-Url")
	if callback != "" && !validCallback(callback) {
		return fail(w, c, badHeader("X-Callback-Url", callback, "an http or https URL of at most 2048 characters"))
	}
	req, timeout, terr := g.request(w, r, c)
	if terr != nil {
		return fail(w, c, terr)
	}
	ctx, cancel := context.WithTimeout(r.Context(), appendTimeout)
	defer cancel()
	e := Entry{Request: req, CallID: c.id, Name: c.name, Timeout: timeout, Callback: callback, Accepted: c.start}
	err := g.cfg.Journal.Append(ctx, e)
	if errors.Is(err, ErrTooLarge) {
		return fail(w, c, &task.Error{Status: http.StatusRequestEntityTooLarge, Cause: "too large to be kept for later: " + err.Error()})
	}
	if err != nil {
		g.cfg.Log.Error("async request refused", "function", c.key, "call", c.id, "error", err)
		return fail(w, c, &task.Error{Status: http.StatusServiceUnavailable, Internal: true, Cause: "the journal cannot take the request; try again later"})
	}
	stamp(w.Header(), c)
	w.WriteHeader(http.StatusAccepted)
	return http.StatusAccepted
}

func validCallback(s string) bool {
	u, err := url.Parse(s)
	return err == nil && len(s) <= 2048 && (u.Scheme == "http" || u.Scheme == "https") && u.Host != ""
}

// Work runs an entry of the journal and calls back. An error means that it should run again: the platform failed it, not
// the function. After the last run, the callback tells that too.
func (g *Gateway) Work(ctx context.Context, e Entry, last bool) error {
	r, start := e.Request, time.Now()
	r.Deadline = start.Add(e.Timeout)
	res := Result{CallID: e.CallID, Name: e.Name, Start: e.Accepted, Status: http.StatusOK}
	terr := g.run(ctx, r, &res)
	res.Duration = time.Since(start)
	if ctx.Err() != nil {
		return context.Cause(ctx) // it did not end by itself
	}
	var again error
	if terr != nil && (terr.Internal || terr.Status == http.StatusTooManyRequests) {
		if again = fmt.Errorf("async request %q for %q: %w", r.ID, r.Target, terr); !last {
			return again
		}
	}
	if e.Callback != "" {
		err := g.cfg.Callbacks.Deliver(ctx, e.Callback, res)
		if err != nil && ctx.Err() != nil {
			return err // the process ends: rather twice than never
		}
		if err != nil {
			g.cfg.Log.Warn("callback not delivered", "function", r.Target, "call", e.CallID, "error", err)
		}
	}
	return again
}

// run invokes and counts. A target that is no longer there is not counted, and not the platform's failure.
func (g *Gateway) run(ctx context.Context, r task.Request, res *Result) *task.Error {
	if _, known := g.cfg.Directory.Resolve(r.Target); !known {
		terr := &task.Error{Status: http.StatusNotFound, Cause: notFound(r.Target)}
		res.fail(terr)
		return terr
	}
	f, start := g.metrics.function(r.Target), time.Now()
	f.begin()
	t := g.begin(start, r.Traceparent, headerValue(r.Header, "Tracestate"))
	trace(&r, t)
	e := task.Ended{CallID: res.CallID, Target: r.Target, Async: "run", Start: start}
	resp, terr := g.cfg.Invoker.Invoke(ctx, r)
	if terr == nil {
		e.Calls = resp.Stages
		var err error
		if res.ContentType, res.Body, err = tensor.ToHTTP(resp.Output); err != nil {
			terr = &task.Error{Status: http.StatusInternalServerError, Cause: "output: " + err.Error()}
		}
	}
	if terr != nil {
		res.fail(terr)
		e.Cause, e.Calls = terr.Error(), append(e.Calls, terr.Stages...)
	}
	f.end(res.Status, time.Since(start))
	e.Status = res.Status
	g.ended(t, r.Traceparent, e)
	return terr
}

// Result is the end of an async request, as its callback gets it.
type Result struct {
	CallID      string
	Name        string // of the function, as the client wrote it
	Status      int    // HTTP status
	ContentType string
	Body        []byte
	Start       time.Time     // when the request was accepted
	Duration    time.Duration // of its last run
}

func (r *Result) fail(e *task.Error) {
	r.Status, r.ContentType, r.Body = e.Status, "text/plain; charset=utf-8", []byte(e.Error()+"\n")
}
