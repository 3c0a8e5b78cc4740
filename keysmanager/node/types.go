package node

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"
)

// Version is that of all messages of this protocol.
const Version = 1

// Identity identifies a daemon. The name belongs to a node. The id belongs to one run of the
// daemon.
type Identity struct {
	Name string `json:"name"`
	ID   string `json:"id"`   // of this run of the daemon
	Host string `json:"host"` // its host's name
	// boot id of the machine; nodes with the same one are on the same machine.
	Boot    string    `json:"boot"`
	PID     int       `json:"pid"`     // of the daemon
	Version string    `json:"version"` // of the program
	Started time.Time `json:"started"`
}

// Inventory is the complete state of a node. Slices are sorted by function, then digest or name.
type Inventory struct {
	V int `json:"v"`
	Identity
	Embedded bool `json:"embedded,omitempty"` // it is part of `stagecoach up`, and no daemon
	// Path of the daemon's unix socket; empty: it must be reached over the tunnel.
	Socket string `json:"socket,omitempty"`
	// host:port where its tunnel listens; empty: only processes of its machine reach it.
	Address string `json:"address,omitempty"`
	Link    Link   `json:"link,omitempty"` // how the control plane reaches it, which adds it
	Departure
	Events uint64 `json:"events"` // the number of the latest event
	// Highest epoch of all control planes that have spoken to the node; 0: none has an epoch.
	Epoch uint64 `json:"epoch,omitempty"`

	Memory     Memory      `json:"memory"`
	CPU        CPU         `json:"cpu"`
	Devices    []Device    `json:"devices"`
	Zygotes    []Zygote    `json:"zygotes"`
	Failures   []Failure   `json:"failures"`
	Replicas   []Replica   `json:"replicas"`
	Containers []Container `json:"containers,omitempty"` // sorted by function; empty: none
	Stock
	Counts     Counts `json:"counts"`
	OutputLost uint64 `json:"outputLost"` // lines of replicas that nobody took in time
}

// Departure says whether a node goes away.
type Departure struct {
	// It takes no orders to start, and its replicas should be drained.
	Leaving bool `json:"leaving,omitempty"`
	// While it is leaving: there is still time for replacements to start before replicas are drained.
	Patient bool `json:"patient,omitempty"`
	Gone    bool `json:"gone,omitempty"` // this is its last announcement
}

// Stock is what a node has for next starts, and what it knows.
type Stock struct {
	// Features that its daemon understands. An earlier release announces none.
	Knows []Feature `json:"knows,omitempty"`
	// Containers that wait for the next starts of functions, by function.
	Spares map[string]int `json:"spares,omitempty"`
	// Digests of images that it has completely, the latest used first, at most [MaxImages].
	Images []string `json:"images,omitempty"`
	// Address of this machine where its functions can call functions, whichever control plane leads;
	// empty: none, or its replicas do not outlive control planes.
	Inside string `json:"inside,omitempty"`
	// Functions whose secrets the node keeps because they came over the tunnel, sorted.
	Secrets []string `json:"secrets,omitempty"`
	// Bytes of large outputs that it may keep for other nodes; 0: it keeps none.
	Items int64 `json:"items,omitempty"`
}

// Container is a container of containerd that the node has started.
type Container struct {
	ID       string `json:"id"`
	Function string `json:"function"`
	// Name of the replica, or of the zygote whose forks are in it.
	Replica string `json:"replica"`
	PID     int    `json:"pid"`             // of its program on this machine
	Class   string `json:"class,omitempty"` // its runtime class; empty: the default
}

// Memory is in bytes.
type Memory struct {
	Bound     string `json:"bound"`     // the tightest bound: --memory, cgroup or machine
	Total     int64  `json:"total"`     // that bound
	Used      int64  `json:"used"`      // of it, now
	Threshold int64  `json:"threshold"` // part of Total above which idle zygotes are evicted
	Free      int64  `json:"free"`      // room for a load without an eviction
}

// CPU is in thousandths of a core.
type CPU struct {
	Total int `json:"total"`
	Used  int `json:"used"` // promised to replicas
}

