package keysmanager

import (
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
)

// memory is what eviction may know of a node's memory. One without bounds has no end.
type memory struct {
	bounds  []resources.Bound
	coming  int64 // bytes that loads under way are expected to take
	pressed bool  // an eviction has begun and has not come to its end: hysteresis
	short   bool  // it was so a moment ago: nothing is loaded ahead of need
}

// tightest returns the bound with the least room below a share of it, and that room; it is negative when the share is passed.
func (m memory) tightest(share float64) (b resources.Bound, room int64) {
	for i, other := range m.bounds {
		if r := other.Below(share); i == 0 || r < room {
			b, room = other, r
		}
	}
	if len(m.bounds) == 0 {
		return resources.Bound{}, 1 << 62
	}
	return b, room
}

// free is how many bytes a load finds without eviction; negative: none, and so many have to go.
func (m memory) free() int64 {
	_, room := m.tightest(Threshold)
	return room - m.coming
}

// cached is what eviction may know of a zygote.
type cached struct {
	key   zygote.Key
	bytes int64
	busy  bool // it loads, forks or has replicas
	keep  bool // a key stage: evicted last
}

// evict returns which zygotes to end: none until more than [Threshold] of a bound is in use, and then as many as it takes to come
// down to resources.CalmBelow of every bound. Key stages go when nothing else is idle, of others the first in the given order (least recently
// used first); what is busy stays, also when that is too much. pressed says that memory is still short then.
func evict(all []cached, m memory) (out []zygote.Key, pressed bool) {
	if _, room := m.tightest(Threshold); room >= 0 && !m.pressed {
		return nil, false
	}
	_, room := m.tightest(resources.CalmBelow)
	out, missing := takeIdle(all, -room, true)
	return out, missing > 0
}

// fit returns which idle zygotes have to go, in the same order, so that one of so many bytes can be loaded, and how many bytes
// are missing even then; when any are, none has to go.
func fit(all []cached, m memory, bytes int64) (out []zygote.Key, missing int64) {
	if out, missing = takeIdle(all, bytes-m.free(), true); missing > 0 {
		return nil, missing
	}
	return out, 0
}

// room says whether a zygote of the given size may be loaded ahead of need: into memory that is free, and for a key stage also
// into what idle zygotes of others take. Nothing else gives way to it, or two that do not fit together would take turns; and
// while memory is short nothing is loaded ahead.
func room(all []cached, m memory, bytes int64, keep bool) bool {
	missing := bytes - m.free()
	if keep {
		_, missing = takeIdle(all, missing, false)
	}
	return !m.pressed && !m.short && missing <= 0
}

// takeIdle returns the first idle zygotes whose sizes make up the given number of bytes, those of key stages only if they may be taken,
// and how many bytes are missing then.
func takeIdle(all []cached, bytes int64, keyToo bool) (out []zygote.Key, missing int64) {
	for _, keyStages := range []bool{false, true} {
		for _, c := range all {
			if bytes <= 0 {
				return out, 0
			}
			if !c.busy && c.keep == keyStages && (keyToo || !keyStages) {
				out = append(out, c.key)
				bytes -= c.bytes
			}
		}
	}
	return out, max(bytes, 0)
}

// The counts of zygotes that load and soon end.
const (
	// lastBackoffOfEnds is the longest back-off for zygotes that load and soon end. It is short
	// because requests wait for the zygote.
	lastBackoffOfEnds = 4 * time.Second
	// longLife is how long a zygote must live to reset the count of early ends.
	longLife = 10 * time.Second
)
