package warden

import (
	"errors"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// Process is a process to be started, with what is kept for it.
type Process struct {
	Name    string // of the entry; unique
	Meta    []byte // what the manager wants to be told again; at most MaxMeta bytes
	Command sandbox.Command
	Keep    []*os.File // descriptors kept under the name; the caller's to close
	// Idle says that the process is of use only while there is a manager or it has children: a zygote. See Server.Linger.
	Idle bool
}

// Kept is an entry of a warden: a process, descriptors, or both.
type Kept struct {
	Name   string
	Meta   []byte
	Files  []*os.File      // as they were put; the receiver's to close
	PID    int             // 0: no process
	Ended  bool            // the process has, as Status says
	Status unix.WaitStatus // undefined while it runs
	Lost   int64           // bytes that were read from its pipes while there was no manager
}

// Exit is the end of a process.
type Exit struct {
	Name   string
	PID    int
	Status unix.WaitStatus
	Err    error // the warden itself has ended, and the process with it; Status is undefined then
}

// Errors that callers may want to tell apart.
var (
	ErrClosed  = errors.New("warden: closed")               // the client was closed
	ErrLost    = errors.New("the node's warden has ended")  // and all that it had started
	ErrTaken   = errors.New("an entry of this name exists") // of Start
	ErrUnknown = errors.New("no entry of this name")        // of Put and Signal
)

// Bounds of what a manager may send.
const (
	MaxMeta  = 16 << 10 // bytes of an entry's description
	MaxFiles = 64       // descriptors kept under a name, and those that a process is started with
)

// Client is a manager's way to its warden. Its methods are safe for concurrent use.
type Client struct{ to keeper }

// keeper is a warden in this process, or the way to one in another.
type keeper interface {
	attach(onExit func(Exit)) ([]Kept, error)
	release() error
	start(p Process) (pid int, err error)
	signal(name string, s syscall.Signal) error
	put(name string, meta []byte, files []*os.File) error
	drop(name string) error
	close()
}

// InProcess returns a warden inside this process. Its processes end with it, or with Close.
func InProcess() *Client { return &Client{newStore()} }

// Attach makes the caller the manager and returns all that is kept. From now on onExit is called for each process that
// ends and was not in the list as ended, by one goroutine at a time; it must not block, nor call the Client. Output is no
// longer read away. Processes that have ended stay in the list until they are dropped.
func (c *Client) Attach(onExit func(Exit)) ([]Kept, error) { return c.to.attach(onExit) }

// Release is the opposite of Attach. When it has returned, onExit is not called any more.
func (c *Client) Release() error { return c.to.release() }

// Start starts a process and returns its pid. It leads a session of its own, and what it leaves in its process group ends
// with it. The entry stays when the process has ended, until it is dropped.
func (c *Client) Start(p Process) (pid int, err error) { return c.to.start(p) }

// Signal signals a process; one that has ended needs none.
func (c *Client) Signal(name string, s syscall.Signal) error { return c.to.signal(name, s) }

// Put keeps descriptors, which stay the caller's to close, and a description: under a new name, or in place of those of a
// name that is there. Without files those that are there stay.
func (c *Client) Put(name string, meta []byte, files ...*os.File) error {
	return c.to.put(name, meta, files)
}

// Drop forgets an entry whose process has ended or that has none; one that is not there needs it not. A process that runs is
// an error.
func (c *Client) Drop(name string) error { return c.to.drop(name) }

// Close ends all processes of a warden inside this process. From another process's, it takes leave.
func (c *Client) Close() { c.to.close() }
