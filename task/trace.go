package task

import (
	"encoding/hex"
	"hash/fnv"
	"time"
)

// Ended is a request that has ended, as whoever makes spans of requests gets to know it.
type Ended struct {
	CallID string // X-Call-Id
	Target string // pipeline.Key of a function or a pipeline
	Async  string // which half of an async request this is: "accept", "run"; empty: a sync one
	Method string // of HTTP; empty for the run of an async request
	Path   string // of the URL after the function's name; as Method
	Status int    // HTTP
	Cause  string // why Status is not good; empty: it is, or nobody said
	Start  time.Time
	End    time.Time
	Calls  []Timing
}

// A traceparent of version 00 has 55 characters: the version, the trace's id from the fourth, the span's id from the 37th, flags.
const (
	traceparentSize = 55
	spanAt, spanEnd = 36, 52
)

// CallParent returns the traceparent for the function that runs an attempt of a task: that of the request, with the id of the
// attempt's own span in it. The id is a hash of the request's span, the task and the attempt, so that the coordinator names
// the span before it is over and whoever builds it later finds the same name. What is no traceparent stays as it is.
func CallParent(request string, number uint32, attempt uint8) string {
	if len(request) != traceparentSize {
		return request
	}
	h := fnv.New64a()
	_, _ = h.Write([]byte(request[spanAt:spanEnd])) // never fails
	_, _ = h.Write([]byte{byte(number), byte(number >> 8), byte(number >> 16), byte(number >> 24), attempt})
	id := h.Sum(nil)
	id[0] |= 1 // zero is no id
	return request[:spanAt] + hex.EncodeToString(id) + request[spanEnd:]
}
