package lease

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Entry is a change in a [Store]: a key's new value and revision.
type Entry = struct {
	Key      string
	Value    []byte
	Revision uint64
	Deleted  bool
}

// Store keeps records. queue.KV is one, with an adapter for its errors.
type Store interface {
	// Replace stores value if the key has revision rev, or no value if rev is 0. Otherwise it returns
	// ErrConflict. After any other error, the value may be stored, now or later.
	Replace(ctx context.Context, key string, value []byte, rev uint64) (uint64, error)
	// Get returns a value and its revision. It returns ErrNone if there is none.
	Get(ctx context.Context, key string) ([]byte, uint64, error)
	// Watch calls f with all values and then with each change, until stop is called.
	Watch(ctx context.Context, f func(Entry)) (stop func(), err error)
}

// Errors of a [Store].
var (
	ErrConflict = errors.New("lease: the record has another revision")
	ErrNone     = errors.New("lease: no record")
)

// KeeperConfig configures a Keeper. Clock and First are optional.
type KeeperConfig struct {
	Store Store
	Me    string // id of this process, which no other process ever has
	Where string // what others need to know of this process
	Knows string // features of this process, separated by spaces
	Log   *slog.Logger
	// Clock returns the time of a clock that only runs forward; nil: the machine's time since its
	// start, which counts the time of sleep.
	Clock func() time.Duration
	First func() uint64 // see Config; nil: the Unix time in seconds
}

// Keeper takes and renews leases. Its methods are safe for concurrent use.
type Keeper struct {
	cfg    KeeperConfig
	ctx    context.Context
	cancel context.CancelFunc
	group  sync.WaitGroup
	stop   func() // ends the watch

	mu     sync.Mutex
	leases map[string]*Lease
	seen   map[string]Seen // the latest change of each key, for leases that are asked for later
}

// sinceBoot returns the time since the machine has started.
func sinceBoot() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &t); err != nil {
		panic(fmt.Sprintf("lease: clock: %v", err)) // no Linux that we run on lacks it
	}
	return time.Duration(t.Nano())
}

// Open returns a Keeper that follows the store's leases. The caller closes it.
func Open(ctx context.Context, cfg KeeperConfig) (*Keeper, error) {
	if cfg.Clock == nil {
		cfg.Clock = sinceBoot
	}
	if cfg.First == nil {
		cfg.First = func() uint64 { return uint64(max(time.Now().Unix(), 1)) }
	}
	k := &Keeper{cfg: cfg, leases: map[string]*Lease{}, seen: map[string]Seen{}}
	k.ctx, k.cancel = context.WithCancel(context.WithoutCancel(ctx))
	var err error
	if k.stop, err = cfg.Store.Watch(k.ctx, k.watched); err != nil {
		k.cancel()
		return nil, fmt.Errorf("leases: %w", err)
	}
	return k, nil
}

// Close releases all leases that this process holds, if the store answers before ctx ends.
func (k *Keeper) Close(ctx context.Context) {
	k.mu.Lock()
	all := make([]*Lease, 0, len(k.leases))
	for _, l := range k.leases {
		all = append(all, l)
	}
	k.mu.Unlock()
	var released sync.WaitGroup
	for _, l := range all {
		released.Go(func() { l.Release(ctx) })
	}
	released.Wait()
	k.cancel()
	k.stop()
	k.group.Wait()
}

// watched takes a change of the store.
func (k *Keeper) watched(e Entry) {
	s := Seen{Revision: e.Revision}
	if !e.Deleted {
		var err error
		if s.Record, err = decode(e.Value); err != nil {
			k.cfg.Log.Error("lease cannot be read", "lease", e.Key, "error", err)
			return
		}
	}
	k.mu.Lock()
	k.seen[e.Key] = s
	l := k.leases[e.Key]
	k.mu.Unlock()
	if l != nil {
		l.post(s)
	}
}

func decode(b []byte) (Record, error) {
	var r Record
	if err := json.Unmarshal(b, &r); err != nil {
		return Record{}, fmt.Errorf("record of %d bytes: %w", len(b), err)
	}
	if r.V != Version {
		return Record{}, fmt.Errorf("record of version %d, want %d: run the same release of stagecoach everywhere", r.V, Version)
	}
	return r, nil
}

// Options are those of one lease.
type Options struct {
	Passive bool // follow it, and do not take it
	// Changed is called in order when this process gets or loses the lease, and when the epoch
	// changes. It must not block for long, because the lease is not renewed meanwhile.
	Changed func(State)
}

// State is what a process knows of a lease.
type State struct {
	Holds  bool   // this process holds it
	Epoch  uint64 // of the latest holding that is known
	Since  uint64 // if Holds: see Core.Since
	Holder string // empty: nobody, as far as is known
	Where  string // of the holder
	Knows  string // features of the holder, separated by spaces
}

// Understands reports whether the holder has a feature.
func (s State) Understands(feature string) bool {
	return slices.Contains(strings.Fields(s.Knows), feature)
}

