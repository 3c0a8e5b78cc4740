package task

import (
	"encoding/hex"
	"hash/fnv"
	"time"
)

// Ended describes an ended request for tracing.
type Ended struct {
	CallID string // X-Call-Id
	Target string // pipeline.Key of a function or pipeline, as text
	Async  string // half of an async request, "accept" or "run"; empty: a sync request
	Method string // HTTP method; empty for the run of an async request
	Path   string // path in the URL after the function's name; empty like Method
	Status int    // HTTP status
	Cause  string // cause of a failure; empty: success, or unknown
	Start  time.Time
	End    time.Time
	Calls  []Timing
}

// Positions in a traceparent of version 00, which has 55 characters: version, trace id from the
// fourth, span id from the 37th, flags.
const (
	traceparentSize = 55
	spanAt, spanEnd = 36, 52
)

// CallParent returns the traceparent for the function that runs an attempt of a task: the request's
// traceparent with the span id of the attempt. The span id is a hash of the request's span id, the
// task's number and the attempt. So the id is known before the attempt's span exists, and the span
// gets the same id when it is created. CallParent returns an invalid traceparent unchanged.
func CallParent(request string, number uint32, attempt uint8) string {
	if len(request) != traceparentSize {
		return request
	}
	h := fnv.New64a()
	_, _ = h.Write([]byte(request[spanAt:spanEnd])) // never fails
	_, _ = h.Write([]byte{byte(number), byte(number >> 8), byte(number >> 16), byte(number >> 24), attempt})
	id := h.Sum(nil)
	id[0] |= 1 // an id must not be zero
	return request[:spanAt] + hex.EncodeToString(id) + request[spanEnd:]
}
