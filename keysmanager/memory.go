package keysmanager

import (
	"cmp"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/cache"
	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
)

// sampleEvery is how often the watcher looks at the memory.
const sampleEvery = 500 * time.Millisecond

// census returns what runs and has to be counted.
func (m *Manager) census() resources.Census {
	m.mu.Lock()
	defer m.mu.Unlock()
	c := resources.Census{Coming: map[int]int64{}, Epoch: m.epoch}
	byZygote := map[*zygote.Zygote]int{}
	for _, s := range m.slots.Values() {
		switch {
		case s.zygote != nil:
			byZygote[s.zygote] = len(c.Families)
			c.Families = append(c.Families, resources.Family{Of: s.zygote.Parent(), Replicas: s.zygote.Family.Spares()})
		case s.pid != 0:
			c.Coming[s.pid] = s.need.bytes
		}
	}
	alone := m.processes.count(c.Families, byZygote)
	for z := range m.going {
		c.Going = append(c.Going, z.PID)
	}
	c.Families = append(c.Families, alone)
	return c
}

// weigh samples the memory, unless that was done a moment ago. It must be called without m.mu.
func (m *Manager) weigh(fresh time.Duration) resources.Sample { return m.scale.Weigh(fresh, m.census) }

// lockWeighed locks m.mu and returns a sample that counts the zygotes that there are now.
func (m *Manager) lockWeighed(fresh time.Duration) resources.Sample {
	for tries := 0; ; tries++ {
		s := m.weigh(fresh)
		m.mu.Lock()
		if s.Epoch == m.epoch || tries == maxWeighed {
			return s
		}
		m.mu.Unlock()
		fresh = 0
	}
}

// maxWeighed bounds how often memory is measured again because zygotes come and go meanwhile.
const maxWeighed = 10

// memory is the sample as a refusal reports it, with m.mu held.
func (m *Manager) memory(s resources.Sample) memory {
	_, room := cache.Tightest(s.Bounds, Threshold)
	return memory{bounds: s.Bounds, coming: room - m.slots.cache.Free(s.Bounds)}
}

// watchMemory evicts as soon as memory is short, until ctx ends.
func (m *Manager) watchMemory() {
	t := time.NewTicker(cmp.Or(m.cfg.sampleEvery, sampleEvery))
	defer t.Stop()
	for {
		select {
		case <-m.ctx.Done():
			return
		case <-t.C:
			m.tidy()
			m.parkAhead()
		}
	}
}
