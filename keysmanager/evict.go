package keysmanager

import "time"

// cached is what eviction may know of a zygote.
type cached struct {
	key   zygoteKey
	bytes int64
	busy  bool // it loads, forks or has replicas
	keep  bool // a key stage: evicted last
}

// evict returns which zygotes to end so that what is left takes at most limit bytes: idle ones, in the given order (least
// recently used first), key stages only when nothing else is idle. What is busy stays, also when that is too much.
func evict(all []cached, limit int64) []zygoteKey {
	used := int64(0)
	for _, c := range all {
		used += c.bytes
	}
	var out []zygoteKey
	for _, keyStages := range []bool{false, true} {
		for _, c := range all {
			if used <= limit {
				return out
			}
			if !c.busy && c.keep == keyStages {
				out = append(out, c.key)
				used -= c.bytes
			}
		}
	}
	return out
}

// room says whether a zygote of the given size may be loaded ahead of need: into memory that is free, and for a key stage also
// into what idle zygotes of others take. Nothing else gives way to it, or two that do not fit together would take turns.
func room(all []cached, bytes int64, keep bool, limit int64) bool {
	for _, c := range all {
		if !keep || c.busy || c.keep {
			bytes += c.bytes
		}
	}
	return bytes <= limit
}

// The back-off of zygotes that fail.
const (
	firstBackoff = 500 * time.Millisecond
	lastBackoff  = 30 * time.Second
)

// backoff is how long a zygote that failed count times in a row is not loaded again: half a second, doubled each time, at
// most half a minute.
func backoff(count int) time.Duration {
	if count < 1 {
		return 0
	}
	return min(firstBackoff<<min(count-1, 10), lastBackoff)
}
