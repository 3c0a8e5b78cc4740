package device

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// Info is the last known state of a device.
type Info struct {
	UUID   string // GPU-… or MIG-…
	Index  string // index of the GPU on the machine, such as 2, or GPU:INSTANCE, such as 2:0
	Name   string
	Memory int64 // bytes that processes may use
	Used   int64 // bytes that they use
	// Share of recent time in which the device computed, 0 to 1; -1: unknown.
	Utilisation float64
	Temperature int           // degrees Celsius; 0: unknown, as for an instance
	Power       float64       // in watts; 0: unknown, as for an instance
	Processes   map[int]int64 // bytes by pid, if the driver reports them; must not be changed
	Fault       Fault
}

// Library is the part of NVML that is used; nvml.New() implements it.
type Library interface {
	Init() nvml.Return
	Shutdown() nvml.Return
	Extensions() nvml.ExtendedInterface
	DeviceGetCount() (int, nvml.Return)
	DeviceGetHandleByIndex(index int) (nvml.Device, nvml.Return)
	EventSetCreate() (nvml.EventSet, nvml.Return)
}

// Config configures a Watch.
type Config struct {
	Share   Share
	Library Library       // nil: the machine's
	Path    string        // of the machine's library; empty: the one that the system's linker finds
	Every   time.Duration // between two looks; 0: 3 s
	Timeout time.Duration // of a look; 0: 10 s
	Log     *slog.Logger
}

// Watch monitors the devices. Its methods are safe for concurrent use.
type Watch struct {
	cfg  Config
	quit chan struct{}
	once sync.Once
	done chan struct{}      // closed when the library's owner has ended
	asks chan chan struct{} // of Look: each is closed after a look

	mu    sync.Mutex
	seen  []Info    // sorted by index
	began time.Time // start of the running look; zero: none runs
}

// Open starts a watch. It returns after the first look at the devices, or after Timeout. The caller
// closes the Watch.
func Open(cfg Config) *Watch {
	cfg.Every = cmp.Or(cfg.Every, 3*time.Second)
	cfg.Timeout = cmp.Or(cfg.Timeout, 10*time.Second)
	w := &Watch{cfg: cfg, quit: make(chan struct{}), done: make(chan struct{}), asks: make(chan chan struct{})}
	if cfg.Share.none {
		close(w.done)
		return w
	}
	switch {
	case cfg.Library != nil:
	case cfg.Path != "":
		w.cfg.Library = nvml.New(nvml.WithLibraryPath(cfg.Path))
	default:
		w.cfg.Library = nvml.New()
	}
	looked := make(chan struct{})
	go w.own(looked) // Close waits for it
	select {
	case <-looked:
	case <-time.After(cfg.Timeout):
	}
	return w
}

// Devices returns the last known state of the share's devices, by index. It does not wait.
func (w *Watch) Devices() []Info {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := slices.Clone(w.seen)
	if since := time.Since(w.began); !w.began.IsZero() && since > w.cfg.Timeout {
		for i := range out {
			out[i].Fault = Fault{Unanswered, fmt.Sprintf("NVML has not answered for %v", since.Round(time.Second))}
		}
	}
	return out
}

// Look reads the devices now and returns when it has. It returns an error if ctx ends first.
// Without a library, Look has no effect.
func (w *Watch) Look(ctx context.Context) error {
	looked := make(chan struct{})
	select {
	case w.asks <- looked:
	case <-w.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case <-looked:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Close ends the watch. It does not wait for a library that hangs.
func (w *Watch) Close() {
	w.once.Do(func() { close(w.quit) })
	select {
	case <-w.done:
	case <-time.After(w.cfg.Timeout):
		w.cfg.Log.Warn("NVML does not answer; the call that hangs is abandoned", "waited", w.cfg.Timeout)
	}
}

// own owns the library. No other goroutine calls it.
func (w *Watch) own(looked chan<- struct{}) {
	defer close(w.done)
	r := &reader{lib: w.cfg.Library, share: w.cfg.Share, log: w.cfg.Log, known: map[string]known{}, trouble: map[string]trouble{}}
	w.look(r)
	if !r.open { // at the first look: there is nothing to watch
		close(looked)
		return
	}
	w.log(nil)
	for _, name := range w.cfg.Share.names {
		if !slices.ContainsFunc(w.seen, func(d Info) bool { return (Share{names: []string{name}}).has(d, r.known[d.UUID].gpu) }) {
			w.cfg.Log.Warn("no such device; it is used once it appears", "device", name)
		}
	}
	close(looked)
	tick := time.NewTicker(w.cfg.Every)
	defer tick.Stop()
	for {
		select {
		case <-w.quit:
			r.shutdown()
			return
		case <-tick.C:
			w.lookAgain(r)
		case looked := <-w.asks:
			w.lookAgain(r)
			close(looked)
		}
	}
}

// lookAgain reads all devices once, and logs what has changed.
func (w *Watch) lookAgain(r *reader) {
	before := w.seen // written by this goroutine alone
	w.look(r)
	w.log(before)
}

// look reads all devices once.
func (w *Watch) look(r *reader) {
	w.mu.Lock()
	w.began = time.Now()
	w.mu.Unlock()
	late := time.AfterFunc(w.cfg.Timeout, func() {
		w.cfg.Log.Error("NVML does not answer: no device is used until it does", "waited", w.cfg.Timeout)
	})
	seen := r.read(time.Now())
	late.Stop()
	w.mu.Lock()
	w.seen, w.began = seen, time.Time{}
	w.mu.Unlock()
}

// log logs which devices have changed.
func (w *Watch) log(before []Info) {
	for _, d := range w.seen {
		i := slices.IndexFunc(before, func(b Info) bool { return b.UUID == d.UUID })
		switch {
		case i < 0 && d.Fault.Kind == Healthy:
			w.cfg.Log.Info("device", "index", d.Index, "uuid", d.UUID, "name", d.Name, "bytes", d.Memory)
		case d.Fault.Kind != Healthy && (i < 0 || before[i].Fault.Kind == Healthy):
			w.cfg.Log.Error("device is unhealthy and not used until it recovers", "index", d.Index, "uuid", d.UUID, "fault", d.Fault.Kind, "error", d.Fault.Text)
		case i >= 0 && before[i].Fault.Kind != Healthy && d.Fault.Kind == Healthy:
			w.cfg.Log.Info("device is healthy again", "index", d.Index, "uuid", d.UUID)
		}
	}
}
