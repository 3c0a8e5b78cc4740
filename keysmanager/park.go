package keysmanager

import (
	"slices"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/cache"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
)

// A parked child was told its device ahead of need, and is ready there except for its parameters.
// That saves the longest part of a start. Each key stage in Python that uses one device has a
// parked child on each device with room for one of its replicas. If an order needs the memory that
// a parked child takes, the child is ended (docs/adr/0033).

// parker knows how much of each device is free, and parks children on devices. It has no lock of
// its own. The caller of a method holds the store's mutex, unless the method says that it takes the
// mutex itself.
type parker struct {
	cfg    *Config
	store  *store
	pool   *resources.Pool
	loader *loader // its samples say how much memory is free
}

// keeping is the part of a slot that only key stages use. The zero value means that the slot is not
// a key stage's.
type keeping struct {
	keep  bool
	parks bool  // its children may be parked on devices
	bytes int64 // of a device, per replica, as node.Spec.DeviceMemory
}

// keepingOf returns the keeping of a function that is a key stage.
func keepingOf(s node.Spec, e engine) keeping {
	return keeping{keep: true, parks: s.Devices == 1 && e.name == python.name, bytes: s.DeviceMemory}
}

// holdersOf returns what a slot holds of devices in addition to its replicas: the context of a
// worker, or parked children. The caller holds the store's mutex.
func (p *parker) holdersOf(k zygote.Key, s *slot) (all []resources.Holder) {
	if k.Form == zygote.Worker && k.Device != "" {
		h := resources.Holder{PID: s.pid, Reserved: map[string]int64{k.Device: resources.ContextOverhead}}
		if s.zygote != nil {
			h.PID = s.zygote.PID
		}
		return []resources.Holder{h}
	}
	if s.zygote == nil {
		return nil
	}
	name := p.store.nameOf(k, s)
	for device, b := range s.zygote.Family.Parked() {
		h := resources.Holder{Reserved: map[string]int64{device: resources.ContextOverhead}, Parks: true}
		if h.PID = b.PID; !b.Coming {
			h.Parked = name
		}
		all = append(all, h)
	}
	return all
}

// unparkAll dismisses all parked children because memory is short. It returns the number of
// dismissed children, and how many bytes they had in addition to the memory that they shared with
// their zygotes. The caller holds the store's mutex.
func (st *store) unparkAll() (n int, bytes int64) {
	for _, z := range st.slots.parkedZygotes() {
		shared, _ := st.cfg.meter.Resident(z.PID)
		for device, b := range z.Family.Parked() {
			own, _ := st.cfg.meter.Resident(b.PID)
			if z.Family.Unpark(device) {
				n++
				bytes += max(0, own-shared)
			}
		}
	}
	return n, bytes
}

// unparkFor dismisses parked children whose device memory an order has just reserved. It leaves
// children of the order's own function, because the order may use one of them. The caller holds the
// store's mutex.
func (p *parker) unparkFor(o node.Order) {
	if o.Device == "" {
		return
	}
	own, ok := p.store.uses[o.Spec.Function]
	p.unparkBeyond(strings.Split(o.Device, ","), func(z *zygote.Zygote) bool { return ok && z.Key == own })
}

// unparkBeyond ends parked children on devices whose memory is wanted, except those of zygotes for
// which stays returns true. The caller holds the store's mutex.
func (p *parker) unparkBeyond(devices []string, stays func(*zygote.Zygote) bool) {
	for _, d := range p.devices() {
		if !slices.Contains(devices, d.ID) {
			continue
		}
		over := d.Parked - d.Free
		for _, z := range p.store.slots.parkedZygotes() {
			if b, there := z.Family.Parked()[d.ID]; there && over > 0 && !stays(z) {
				z.Family.Unpark(d.ID)
				over -= max(resources.ContextOverhead, d.Processes[b.PID])
			}
		}
	}
}

// parkAhead parks children where key stages need them, and ends parked children that are not
// needed.
func (p *parker) parkAhead() {
	if p.cfg.Devices == nil {
		return
	}
	now := p.loader.lockWeighed(resources.SampleFresh)
	defer p.store.mu.Unlock()
	if p.store.closed {
		return
	}
	all := p.devices()
	var ids []string
	for _, d := range all {
		ids = append(ids, d.ID)
	}
	for _, s := range p.store.slots.Values() {
		if s.zygote == nil {
			continue
		}
		for device := range s.zygote.Family.Parked() {
			i := slices.IndexFunc(all, func(d DeviceInfo) bool { return d.ID == device })
			if !s.parks || s.settled != nil || i < 0 || all[i].Unhealthy != "" {
				s.zygote.Family.Unpark(device)
			}
		}
	}
	p.unparkBeyond(ids, func(*zygote.Zygote) bool { return false })
	room := p.store.slots.cache.Ahead(time.Now(), now.Bounds)
	for _, s := range slices.Backward(p.store.slots.Values()) {
		if s.zygote == nil || !s.parks || s.settled != nil {
			continue
		}
		for _, id := range ids {
			i := slices.IndexFunc(all, func(d DeviceInfo) bool { return d.ID == id })
			if _, there := s.zygote.Family.Parked()[id]; !there && i >= 0 && room >= cache.ParkedHost && all[i].Takes(s.bytes) {
				s.zygote.Family.EnsureSpare(id)
				room -= cache.ParkedHost
				all = p.devices()
			}
		}
	}
}

// devices returns the node's devices and how much of each is free. The caller holds the store's
// mutex.
func (p *parker) devices() []DeviceInfo {
	if !p.pool.HasDevices() {
		return nil
	}
	return p.pool.Devices(p.holders())
}

// holders returns what zygotes and workers hold of devices in addition to their replicas. The
// caller holds the store's mutex.
func (p *parker) holders() (all []resources.Holder) {
	for _, k := range p.store.slots.Keys() {
		if s, _ := p.store.slots.Peek(k); s.zygote != nil || s.loading != nil {
			all = append(all, p.holdersOf(k, s)...)
		}
	}
	return all
}