// Device is an accelerator, or a part of one (MIG).
type Device struct {
	UUID string `json:"uuid"`
	// Of the GPU on the machine, such as 2; of a part GPU:PART, such as 2:0.
	Index    string `json:"index"`
	Name     string `json:"name"`     // of a part, with its profile
	Memory   int64  `json:"memory"`   // bytes
	Used     int64  `json:"used"`     // bytes, by all processes of the machine
	Reserved int64  `json:"reserved"` // bytes, promised to replicas
	// Bytes of Free that parked children use and release when needed.
	Parked      int64   `json:"parked,omitempty"`
	Free        int64   `json:"free"`                  // bytes that may still be promised
	Utilisation float64 `json:"utilisation"`           // 0 to 1; negative: unknown
	Temperature int     `json:"temperature,omitempty"` // degrees Celsius; 0: unknown, as of a part
	// watts that it draws; 0: unknown, as of a part.
	Power   float64 `json:"power,omitempty"`
	Healthy bool    `json:"healthy"`
	Cause   string  `json:"cause,omitempty"` // why it is not healthy

	// Functions whose children are parked on it, sorted.
	ParkedFor []string `json:"parkedFor,omitempty"`
}

// ZygoteState is the state of a [Zygote].
type ZygoteState string

// The states of a [Zygote].
const (
	Loading  ZygoteState = "loading"
	Ready    ZygoteState = "ready"
	Retiring ZygoteState = "retiring" // it goes once its replicas have gone
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
	State     ZygoteState   `json:"state"`
	Load      time.Duration `json:"load"` // how long it took, in nanoseconds
	LastUsed  time.Time     `json:"lastUsed,omitzero"`
	Usage     *Usage        `json:"usage,omitempty"` // nil: not measured

	// name of the worker, which keeps no parameters but those of its replicas.
	Worker string `json:"worker,omitempty"`
	Device string `json:"device,omitempty"` // of that

	Generation uint64 `json:"generation,omitempty"` // how often the parameters were invalidated
}

// Failure describes a zygote that did not load or that ended. The first order after Retry loads it
// again.
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

	// Another control plane can take it over. The two fields below are from the claim of the
	// control plane that has claimed it last.
	Kept     bool   `json:"kept,omitempty"`
	Revision uint64 `json:"revision,omitempty"` // of its function
	Home     string `json:"home,omitempty"`     // what it uses of the control plane's machine
}

// Usage is what a replica or zygote takes.
type Usage struct {
	CPUMilli  int           `json:"cpuMilli"`  // since the last look
	Memory    int64         `json:"memory"`    // bytes
	Throttled time.Duration `json:"throttled"` // since its start, in nanoseconds
}

// Phase is a timed part of a replica's start. A KeysManager reports these phases:
//
//   - image: the fetch of an image that was not on the node
//   - order: from the arrival of the order until the fork or spawn begins, without load
//   - load: the load of parameters that were not in memory
//   - fork: the fork by the zygote, until a child is the replica
//   - spawn: the start of a process without a zygote
//
// The control plane adds the phase place, which ends when the replica is ready, and the phases
// that the replica reports.
type Phase struct {
	Name string        `json:"name"`
	Took time.Duration `json:"took"` // nanoseconds
}

// Counts counts what happened since the daemon's start.
type Counts struct {
	Hits      uint64 `json:"hits"` // starts that found their zygote
	Misses    uint64 `json:"misses"`
	Evictions uint64 `json:"evictions"` // for want of memory
	Refused   uint64 `json:"refused"`   // loads that could not fit

	Evicted Evicted `json:"evicted"`
}

// Evicted counts ended zygotes by reason.
type Evicted struct {
	// To make room for another one, or because the node's processes used too much.
	Memory      uint64 `json:"memory"`
	Pressure    uint64 `json:"pressure"`    // because the machine or the cgroup was short of memory
	Invalidated uint64 `json:"invalidated"` // by an order, a redeploy or a removal
	Asked       uint64 `json:"asked"`       // by an order to evict
}

// OrderKind says what an [Order] asks for.
type OrderKind string

