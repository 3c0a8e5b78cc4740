package schema

import "time"

// DeadLetter is a dead letter: an async request, or the callback of one, that has failed for good.
type DeadLetter struct {
	ID        string    `json:"id"`
	Function  string    `json:"function"`
	Namespace string    `json:"namespace"`
	Kind      string    `json:"kind"` // what failed: run or callback
	Cause     string    `json:"cause"`
	Dropped   string    `json:"dropped,omitempty"` // why a policy dropped the last run
	Attempts  int       `json:"attempts"`
	Accepted  time.Time `json:"accepted"`
	Died      time.Time `json:"died"`
	Bytes     int64     `json:"bytes"` // size of its content

	// Only GET /system/dead/ID answers with the fields below.
	CallID   string              `json:"callId,omitempty"`
	Request  string              `json:"request,omitempty"`  // its first line
	Header   map[string][]string `json:"header,omitempty"`   // without credentials
	Callback string              `json:"callback,omitempty"` // URL, without user and query
	Status   int                 `json:"status,omitempty"`   // of the result that the callback has
}

// DeadPage is a page of GET /system/dead, with the oldest letter first.
type DeadPage struct {
	Letters []DeadLetter `json:"letters"`
	// value of after= for the next page; empty: this is the last one
	Next string `json:"next,omitempty"`
}

// DeadDone says how many letters a request has changed.
type DeadDone struct {
	Letters int `json:"letters"`
}
