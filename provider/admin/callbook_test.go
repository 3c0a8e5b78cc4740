package admin

import (
	"errors"
	"fmt"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/provider/schema"
	"github.com/stagecoach-serving/stagecoach/request/gateway"
	"github.com/stagecoach-serving/stagecoach/request/queue"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// runCallOf takes a call through a book: accepted, run once, ended.
func runCallOf(b *Calls, id string, body []byte, fault error) {
	b.Accept(gateway.Entry{Request: task.Request{ID: id, Target: "f.openfaas-fn"}, CallID: callOf(id), Accepted: time.Now()})
	r := queue.Record{ID: id, Function: "f.openfaas-fn", Attempt: 1}
	b.Begin(r, "")
	b.Ran(r, gateway.Ending{Err: fault, Result: &gateway.Result{Status: 200, Body: body}})
}

// TestCallBookIsBounded checks that the calls that ended first are forgotten first, if there are
// too many or their results have too many bytes. Calls that have not ended stay.
func TestCallBookIsBounded(t *testing.T) {
	t.Parallel()
	b := NewCalls()
	b.Accept(gateway.Entry{Request: task.Request{ID: "waits", Target: "f.openfaas-fn"}, CallID: "waits"})
	from := b.since()
	for i := range endedCalls {
		runCallOf(b, fmt.Sprintf("small-%d", i), nil, nil)
	}
	if _, known := b.get("small-0"); !known || b.since() != from {
		t.Errorf("the first of %d ends is known: %v, ends are known since %v, want %v", endedCalls, known, b.since(), from)
	}
	first, _ := b.get("small-0")
	runCallOf(b, "mine.small-last", nil, nil)
	if _, known := b.get("small-0"); known || b.since() != first.since {
		t.Errorf("one end more: the first is known: %v, ends are known since %v, want %v", known, b.since(), first.since)
	}
	runCallOf(b, "big", make([]byte, endedResultBytes+1), nil)
	if c, _ := b.get("big"); c.state != schema.CallDone || c.result == nil || c.result.Body != nil {
		t.Errorf("of a large result %+v is kept, want no body", c.result)
	}
	for i := range endedResults/endedResultBytes + 1 {
		runCallOf(b, fmt.Sprintf("large-%d", i), make([]byte, endedResultBytes), nil)
	}
	_, oldest := b.get("large-0")
	_, small := b.get("mine")
	if _, next := b.get("large-1"); oldest || small || !next || b.bytes != endedResults {
		t.Errorf("%d bytes of results; known: the oldest large one %v, one before it %v, the next one %v", b.bytes, oldest, small, next)
	}
	if c, known := b.get("waits"); !known || c.state != schema.CallAccepted {
		t.Errorf("the one that waits: %+v, %v", c, known)
	}
	if len(b.calls) != len(b.ended)+1 || len(b.records) != len(b.calls) {
		t.Errorf("%d calls, %d records, %d ends, want one more than these", len(b.calls), len(b.records), len(b.ended))
	}
}

// TestCallBookOfOneID checks calls to which a client gives the same id. They are bounded as others
// are, and so are the content types of their results.
func TestCallBookOfOneID(t *testing.T) {
	t.Parallel()
	b := NewCalls()
	for i := range endedCalls + 10 {
		runCallOf(b, fmt.Sprintf("mine.r%d", i), nil, nil)
	}
	if len(b.calls["mine"]) != endedCalls || len(b.records) != endedCalls {
		t.Errorf("%d calls of the client, %d records, want %d", len(b.calls["mine"]), len(b.records), endedCalls)
	}
	if c, _ := b.get("mine"); c.id != fmt.Sprintf("mine.r%d", endedCalls+9) {
		t.Errorf("the latest is %s", c.id)
	}
	kind := strings.Repeat("x", endedResultBytes)
	for i := range endedResults/endedResultBytes + 10 {
		r := queue.Record{ID: fmt.Sprintf("other.r%d", i), Function: "f.openfaas-fn", Attempt: 1}
		b.Begin(r, "")
		b.Ran(r, gateway.Ending{Result: &gateway.Result{Status: 200, ContentType: kind}})
	}
	if b.bytes > endedResults || len(b.records) != endedResults/endedResultBytes {
		t.Errorf("%d bytes of %d results are kept, want at most %d", b.bytes, len(b.records), endedResults)
	}
}

// TestCallBookRunsAgain checks that a dead letter that is sent again no longer counts as ended, and
// that a refused request leaves no call. Of several calls with one id, the latest is shown.
func TestCallBookRunsAgain(t *testing.T) {
	t.Parallel()
	b := NewCalls()
	runCallOf(b, "mine.a", []byte("first"), errors.New("no luck"))
	b.Died(queue.DeadLetter{ID: "mine.a", Kind: queue.Run, Cause: "another cause"})
	if c, _ := b.get("mine"); c.state != schema.CallDead || c.cause != "no luck" {
		t.Errorf("dead: %+v", c)
	}
	b.Found(queue.Found{ID: "mine.a", Function: "f.openfaas-fn"})
	if c, _ := b.get("mine"); c.state != schema.CallAccepted || c.cause != "" || c.result != nil || len(b.ended) != 0 || b.bytes != 0 {
		t.Errorf("sent again: %+v, %d ends, %d bytes", c, len(b.ended), b.bytes)
	}
	// Its work could not report the end.
	b.Died(queue.DeadLetter{ID: "mine.a", Kind: queue.Run, Cause: "panic: x"})
	if c, _ := b.get("mine"); c.state != schema.CallDead || c.cause != "panic: x" {
		t.Errorf("dead again: %+v", c)
	}
	runCallOf(b, "mine.b", []byte("second"), nil)
	if c, _ := b.get("mine"); c.id != "mine.b" || c.state != schema.CallDone || string(c.result.Body) != "second" {
		t.Errorf("the latest: %+v", c)
	}
	if c, known := b.get("mine.a"); !known || c.state != schema.CallDead {
		t.Errorf("the earlier one, by its record: %+v, %v", c, known)
	}
	b.Accept(gateway.Entry{Request: task.Request{ID: "mine.c", Target: "f.openfaas-fn"}, CallID: "mine"})
	b.Refuse("mine.c")
	if c, _ := b.get("mine"); c.id != "mine.b" {
		t.Errorf("after one that was refused: %+v", c)
	}
}

// TestLetterOfACall checks that a known call has its own dead letter, not the letter of another
// call with the same client's id. If the call is not known, the latest letter with its id counts.
func TestLetterOfACall(t *testing.T) {
	t.Parallel()
	all := []queue.DeadLetter{{ID: "mine.a"}, {ID: "mine.b.callback", Kind: queue.Callback}, {ID: "other.c"}}
	for _, tc := range []struct{ id, record, want string }{
		{"mine", "mine.a", "mine.a"},
		{"mine", "mine.b", "mine.b.callback"},
		{"mine", "mine.z", ""},
		{"mine", "", "mine.b.callback"},
		{"mine.a", "", "mine.a"},
		{"mine.b", "", "mine.b.callback"},
		{"mine.b.callback", "", "mine.b.callback"},
		{"nobody", "", ""},
	} {
		if l, there := letterOf(all, tc.id, tc.record); l.ID != tc.want || there != (tc.want != "") {
			t.Errorf("%s, record %q: letter %q, want %q", tc.id, tc.record, l.ID, tc.want)
		}
	}
}

// TestDropsAreShown checks that a call's result and a dead letter name the reason for a drop.
func TestDropsAreShown(t *testing.T) {
	r := &gateway.Result{Status: 503, Dropped: task.DropLate, Body: []byte("dropped")}
	if got := (callAPI{}).show(asyncCall{id: "mine.a", state: schema.CallDead, result: r}).Result; got.Dropped != "late" {
		t.Errorf("result %+v, want the reason", got)
	}
	w := httptest.NewRecorder()
	writeResult(w, r)
	if w.Header().Get("X-Dropped") != "late" || w.Header().Get("X-Function-Status") != "503" {
		t.Errorf("header %v, want the reason", w.Header())
	}
	if l := showLetter(queue.DeadLetter{ID: "mine.a", Dropped: "late"}); l.Dropped != "late" {
		t.Errorf("letter %+v, want the reason", l)
	}
}
