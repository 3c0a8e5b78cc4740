package cluster

import (
	"errors"
	"fmt"
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/plan"
)

// Why a function cannot be pinned.
var (
	ErrPinned = errors.New("cluster: pinned by somebody else")
	ErrInUse  = errors.New("cluster: in use")
)

// Quiet is how long nobody must have asked a function for it to be pinned: what it then takes from its users is measured away.
const Quiet = 2 * time.Second

// Pin holds a function at one replica that may use a given share of the processor, so that it can be measured. It is a lease: when
// nobody renews it, the next plan has the function as it would be without it. Nothing that happens to the function meanwhile counts
// as measured.
type Pin struct {
	Holder   string
	CPUMilli int // thousandths of a core; 0: as declared
	Until    time.Time
}

// at is the pin, if it holds at that time.
func (p *Pin) at(now time.Time) (Pin, bool) {
	if p == nil || !now.Before(p.Until) {
		return Pin{}, false
	}
	return *p, true
}

// Held is what has become of a [Pin].
type Held struct {
	plan.Replica      // the one that is held; empty: there is none yet
	CPUMilli     int  // that it may use now, as far as its node was told; 0: as declared
	Unbounded    bool // its node has been asked and does not limit CPU
	Alone        bool // there is no other
	Slots        int  // batches that it takes at a time
	Batch        int  // largest batch
}

// Pin pins a function that nobody uses, changes its pin, or renews it, and says how far that is. The function must be deployed.
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
		return Held{}, false, fmt.Errorf("function %q: %w, until %s unless that goes on", function, ErrPinned, l.told(old.Until).Format(time.TimeOnly))
	}
	f.pin = &p
	return l.held(function, f), !there || old.CPUMilli != p.CPUMilli, nil
}

// PinnedBy tells whether a function is pinned by this holder.
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

// PinnedUntil returns when a function's pin ends unless it is renewed; false: it has none.
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

// Unpin ends the holder's pin; that of another stays.
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

// held looks at the function's newest replica; l.mu is held.
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
		h.Batch = min(h.Batch, max(r.spec.Declared.Batch, 1))
	}
	return h
}

// pinned changes what a policy sees of f to what its pin wants.
func (k *function) pinned(f *plan.Function, now time.Time) {
	if _, ok := k.pin.at(now); ok {
		f.Min, f.Max, f.Zero = 1, 1, false
	}
}
