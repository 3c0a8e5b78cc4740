package admin

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
	"github.com/stagecoach-serving/stagecoach/request/gateway"
	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// callAPI serves GET /system/async/ID[?body=1].
type callAPI struct {
	calls    *Calls
	journal  Journal
	requests Requests
}

// ServeHTTP implements http.Handler.
func (a callAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	id := r.PathValue("id")
	c, known := a.calls.get(id)
	out := a.show(c)
	if !known || c.state == schema.CallDead {
		// The journal bounds the letters. Dead fails only with an id to go on from.
		all, _, _ := a.journal.Dead(nil, "", 1<<30)
		if l, there := letterOf(all, id, c.id); there {
			out.Letter = l.ID
			if !known { // an earlier process had it, or it ended long ago
				out = schema.Call{CallID: callOf(l.ID), ID: l.ID, Function: l.Function, State: schema.CallDead, Accepted: l.Accepted.UTC(), Attempt: l.Attempts, Cause: l.Cause, Letter: l.ID}
				died := l.Died.UTC()
				out.Since, known = &died, true
			}
		}
	}
	if !known {
		http.Error(w, fmt.Sprintf("async call %q: it is not known. It was not accepted here, or it ended before %s: up remembers the latest %d ended calls, "+
			"with at most %d MiB of results, until it ends", id, a.calls.since().UTC().Format(time.RFC3339), endedCalls, endedResults>>20), http.StatusNotFound)
		return
	}
	key := pipeline.ParseKey(out.Function)
	out.Function, out.Namespace = key.Name, key.Namespace
	if r.URL.Query().Get("body") == "" {
		answerJSON(w, out)
		return
	}
	if out.Result == nil || !out.Result.Kept {
		http.Error(w, fmt.Sprintf("async call %q: it is %s, and no result of it is kept%s", id, out.State, whyNoResult(out)), http.StatusNotFound)
		return
	}
	writeResult(w, c.result)
}

// whyNoResult returns why a result is not kept, or where to find more.
func whyNoResult(c schema.Call) string {
	switch {
	case c.Letter != "":
		return "; `stagecoach dead show " + c.Letter + "` says more"
	case c.State == schema.CallDone:
		return fmt.Sprintf(": it is larger than %d KiB; an X-Callback-Url gets results of any size", endedResultBytes>>10)
	}
	return " yet"
}

func writeResult(w http.ResponseWriter, r *gateway.Result) {
	h := w.Header()
	h.Set("Content-Type", r.ContentType)
	h.Set("X-Function-Status", fmt.Sprint(r.Status))
	if r.Dropped != "" {
		h.Set("X-Dropped", string(r.Dropped))
	}
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Content-Disposition", "attachment") // browsers must not show content of strangers
	_, _ = w.Write(r.Body)                     // fails only when the client is gone
}

// letterOf returns the latest dead letter of a call. If the call's record is known, the letter must
// be of that record. Otherwise any letter with the id counts: if a client has chosen the id,
// several calls can have it.
func letterOf(all []queue.DeadLetter, id, record string) (found queue.DeadLetter, there bool) {
	for _, l := range slices.Backward(all) {
		of := strings.TrimSuffix(l.ID, ".callback")
		if record != "" && of == record || record == "" && (of == id || l.ID == id || callOf(of) == id) {
			return l, true
		}
	}
	return found, false
}

// show describes a call without its dead letter.
func (a callAPI) show(c asyncCall) schema.Call {
	out := schema.Call{
		CallID: callOf(c.id), ID: c.id, Function: c.function, State: c.state, Accepted: c.accepted.UTC(), Attempt: c.attempt, Cause: c.cause, Callback: c.callback,
	}
	if !c.since.IsZero() {
		since := c.since.UTC()
		out.Since = &since
	}
	if !c.next.IsZero() {
		next := c.next.UTC()
		out.Next = &next
	}
	if c.state == schema.CallRunning {
		for _, p := range a.requests.Where(c.id) {
			out.Stages = append(out.Stages, schema.CallStage(p))
		}
	}
	if r := c.result; r != nil {
		out.Result = &schema.CallResult{Status: r.Status, ContentType: r.ContentType, Seconds: r.Duration.Seconds(), Dropped: string(r.Dropped), Kept: r.Body != nil && c.over()}
	}
	return out
}
