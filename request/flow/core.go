package flow

import (
	"container/heap"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Attempts is how often a call is tried. An attempt does not count if the call did not cause the
// end of its replica, or if other calls on the replica may have caused it.
const Attempts = 3

// mostAttempts bounds the attempts of a call, including those that do not count. Each attempt that
// does not count has lost a replica.
const mostAttempts = 100

// EachWindow bounds the outstanding calls of one stage in a request. The other calls follow as
// replies arrive.
const EachWindow = 64

// Core runs requests through graphs. It is not safe for concurrent use. NewCore makes one.
type Core struct {
	walks     map[string]*walk
	now       time.Time // time of the current step
	deadlines deadlines
	out       []Effect
}

// NewCore returns a Core without requests.
func NewCore() *Core { return &Core{walks: map[string]*walk{}} }

// Requests returns how many requests have not ended.
func (c *Core) Requests() int { return len(c.walks) }

// Next returns the earliest deadline, at which a Tick is due. ok is false if no request has a
// deadline.
func (c *Core) Next() (at time.Time, ok bool) {
	if len(c.deadlines) == 0 {
		return time.Time{}, false
	}
	return c.deadlines[0].req.Deadline, true
}

// Step applies an event and returns the effects to carry out. The next Step overwrites the slice,
// but the effects may be kept.
func (c *Core) Step(now time.Time, ev Event) []Effect {
	clear(c.out) // tasks of the last step may be large
	c.out, c.now = c.out[:0], now
	switch e := ev.(type) {
	case Start:
		c.start(now, e)
	case Replied:
		c.replied(now, e.Reply, nil)
	case Outlined:
		c.replied(now, e.Reply, e.Outlines)
	case Canceled:
		if w := c.walks[e.Request]; w != nil {
			c.fail(w, &task.Error{Status: statusClientClosed, Cause: "the client closed the connection"})
		}
	case Tick:
		for len(c.deadlines) > 0 && !c.deadlines[0].req.Deadline.After(now) {
			w := c.deadlines[0]
			c.fail(w, expired(w))
		}
	}
	return c.out
}

// statusClientClosed is nginx's status for a client that left. Nobody reads it.
const statusClientClosed = 499

func expired(w *walk) *task.Error {
	e := &task.Error{Status: http.StatusGatewayTimeout, Internal: true, Cause: "the deadline passed before the request was done; X-Timeout asks for more time"}
	if stages := w.unfinished(); len(stages) > 0 {
		e.Stage = stages[0]
		e.Cause = "the deadline passed while the request was in " + strings.Join(stages, ", ") + "; X-Timeout asks for more time"
	}
	return e
}

func (c *Core) start(now time.Time, e Start) {
	id := e.Request.ID
	if _, twice := c.walks[id]; twice {
		c.out = append(c.out, Finish{Request: id, Error: &task.Error{Status: http.StatusConflict, Cause: fmt.Sprintf("request %q is already running, want an id that is unique", id)}})
		return
	}
	if e.Request.Arrived.IsZero() {
		e.Request.Arrived = now
	}
	entry, refusal := measureRequest(&e, &e.Graph.Stages[0]) // the entry, as the graph has no faults
	if refusal == nil {
		refusal = admit(now, &e.Request, &e.Graph, e.Loads)
	}
	if refusal != nil {
		c.out = append(c.out, Finish{Request: id, Error: refusal, Blobs: hasRefs(e.Request.Input)})
		return
	}
	pins, refusal := wanted(&e.Request, &e.Graph)
	if refusal != nil {
		c.out = append(c.out, Finish{Request: id, Error: refusal, Blobs: hasRefs(e.Request.Input)})
		return
	}
	w := newWalk(e.Request, e.Graph, e.Loads)
	for i, p := range pins {
		if p.Function != "" {
			w.stages[i].pins = []task.Pin{p}
		}
	}
	c.walks[id] = w
	if !w.req.Deadline.IsZero() {
		heap.Push(&c.deadlines, w)
	}
	if entry != nil {
		l, _ := pipeline.ParseLength(e.Graph.Stages[0].Length)
		w.unit, entry.from = l.Unit, plan.FromClient
	}
	w.deliver(w.entry, "", e.Request.Input, entry)
	c.advance(w, w.entry)
	c.expect(w, e.Loads)
}

// advance does what has become possible in stage first and all later stages: it starts stages whose
// input is complete, submits calls, and passes the outputs of complete stages on. Outputs go only
// to stages with a higher index, so one pass is enough. If all sinks are complete, advance finishes
// the request.
func (c *Core) advance(w *walk, first int) {
	for i := first; i < len(w.stages); i++ {
		if s := &w.stages[i]; !s.started && len(s.parts) >= s.need {
			w.begin(i)
		}
		c.issue(w, i)
		if several := len(w.stages[i].inputs) > 1; w.complete(i) && several {
			c.out = append(c.out, Leave{w.req.ID, w.functions[i]})
		}
	}
	if w.sinksLeft == 0 {
		c.finish(w, &task.Response{Output: w.output, Header: w.header}, nil)
	}
}

// issue submits calls of a stage, up to EachWindow at a time.
func (c *Core) issue(w *walk, i int) {
	s := &w.stages[i]
	for s.started && s.issued < len(s.inputs) && s.issued-s.done < EachWindow {
		from, length := s.origin(w.graph.Stages[i].Each, s.issued)
		w.calls = append(w.calls, call{id: uint32(len(w.calls) + 1), stage: i, item: s.issued, attempt: 1, from: from, length: length})
		s.issued++
		c.submit(w, &w.calls[len(w.calls)-1])
	}
}

func (c *Core) submit(w *walk, k *call) {
	k.sent = c.now
	c.out = append(c.out, Submit{w.task(k)})
}

// replied takes the end of an attempt. outlines may be nil, see [Outlined].
func (c *Core) replied(now time.Time, r *task.Reply, outlines []tensor.Outline) {
	w := c.walks[r.Request]
	if w == nil || r.Task < 1 || int(r.Task) > len(w.calls) {
		return // its request has ended
	}
	k := &w.calls[r.Task-1] // valid until calls are added
	if k.done || k.attempt != r.Attempt {
		return // a duplicate, or the reply of an attempt that was given up
	}
	stage := &w.graph.Stages[k.stage]
	w.note(now, k, r)
	if r.Code != task.OK {
		k.failed(r)
	}
	switch {
	case r.Code == task.OK && k.again:
		c.remade(w, k, r)
	case r.Code == task.InputLost && len(r.Lost) == 0 && k.attempt < mostAttempts && beforeDeadline(now, w):
		k.attempt++ // no replica got it
		c.submit(w, k)
	case r.Code == task.InputLost && len(r.Lost) > 0:
		c.remake(now, w, k, r)
	case r.Code == task.OK && w.strays(k, r):
		k.done = true
		c.fail(w, w.failure(k, &task.Reply{Code: task.Redeployed, Message: fmt.Sprintf("%s answered, and the request asks for %s (%s)", w.answering(k, r), w.only(k.stage), task.HeaderVariants)}))
	case r.Code == task.OK && w.mixes(k, r):
		// The call was tried again while its first answer was on the way.
		k.done = true
		c.fail(w, w.failure(k, &task.Reply{Code: task.Redeployed, Message: "two of its calls were answered by different revisions"}))
	case r.Code == task.OK:
		if refused := w.accept(k, r, outlines); refused != nil {
			c.fail(w, refused)
			return
		}
		c.advance(w, k.stage)
	case w.elsewhere(k, r) && !k.exhausted(r) && mayRunAgain(stage.Idempotent, r) && beforeDeadline(now, w):
		k.attempt++
		c.submit(w, k)
	default:
		k.done = true // the dispatcher is done with it and needs no cancel
		c.fail(w, w.failure(k, r))
	}
}

// elsewhere reports whether a failed call may succeed on another replica. It may in three cases:
//
//   - The replica was lost.
//   - The replica's device was out of memory. The replica gets no more tasks.
//   - No replica is left of the revision that the request began with, and the request has used no
//     answer of that revision. So another revision will do.
func (w *walk) elsewhere(k *call, r *task.Reply) bool {
	return r.Code == task.ReplicaLost || r.Code == task.OutOfMemory || r.Code == task.Redeployed && w.pinned(k, r) == 0 && !k.again
}

// failed counts a failed reply against the call.
func (k *call) failed(r *task.Reply) {
	if r.Code == task.InputLost && len(r.Lost) == 0 {
		return // it has not run
	}
	blame := task.BlameNone
	if r.Code == task.ReplicaLost {
		blame = r.Blame
	}
	switch blame {
	case task.BlameShared:
	case task.BlameCompany:
		k.ends++
	case task.BlameAlone:
		k.ends++
		k.alone++
		k.used++
	case task.BlameUnclear:
		k.ends++
		k.used++
	default:
		k.used++
	}
}

// exhausted reports whether a call has used all its attempts or is convicted.
func (k *call) exhausted(r *task.Reply) bool {
	return k.convicted(r) || k.used >= Attempts || k.attempt >= mostAttempts
}

// convicted reports whether a call is to blame for the ends of its replicas. That is the case if at
// least two replicas ended while they ran the call, and the last of these ended by itself and ran
// no other call.
func (k *call) convicted(r *task.Reply) bool {
	return r.Code == task.ReplicaLost && r.Blame == task.BlameAlone && k.ends > 1
}

// mayRunAgain reports whether a task whose replica was lost may run again: the stage is idempotent,
// or no replica got the task.
func mayRunAgain(idempotent bool, r *task.Reply) bool { return idempotent || r.Replica == "" }

func beforeDeadline(now time.Time, w *walk) bool {
	return w.req.Deadline.IsZero() || now.Before(w.req.Deadline)
}

// failure returns the client's error for a failed call. The statuses 429 and 503 invite a retry, so
// failure replaces them with 502 if a stage that is not idempotent may have run.
func (w *walk) failure(k *call, r *task.Reply) *task.Error {
	stage := &w.graph.Stages[k.stage]
	e := failure(stage.Name, stage.Idempotent, k, r)
	if k.convicted(r) {
		e.Internal, e.Convicted = false, true
		e.Cause = fmt.Sprintf("function %q: its replica ended %d times under this call, %d of them with no other call on it; the last cause: %s; "+
			"it is not tried again: fix the function, or its input", w.functions[k.stage], k.ends, k.alone, r.Message)
	}
	if e.Status != http.StatusTooManyRequests && e.Status != http.StatusServiceUnavailable {
		return e
	}
	for i := range w.calls {
		other := &w.calls[i]
		if s := &w.graph.Stages[other.stage]; !s.Idempotent && (other != k || r.Replica != "") {
			e.Status, e.Internal, e.RetryAfter = http.StatusBadGateway, true, 0
			e.Cause += fmt.Sprintf("; stage %q, which is declared not idempotent, may have run", s.Name)
			break
		}
	}
	return e
}

// failure returns the error for a failed task alone, without regard to the rest of its request.
func failure(stage string, idempotent bool, k *call, r *task.Reply) *task.Error {
	e := &task.Error{Stage: stage, Cause: r.Message, Internal: true}
	switch r.Code {
	case task.BadInput:
		e.Status, e.Internal = http.StatusBadRequest, false
	case task.Failed:
		e.Status, e.Internal = http.StatusInternalServerError, false
	case task.ReplicaLost:
		e.Status = http.StatusBadGateway
		e.Cause = fmt.Sprintf("lost its replica in attempt %d of %d: %s", max(k.used, 1), Attempts, r.Message)
		if k.attempt >= mostAttempts {
			e.Cause = fmt.Sprintf("lost its replica in each of %d attempts: %s", k.attempt, r.Message)
		}
		if !idempotent {
			e.Cause += "; not tried again, because the stage is declared not idempotent"
		}
	case task.InputLost:
		e.Status = http.StatusBadGateway
	case task.OutOfMemory:
		e.Status, e.RetryAfter = http.StatusServiceUnavailable, time.Second
		e.Cause = fmt.Sprintf("out of memory in attempt %d of %d: %s; %s", k.used, Attempts, r.Message, task.MoreMemory)
	case task.Expired:
		e.Status = http.StatusGatewayTimeout
	case task.Overloaded:
		e.Status, e.Internal, e.RetryAfter = http.StatusTooManyRequests, false, time.Second
	case task.Unavailable:
		e.Status, e.RetryAfter = http.StatusServiceUnavailable, time.Second
	case task.Dropped:
		e.Status, e.RetryAfter, e.Dropped = http.StatusServiceUnavailable, time.Second, r.Reason.Known()
		e.Cause = fmt.Sprintf("dropped (%s): %s", e.Dropped, r.Message)
	case task.Redeployed:
		e.Status, e.RetryAfter = http.StatusServiceUnavailable, time.Second
		e.Cause = fmt.Sprintf("function %q was redeployed while the request ran: %s", stage, r.Message)
	default:
		e.Status = http.StatusInternalServerError
		e.Cause = fmt.Sprintf("ended with code %d, which nobody asked for: %s", r.Code, r.Message)
	}
	return e
}

func (c *Core) fail(w *walk, e *task.Error) { c.finish(w, nil, e) }

// finish ends a request and cancels its outstanding tasks.
func (c *Core) finish(w *walk, resp *task.Response, e *task.Error) {
	for i := range w.calls {
		if k := &w.calls[i]; !k.done {
			c.out = append(c.out, Cancel{task.Key{Request: w.req.ID, Task: k.id, Attempt: k.attempt}, w.functions[k.stage]})
			w.note(c.now, k, &task.Reply{Code: task.Canceled, Message: "nobody waits for it any more"})
		}
	}
	for i := range w.stages {
		if len(w.stages[i].inputs) > 1 { // the stage has started and is not complete
			c.out = append(c.out, Leave{w.req.ID, w.functions[i]})
		}
		w.blobs = w.blobs || w.stages[i].hasRefs()
	}
	delete(c.walks, w.req.ID)
	if w.heapIndex >= 0 {
		heap.Remove(&c.deadlines, w.heapIndex)
	}
	if resp != nil {
		slices.SortFunc(resp.Output, byFrom)
		resp.Stages = w.timings
	} else {
		e.Stages = w.timings
	}
	c.out = append(c.out, Finish{Request: w.req.ID, Response: resp, Error: e, Blobs: w.blobs})
}

// deadlines is a heap of requests by deadline, then by id.
type deadlines []*walk

func (d deadlines) Len() int { return len(d) }
func (d deadlines) Less(i, j int) bool {
	a, b := &d[i].req, &d[j].req
	return a.Deadline.Before(b.Deadline) || a.Deadline.Equal(b.Deadline) && a.ID < b.ID
}

func (d deadlines) Swap(i, j int) {
	d[i], d[j] = d[j], d[i]
	d[i].heapIndex, d[j].heapIndex = i, j
}

// Push implements heap.Interface.
func (d *deadlines) Push(x any) {
	w := x.(*walk)
	w.heapIndex = len(*d)
	*d = append(*d, w)
}

// Pop implements heap.Interface.
func (d *deadlines) Pop() any {
	last := len(*d) - 1
	w := (*d)[last]
	(*d)[last] = nil
	*d = (*d)[:last]
	w.heapIndex = -1
	return w
}