// The kinds of an [Order].
const (
	OrderWho        OrderKind = "who"        // who are you? answered by anyone who holds the name
	OrderStart      OrderKind = "start"      // Replica, Spec, CPUMilli, Device
	OrderStop       OrderKind = "stop"       // Replica, Grace
	OrderSetCPU     OrderKind = "setCPU"     // Replica, CPUMilli
	OrderWarm       OrderKind = "warm"       // Wanted: the whole list
	OrderLoad       OrderKind = "load"       // Spec
	OrderEvict      OrderKind = "evict"      // Function, or Digest
	OrderInvalidate OrderKind = "invalidate" // Function
	OrderForget     OrderKind = "forget"     // Function
	OrderCancel     OrderKind = "cancel"     // Target: an order that nobody waits for any more
	OrderEvents     OrderKind = "events"     // Since: events that were missed
	OrderRefuse     OrderKind = "refuse"     // Cause: why the node cannot be used; its daemon ends
	OrderImages     OrderKind = "images"     // Images.InUse: the whole list
	OrderComplain   OrderKind = "complain"   // Cause: why its latest announcement was refused
)

// Order asks a node to do something. If an order arrives again with the same id, it is not carried
// out again. [Client] fills in V, ID, To, Epoch and Within. A KeysManager in the same process needs
// none of them.
type Order struct {
	V  int    `json:"v"`
	ID string `json:"id"`
	// The daemon's id; an order for an earlier one is refused. Not set in OrderWho.
	To string `json:"to,omitempty"`
	// Epoch of the control plane; a node that has seen a higher one refuses the order. Not set in
	// OrderWho.
	Epoch  uint64        `json:"epoch,omitempty"`
	Kind   OrderKind     `json:"kind"`
	Within time.Duration `json:"within"` // nanoseconds left to carry it out

	Replica string     `json:"replica,omitempty"` // name, unique on the node
	Spec    Spec       `json:"spec,omitzero"`     // of the function
	Claim   `json:"-"` // sent when the socket is claimed
	// Thousandths of a core; 0: as the spec says.
	CPUMilli int `json:"cpuMilli,omitempty"`
	// The control plane is on another machine. The node replaces those fields of specs that name
	// something of a machine: Group, Secrets, Gateway and Rendezvous.
	Far bool `json:"far,omitempty"`
	// UUIDs of the replica's devices, joined by commas; empty: none.
	Device   string        `json:"device,omitempty"`
	Grace    time.Duration `json:"grace,omitempty"` // nanoseconds
	Wanted   []Wanted      `json:"wanted,omitempty"`
	Function string        `json:"function,omitempty"`
	Digest   string        `json:"digest,omitempty"`
	Target   string        `json:"target,omitempty"`
	Since    uint64        `json:"since,omitempty"`
	Cause    string        `json:"cause,omitempty"`
	Images   Images        `json:"images,omitzero"`
}

// Claim is what a control plane says about a replica that may outlive it.
type Claim struct {
	Revision uint64 // see Replica
	Home     string // see Replica
	Gateway  string // where this process listens for functions; [Client] sets it
}

// MaxImages bounds the images of an announcement.
const MaxImages = 64

// Images is what an order says about images.
type Images struct {
	// Where the node finds images that it lacks, in this order; after these, the registries in the
	// images' names.
	Sources []ImageSource `json:"sources,omitempty"`
	// Digests of the images that functions use. The node removes others after a while.
	InUse []string `json:"inUse,omitempty"`
}

// ImageSource is a process of the cluster that serves images.
type ImageSource struct {
	Node    string `json:"node,omitempty"`    // empty: a control plane
	Control string `json:"control,omitempty"` // name of the control plane, if it is on another machine
	// unix:PATH on the same machine, or the host:port of a node's tunnel. Empty: over the connection
	// that the control plane has made.
	Address string `json:"address,omitempty"`
}

// Wanted is a function whose parameters should be in memory.
type Wanted struct {
	Spec Spec `json:"spec"`
	Key  bool `json:"key,omitempty"` // evicted last
}

// Answer is an answer to an order: progress any number of times, then one that is Done.
type Answer struct {
	V    int      `json:"v"`
	ID   string   `json:"id"` // of the order
	Done bool     `json:"done"`
	From Identity `json:"from"`
	// A phase that has ended; nil in the first answer, which confirms the order.
	Phase *Phase `json:"phase,omitempty"`

	// Fields of the last answer:
	Error  string  `json:"error,omitempty"`
	Code   Code    `json:"code,omitempty"` // kind of Error, such as CodeUnsupported
	PID    int     `json:"pid,omitempty"`
	Path   string  `json:"path,omitempty"`
	Phases []Phase `json:"phases,omitempty"`
	// Bytes that what was loaded takes, or what was evicted took, or what does not fit needs.
	Bytes int64 `json:"bytes,omitempty"`
	// The lack of device memory that caused Error; nil: Error has another cause.
	Memory *MemoryError `json:"memory,omitempty"`
	Events []Event      `json:"events,omitempty"`
}

