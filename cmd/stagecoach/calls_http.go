package main

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/flow"
	"github.com/stagecoach-serving/stagecoach/request/gateway"
	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// callStatus is an async call as GET /system/async/ID shows it.
type callStatus struct {
	CallID    string      `json:"callId"` // the client's
	ID        string      `json:"id"`     // of its record in the journal
	Function  string      `json:"function"`
	Namespace string      `json:"namespace"`
	State     string      `json:"state"` // accepted, running, retrying, telling, done or dead
	Accepted  time.Time   `json:"accepted"`
	Since     *time.Time  `json:"since,omitempty"`    // of the state
	Attempt   int         `json:"attempt"`            // the present or latest one; 0: none yet
	Next      *time.Time  `json:"next,omitempty"`     // of the next attempt
	Stages    []callStage `json:"stages,omitempty"`   // while it runs: the stages that it is in
	Cause     string      `json:"cause,omitempty"`    // why the latest attempt failed
	Callback  string      `json:"callback,omitempty"` // URL, without user and query
	Result    *callResult `json:"result,omitempty"`   // of its last run
	Letter    string      `json:"letter,omitempty"`   // id of its dead letter, while that is kept
}

// callStage is the progress of a call in a stage.
type callStage struct {
	Stage   string `json:"stage"`
	Calls   int    `json:"calls"`
	Done    int    `json:"done"`
	Attempt int    `json:"attempt"` // the highest of the calls that are not done
}

// callResult is the result of a call.
type callResult struct {
	Status      int     `json:"status"`
	ContentType string  `json:"contentType,omitempty"`
	Seconds     float64 `json:"seconds"` // of its last run
	Kept        bool    `json:"kept"`    // ?body=1 has its body
}

// callAPI serves GET /system/async/ID[?body=1].
type callAPI struct {
	calls   *callBook
	journal *queue.Journal
	flow    *flow.Coordinator
}

func serveCall(calls *callBook, j *queue.Journal, f *flow.Coordinator) http.Handler {
	return callAPI{calls, j, f}
}

// ServeHTTP implements http.Handler.
func (a callAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	id := r.PathValue("id")
	c, known := a.calls.get(id)
	out := a.show(c)
	if !known || c.state == callDead {
		all, _, _ := a.journal.Dead(nil, "", 1<<30) // bounded by the journal; it fails only with an id to go on from
		if l, there := letterOf(all, id, c.id); there {
			out.Letter = l.ID
			if !known { // an earlier process, or long ago
				out = callStatus{CallID: callOf(l.ID), ID: l.ID, Function: l.Function, State: callDead, Accepted: l.Accepted.UTC(), Attempt: l.Attempts, Cause: l.Cause, Letter: l.ID}
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
func whyNoResult(c callStatus) string {
	switch {
	case c.Letter != "":
		return "; `stagecoach dead show " + c.Letter + "` says more"
	case c.State == callDone:
		return fmt.Sprintf(": it is larger than %d KiB; an X-Callback-Url gets results of any size", endedResultBytes>>10)
	}
	return " yet"
}

func writeResult(w http.ResponseWriter, r *gateway.Result) {
	h := w.Header()
	h.Set("Content-Type", r.ContentType)
	h.Set("X-Function-Status", fmt.Sprint(r.Status))
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Content-Disposition", "attachment") // so that a browser does not show a stranger's content
	_, _ = w.Write(r.Body)                     // fails only when the client is gone
}

// letterOf returns the latest dead letter of a call: of the call with this record or, if record is
// empty, of any that the id names. The id may be a client's, which several calls can have.
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
func (a callAPI) show(c asyncCall) callStatus {
	out := callStatus{
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
	if c.state == callRunning {
		for _, p := range a.flow.Where(c.id) {
			out.Stages = append(out.Stages, callStage(p))
		}
	}
	if r := c.result; r != nil {
		out.Result = &callResult{Status: r.Status, ContentType: r.ContentType, Seconds: r.Duration.Seconds(), Kept: r.Body != nil && c.over()}
	}
	return out
}
