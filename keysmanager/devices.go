package keysmanager

import (
	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
)

// devices returns the node's devices and what is free of them, with m.mu held.
func (m *Manager) devices() []DeviceInfo {
	if !m.pool.HasDevices() {
		return nil
	}
	return m.pool.Devices(m.holders())
}

// holders returns what zygotes and workers hold of devices beside replicas, with m.mu held.
func (m *Manager) holders() (all []resources.Holder) {
	for _, k := range m.slots.Keys() {
		if s, _ := m.slots.Peek(k); s.zygote != nil || s.loading != nil {
			all = append(all, m.holdersOf(k, s)...)
		}
	}
	return all
}
