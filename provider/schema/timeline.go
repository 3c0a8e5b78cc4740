package schema

import "time"

// Timeline is a function's present and recent past, as GET /system/timeline/NAME answers.
type Timeline struct {
	Function string  `json:"function"`
	Waiting  int     `json:"waiting"` // requests in its line
	Running  int     `json:"running"` // requests on replicas
	Ready    int     `json:"ready"`   // replicas
	Why      string  `json:"why"`     // the last decision on its size
	Events   []Event `json:"events"`  // the latest ones, in order
}

// Event is a step in a replica's life.
type Event struct {
	At      time.Time         `json:"at"`
	Replica string            `json:"replica"`
	Kind    string            `json:"kind"` // as package cluster has them
	Path    string            `json:"path,omitempty"`
	Phases  map[string]string `json:"phases,omitempty"` // started: how long each phase took
	Cause   string            `json:"cause,omitempty"`
}

// Kinds of events that callers look for. Package cluster has all kinds.
const (
	Ordered  = "ordered"
	Process  = "started"
	Ready    = "ready"
	Answered = "first answer"
	Stopped  = "stopped"
	Failed   = "failed"
	Lost     = "lost"
)
