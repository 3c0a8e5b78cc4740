package cache

import "time"

const (
	// Threshold is the share of a bound that may be in use before idle entries are evicted (QUART,
	// §5).
	Threshold = 0.85
	// CalmBelow is the share of a bound at which eviction stops once it has begun. Without this
	// margin, each further byte would begin another eviction.
	CalmBelow = 0.80
	// calmFor is how long after memory was short nothing is done ahead of need.
	calmFor = 10 * time.Second
)

// Bound is a limit on the memory of a node, as of one sample.
type Bound struct {
	Name  string
	Total int64
	Used  int64 // as the limit counts it, without what the kernel can take back
}

// Below returns how many more bytes may be used until a share of the bound is in use. It is
// negative if more than the share is in use.
func (b Bound) Below(share float64) int64 { return int64(float64(b.Total)*share) - b.Used }

// unbounded is the room of a node without bounds.
const unbounded = 1 << 62

// Tightest returns the bound with the least room below a share of it, and that room. Without
// bounds, the room is unlimited.
func Tightest(bounds []Bound, share float64) (tightest Bound, room int64) {
	room = unbounded
	for _, b := range bounds {
		if r := b.Below(share); r < room {
			tightest, room = b, r
		}
	}
	return tightest, room
}

// Free returns how many bytes can be loaded without eviction. If it is negative, that many bytes
// must be freed before any load can begin.
func (c *Core[K]) Free(bounds []Bound) int64 {
	_, room := Tightest(bounds, Threshold)
	return room - c.coming
}

// ParkedHost is what a parked child is expected to take of a node's memory.
const ParkedHost = 512 << 20

// Ahead returns how many bytes are free for something that is done ahead of need. It is negative
// while memory is short and for ten seconds afterwards.
func (c *Core[K]) Ahead(now time.Time, bounds []Bound) int64 {
	if c.short(now) {
		return -1
	}
	return c.Free(bounds)
}

// short reports whether memory is short, or was so a moment ago.
func (c *Core[K]) short(now time.Time) bool { return c.pressed || latest(now, c.now).Before(c.calm) }

// Room reports whether parameters of the given size may be loaded ahead of need now. They may take
// free memory, and those of a key stage also the memory of idle entries of other stages. No other
// entry is evicted ahead of need, because two entries that do not fit together would evict each
// other in turn.
func (c *Core[K]) Room(now time.Time, bounds []Bound, bytes int64, keyStage bool) bool {
	missing := bytes - c.Free(bounds)
	if keyStage {
		_, missing = c.order.idle(missing, false)
	}
	return !c.short(now) && missing <= 0
}

// want decides about a load.
func (c *Core[K]) want(now time.Time, w Want[K]) {
	e := c.entries[w.Key]
	switch {
	case e == nil || e.state != empty || e.stale:
		return
	case e.retry.After(now):
		c.do(Wait[K]{w.Key, e.retry})
		return
	}
	victims, missing := c.order.idle(w.Bytes-c.Free(w.Bounds)-w.Freed, true)
	switch {
	case len(victims) == 0 && missing == 0:
	case c.unpark():
		return
	case missing > 0:
		c.do(Refuse[K]{w.Key, missing})
		return
	}
	for _, v := range victims {
		c.end(v, Evict[K]{Why: Room, For: w.Key})
	}
	c.load(e, w.Bytes)
}

// press evicts idle entries if too much memory is in use.
func (c *Core[K]) press(now time.Time, bounds []Bound) {
	if _, room := Tightest(bounds, Threshold); room >= 0 && !c.pressed {
		return
	}
	b, room := Tightest(bounds, CalmBelow)
	victims, missing := c.order.idle(-room, true)
	if c.pressed = missing > 0; !c.pressed && len(victims) == 0 {
		return
	}
	c.calm = now.Add(calmFor)
	if c.unpark() {
		return // the next sample shows what that has freed
	}
	for _, v := range victims {
		c.end(v, Evict[K]{Why: Pressure, Bound: b.Name})
	}
}

// unpark ends all parked children and reports whether there were any.
func (c *Core[K]) unpark() bool {
	found := c.order.unpark()
	if found {
		c.do(Unpark{})
	}
	return found
}
