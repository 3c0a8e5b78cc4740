package admin

import (
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/provider/schema"
	"github.com/stagecoach-serving/stagecoach/request/gateway"
	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// Bounds of the ended async calls that Calls remembers. The journal bounds the calls that have not
// ended.
const (
	endedCalls       = 10_000
	endedResults     = 16 << 20 // bytes of all results
	endedResultBytes = 64 << 10 // bytes of one result; a larger one is not kept
)

// asyncCall is the state of an async call.
type asyncCall struct {
	id       string // of its record
	function string // key of the function or pipeline
	accepted time.Time
	callback string // where its result goes, without secrets
	state    string
	attempt  int       // the present or latest one: of runs, or of callbacks while telling
	since    time.Time // of the state
	next     time.Time // the next attempt; zero: none is due
	cause    string    // why the latest attempt failed
	failed   bool      // its runs have failed for good; its result is the failure
	result   *gateway.Result
}

// Calls is a record of all async calls that have not ended, and of the latest that have. It is only
// in memory. After a restart, the journal adds the calls that have not ended. Its methods are safe
// for concurrent use.
type Calls struct {
	mu      sync.Mutex
	from    time.Time               // no call that ended after it is forgotten
	records map[string]*asyncCall   // all calls, by the ids of their records
	calls   map[string][]*asyncCall // all calls, by the clients' ids, the latest last
	ended   []*asyncCall            // the first to end first; those that run again have left
	bytes   int                     // of their results
}

// NewCalls returns a Calls that knows no call.
func NewCalls() *Calls {
	return &Calls{from: time.Now(), records: map[string]*asyncCall{}, calls: map[string][]*asyncCall{}}
}

// callOf returns the id by which the client knows the call that a record belongs to. The record of
// a callback that was a dead letter has the suffix ".callback".
func callOf(record string) string { return gateway.CallOf(strings.TrimSuffix(record, ".callback")) }

// find returns the call of a record, or nil if it is not known. The caller holds b.mu.
func (b *Calls) find(record string) *asyncCall {
	return b.records[strings.TrimSuffix(record, ".callback")]
}

// open returns the call of a record. It makes the call if it is not known. The caller holds b.mu.
func (b *Calls) open(record, function string) *asyncCall {
	c := b.find(record)
	if c == nil {
		c = &asyncCall{id: strings.TrimSuffix(record, ".callback"), function: function, accepted: time.Now()}
		b.records[c.id] = c
		b.calls[callOf(record)] = append(b.calls[callOf(record)], c)
	}
	return c
}

// drop forgets a call. The caller holds b.mu.
func (b *Calls) drop(c *asyncCall) {
	delete(b.records, c.id)
	id := callOf(c.id)
	left := slices.DeleteFunc(b.calls[id], func(x *asyncCall) bool { return x == c })
	if len(left) == 0 {
		delete(b.calls, id)
	} else {
		b.calls[id] = left
	}
}

// to moves a call to another state. The caller holds b.mu.
func (b *Calls) to(c *asyncCall, state string) {
	if c.over() { // a dead letter was sent again
		if i := slices.Index(b.ended, c); i >= 0 {
			b.ended = slices.Delete(b.ended, i, i+1)
			b.bytes -= c.kept()
		}
	}
	c.state, c.since = state, time.Now()
	if !c.over() {
		return
	}
	c.next = time.Time{}
	b.ended = append(b.ended, c)
	b.bytes += c.kept()
	for len(b.ended) > endedCalls || b.bytes > endedResults {
		oldest := b.ended[0]
		b.ended[0] = nil
		b.ended, b.from = b.ended[1:], oldest.since
		b.bytes -= oldest.kept()
		b.drop(oldest)
	}
}

func (c *asyncCall) over() bool { return c.state == schema.CallDone || c.state == schema.CallDead }

// kept returns the size of the result that is kept, in bytes. It counts the content type, which is
// as long as a function likes.
func (c *asyncCall) kept() int {
	if c.result == nil {
		return 0
	}
	return len(c.result.Body) + len(c.result.ContentType)
}

// Accept records a request before the journal has accepted it, because its run may end first.
func (b *Calls) Accept(e gateway.Entry) {
	b.mu.Lock()
	defer b.mu.Unlock()
	c := b.open(e.Request.ID, e.Request.Target)
	c.accepted, c.callback = e.Accepted, gateway.SafeURL(e.Callback)
	b.to(c, schema.CallAccepted)
}

// Refuse forgets a request that the journal did not accept.
func (b *Calls) Refuse(record string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if c := b.find(record); c != nil {
		b.drop(c)
	}
}

// Found records a request that an earlier process has accepted, or that was a dead letter.
func (b *Calls) Found(f queue.Found) {
	b.mu.Lock()
	defer b.mu.Unlock()
	c := b.open(f.ID, f.Function)
	c.accepted, c.attempt, c.next = f.Accepted, f.Failed, f.Next
	switch {
	case f.Kind == queue.Callback:
		b.to(c, schema.CallTelling)
	case f.Failed > 0:
		b.to(c, schema.CallRetrying)
	default:
		b.to(c, schema.CallAccepted)
	}
	c.cause, c.failed, c.result = "", false, nil
}

// Begin records the start of an attempt: of a run, or of a callback. callback is the URL that gets
// the result, without secrets.
func (b *Calls) Begin(r queue.Record, callback string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	c := b.open(r.ID, r.Function)
	c.attempt, c.callback, c.next = r.Attempt, callback, time.Time{}
	state := schema.CallRunning
	if r.Kind == queue.Callback {
		state = schema.CallTelling
	}
	b.to(c, state)
}

// Ran records the end of a run.
func (b *Calls) Ran(r queue.Record, end gateway.Ending) {
	b.mu.Lock()
	defer b.mu.Unlock()
	c := b.open(r.ID, r.Function)
	c.next, c.cause, c.failed = time.Time{}, "", false
	if end.Err != nil {
		c.cause = end.Err.Error()
	}
	switch {
	case end.Again:
		c.next = time.Now().Add(end.After)
		b.to(c, schema.CallRetrying)
	case end.Notice != nil:
		c.failed, c.attempt = end.Err != nil, 0
		c.keep(*end.Result)
		c.result.Body = nil // the journal has it until the callback has taken it
		b.to(c, schema.CallTelling)
	default:
		c.keep(*end.Result)
		b.to(c, endState(end.Err != nil))
	}
}

// endState returns the state of a call that has ended.
func endState(failed bool) string {
	if failed {
		return schema.CallDead
	}
	return schema.CallDone
}

// Told records the end of an attempt to send a result to the callback.
func (b *Calls) Told(r queue.Record, result gateway.Result, end gateway.Ending) {
	b.mu.Lock()
	defer b.mu.Unlock()
	c := b.open(r.ID, r.Function)
	if end.Err != nil {
		c.cause = end.Err.Error()
	}
	if end.Again {
		c.next = time.Now().Add(end.After)
		b.to(c, schema.CallTelling)
		return
	}
	c.keep(result)
	b.to(c, endState(end.Err != nil || c.failed))
}

// keep stores the result, with its body if that is small. The call has not ended yet.
func (c *asyncCall) keep(r gateway.Result) {
	if len(r.Body) > endedResultBytes {
		r.Body = nil
	} else {
		r.Body = append([]byte{}, r.Body...) // a copy, because it may be nil or part of a larger slice
	}
	c.result = &r
}

// get returns the latest call with this id, which is the client's or that of the record.
func (b *Calls) get(id string) (c asyncCall, known bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if of := b.calls[id]; len(of) > 0 {
		return *of[len(of)-1], true
	}
	if found := b.find(id); found != nil {
		return *found, true
	}
	return asyncCall{}, false
}

// since returns the time after which all ended calls are remembered.
func (b *Calls) since() time.Time {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.from
}

// Died records a new dead letter. It ends calls whose work could not report its end, for example
// because it panicked.
func (b *Calls) Died(l queue.DeadLetter) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if c := b.find(l.ID); c != nil && !c.over() && (l.Kind == queue.Callback || c.state != schema.CallTelling) {
		c.cause = l.Cause
		b.to(c, schema.CallDead)
	}
}
