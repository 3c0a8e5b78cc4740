package cache

import (
	"slices"
	"time"
)

// evict removes the evicted entries from the model, and checks the rules for each.
func (m *model) evict(e *modelEntry, v Evict[int]) Effect {
	if e.Busy() || !e.Ready {
		m.t.Fatalf("the model evicts %+v, which is busy", e)
	}
	if e.KeyStage && (v.Why == Room || v.Why == Pressure) {
		m.counts["a key stage"]++
		for _, other := range m.idle() {
			if !other.KeyStage {
				m.t.Fatalf("the model evicts a key stage's %d although %d is idle", e.name, other.name)
			}
		}
	}
	m.drop(e.name)
	v.Key, v.Since = e.name, e.Since
	return v
}

// unpark ends all parked children.
func (m *model) unpark() (ended bool) {
	for _, e := range m.held {
		ended = ended || e.parked > 0
		e.parked = 0
	}
	return ended
}

// apply applies an event to the model, and returns the effects that the core should return.
func (m *model) apply(ev Event) (fx []Effect) {
	switch ev := ev.(type) {
	case Hold[int]:
		e := m.add(ev.Key)
		m.drop(ev.Key)
		m.held = append(m.held, e)
		e.Holds++
		return nil
	case Loaded[int]:
		m.add(ev.Key)
	case Mark[int]:
		for _, e := range m.held {
			e.KeyStage = slices.Contains(ev.Keys, e.name)
		}
		return nil
	case Weighed:
		return m.weighed()
	}
	e := m.find(keyOf(ev))
	if e == nil {
		return nil
	}
	switch ev := ev.(type) {
	case Release[int]:
		if e.Holds--; e.Holds == 0 && e.Stale && !e.settled {
			e.settled = true
			fx = append(fx, Settled[int]{e.name})
		}
	case Want[int]:
		return m.wanted(e, ev)
	case Loaded[int]:
		if e.Loading && e.Stale {
			e.Loading, e.Bytes = false, 0
			return []Effect{Discard[int]{e.name}}
		}
		e.Loading, e.Ready, e.Bytes, e.Fails = false, true, ev.Bytes, 0
	case Failed[int]:
		if e.Loading {
			e.Loading, e.Bytes = false, 0
		}
		if !e.Ready && !e.Stale {
			e.Fails++
			e.Retry = m.now.Add(min(sec/2<<min(e.Fails-1, 20), 30*sec))
		}
	case Ended[int]:
		if !e.Ready {
			return nil
		}
		e.Ready, e.Bytes, e.parked = false, 0, 0
		if ev.Lived > 10*sec {
			e.Ends = 0
		}
		if e.Ends++; e.Ends == 1 {
			e.Retry = m.now
		} else {
			e.Retry = m.now.Add(min(sec/2<<min(e.Ends-2, 20), 4*sec))
		}
	case Using[int]:
		e.Replicas, e.parked, e.wanted, e.workerRests = ev.Replicas, ev.Parked, ev.Wanted, ev.Rests
	case Invalidate[int]:
		if e.Stale {
			return nil
		}
		e.Stale, e.Since = true, m.now
		if e.Loading {
			fx = append(fx, Cancel[int]{e.name})
		}
		if e.Holds == 0 {
			e.settled = true
			fx = append(fx, Settled[int]{e.name})
		}
	case Drop[int]:
		if e.Ready && !e.Busy() {
			fx = append(fx, m.evict(e, Evict[int]{Why: Asked}))
		}
	}
	return fx
}

func keyOf(ev Event) int {
	switch ev := ev.(type) {
	case Release[int]:
		return ev.Key
	case Want[int]:
		return ev.Key
	case Loaded[int]:
		return ev.Key
	case Failed[int]:
		return ev.Key
	case Ended[int]:
		return ev.Key
	case Using[int]:
		return ev.Key
	case Invalidate[int]:
		return ev.Key
	case Drop[int]:
		return ev.Key
	}
	return -1
}

func (m *model) wanted(e *modelEntry, w Want[int]) (fx []Effect) {
	if e.Ready || e.Loading || e.Stale {
		return nil
	}
	if e.Retry.After(m.now) {
		return []Effect{Wait[int]{e.name, e.Retry}}
	}
	gone, missing := victims(m.idle(), w.Bytes+m.coming()+m.over(Threshold))
	if (len(gone) > 0 || missing > 0) && m.unpark() {
		return []Effect{Unpark{}}
	}
	if missing > 0 {
		return []Effect{Refuse[int]{e.name, missing}}
	}
	for _, v := range gone {
		fx = append(fx, m.evict(v, Evict[int]{Why: Room, For: e.name}))
	}
	e.Loading, e.Bytes = true, w.Bytes
	if over := m.over(Threshold) + m.coming(); over > 0 {
		m.t.Fatalf("%d bytes above the threshold once loads have ended", over)
	}
	return append(fx, Load[int]{e.name})
}

func (m *model) weighed() (fx []Effect) {
	bounds, over, calm := m.bounds(), m.over(Threshold), m.over(CalmBelow)
	for _, e := range slices.Clone(m.held) {
		why := Unused
		switch {
		case e.workerRests > 0 && e.Busy():
			e.idle = time.Time{}
			continue
		case e.workerRests > 0:
			if e.idle.IsZero() {
				e.idle = m.now
			}
			if m.now.Sub(e.idle) < e.workerRests {
				continue
			}
			why = Rested
		case e.wanted:
			e.Since = time.Time{}
			continue
		case e.Busy():
			if e.Since.IsZero() {
				e.Since = m.now
			}
			continue
		}
		if e.Ready {
			fx = append(fx, m.evict(e, Evict[int]{Why: why}))
		} else {
			m.drop(e.name)
			fx = append(fx, Forget[int]{e.name})
		}
	}
	if over <= 0 && !m.short {
		return fx
	}
	gone, missing := victims(m.idle(), calm)
	if m.short = missing > 0; !m.short && len(gone) == 0 {
		return fx
	}
	m.calm = m.now.Add(10 * sec)
	if m.unpark() {
		return append(fx, Unpark{})
	}
	name := bounds[0].Name
	if bounds[1].Below(CalmBelow) < bounds[0].Below(CalmBelow) {
		name = bounds[1].Name
	}
	for _, v := range gone {
		fx = append(fx, m.evict(v, Evict[int]{Why: Pressure, Bound: name}))
	}
	if m.over(CalmBelow) > 0 && len(m.idle()) > 0 {
		m.t.Fatalf("%d bytes above the calm although entries are idle", m.over(CalmBelow))
	}
	return fx
}
