package rate

import "time"

// Arrivals are counted per half second, and also per 2 s, 8 s and 32 s, so that splits of the
// recent past are dense, and those of the far past are few.
const (
	slot   = 500 * time.Millisecond // length of a slot of level 0
	ratio  = 4                      // a slot is this many times as long as one of the level before
	levels = 4
	ring   = 16 // slots per level
	used   = 8  // least number of slots of a level that are read before those of the next level
	// most is the largest number of splits. Each level has up to ratio-1 more than used, so that the
	// next level begins where one of its slots begins.
	most = levels*(used+ratio) + 1
)

// Window is how long Poisson arrivals of a steady rate are counted. Bursty arrivals are counted for
// Ca² times as long, because the count of a time then has Ca² times the variance (Cox, Renewal
// Theory, 1962, §4.2).
const Window = 10 * time.Second

// shortest is the shortest time over which a rate is computed. Arrivals that come at once, as the
// items of one request do, are otherwise a rate without bound.
const shortest = time.Second

// Estimator estimates the rate of arrivals in bounded memory. The zero value is ready. Times are
// since any fixed time, and must not go backwards. Add costs the same for any history.
type Estimator struct {
	slots [levels][ring]counts
	at    int64         // number of the newest slot of level 0
	any   bool          // there was an arrival
	last  time.Duration // time of the latest arrival
	since time.Duration // time of the latest change, or of the first arrival
	past  gaps          // gaps of before the latest change
	usual usual
}

// counts are the arrivals of a time, and sums over the gaps between them.
type counts struct {
	n             float64 // number of arrivals
	gaps          float64 // number of gaps that ended in the time
	time, squares float64 // sums of these gaps and of their squares, in seconds
	first         float64 // first of these gaps, which began before; 0: none
}

// prepend adds the counts of an earlier time.
func (c *counts) prepend(o counts) {
	c.n += o.n
	c.gaps += o.gaps
	c.time += o.time
	c.squares += o.squares
	if o.n > 0 {
		c.first = o.first
	}
}

// inner returns c without the gap that began before its time.
func (c counts) inner() counts {
	if c.first > 0 {
		c.gaps--
		c.time -= c.first
		c.squares -= c.first * c.first
		c.first = 0
	}
	return c
}

// Add counts an arrival.
func (e *Estimator) Add(at time.Duration) {
	e.turn(at)
	one := counts{n: 1}
	if !e.any || at-e.last > longestGap {
		*e = Estimator{at: e.at, any: true, since: at, usual: usual{from: at, at: at}}
	} else {
		gap := (at - e.last).Seconds()
		one.gaps, one.time, one.squares, one.first = 1, gap, gap*gap, gap
	}
	e.last = at
	e.usual.add(at, 1, 0)
	for l, k := 0, e.at; l < levels; l, k = l+1, k/ratio {
		s := &e.slots[l][k%ring]
		earlier := *s
		*s = one
		s.prepend(earlier)
	}
}

// turn clears the slots between the newest one and the slot of the time at.
func (e *Estimator) turn(at time.Duration) {
	from, to := e.at, int64(at/slot)
	if to <= from {
		return
	}
	e.at = to
	for l := range levels {
		for k := max(from+1, to-ring+1); k <= to; k++ {
			e.slots[l][k%ring] = counts{}
		}
		from, to = from/ratio, to/ratio
	}
}

// Estimate is what an [Estimator] knows. The zero value means that nothing has arrived.
type Estimate struct {
	Rate float64 // arrivals per second
	// Ahead is the rate to expect after [Horizon]. If the rate has changed often, Ahead is nearer to
	// the mean rate of the last minutes.
	Ahead float64
	// CV2 is the squared coefficient of variation of the gaps; 0: too few gaps are known, or all
	// gaps are equal.
	CV2 float64
	// Since is the time of the latest change of the rate, or of the first arrival. After a silence of
	// a minute it is the time of the latest arrival, and the rate is zero.
	Since time.Duration
}

// Read returns the estimate as of a time, or as of the latest call if that is later. If the rate
// has certainly changed, Read forgets all arrivals before the change. Changes are found only by
// Read, so it should be called about once per second.
func (e *Estimator) Read(at time.Duration) Estimate {
	if !e.any {
		return Estimate{}
	}
	at = max(at, time.Duration(e.at)*slot)
	e.turn(at)
	if at-e.last > longestGap {
		return Estimate{Since: e.last}
	}
	var room [most]split
	h := history{splits: e.splits(at, room[:0])}
	for {
		h.past = e.past
		k, evidence := h.weigh()
		if evidence <= Certain {
			cv2 := h.cv2(len(h.splits) - 1)
			rate := h.rate(cv2)
			return Estimate{Rate: rate, Ahead: e.usual.ahead(at, rate), CV2: cv2, Since: e.since}
		}
		e.past.add(h.before(k), e.past)
		e.since = at - h.splits[k].age
		e.usual.add(at, 0, 1)
		h.splits = h.splits[:k+1]
	}
}

// splits appends the possible times of a change to out, from the latest to the earliest. The last
// one is the time of the latest known change, or the earliest time that is counted. A split is at
// least the shortest time ago, but for the only one.
func (e *Estimator) splits(at time.Duration, out []split) []split {
	var sum counts
	length, k := slot, e.at
	for l := range levels {
		for end := lastUsed(k, l); k >= end; k-- {
			sum.prepend(e.slots[l][k%ring])
			from := max(time.Duration(k)*length, e.since)
			if from == e.since {
				return append(out, split{at - from, sum})
			}
			if at-from >= shortest {
				out = append(out, split{at - from, sum})
			}
		}
		k = (k+1)/ratio - 1 // the loop ended at the beginning of a slot of the next level
		length *= ratio
	}
	return out
}

// lastUsed returns the number of the earliest slot of a level that is used, if k is the newest.
func lastUsed(k int64, level int) int64 {
	end := k - used + 1
	if level < levels-1 {
		end -= max(end, 0) % ratio
	}
	return max(end, 0)
}
