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

// Host is what zygotes get from their daemon.
type Host struct {
	Warden *warden.Client
	Pool   *resources.Pool
	Exits  *resources.Ends
	Meter  resources.Meter
	Limits resources.Limits // of a zygote's cgroup
	// Context ends with the daemon. Children that are forked ahead of need are given up then: they
	// outlive the call that began them.
	Context context.Context
	// Detached is closed once what runs is left to the warden.
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
	PID    int           // 0: it is no process but memory
	Loaded time.Time     // when it was
	Load   time.Duration // how long that took
	Bytes  int64         // proportional set size once loaded
	// Of a worker: bytes resident in it that are other processes' part of what it shares.
	Shared    int64
	Prepacked bool // its weights are mapped from a file
}

// Zygote is a zygote process, a worker, or memory that replicas map in place of a zygote. Its
// methods are safe for concurrent use.
//
// One goroutine, read, receives what the process says. The Family has a lock for what changes; the
// other fields are set before Load, Pack or Adopt returns the Zygote, and do not change.
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
	output  *sandbox.Output
	memory  []*os.File    // graph and weights, sealed; nil: it is a process
	freed   sync.Once     // of memory
	gone    chan struct{} // closed when the process has ended and its children are reported
}

func newZygote(h *Host, key Key, entry, function string) *Zygote {
	z := &Zygote{Key: key, Entry: entry, Function: function, host: h, held: h.Pool.New(), gone: make(chan struct{})}
	z.Family = newFamily(z)
	return z
}

// prints takes a line that the zygote has printed.
func (z *Zygote) prints(stream, line string) {
	z.host.Output(z.Function, z.Key.What(), stream, line)
}

// Held returns what the process holds of the node.
func (z *Zygote) Held() *resources.Reservation {
	if z == nil {
		return nil
	}
	return z.held
}

// Gone is closed when the zygote has ended or is left to the warden, and its children are reported.
func (z *Zygote) Gone() <-chan struct{} { return z.gone }

// Works tells whether a zygote, which may be nil, is a worker.
func (z *Zygote) Works() bool { return z != nil && z.Key.Form == Worker }

// Memory returns the sealed files that replicas map; nil: it is a process. They stay the Zygote's.
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

// Parent returns the zygote as memory is counted.
func (z *Zygote) Parent() resources.Parent {
	return resources.Parent{Entry: z.Entry, PID: z.PID, Bytes: z.Bytes, Shared: z.Shared, Worker: z.Works()}
}

// measureShared notes how much of what seems to be a worker's is other processes': only what it
// grows by is its own.
func (z *Zygote) measureShared() {
	if !z.Works() {
		return
	}
	anonymous, files := z.host.Meter.Resident(z.PID)
	if bytes, err := sandbox.PSS(z.PID); err == nil {
		z.Shared = max(0, anonymous+files-bytes)
	}
}

// Kill ends the process. It fails when the warden is gone, and the zygote with it.
func (z *Zygote) Kill() {
	if z.memory != nil {
		z.free(false)
		return
	}
	_ = z.host.Warden.Signal(z.Entry, syscall.SIGKILL)
}

// Stop ends the zygote and its children and waits.
func (z *Zygote) Stop() {
	z.Kill()
	<-z.gone
}

// Lied ends a zygote for a lie, and returns the error of the start that found it.
func (z *Zygote) Lied(lie error) error {
	z.Family.mu.Lock()
	z.Family.lie = lie
	z.Family.mu.Unlock()
	z.Kill()
	return ErrLied{lie}
}

// ErrLied says that a zygote was ended for a lie.
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

// Leave stops to listen to a zygote, or closes memory, that the warden keeps. The daemon has closed
// Host.Detached before.
func (z *Zygote) Leave() {
	if z.memory != nil {
		z.free(true)
		return
	}
	_ = z.control.conn.Close() // read ends
}

// free gives memory back, once its replicas have ended; they keep what they map. kept says that it
// is left to the warden.
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
	// errNotLoaded says that a zygote ended early. Its status says why: it was set before the
	// socket closed.
	errNotLoaded = errors.New("zygote ended before it had loaded its parameters")
	// errChildEnded says that a child ended at its gate.
	errChildEnded = errors.New("its process ended before it was told which replica it is")
)

// Impossible says that a variant's parameters cannot be kept in a form.
type Impossible struct{ Why string }

func (e Impossible) Error() string { return e.Why }

// said is why a zygote does not load, in its own words.
type said struct{ who, text string }

func (e said) Error() string { return e.who + ": " + e.text }

// Unwrap returns the words.
func (e said) Unwrap() error { return resources.Printed(e.text) }
