package keysmanager

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// A child that is parked was told its device ahead of need, and has made itself ready there but for parameters, which takes longer than
// anything else of a start. Key stages in Python that use one device have one on each device that would take a replica of theirs. It
// gives way to whatever is wanted in earnest (docs/adr/0033).

// keeping is what is known of a slot because of a key stage. The zero value is that of others.
type keeping struct {
	keep  bool
	parks bool  // its children may be parked on devices
	bytes int64 // of a device that a replica takes, as node.Spec.DeviceMemory
}

// keeping is what a function that is a key stage says of its slot.
func keepingOf(s node.Spec, e engine) keeping {
	return keeping{keep: true, parks: s.Devices == 1 && e.name == python.name, bytes: s.DeviceMemory}
}

// parkedHost is what a parked child is expected to take of the node's memory, in bytes.
const parkedHost = 512 << 20

// park tells a child at its gate to make itself ready on a device, and waits until it is.
func (c *child) park(ctx context.Context, device string) error {
	stop := context.AfterFunc(ctx, func() { _ = c.gate.SetDeadline(time.Now()) })
	defer stop()
	o := wire.Order{Kind: wire.OrderPark, Version: wire.OrderVersion, Env: []string{resources.EnvDevices + "=" + device}}
	_ = c.gate.SetWriteDeadline(time.Now().Add(sendTimeout)) // fails as the write does
	_, err := c.gate.Write(wire.AppendOrder(nil, o))
	if err == nil {
		o, err = receiveFrom(c.gate, make([]byte, maxOrder))
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

// receiveFrom reads one message.
func receiveFrom(conn *net.UnixConn, buf []byte) (wire.Order, error) {
	n, err := conn.Read(buf)
	if err != nil {
		return wire.Order{}, err
	}
	return wire.DecodeOrder(buf[:n])
}

// holdersOf returns what a slot has of devices beside its replicas: a worker's context, parked children; with m.mu held.
func (m *Manager) holdersOf(k zygoteKey, s *slot) (all []resources.Holder) {
	if k.form == formWorker && k.device != "" {
		h := resources.Holder{PID: s.pid, Reserved: map[string]int64{k.device: resources.ContextOverhead}}
		if s.zygote != nil {
			h.PID = s.zygote.pid
		}
		return []resources.Holder{h}
	}
	if s.zygote == nil {
		return nil
	}
	name := m.nameOf(k, s)
	for device, b := range s.zygote.parked() {
		h := resources.Holder{Reserved: map[string]int64{device: resources.ContextOverhead}, Parks: true}
		if h.PID = b.pid(); !b.coming {
			h.Parked = name
		}
		all = append(all, h)
	}
	return all
}

// parked returns the berths of children that are parked, or about to be, by device.
func (z *zygote) parked() map[string]berth {
	z.mu.Lock()
	defer z.mu.Unlock()
	all := map[string]berth{}
	for device, b := range z.berths {
		if device != "" && (b.child != nil || b.coming) {
			all[device] = *b
		}
	}
	return all
}

// pid is that of the child; 0: it is not there yet.
func (b berth) pid() int {
	if b.child == nil {
		return 0
	}
	return b.child.pid
}

// unpark dismisses the child that is parked on a device, with m.mu held; false: it is not there yet, and goes when it is found to be
// too much.
func (m *Manager) unpark(z *zygote, device string) bool {
	z.mu.Lock()
	c := z.unberth(z.berths[device].child)
	z.mu.Unlock()
	if c != nil {
		m.ends.Go(func() { z.dismiss(c) })
	}
	return c != nil
}

// parkedZygotes returns the zygotes that have parked children, least recently used first, with m.mu held.
func (m *Manager) parkedZygotes() (all []*zygote) {
	for _, s := range m.slots.Values() {
		if s.zygote != nil && len(s.zygote.parked()) > 0 {
			all = append(all, s.zygote)
		}
	}
	return all
}

// unparkAll dismisses all parked children because memory is short, with m.mu held. It returns how many, and how many bytes of that
// they have beyond what they share with their zygotes.
func (m *Manager) unparkAll() (n int, bytes int64) {
	for _, z := range m.parkedZygotes() {
		shared, _ := m.cfg.meter.Resident(z.pid)
		for device, b := range z.parked() {
			own, _ := m.cfg.meter.Resident(b.pid())
			if m.unpark(z, device) {
				n++
				bytes += max(0, own-shared)
			}
		}
	}
	return n, bytes
}

// yield dismisses parked children whose memory an order has reserved now, those of its own function's last: it may become one of these;
// with m.mu held.
func (m *Manager) yield(o node.Order) {
	if o.Device == "" {
		return
	}
	own, ok := m.uses[o.Spec.Function]
	m.unparkBeyond(strings.Split(o.Device, ","), func(z *zygote) bool { return ok && z.key == own })
}

// unparkBeyond dismisses parked children of devices whose memory is wanted, but for those that stay, with m.mu held.
func (m *Manager) unparkBeyond(devices []string, stays func(*zygote) bool) {
	for _, d := range m.devices() {
		if !slices.Contains(devices, d.ID) {
			continue
		}
		over := d.Parked - d.Free
		for _, z := range m.parkedZygotes() {
			if b, there := z.parked()[d.ID]; there && over > 0 && !stays(z) {
				m.unpark(z, d.ID)
				over -= max(resources.ContextOverhead, d.Processes[b.pid()])
			}
		}
	}
}

// parkAhead has children parked where they should be, and ends those that should not be.
func (m *Manager) parkAhead() {
	if m.cfg.Devices == nil {
		return
	}
	now := m.lockWeighed(resources.SampleFresh)
	defer m.mu.Unlock()
	if m.closed {
		return
	}
	all := m.devices()
	var ids []string
	for _, d := range all {
		ids = append(ids, d.ID)
	}
	for _, s := range m.slots.Values() {
		if s.zygote == nil {
			continue
		}
		for device := range s.zygote.parked() {
			i := slices.IndexFunc(all, func(d DeviceInfo) bool { return d.ID == device })
			if !s.parks || s.settled != nil || i < 0 || all[i].Unhealthy != "" {
				m.unpark(s.zygote, device)
			}
		}
	}
	m.unparkBeyond(ids, func(*zygote) bool { return false })
	room := m.memory(now).free()
	if m.pressed || time.Now().Before(m.calm) {
		return
	}
	for _, s := range slices.Backward(m.slots.Values()) {
		if s.zygote == nil || !s.parks || s.settled != nil {
			continue
		}
		for _, id := range ids {
			i := slices.IndexFunc(all, func(d DeviceInfo) bool { return d.ID == id })
			if _, there := s.zygote.parked()[id]; !there && i >= 0 && room >= parkedHost && all[i].Takes(s.bytes) {
				m.provide(s.zygote, id)
				room -= parkedHost
				all = m.devices()
			}
		}
	}
}
