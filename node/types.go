package node

import (
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"time"
)

// Version is that of all messages of this protocol.
const Version = 1

// Identity says which daemon is meant: a name is one node's, an id one daemon's, from its start to its end.
type Identity struct {
	Name    string    `json:"name"`
	ID      string    `json:"id"`      // of this run of the daemon
	Host    string    `json:"host"`    // its host's name
	Boot    string    `json:"boot"`    // the machine's boot id: who shares it is on the same machine
	PID     int       `json:"pid"`     // of the daemon
	Version string    `json:"version"` // of the program
	Started time.Time `json:"started"`
}

// Inventory is all that a node is and has. Slices are sorted by function, then digest or name.
type Inventory struct {
	V int `json:"v"`
	Identity
	Embedded bool   `json:"embedded,omitempty"` // it is part of `stagecoach up`, and no daemon
	Socket   string `json:"socket,omitempty"`   // path of the daemon's unix socket
	Leaving  bool   `json:"leaving,omitempty"`  // it takes no orders to start; who has replicas there drains them
	Gone     bool   `json:"gone,omitempty"`     // its last one
	Events   uint64 `json:"events"`             // the number of the latest event

	Memory     Memory    `json:"memory"`
	CPU        CPU       `json:"cpu"`
	Devices    []Device  `json:"devices"`
	Zygotes    []Zygote  `json:"zygotes"`
	Failures   []Failure `json:"failures"`
	Replicas   []Replica `json:"replicas"`
	Counts     Counts    `json:"counts"`
	OutputLost uint64    `json:"outputLost"` // lines of replicas that nobody took in time
}

// Memory is in bytes.
type Memory struct {
	Bound     string `json:"bound"`     // what leaves least: --memory, cgroup or machine
	Total     int64  `json:"total"`     // of that
	Used      int64  `json:"used"`      // of it, now
	Threshold int64  `json:"threshold"` // of it, above which idle zygotes are evicted
	Free      int64  `json:"free"`      // that a load finds without an eviction
}

// CPU is in thousandths of a core.
type CPU struct {
	Total int `json:"total"`
	Used  int `json:"used"` // promised to replicas
}

// Device is an accelerator, or a part of one (MIG).
type Device struct {
	UUID        string  `json:"uuid"`
	Index       string  `json:"index"`                 // of the GPU on the machine, such as 2; of a part GPU:PART, such as 2:0
	Name        string  `json:"name"`                  // of a part, with its profile
	Memory      int64   `json:"memory"`                // bytes
	Used        int64   `json:"used"`                  // bytes, by all processes of the machine
	Reserved    int64   `json:"reserved"`              // bytes, promised to replicas
	Parked      int64   `json:"parked,omitempty"`      // bytes of Free that parked children take, and give back when they are wanted
	Free        int64   `json:"free"`                  // bytes that may still be promised
	Utilisation float64 `json:"utilisation"`           // 0 to 1; negative: unknown
	Temperature int     `json:"temperature,omitempty"` // degrees Celsius; 0: unknown, as of a part
	Power       float64 `json:"power,omitempty"`       // watts that it draws; 0: unknown, as of a part
	Healthy     bool    `json:"healthy"`
	Cause       string  `json:"cause,omitempty"` // why it is not healthy

	ParkedFor []string `json:"parkedFor,omitempty"` // whose children are parked on it, by function, sorted
}

// The states of a [Zygote].
const (
	Loading  = "loading"
	Ready    = "ready"
	Retiring = "retiring" // it goes once its replicas have gone
)

// Zygote is a parameter set in memory.
type Zygote struct {
	Function  string        `json:"function"` // that uses it; the first by name when several do
	Namespace string        `json:"namespace"`
	Digest    string        `json:"digest"` // of the image
	Model     string        `json:"model"`
	PID       int           `json:"pid"`
	Bytes     int64         `json:"bytes"`
	Path      string        `json:"path,omitempty"` // how replicas start from it
	Replicas  int           `json:"replicas"`
	Key       bool          `json:"key"` // a key stage's: evicted last
	State     string        `json:"state"`
	Load      time.Duration `json:"load"` // how long it took, in nanoseconds
	LastUsed  time.Time     `json:"lastUsed,omitzero"`
	Usage     *Usage        `json:"usage,omitempty"` // nil: not measured

	Worker string `json:"worker,omitempty"` // its name, of a worker, which keeps no parameters but those of its replicas
	Device string `json:"device,omitempty"` // of that

	Generation uint64 `json:"generation,omitempty"` // how often the parameters have been invalidated
}

// Failure is a zygote that did not load or that ended, and is loaded again at the next order after Retry.
type Failure struct {
	Function string    `json:"function"`
	Digest   string    `json:"digest"`
	Count    int       `json:"count"` // in a row
	Retry    time.Time `json:"retry"`
	Cause    string    `json:"cause"`
}

// Replica is one that runs.
type Replica struct {
	Name     string    `json:"name"`
	Function string    `json:"function"`
	PID      int       `json:"pid"`
	Path     string    `json:"path"`
	Phases   []Phase   `json:"phases"`
	Started  time.Time `json:"started"`
	CPUMilli int       `json:"cpuMilli"` // its limit; 0: none
	Device   string    `json:"device,omitempty"`
	Usage    *Usage    `json:"usage,omitempty"` // nil: not measured
}

// Usage is what a replica or zygote takes.
type Usage struct {
	CPUMilli  int           `json:"cpuMilli"`  // since the last look
	Memory    int64         `json:"memory"`    // bytes
	Throttled time.Duration `json:"throttled"` // since its start, in nanoseconds
}

