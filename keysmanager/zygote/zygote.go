package zygote

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/warden"
)

// Host is what a daemon gives its zygotes.
type Host struct {
	Warden *warden.Client
	Pool   *resources.Pool
	Exits  *resources.Ends
	Meter  resources.Meter
	Limits resources.Limits // of a zygote's cgroup
	// Context ends with the daemon. It bounds forks ahead of need, because they outlive the call that
	// began them.
	Context context.Context
	// Detached is closed when the daemon leaves its processes to the warden.
	Detached <-chan struct{}
	// Tasks are goroutines that the daemon waits for before it ends.
	Tasks *sync.WaitGroup
	// Describe encodes a description for the warden.
	Describe func(Description) []byte
	// Output gets each line that a zygote prints.
	Output func(function, replica, stream, line string)
	Log    *slog.Logger
}

// Facts are what is known of a zygote once it has loaded. They do not change.
type Facts struct {
	PID    int           // 0: memory in place of a process
	Loaded time.Time     // time at which it had loaded
	Load   time.Duration // duration of the load
	Bytes  int64         // proportional set size once loaded
	// Of a worker: bytes resident in it that belong to other processes, with which it shares them.
	Shared    int64
	Prepacked bool // its weights are mapped from a file
}

// Zygote is a zygote process, a worker, or memory that replicas map in place of a zygote. Its
// methods are safe for concurrent use.
//
// One goroutine runs read, which receives the messages of the process. The Family has a lock for
// its changing state. The other fields are set before Load, Pack or Adopt returns the Zygote, and
// do not change.
type Zygote struct {
	Family *Family // its children

	Key      Key
	Entry    string // of the warden
	Function string // that it was loaded for
	Facts

	host    *Host
	held    *resources.Reservation
	ended   <-chan warden.Exit
	control control
	pids    sandbox.PIDSpace // of the process: its messages have the numbers of its namespace
	output  *sandbox.Output
	memory  []*os.File    // graph and weights, sealed; nil: it is a process
	freed   sync.Once     // of memory
	gone    chan struct{} // closed when it has ended and the ends of its children are reported
}

func newZygote(h *Host, key Key, entry, function string) *Zygote {
	z := &Zygote{Key: key, Entry: entry, Function: function, host: h, held: h.Pool.New(), gone: make(chan struct{})}
	z.Family = newFamily(z)
	return z
}

// prints handles a line that the zygote has printed.
func (z *Zygote) prints(stream, line string) {
	z.host.Output(z.Function, z.Key.What(), stream, line)
}

// Held returns the reservation of the process.
func (z *Zygote) Held() *resources.Reservation {
	if z == nil {
		return nil
	}
	return z.held
}

// Gone returns a channel that is closed when the zygote has ended or is left to the warden, and the
// ends of its children are reported.
func (z *Zygote) Gone() <-chan struct{} { return z.gone }

// Works reports whether a zygote, which may be nil, is a worker.
func (z *Zygote) Works() bool { return z != nil && z.Key.Form == Worker }

// Memory returns the sealed files that replicas map; nil: it is a process. The Zygote closes them.
func (z *Zygote) Memory() []*os.File { return z.memory }

// Path returns the path of replicas that start from z.
func (z *Zygote) Path() string {
	switch {
	case z.Works():
		return PathResident
	case z.memory != nil:
		return PathMap
	case z.Prepacked:
		return PathFork
	}
	return PathHeap
}

// Parent returns the zygote in the form in which memory is counted.
func (z *Zygote) Parent() resources.Parent {
	return resources.Parent{Entry: z.Entry, PID: z.PID, Bytes: z.Bytes, Shared: z.Shared, Worker: z.Works()}
}

// measureShared measures how much of a worker's memory belongs to other processes. Only memory
// beyond that counts as the worker's.
func (z *Zygote) measureShared() {
	if !z.Works() {
		return
	}
	anonymous, files := z.host.Meter.Resident(z.PID)
	if bytes, err := sandbox.PSS(z.PID); err == nil {
		z.Shared = max(0, anonymous+files-bytes)
	}
}

// Kill kills the process. If the signal fails, the warden is gone, and the zygote with it.
func (z *Zygote) Kill() {
	if z.memory != nil {
		z.free(false)
		return
	}
	_ = z.host.Warden.Signal(z.Entry, syscall.SIGKILL)
}

// Stop ends the zygote and its children and waits for their ends.
func (z *Zygote) Stop() {
	z.Kill()
	<-z.gone
}

// Lied ends a zygote that violated the protocol, and returns the error of the start that found it.
func (z *Zygote) Lied(lie error) error {
	z.Family.mu.Lock()
	z.Family.lie = lie
	z.Family.mu.Unlock()
	z.Kill()
	return ErrLied{lie}
}

// ErrLied means that a zygote was ended because it violated the protocol.
type ErrLied struct{ error }

func (e ErrLied) Error() string { return "zygote was ended: " + e.error.Error() }

// Alive reports whether the zygote has not ended. Memory is alive until it is freed.
func (z *Zygote) Alive() bool {
	select {
	case <-z.gone:
		return false
	default:
		return z.Died() == nil
	}
}

// Died returns why the zygote ended; nil: it lives.
func (z *Zygote) Died() error {
	z.Family.mu.Lock()
	defer z.Family.mu.Unlock()
	return z.Family.died
}

// Replace notes that the zygote's parameters have been invalidated, for this daemon and the next.
func (z *Zygote) Replace() error {
	z.Family.mu.Lock()
	z.Family.replaced = true
	z.Family.mu.Unlock()
	return z.host.Warden.Put(z.Entry, z.host.Describe(z.Describe()))
}

// Leave stops reading from a zygote that the warden keeps, or closes memory that the warden keeps.
// The daemon has closed Host.Detached before.
func (z *Zygote) Leave() {
	if z.memory != nil {
		z.free(true)
		return
	}
	_ = z.control.conn.Close() // read ends
}

// free frees memory once its replicas have ended; they keep their own mappings. kept reports that
// the memory is left to the warden.
func (z *Zygote) free(kept bool) {
	z.freed.Do(func() {
		resources.CloseFiles(z.memory)
		if !kept {
			z.host.Pool.Drop(z.Entry)
		}
		close(z.gone)
	})
}

// Errors of Load that the daemon tells apart.
var (
	// errNotLoaded means that a zygote ended early. Its status says why: it was set before the socket
	// closed.
	errNotLoaded = errors.New("zygote ended before it had loaded its parameters")
	// errChildEnded means that a child ended at its gate.
	errChildEnded = errors.New("its process ended before it was told which replica it is")
)

// Impossible is the error of parameters that cannot be kept in a form.
type Impossible struct{ Why string }

func (e Impossible) Error() string { return e.Why }

// said is why a zygote does not load, in the zygote's words.
type said struct{ who, text string }

func (e said) Error() string { return e.who + ": " + e.text }

// Unwrap returns the words.
func (e said) Unwrap() error { return resources.Printed(e.text) }
