package cluster

import (
	"errors"
	"fmt"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/profile"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// Errors of functions that cannot be pinned.
var (
	ErrPinned = errors.New("cluster: pinned by another holder")
	ErrInUse  = errors.New("cluster: in use")
)

// Quiet is how long a function must have had no request before it can be pinned, because a pinned
// function serves its users worse.
const Quiet = profile.Quiet

// Pin keeps a function at one replica with a given CPU limit, so that the function can be measured.
// A pin is a lease: it ends at Until unless its holder renews it. While the pin lasts, policies get
// no new measurements of the function.
type Pin struct {
	Holder   string
	CPUMilli int // thousandths of a core; 0: as declared
	Until    time.Time
}

// at returns the pin if it is valid at that time.
func (p *Pin) at(now time.Time) (Pin, bool) {
	if p == nil || !now.Before(p.Until) {
		return Pin{}, false
	}
	return *p, true
}

// Held is the present state of a [Pin].
type Held struct {
	plan.Replica      // the pinned replica; empty: none yet
	CPUMilli     int  // present CPU limit, as far as the node was told; 0: as declared
	Unbounded    bool // the node says that it cannot limit CPU
	Alone        bool // there is no other replica
	Slots        int  // concurrent batches
	Batch        int  // largest batch
}

// Pin pins a function that nobody uses, or changes or renews its pin. It returns the present state.
// The function must be deployed.
func (l *Local) Pin(function pipeline.Key, p Pin) (Held, error) {
	if !l.PinnedBy(function, p.Holder) {
		now := time.Now()
		if is := l.cfg.Lines.Signals(function, now); is.Waiting+is.Running > 0 || now.Sub(is.Demand.Last) < Quiet {
			return Held{}, fmt.Errorf("function %q: %w", function, ErrInUse)
		}
	}
	h, changed, err := l.pin(function, p)
	if err == nil {
		l.cfg.Lines.PauseMeasuring(function, p.Until)
	}
	if changed {
		l.cfg.Changed()
	}
	return h, err
}

func (l *Local) pin(function pipeline.Key, p Pin) (h Held, changed bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return Held{}, false, ErrClosed
	}
	f := l.of(function)
	p.Until = l.clock.at(p.Until)
	old, there := f.pin.at(l.now())
	if there && old.Holder != p.Holder {
		return Held{}, false, fmt.Errorf("function %q: %w until %s, or longer if the holder renews the pin", function, ErrPinned, l.told(old.Until).Format(time.TimeOnly))
	}
	f.pin = &p
	return l.held(function, f), !there || old.CPUMilli != p.CPUMilli, nil
}

// PinnedBy reports whether this holder has pinned the function.
func (l *Local) PinnedBy(function pipeline.Key, holder string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	f := l.functions[function]
	if f == nil {
		return false
	}
	p, ok := f.pin.at(l.now())
	return ok && p.Holder == holder
}

// PinnedUntil returns when a function's pin ends unless it is renewed. It returns false if there is
// no pin.
func (l *Local) PinnedUntil(function pipeline.Key) (time.Time, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f := l.functions[function]
	if f == nil {
		return time.Time{}, false
	}
	p, ok := f.pin.at(l.now())
	return l.told(p.Until), ok
}

// Unpin ends the holder's pin. It does not end that of another holder.
func (l *Local) Unpin(function pipeline.Key, holder string) {
	l.mu.Lock()
	f := l.functions[function]
	mine := f != nil && f.pin != nil && f.pin.Holder == holder
	if mine {
		f.pin = nil
	}
	l.mu.Unlock()
	if mine {
		l.cfg.Lines.PauseMeasuring(function, time.Time{})
		l.cfg.Changed()
	}
}

// held returns the state of the function's newest replica. The caller holds l.mu.
func (l *Local) held(function pipeline.Key, f *function) Held {
	h := Held{Alone: true, Slots: max(f.slots, 1), Batch: max(f.batch, 1)}
	var newest *replica
	for _, r := range l.sorted() {
		if r.function != function {
			continue
		}
		if newest != nil {
			h.Alone = false
		}
		if newest == nil || r.spec.Revision > newest.spec.Revision || r.spec.Revision == newest.spec.Revision && newest.released {
			newest = r
		}
	}
	if r := newest; r != nil && !r.hidden && !r.released {
		h.Replica = plan.Replica{Name: r.name, Revision: r.spec.Revision, Node: r.node, Device: r.device, State: r.state, Since: r.since}
		h.CPUMilli, h.Unbounded = r.cpu, r.unbounded
		// r.spec may have an older one, because the annotation changes without a restart.
		h.Batch = min(h.Batch, max(f.declared, 1))
	}
	return h
}

// pinned changes f, as policies see it, to what its pin requires.
func (k *function) pinned(f *plan.Function, now time.Time) {
	if _, ok := k.pin.at(now); ok {
		f.Min, f.Max, f.Zero = 1, 1, false
		if f.AutoBatch > 0 { // all sizes are measured
			f.Batch, f.AutoBatch = f.AutoBatch, 0
		}
	}
}
