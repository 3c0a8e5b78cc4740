// Package schema has the JSON types of Stagecoach's own HTTP API: the answers of package
// provider/admin, and what clients send. The types of OpenFaaS's API are those of faas-provider.
package schema

import "time"

// The states of an async call.
const (
	CallAccepted = "accepted" // it waits for its first run
	CallRunning  = "running"
	CallRetrying = "retrying" // a run has failed, and the next one has a time
	CallTelling  = "telling"  // it has run; its result goes to its callback
	CallDone     = "done"
	CallDead     = "dead" // it has failed for good
)

// Call is an async call, as GET /system/async/ID shows it.
type Call struct {
	CallID    string      `json:"callId"` // the client's
	ID        string      `json:"id"`     // of its record in the journal
	Function  string      `json:"function"`
	Namespace string      `json:"namespace"`
	State     string      `json:"state"` // accepted, running, retrying, telling, done or dead
	Accepted  time.Time   `json:"accepted"`
	Since     *time.Time  `json:"since,omitempty"`    // when the state began
	Attempt   int         `json:"attempt"`            // the present or latest attempt; 0: none yet
	Next      *time.Time  `json:"next,omitempty"`     // time of the next attempt
	Stages    []CallStage `json:"stages,omitempty"`   // the stages that a running call is in
	Cause     string      `json:"cause,omitempty"`    // why the latest attempt failed
	Callback  string      `json:"callback,omitempty"` // URL, without user and query
	Result    *CallResult `json:"result,omitempty"`   // of its last run
	Letter    string      `json:"letter,omitempty"`   // id of its dead letter, while that is kept
}

// CallStage is the progress of a call in a stage.
type CallStage struct {
	Stage   string `json:"stage"`
	Calls   int    `json:"calls"`
	Done    int    `json:"done"`
	Attempt int    `json:"attempt"` // highest attempt of the calls that are not done
	// Functions whose replicas have answered calls of the stage: its own, or its variants.
	Variants []string `json:"variants,omitempty"`
}

// CallResult is the result of a call.
type CallResult struct {
	Status      int     `json:"status"`
	ContentType string  `json:"contentType,omitempty"`
	Seconds     float64 `json:"seconds"`           // duration of its last run
	Dropped     string  `json:"dropped,omitempty"` // why a policy dropped its last run
	Kept        bool    `json:"kept"`              // GET with ?body=1 answers with its body
}