// Code is the kind of an [Answer]'s Error.
type Code string

// The codes of an [Answer]'s Error. Other errors have no code.
const (
	CodeUnsupported Code = "unsupported" // the node cannot do what is asked
	CodeBusy        Code = "busy"        // what is to go is in use
	CodeNoModel     Code = "noModel"     // the function has no parameters
	CodeNoRoom      Code = "noRoom"      // they do not fit into the node's memory
	CodeNotCached   Code = "notCached"   // they are not in its memory
	CodeOldEpoch    Code = "oldEpoch"    // the node has seen a control plane with a higher epoch
)

// Codes maps codes to the errors of both sides. A daemon answers one of these errors with its code.
// For callers of [Client], an answer with a code wraps that error.
type Codes map[Code]error

// of returns the code of an error; empty: it has none.
func (c Codes) of(err error) Code {
	for _, code := range slices.Sorted(maps.Keys(c)) {
		if errors.Is(err, c[code]) {
			return code
		}
	}
	return ""
}

// Error is the error of an order to a node: the daemon answered it, or no answer came.
type Error struct {
	Node string
	Err  error
}

// Error returns the text, which begins with the node's name.
func (e *Error) Error() string { return fmt.Sprintf("node %q: %v", e.Node, e.Err) }

// Unwrap returns the error without the node's name.
func (e *Error) Unwrap() error { return e.Err }

// answered is an error that a daemon has answered.
type answered struct {
	text   string
	kind   error        // nil: it has no code
	memory *MemoryError // nil: none
	room   *roomError   // nil: none
}

// roomError says how many bytes of a node's memory did not fit.
type roomError struct{ bytes int64 }

func (e *roomError) Error() string { return fmt.Sprintf("%d bytes do not fit", e.bytes) }

// NeedsMemory returns the bytes.
func (e *roomError) NeedsMemory() int64 { return e.bytes }

func (e *answered) Error() string { return e.text }

// Unwrap returns the errors of [Codes], of devices' memory and of the node's memory that the daemon
// has answered with the text.
func (e *answered) Unwrap() []error {
	var all []error
	if e.kind != nil {
		all = append(all, e.kind)
	}
	if e.memory != nil {
		all = append(all, e.memory)
	}
	if e.room != nil {
		all = append(all, e.room)
	}
	return all
}

// MemoryError means that a replica's devices have too little memory for it.
type MemoryError struct {
	Devices []string `json:"devices,omitempty"` // UUIDs of the full devices; empty: unknown
	Text    string   `json:"text"`              // how much memory was wanted and free
}

// Error returns the text.
func (e *MemoryError) Error() string { return e.Text }

// EventKind says what an [Event] reports.
type EventKind string

// The kinds of an [Event].
const (
	EventExit  EventKind = "exit"  // a replica's process ended: Replica, Function, PID, Cause, End
	EventEvict EventKind = "evict" // a zygote was ended for want of memory: Function, Bytes
)

// Event is something that a node reports without being asked. Events are numbered from 1, so that
// missed ones can be requested.
type Event struct {
	V        int       `json:"v"`
	ID       string    `json:"id"` // the daemon's
	Number   uint64    `json:"number"`
	Epoch    uint64    `json:"epoch,omitempty"` // as of an Inventory
	At       time.Time `json:"at"`
	Kind     EventKind `json:"kind"`
	Replica  string    `json:"replica,omitempty"`
	Function string    `json:"function,omitempty"`
	PID      int       `json:"pid,omitempty"`
	Cause    string    `json:"cause,omitempty"`
	End      string    `json:"end,omitempty"` // of an exit: task.End
	// The lack of device memory that ended the replica; nil: it ended for another reason.
	Memory *MemoryError `json:"memory,omitempty"`
	Bytes  int64        `json:"bytes,omitempty"`
}
