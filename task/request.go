package task

import (
	"fmt"
	"time"

	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Request is one invocation of a function or a pipeline, as a gateway accepts it.
type Request struct {
	ID          string // X-Call-Id; unique
	Target      string // pipeline.Key of a function or a pipeline
	Deadline    time.Time
	Traceparent string // W3C trace context that its tasks belong to; empty: none
	Traced      bool   // Traceparent is of a recorded span, below which each call gets one of its own, see [CallParent]
	Header      []Header
	Input       tensor.Activation
}

// Header fields between the gateway and functions that speak HTTP. Neither clients nor functions can write HeaderDirect.
const (
	// HeaderDirect, of a request, says that its function was invoked by itself, so that its status and headers are the
	// client's to see. Its value is empty, or "unix TOKEN PATH": at that socket the gateway waits for the replica, which says
	// the token and a newline, and is then asked over HTTP on that connection. If the input is a request, see
	// [TypeRequest], the replica may say the token and a plus sign instead, wait for a newline, and answer.
	//
	// Of an answer, it says how long the function has worked before it began to answer.
	HeaderDirect = "Stagecoach-Direct"
	// HeaderStatus, of a response, is the HTTP status that its function answered with, 200 to 599; absent: 200.
	HeaderStatus = "Http-Status"
)

// Content types of the input and output of a task with a rendezvous, if its HTTP exchange is so small that it travels with the
// task. Each is one item.
const (
	TypeRequest  = "message/http;msgtype=request"
	TypeResponse = "message/http;msgtype=response"
	// MaxMessage is how many bytes such an item has at most: it has to travel in the queue's messages.
	MaxMessage = tensor.InlineLimit - 1<<10
)

// Response is a request's good end.
type Response struct {
	Output tensor.Input // one part a sink of the graph, by the sink's name
	Header []Header     // from the last stage
	Stages []Timing     // one an attempt, in order of their ends
}

// Timing is what one attempt of a call of a stage cost.
type Timing struct {
	Stage     string
	Function  string // pipeline.Key
	Task      uint32
	Attempt   uint8
	Code      Code
	Message   string // why, unless Code is OK
	Replica   string // empty: it got to none
	Batch     uint64 // number of its batch, unique within the function; 0: none
	BatchSize int
	Start     time.Time     // when the coordinator sent it
	End       time.Time     // when the coordinator had the reply, or gave it up
	Wait      time.Duration // in the stage's line
	Service   time.Duration // on the replica
}

// Error is a request's bad end: what its client is told.
type Error struct {
	Status     int           // HTTP status code
	Internal   bool          // the platform's fault, not the function's: X-OpenFaaS-Internal
	Stage      string        // name of the stage; empty: none is to blame
	Cause      string        // what was got, what was wanted, what to do
	RetryAfter time.Duration // with 429 and 503; 0: unknown
	Convicted  bool          // a call of the request ended two replicas, so the request must not be repeated
	Stages     []Timing      // as a Response has them; those that were still out are [Canceled]
}

// Error names the stage and the cause.
func (e *Error) Error() string {
	if e.Stage == "" {
		return e.Cause
	}
	return fmt.Sprintf("stage %q: %s", e.Stage, e.Cause)
}

// Load is what admission knows of a function: enough to predict how long a new task waits.
type Load struct {
	Waiting int           // tasks in the line
	Running int           // tasks on replicas
	Servers int           // tasks that can run at a time on the ready replicas
	Max     int           // tasks that could run at a time at the largest scale allowed
	Limit   int           // tasks that may wait
	Service time.Duration // mean of a task; 0: not yet known
	Start   time.Duration // from an order to a replica's first answer, as last seen; 0: not yet known
}
