package warden

import (
	"context"
	"errors"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// Process is a process to start, and what the warden keeps for it.
type Process struct {
	Name    string // name of the entry; unique
	Meta    []byte // description for the next manager; at most MaxMeta bytes
	Command sandbox.Command
	Keep    []*os.File // descriptors kept under the name; the caller closes them
	// Idle says that the process is useful only while there is a manager or it has children, as a
	// zygote is. See Server.Linger.
	Idle bool
}

// Kept is an entry of a warden: a process, descriptors, or both.
type Kept struct {
	Name   string
	Meta   []byte
	Files  []*os.File      // as they were put; the receiver closes them
	PID    int             // 0: no process
	Ended  bool            // the process has ended with Status
	Status unix.WaitStatus // undefined while the process runs
	// Lost is the number of bytes that the warden dropped from its pipes without a manager.
	Lost int64
}

// Exit says how a process ended.
type Exit struct {
	Name   string
	PID    int
	Status unix.WaitStatus
	Err    error // the warden has ended, and the process with it; Status is undefined
}

// Errors that callers may distinguish.
var (
	ErrClosed  = errors.New("warden: closed")               // the client was closed
	ErrLost    = errors.New("the node's warden has ended")  // its processes have ended, too
	ErrTaken   = errors.New("an entry of this name exists") // returned by Start
	ErrUnknown = errors.New("no entry of this name")        // returned by Put and Signal
)

// Limits of what a manager may send.
const (
	MaxMeta  = 16 << 10 // bytes per description
	MaxFiles = 64       // descriptors kept per name, and per start of a process
)

// Client is a manager's connection to its warden. Its methods are safe for concurrent use.
type Client struct{ to keeper }

// keeper is a warden in this process, or the connection to one in another process.
type keeper interface {
	attach(onExit func(Exit)) ([]Kept, error)
	release() error
	start(ctx context.Context, p Process) (pid int, err error)
	signal(name string, s syscall.Signal) error
	put(name string, meta []byte, files []*os.File) error
	drop(name string) error
	close()
}

// InProcess returns a warden inside this process, whose processes r starts. They end with this
// process, or with Close, which closes r as well.
func InProcess(r sandbox.Runtime) *Client { return &Client{newStore(r)} }

// Attach makes the caller the manager and returns all entries. From then on, one goroutine calls
// onExit once for each process that ends. It does not repeat the ends that the returned entries
// show. onExit must not block and must not call the Client. The warden stops reading output.
// Entries of ended processes stay until they are dropped.
func (c *Client) Attach(onExit func(Exit)) ([]Kept, error) { return c.to.attach(onExit) }

// Release undoes Attach. onExit is not called after Release returns.
func (c *Client) Release() error { return c.to.release() }

// Start starts a process and returns its pid. The process leads its own session, and its process
// group ends with it. The entry stays after the process has ended, until it is dropped. If ctx ends
// first, Start fails soon, and neither an entry nor a process is left.
func (c *Client) Start(ctx context.Context, p Process) (pid int, err error) {
	return c.to.start(ctx, p)
}

// Signal signals a process. It returns nil if the process has ended.
func (c *Client) Signal(name string, s syscall.Signal) error { return c.to.signal(name, s) }

// Put keeps copies of descriptors, and a description, under a new name or in place of those of an
// existing name. Without files, an existing name keeps its descriptors. The caller closes files.
func (c *Client) Put(name string, meta []byte, files ...*os.File) error {
	return c.to.put(name, meta, files)
}

// Drop removes an entry. It returns nil if there is no entry of this name, and an error if the
// entry's process still runs.
func (c *Client) Drop(name string) error { return c.to.drop(name) }

// Close ends all processes of a warden inside this process. It only disconnects from a warden in
// another process.
func (c *Client) Close() { c.to.close() }
