package keysmanager

import (
	"cmp"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/cache"
	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
)

// sampleEvery is the time between two samples of the memory by the watcher.
const sampleEvery = 500 * time.Millisecond

// census returns the processes whose memory counts.
func (st *store) census() resources.Census {
	st.mu.Lock()
	defer st.mu.Unlock()
	c := resources.Census{Coming: map[int]int64{}, Epoch: st.epoch}
	byZygote := map[*zygote.Zygote]int{}
	for _, s := range st.slots.Values() {
		switch {
		case s.zygote != nil:
			byZygote[s.zygote] = len(c.Families)
			c.Families = append(c.Families, resources.Family{Of: s.zygote.Parent(), Replicas: s.zygote.Family.Spares()})
		case s.pid != 0:
			c.Coming[s.pid] = s.need.bytes
		}
	}
	alone := st.processes.count(c.Families, byZygote)
	for _, pid := range st.spares.pids() {
		alone.Replicas = append(alone.Replicas, resources.Copied{PID: pid, Bytes: -1})
	}
	for z := range st.going {
		c.Going = append(c.Going, z.PID)
	}
	c.Families = append(c.Families, alone)
	return c
}

// weigh samples the memory, unless the latest sample is fresh. The caller must not hold the store's
// mutex.
func (l *loader) weigh(fresh time.Duration) resources.Sample {
	return l.scale.Weigh(fresh, l.store.census)
}

// lockWeighed locks the store's mutex and returns a sample that counts all zygotes that exist now.
func (l *loader) lockWeighed(fresh time.Duration) resources.Sample {
	for tries := 0; ; tries++ {
		s := l.weigh(fresh)
		l.store.mu.Lock()
		if s.Epoch == l.store.epoch || tries == maxWeighed {
			return s
		}
		l.store.mu.Unlock()
		fresh = 0
	}
}

// maxWeighed bounds how often memory is measured again because zygotes start or end meanwhile.
const maxWeighed = 10

// watchMemory evicts as soon as memory is short, until ctx ends.
func (m *Manager) watchMemory() {
	t := time.NewTicker(cmp.Or(m.cfg.sampleEvery, sampleEvery))
	defer t.Stop()
	for {
		select {
		case <-m.ctx.Done():
			return
		case <-t.C:
			m.loader.tidy()
			m.parker.parkAhead()
			m.spares.tend()
		}
	}
}

// tidy ends zygotes that no function's current spec uses. When memory is short, it also ends idle
// zygotes. It does not wait until they have ended.
func (l *loader) tidy() {
	now := l.lockWeighed(resources.SampleFresh)
	if l.store.closed {
		l.store.mu.Unlock()
		return
	}
	l.store.tell()
	d := l.store.step(cache.Weighed{Bounds: now.Bounds})
	l.store.forgetVariants()
	l.store.mu.Unlock()
	if len(d.gone) > 0 {
		l.cfg.changed()
	}
}
