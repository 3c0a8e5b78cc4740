package zygote

import (
	"context"
	"fmt"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/cache"
	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// Bounds of the time until a spare child is forked, and until a child is ready on a device.
const (
	spareTimeout = 10 * time.Second
	parkTimeout  = time.Minute
)

// spareSlots are the places where spare children wait, by the device that they wait on; an empty
// key means no device. Family.mu guards them.
type spareSlots map[string]*spareSlot

// spareSlot is the place of one spare child.
type spareSlot struct {
	child  *child // nil: none
	coming bool   // a child is being forked or parked

	failures int       // to park or keep a child, in a row
	retry    time.Time // no attempt before this time
}

func (b *spareSlot) fail() {
	b.failures++
	b.retry = time.Now().Add(cache.Backoff(b.failures))
}

// remove removes a child from its slot and returns it, or nil if it is at none.
func (all spareSlots) remove(c *child) *child {
	for _, b := range all {
		if c != nil && b.child == c {
			b.child = nil
			return c
		}
	}
	return nil
}

// lost removes a child that has ended by itself. If the child was parked, the next attempt to park
// a child there waits for a back-off.
func (all spareSlots) lost(c *child) *child {
	for device, b := range all {
		if c != nil && b.child == c && device != "" {
			b.fail()
		}
	}
	return all.remove(c)
}

// clear removes all children from their slots.
func (all spareSlots) clear() (out []*child) {
	for _, b := range all {
		if b.child != nil {
			out = append(out, b.child)
			b.child = nil
		}
	}
	return out
}

// EnsureSpare forks a spare child in the background, unless the zygote has one. If device is set,
// the child is parked on it. The caller makes sure that Host.Tasks does not end during the call.
func (f *Family) EnsureSpare(device string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	b := f.spareSlots[device]
	if b == nil {
		b = &spareSlot{}
		f.spareSlots[device] = b
	}
	if b.child != nil || b.coming || f.waiting == nil || f.of.memory != nil || f.of.Works() || time.Now().Before(b.retry) {
		return
	}
	b.coming = true
	limits, most := f.limits, spareTimeout
	if device != "" {
		most = parkTimeout
	}
	h := f.of.host
	h.Tasks.Go(func() {
		ctx, cancel := context.WithTimeoutCause(h.Context, most, fmt.Errorf("no spare child after %v", most))
		defer cancel()
		c, err := f.order(ctx, limits, true)
		if err == nil {
			err = f.keepSpare(ctx, c, b, device)
		}
		f.mu.Lock()
		// Otherwise the spare may by now be another child that is on its way.
		if err != nil || device != "" {
			b.coming = false
		}
		if err != nil && device != "" {
			b.fail()
		}
		f.mu.Unlock()
		if err != nil && h.Context.Err() == nil {
			// The next start forks a child itself, and reports why that fails.
			h.Log.Debug("no spare child", "function", f.of.Function, "device", device, "error", err)
		}
	})
}

// keepSpare lets a child wait in a slot, and parks it if device is set. A child that cannot be
// parked is dismissed.
func (f *Family) keepSpare(ctx context.Context, c *child, b *spareSlot, device string) error {
	f.mu.Lock()
	there := f.waiting[uint32(c.id)] == c
	if there {
		b.child, b.coming = c, device != ""
	}
	f.mu.Unlock()
	err := errChildEnded
	if there {
		if device == "" {
			return nil
		}
		if err = c.park(ctx, device); err == nil {
			return nil
		}
		f.mu.Lock()
		there = f.spareSlots.remove(c) == c
		f.mu.Unlock()
		if !there { // it was dismissed meanwhile
			return err
		}
	}
	f.dismiss(c)
	return err
}

// park tells a child at its gate to make itself ready on a device, and waits until it is ready.
func (c *child) park(ctx context.Context, device string) error {
	stop := context.AfterFunc(ctx, func() { _ = c.gate.SetDeadline(time.Now()) })
	defer stop()
	o := wire.Order{Kind: wire.OrderPark, Version: wire.OrderVersion, Env: []string{resources.EnvDevices + "=" + device}}
	_ = c.gate.SetWriteDeadline(time.Now().Add(sendTimeout)) // fails as the write does
	_, err := c.gate.Write(wire.AppendOrder(nil, o))
	if err == nil {
		o, err = receive(c.gate, make([]byte, MaxOrder))
	}
	switch {
	case err != nil && ctx.Err() != nil:
		return fmt.Errorf("child on device %s: %w", device, context.Cause(ctx))
	case err != nil:
		return fmt.Errorf("child on device %s: %w", device, err)
	case o.Kind == wire.ZygoteError:
		return fmt.Errorf("child on device %s: %s", device, o.Text)
	case o.Kind != wire.ChildParked:
		return fmt.Errorf("child on device %s answers %c, want %c", device, o.Kind, wire.ChildParked)
	case !stop():
		return context.Cause(ctx)
	}
	return c.gate.SetDeadline(time.Time{})
}

// claim takes the spare child out of the slot of a device; an empty device means the slot without a
// device. It returns nil if no child waits there, or if the child has other limits. Such a child is
// dismissed.
func (f *Family) claim(limits resources.Limits, device string) *child {
	var c *child
	f.mu.Lock()
	f.limits = limits
	if b := f.spareSlots[device]; b != nil && !b.coming {
		c, b.child, b.failures, b.retry = b.child, nil, 0, time.Time{}
	}
	f.mu.Unlock()
	if c == nil || c.held.Group() == nil || c.held.Group().Limits() == limits {
		return c
	}
	f.of.host.Tasks.Go(func() { f.dismiss(c) }) // the start need not wait for this
	return nil
}

// Waiting describes a spare child, or a place where a child is about to wait.
type Waiting struct {
	PID      int  // 0: the child is not there yet, or has gone
	Coming   bool // the child is being forked or parked
	Failures int  // of the latest attempts, in a row
}

// Waiting returns the spare children by the device that they wait on; an empty key means no device.
func (f *Family) Waiting() map[string]Waiting {
	f.mu.Lock()
	defer f.mu.Unlock()
	all := map[string]Waiting{}
	for device, b := range f.spareSlots {
		w := Waiting{Coming: b.coming, Failures: b.failures}
		if b.child != nil {
			w.PID = b.child.pid
		}
		all[device] = w
	}
	return all
}

// Parked returns the children that are parked, or are being parked, by device.
func (f *Family) Parked() map[string]Waiting {
	all := f.Waiting()
	for device, w := range all {
		if device == "" || w.PID == 0 && !w.Coming {
			delete(all, device)
		}
	}
	return all
}

// Unpark dismisses the child that is parked on a device, or is being parked there. It returns false
// if the child has not been forked yet; a later call has to dismiss it. The caller makes sure that
// Host.Tasks does not end during the call.
func (f *Family) Unpark(device string) bool {
	f.mu.Lock()
	var c *child
	if b := f.spareSlots[device]; b != nil {
		c = f.spareSlots.remove(b.child)
	}
	f.mu.Unlock()
	if c != nil {
		f.of.host.Tasks.Go(func() { f.dismiss(c) })
	}
	return c != nil
}

// Spares returns the children that are not replicas yet, in the form in which memory is counted. It
// returns none for a worker, because memory of its threads is counted as the worker's.
func (f *Family) Spares() (all []resources.Copied) {
	if f.of.Works() {
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range f.waiting {
		if c.pid != 0 { // else it is not located yet
			all = append(all, resources.Copied{PID: c.pid, Bytes: -1})
		}
	}
	return all
}