// Lease is a name that one process at a time may hold. Its methods are safe for concurrent use.
type Lease struct {
	k       *Keeper
	name    string
	changed func(State)
	events  chan Event
	done    chan struct{} // closed when it is released
	close   func()        // closes done, once

	mu   sync.Mutex
	core *Core
}

// eventsWaiting bounds what waits for a lease. Its goroutine takes microseconds per event.
const eventsWaiting = 64

// Lease begins to take a lease, or to follow it. Each name may be asked for once.
func (k *Keeper) Lease(name string, o Options) *Lease {
	l := &Lease{
		k: k, name: name, changed: o.Changed, events: make(chan Event, eventsWaiting), done: make(chan struct{}),
		core: NewCore(Config{Me: k.cfg.Me, Where: k.cfg.Where, Knows: k.cfg.Knows, Passive: o.Passive, First: k.cfg.First}),
	}
	l.close = sync.OnceFunc(func() { close(l.done) })
	if l.changed == nil {
		l.changed = func(State) {}
	}
	l.core.asked = k.cfg.Clock() - readAgain
	l.core.sent = k.cfg.Clock() - Beat
	k.mu.Lock()
	k.leases[name] = l
	seen, known := k.seen[name]
	k.mu.Unlock()
	if known {
		l.post(seen)
	}
	k.group.Go(l.run)
	return l
}

// post passes an event to the lease's goroutine.
func (l *Lease) post(ev Event) {
	select {
	case l.events <- ev:
	case <-l.done:
	case <-l.k.ctx.Done():
	}
}

// run applies events until the lease is released and its last write has ended, or the Keeper is
// closed.
func (l *Lease) run() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	var before State
	for {
		var ev Event = Tick{}
		select {
		case <-l.k.ctx.Done():
			return
		case <-l.done:
			return
		case <-timer.C:
		case ev = <-l.events:
		}
		l.mu.Lock()
		now := l.k.cfg.Clock()
		effects := l.core.Step(now, ev)
		l.mu.Unlock()
		for _, e := range effects {
			switch e := e.(type) {
			case Wake:
				timer.Reset(e.At - now)
			case Write:
				l.k.group.Go(func() { l.write(e) })
			case Read:
				l.k.group.Go(l.read)
			}
		}
		if is := l.State(); is != before {
			before = is
			l.changed(is)
		}
		if slices.Contains(effects, Effect(Freed{})) {
			l.close()
		}
	}
}

// storeTimeout bounds a write or a read.
const storeTimeout = 2 * time.Second

// write stores a record.
func (l *Lease) write(e Write) {
	ctx, cancel := context.WithTimeout(l.k.ctx, storeTimeout)
	defer cancel()
	b, err := json.Marshal(e.Record)
	if err == nil {
		var rev uint64
		if rev, err = l.k.cfg.Store.Replace(ctx, l.name, b, e.Revision); err == nil {
			l.post(Wrote{e.Record.Beat, rev})
			return
		}
	}
	l.k.cfg.Log.Debug("lease not written", "lease", l.name, "epoch", e.Record.Epoch, "beat", e.Record.Beat, "error", err)
	l.post(Failed{Beat: e.Record.Beat, Conflict: errors.Is(err, ErrConflict)})
}

func (l *Lease) read() {
	ctx, cancel := context.WithTimeout(l.k.ctx, storeTimeout)
	defer cancel()
	b, rev, err := l.k.cfg.Store.Get(ctx, l.name)
	switch {
	case errors.Is(err, ErrNone):
		l.post(Seen{})
		return
	case err != nil:
		return // it is read again
	}
	r, err := decode(b)
	if err != nil {
		l.k.cfg.Log.Error("lease cannot be read", "lease", l.name, "error", err)
		return
	}
	l.post(Seen{r, rev})
}

// State returns what this process knows of the lease now.
func (l *Lease) State() State {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := l.core.Holder()
	_, holds := l.core.Holds(l.k.cfg.Clock())
	is := State{Holds: holds, Epoch: r.Epoch, Holder: r.Holder, Where: r.Where, Knows: r.Knows}
	if holds {
		is.Since = l.core.Since()
	}
	return is
}

// Epoch returns the epoch with which this process holds the lease now. ok is false if it does not.
// Ask right before an action that only the holder may take.
func (l *Lease) Epoch() (epoch uint64, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.core.Holds(l.k.cfg.Clock())
}

// SetPassive says whether this process follows the lease without taking it. It keeps a lease that
// it holds, until the lease lapses.
func (l *Lease) SetPassive(passive bool) { l.post(Stand{passive}) }

// Release gives the lease up for ever, so that another process can take it at once. It returns when
// the store names this process no more, or ctx has ended.
func (l *Lease) Release(ctx context.Context) {
	l.post(Release{})
	select {
	case <-l.done:
	case <-ctx.Done():
	case <-l.k.ctx.Done():
	}
}
