package gateway

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Entry is an accepted async request.
type Entry struct {
	Request  task.Request  // without a Deadline: each run gets Timeout from its own start
	CallID   string        // X-Call-Id
	Name     string        // function's name, as the client wrote it
	Timeout  time.Duration // per run
	Callback string        // callback URL; empty: no callback
	// sent by a function: its callback may reach only what functions may reach.
	Inside   bool
	Accepted time.Time

	// Inference says how the answer is formed; nil unless the request uses the Open Inference
	// Protocol.
	Inference *tensor.Inference
}

// ErrQueueFull means that the journal holds as many requests for one function as it allows.
var ErrQueueFull = errors.New("gateway: too many async requests wait for the function")

// ErrFull means that the journal or its disk has no room for more requests.
var ErrFull = errors.New("gateway: no room for async requests")

// queueFullPause is the Retry-After that a client gets with ErrQueueFull or ErrFull.
const queueFullPause = 5 * time.Second

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
		return fail(w, c, badHeader("X-Callback-Url", callback, "an http or https URL of at most 2048 characters, with a port of 1 to 65535 if it names one"))
	}
	req, timeout, terr := g.request(w, r, c)
	if terr != nil {
		return fail(w, c, terr)
	}
	ctx, cancel := context.WithTimeout(r.Context(), appendTimeout)
	defer cancel()
	e := Entry{Request: req, CallID: c.id, Name: c.name, Timeout: timeout, Callback: callback, Inside: isInside(r), Accepted: c.start, Inference: c.inference.InJSON()}
	err := g.cfg.Journal.Append(ctx, e)
	switch {
	case errors.Is(err, ErrTooLarge):
		return fail(w, c, &task.Error{Status: http.StatusRequestEntityTooLarge, Cause: "too large to be kept for later: " + err.Error()})
	case errors.Is(err, ErrQueueFull):
		return fail(w, c, &task.Error{Status: http.StatusTooManyRequests, RetryAfter: queueFullPause, Cause: err.Error()})
	case errors.Is(err, ErrFull): // not logged: that would be one line per request
		return fail(w, c, &task.Error{Status: http.StatusServiceUnavailable, Internal: true, RetryAfter: queueFullPause, Cause: err.Error()})
	case err != nil:
		g.cfg.Log.Error("async request refused", "function", c.key, "call", c.id, "error", err)
		return fail(w, c, &task.Error{Status: http.StatusServiceUnavailable, Internal: true, RetryAfter: queueFullPause, Cause: "the journal cannot take the request; try again later"})
	}
	stamp(w.Header(), c)
	w.WriteHeader(http.StatusAccepted)
	return http.StatusAccepted
}

func validCallback(s string) bool {
	u, err := url.Parse(s)
	if err != nil || len(s) > 2048 || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" {
		return false
	}
	port, err := strconv.ParseUint(u.Port(), 10, 16)
	return u.Port() == "" || err == nil && port > 0
}

// Retry says which runs of an async request are repeated, and when.
type Retry struct {
	Attempts         int           // largest number of runs
	Codes            []int         // HTTP statuses that are retried
	Faults           bool          // also retry faults of the platform, whatever their status
	Dropped          bool          // also retry runs that a policy dropped before they had begun
	MinWait, MaxWait time.Duration // wait before the second run; longest wait between two runs
}

// wait returns how long to wait after a failed attempt; attempts count from 1. The wait starts at
// MinWait and doubles with each attempt. If said is not 0, it is the wait that the function asked
// for, and replaces the computed one. The wait varies randomly by up to half, so that requests that
// failed together do not return together. It is always between MinWait and MaxWait.
func (r Retry) wait(attempt int, said time.Duration) time.Duration {
	d := min(r.MinWait<<min(attempt-1, 16), r.MaxWait)
	if said > 0 {
		d = said
	}
	d += rand.N(d+1) - d/2
	return min(max(d, r.MinWait), r.MaxWait)
}

// Ending is the outcome of one run of an async request, or of one attempt to deliver its callback.
// The zero Ending means done.
type Ending struct {
	Err    error         // cause of the failure, which is final unless Again
	Again  bool          // try again
	After  time.Duration // wait before the next attempt
	Busy   bool          // the function is overloaded
	Notice *Notice       // the result to deliver, which may be a final failure
	// Dropped is why a policy dropped the run; empty: no policy did.
	Dropped task.DropReason
	// Result is the result of a run. It is nil if the run was cut short or was an attempt to
	// deliver.
	Result *Result
}

// Try is one attempt to run an async request or to deliver its result.
type Try struct {
	Attempt     int  // counts from 1
	Redelivered bool // an earlier process may have started or finished this attempt
}

