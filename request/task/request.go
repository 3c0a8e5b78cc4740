package task

import (
	"fmt"
	"time"

	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Request is an invocation of a function or pipeline that a gateway has accepted.
type Request struct {
	ID          string // unique; see gateway.CallOf
	Target      string // pipeline.Key of a function or pipeline, as text
	Deadline    time.Time
	Arrived     time.Time // when a gateway accepted it; zero: when its run begins
	Traceparent string    // W3C trace context of its tasks; empty: none
	// Traceparent belongs to a recorded span, so each call gets a child span; see [CallParent].
	Traced bool
	Header []Header
	Input  tensor.Activation
	// Input is not the client's body, because a replica that speaks HTTP gets the body from the
	// gateway. Body is then the body's size in bytes; -1: unknown.
	Direct bool
	Body   int64
}

// Header fields between the gateway and functions that speak HTTP. Neither clients nor functions
// can set HeaderDirect.
const (
	// HeaderDirect in a request means that the client invoked the function by its own name and sees
	// its status and headers. The value is empty or "unix TOKEN PATH". PATH is a socket where the
	// gateway waits for the replica. The replica connects, sends TOKEN and a newline, and then gets
	// the HTTP request on that connection.
	//
	// If the task's input is the HTTP request (see [TypeRequest]), the replica may send TOKEN and a
	// plus sign instead. It then waits for a newline from the gateway, and sends only its answer.
	//
	// In an answer, HeaderDirect says how long the function worked before it began to answer.
	HeaderDirect = "Stagecoach-Direct"
	// HeaderVariants in a request names the functions that must serve its stages, by commas. Each is
	// a stage's own function or a variant. Other stages are routed as usual.
	HeaderVariants = "X-Variants"
	// HeaderStatus in a response is the HTTP status of the function's answer, 200 to 599; absent:
	// 200.
	HeaderStatus = "Http-Status"
)

// Content types of a small HTTP exchange, which travels with its task. The request is the task's
// only input item, and the answer is its only output item.
const (
	TypeRequest  = "message/http;msgtype=request"
	TypeResponse = "message/http;msgtype=response"
	// MaxMessage is the largest size of such an item in bytes, so that it fits into the queue's
	// messages.
	MaxMessage = tensor.InlineLimit - 1<<10
)

// Response is the result of a successful request.
type Response struct {
	Output tensor.Input // one part per sink of the graph, under the sink's name
	Header []Header     // from the last stage
	Stages []Timing     // one per attempt, in the order in which the attempts ended
}

// Timing records one attempt of a call of a stage.
type Timing struct {
	Stage     string
	Function  string // pipeline.Key as text
	Task      uint32
	Attempt   uint8
	Code      Code
	Message   string // cause, unless Code is OK
	Replica   string // empty: no replica got it
	Variant   string // function whose replica got it, as pipeline.Key in text; empty: none, or unknown
	Given     int    // items of its input
	Returned  int    // items of its output, if Code is OK
	Length    int    // of its input, in the unit of the stages' max-length; 0: unknown
	Batch     uint64 // number of its batch, unique within the function; 0: none
	BatchSize int
	Start     time.Time     // when the coordinator sent it
	End       time.Time     // when the coordinator had the reply or gave up
	Wait      time.Duration // time in the stage's line
	Service   time.Duration // time on the replica
}

// Error is the result of a failed request, which its client gets.
type Error struct {
	Status     int           // HTTP status code
	Internal   bool          // the platform failed, not the function; sets X-OpenFaaS-Internal
	Stage      string        // name of the stage that failed; empty: none
	Cause      string        // what was got, what was wanted, and what to do
	RetryAfter time.Duration // with 429 and 503; 0: unknown
	// A call of the request ended two replicas, so the request must not be repeated.
	Convicted bool
	Dropped   DropReason // why a policy dropped a task of the request; empty: no policy did
	Stages    []Timing   // as in Response; attempts that had not ended are [Canceled]
}

// Error returns the stage and the cause.
func (e *Error) Error() string {
	if e.Stage == "" {
		return e.Cause
	}
	return fmt.Sprintf("stage %q: %s", e.Stage, e.Cause)
}

// Load is what admission knows about a function. It is enough to predict how long a new task waits.
type Load struct {
	Waiting int           // tasks in the line
	Running int           // tasks on replicas
	Servers int           // tasks that the ready replicas can run at a time
	Max     int           // tasks that could run at a time at the largest allowed scale
	Limit   int           // largest number of waiting tasks
	Service time.Duration // mean time per task; 0: unknown
	// Time from the order of a replica to its first answer, as last seen; 0: unknown.
	Start time.Duration
}