// Phase is a part of a start.
type Phase struct {
	Name string        `json:"name"`
	Took time.Duration `json:"took"` // nanoseconds
}

// Counts are of what happened since the daemon's start.
type Counts struct {
	Hits      uint64 `json:"hits"` // starts that found their zygote
	Misses    uint64 `json:"misses"`
	Evictions uint64 `json:"evictions"` // for want of memory
	Refused   uint64 `json:"refused"`   // loads that could not fit

	Evicted Evicted `json:"evicted"`
}

// Evicted counts zygotes that were ended, by reason.
type Evicted struct {
	Memory      uint64 `json:"memory"`      // to make room for another, or because the node's processes took too much
	Pressure    uint64 `json:"pressure"`    // because the machine or the cgroup was short of memory
	Invalidated uint64 `json:"invalidated"` // by an order, a redeploy or a removal
	Asked       uint64 `json:"asked"`       // by an order to evict
}

// The kinds of an [Order].
const (
	OrderWho        = "who"        // who are you? answered by anyone who holds the name
	OrderStart      = "start"      // Replica, Spec, CPUMilli, Device
	OrderStop       = "stop"       // Replica, Grace
	OrderSetCPU     = "setCPU"     // Replica, CPUMilli
	OrderWarm       = "warm"       // Wanted: the whole list
	OrderLoad       = "load"       // Spec
	OrderEvict      = "evict"      // Function, or Digest
	OrderInvalidate = "invalidate" // Function
	OrderForget     = "forget"     // Function
	OrderCancel     = "cancel"     // Target: an order that nobody waits for any more
	OrderEvents     = "events"     // Since: events that were missed
	OrderRefuse     = "refuse"     // Cause: why the node cannot be used; its daemon ends
)

// Order asks a node for something. One that comes again under its id is not carried out again.
type Order struct {
	V      int           `json:"v"`
	ID     string        `json:"id"`
	To     string        `json:"to,omitempty"` // the daemon's id; an order for an earlier one is refused. Not of OrderWho
	Kind   string        `json:"kind"`
	Within time.Duration `json:"within"` // nanoseconds left to carry it out

	Replica  string          `json:"replica,omitempty"`
	Spec     json.RawMessage `json:"spec,omitempty"` // of the function; unknown fields are refused
	CPUMilli int             `json:"cpuMilli,omitempty"`
	Device   string          `json:"device,omitempty"`
	Grace    time.Duration   `json:"grace,omitempty"` // nanoseconds
	Wanted   []Wanted        `json:"wanted,omitempty"`
	Function string          `json:"function,omitempty"`
	Digest   string          `json:"digest,omitempty"`
	Target   string          `json:"target,omitempty"`
	Since    uint64          `json:"since,omitempty"`
	Cause    string          `json:"cause,omitempty"`
}

// Wanted is a function whose parameters should be in memory.
type Wanted struct {
	Spec json.RawMessage `json:"spec"`
	Key  bool            `json:"key,omitempty"`
}

// Answer is of an order: progress, any number of times, and then one that is Done.
type Answer struct {
	V     int      `json:"v"`
	ID    string   `json:"id"` // of the order
	Done  bool     `json:"done"`
	From  Identity `json:"from"`
	Phase *Phase   `json:"phase,omitempty"` // that has ended; nil in the first answer, which says that the order has come

	// Of the last one:
	Error  string  `json:"error,omitempty"`
	Code   string  `json:"code,omitempty"` // of an Error that callers may want to tell apart, such as CodeUnsupported
	PID    int     `json:"pid,omitempty"`
	Path   string  `json:"path,omitempty"`
	Phases []Phase `json:"phases,omitempty"`
	Bytes  int64   `json:"bytes,omitempty"` // that what was loaded takes, or what was evicted took
	Events []Event `json:"events,omitempty"`
}

// The codes of an [Answer]'s Error. What is none of them has no code.
const (
	CodeUnsupported = "unsupported" // the node cannot do what is asked
	CodeBusy        = "busy"        // what is to go is in use
	CodeNoModel     = "noModel"     // the function has no parameters
	CodeNoRoom      = "noRoom"      // they do not fit into the node's memory
	CodeNotCached   = "notCached"   // they are not in its memory
)

// Codes has the errors of both sides' own by code: a daemon answers one of them with its code, and to callers of [Client] an answer
// with a code is that error.
type Codes map[string]error

// of returns the code of an error; empty: it has none.
func (c Codes) of(err error) string {
	for _, code := range slices.Sorted(maps.Keys(c)) {
		if errors.Is(err, c[code]) {
			return code
		}
	}
	return ""
}

// answered is an error that a daemon has answered.
type answered struct {
	text string
	kind error // nil: of no code
}

func (e *answered) Error() string { return e.text }
func (e *answered) Unwrap() error { return e.kind }

// The kinds of an [Event].
const (
	EventExit  = "exit"  // a replica's process ended: Replica, Function, PID, Cause, End
	EventEvict = "evict" // a zygote was ended for want of memory: Function, Bytes
)

// Event is something that a node tells unasked. Events are numbered from 1 on, so that one that is missed can be asked for.
type Event struct {
	V        int       `json:"v"`
	ID       string    `json:"id"` // the daemon's
	Number   uint64    `json:"number"`
	At       time.Time `json:"at"`
	Kind     string    `json:"kind"`
	Replica  string    `json:"replica,omitempty"`
	Function string    `json:"function,omitempty"`
	PID      int       `json:"pid,omitempty"`
	Cause    string    `json:"cause,omitempty"`
	End      string    `json:"end,omitempty"` // of an exit: task.End
	Bytes    int64     `json:"bytes,omitempty"`
}