// Work runs an entry of the journal once. The function gets the number of the attempt as X-Attempt,
// and X-Redelivered: true if an earlier process may have started this attempt. If ctx ends first,
// the run was cut short and does not count as an attempt.
func (g *Gateway) Work(ctx context.Context, e Entry, try Try, retry Retry) Ending {
	r, start, attempt := e.Request, time.Now(), try.Attempt
	r.Deadline, r.Arrived = start.Add(e.Timeout), e.Accepted
	r.Header = slices.DeleteFunc(slices.Clone(r.Header), func(h task.Header) bool {
		return strings.EqualFold(h.Name, attemptHeader) || strings.EqualFold(h.Name, redeliveredHeader)
	})
	r.Header = append(r.Header, task.Header{Name: attemptHeader, Value: strconv.Itoa(attempt)})
	if try.Redelivered {
		r.Header = append(r.Header, task.Header{Name: redeliveredHeader, Value: "true"})
	}
	res := Result{CallID: e.CallID, Name: e.Name, Start: e.Accepted, Status: http.StatusOK, Attempt: attempt}
	o := g.run(ctx, r, e.Inference, &res)
	res.Duration = time.Since(start)
	if ctx.Err() != nil {
		return Ending{Err: context.Cause(ctx)}
	}
	end := Ending{Result: &res, Dropped: res.Dropped}
	// Any other outcome is an answer.
	if worth := retry.worth(&res, o); worth || o.fault || o.unknown || o.convicted || res.Dropped != "" {
		end.Err = fmt.Errorf("attempt %d of %d: status %d: %.300s", attempt, retry.Attempts, res.Status, bytes.TrimSpace(res.Body))
		end.Busy = res.Status == http.StatusTooManyRequests
		if worth && attempt < retry.Attempts {
			end.Again, end.After = true, retry.wait(attempt, o.retryAfter)
			return end
		}
	}
	if e.Callback != "" {
		end.Notice = &Notice{URL: e.Callback, Inside: e.Inside, Result: res}
	}
	return end
}

// worth reports whether a run is worth another one. A dropped run is only if the function asks for
// that. It is worth one whatever the codes are if nothing has begun that may not run twice, which
// status 503 says.
func (r Retry) worth(res *Result, o runEnd) bool {
	if o.convicted || res.Dropped != "" && !r.Dropped {
		return false
	}
	return slices.Contains(r.Codes, res.Status) || o.fault && r.Faults || res.Dropped != "" && res.Status == http.StatusServiceUnavailable
}

// attemptHeader numbers the runs of an async request, for its function and its callback.
const attemptHeader = "X-Attempt"

// redeliveredHeader marks a request that its receiver may already have received under the same
// X-Call-Id.
const redeliveredHeader = "X-Redelivered"

// runEnd holds what the result of a run does not show.
type runEnd struct {
	unknown    bool // the target does not exist
	fault      bool // the platform failed
	convicted  bool // a call of the request ended two replicas
	retryAfter time.Duration
}

// run invokes the target and counts the request, unless the target no longer exists.
func (g *Gateway) run(ctx context.Context, r task.Request, inf *tensor.Inference, res *Result) (o runEnd) {
	key := pipeline.ParseKey(r.Target)
	if !g.cfg.Directory.Known(key) {
		res.fail(g.unknown(key, r.Target))
		return runEnd{unknown: true}
	}
	f, start := g.metrics.function(key), time.Now()
	f.begin()
	t := g.begin(start, r.Traceparent, headerValue(r.Header, "Tracestate"))
	trace(&r, t)
	e := task.Ended{CallID: res.CallID, Target: r.Target, Async: "run", Start: start}
	resp, terr := g.cfg.Invoker.Invoke(ctx, r)
	if terr == nil {
		e.Calls = resp.Stages
		var a tensor.Answer
		if a, terr = answer(inf, resp.Output); terr == nil {
			res.ContentType, res.Body = a.ContentType, a.Body
			res.Status, o.retryAfter = statusOf(resp.Header), retryAfter(headerValue(resp.Header, "Retry-After"))
		}
	}
	if terr != nil {
		told := *terr
		told.Cause = hidden(g.cfg.Hide, terr.Cause)
		res.fail(&told)
		e.Cause, e.Calls = terr.Error(), append(e.Calls, terr.Stages...)
		o = runEnd{fault: terr.Internal, convicted: terr.Convicted, retryAfter: terr.RetryAfter}
	}
	f.end(res.Status, time.Since(start))
	g.metrics.called(f.name, e.Calls)
	e.Status = res.Status
	g.ended(t, r.Traceparent, e)
	return o
}

// retryAfter parses a Retry-After header: seconds or a date.
func retryAfter(v string) time.Duration {
	if n, err := strconv.ParseUint(v, 10, 31); err == nil {
		return time.Duration(n) * time.Second
	}
	if t, err := http.ParseTime(v); err == nil {
		return max(0, time.Until(t))
	}
	return 0
}
