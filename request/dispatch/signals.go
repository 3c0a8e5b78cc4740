package dispatch

import (
	"math"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/internal/sketch"
	"github.com/stagecoach-serving/stagecoach/request/rate"
)

// signals measures over sliding windows. Rates are those of package rate, which follow a change
// within about a second and do not follow chance. Means of waits and of busy slots are over 15 s,
// where the weight of a task fades with exp(-age/5s). Quantiles of waits cover the last 12 to 15 s
// with equal weights.
const (
	bucketLength   = 500 * time.Millisecond
	buckets        = 30
	fade           = 5 * time.Second
	settled        = 2 * time.Second // from the first arrival, until few arrivals are a rate
	leastExposure  = time.Second
	fewestArrivals = 5 // needed to know the rate at once
	parts          = 5 // parts of the window, with one sketch each
	perPart        = buckets / parts
	farthest       = 1 << 62 * time.Nanosecond // 146 years
)

// signals measures demand, waits and slots in bounded memory. The zero value is ready. If the clock
// goes backwards, time stands still.
type signals struct {
	first  time.Time     // start of measuring, which is the start of bucket 0
	at     time.Duration // latest tick, since first
	newest int64         // number of the bucket of that tick
	ring   [buckets]bucket
	waits  [parts]sketch.Sketch
	all    sketch.Sketch // reused by quantiles
	past   sketch.Sketch // waits of all parts but the newest; pasts says which
	pasts  [2]int64      // range of parts in past, half open

	total   uint64        // number of arrivals
	arrived time.Duration // time of the latest arrival
	began   time.Duration // time of the first arrival
	gaps    gaps
	rate    rate.Estimator
	bursts  bursts
	gone    plan.Tally // tasks that have left the line
}

// bucket holds what happened in half a second.
type bucket struct {
	left  int     // number of tasks that left the line
	waits float64 // sum of their waits in nanoseconds
	// sum over the slots of the time that they were taken, and that they existed.
	busy, slots time.Duration
}

// tick moves the time of s to the time now. busy and slots are the numbers of taken slots and of
// all slots since the latest tick. Whatever is recorded before the next tick counts as if it
// happened at this time.
func (s *signals) tick(now time.Time, busy, slots int) {
	if s.first.IsZero() {
		s.first = now
		return
	}
	from, to := s.at, min(now.Sub(s.first), farthest)
	if to <= from {
		return
	}
	s.at = to
	if k := int64(to / bucketLength); k > s.newest {
		if slots > 0 {
			s.spread(from, to, busy, slots)
		}
		s.turn(k)
		return
	}
	s.current().occupy(to-from, busy, slots)
}

// spread adds the time between two instants to its buckets.
func (s *signals) spread(from, to time.Duration, busy, slots int) {
	for from = max(from, to-buckets*bucketLength); from < to; {
		k := int64(from / bucketLength)
		s.turn(k)
		end := min(time.Duration(k+1)*bucketLength, to)
		s.ring[k%buckets].occupy(end-from, busy, slots)
		from = end
	}
}

// turn makes k the newest bucket and clears those in between.
func (s *signals) turn(k int64) {
	for i := max(s.newest+1, k-buckets+1); i <= k; i++ {
		s.ring[i%buckets] = bucket{}
	}
	for i := max(s.newest/perPart+1, k/perPart-parts+1); i <= k/perPart; i++ {
		s.waits[i%parts].Reset()
	}
	if k > s.newest {
		s.gaps = s.gaps.faded(k - s.newest)
		s.newest = k
	}
}

func (s *signals) current() *bucket { return &s.ring[s.newest%buckets] }

func (b *bucket) occupy(d time.Duration, busy, slots int) {
	b.busy += d * time.Duration(busy)
	b.slots += d * time.Duration(slots)
}

// arrive counts an arrival.
func (s *signals) arrive() {
	if s.total == 0 {
		s.began = s.at
	} else {
		s.gaps.add(s.at - s.arrived)
	}
	s.arrived = s.at
	s.rate.Add(s.at)
	s.total++
	s.bursts.add(s.at)
}

// leave counts a task that has left the line for a replica or at its deadline. wait is how long the
// task was in the line.
func (s *signals) leave(wait time.Duration) {
	b := s.current()
	b.left++
	b.waits += float64(wait)
	s.gone.N++
	s.gone.Seconds += wait.Seconds()
	s.waits[s.newest/perPart%parts].Add(wait)
}

// arrivals returns a copy of s with its arrivals only.
func (s *signals) arrivals() *signals {
	out := *s
	out.ring, out.waits, out.all, out.past = [buckets]bucket{}, [parts]sketch.Sketch{}, sketch.Sketch{}, sketch.Sketch{}
	out.gone = plan.Tally{}
	return &out
}

// read returns all signals as of now. busy and slots are as for tick. The rate is known after a few
// arrivals, or some time after the first arrival. From then on, a rate of zero is a measurement.
func (s *signals) read(now time.Time, busy, slots int) (plan.Demand, plan.Wait, plan.Busy) {
	var d plan.Demand
	var w plan.Wait
	var use plan.Busy
	w.Left = s.gone
	if s.first.IsZero() {
		return d, w, use
	}
	age := max(min(now.Sub(s.first), farthest), s.at)
	base := s.sum(age, busy, slots)
	if s.total > 0 {
		d.Last = now.Add(s.arrived - age)
	}
	if s.total >= fewestArrivals || s.total > 0 && age-s.began >= settled {
		e := s.rate.Read(age)
		d.Known, d.Rate, d.Ahead = true, e.Rate, e.Ahead
		d.CV = s.gaps.faded(int64(age/bucketLength) - s.newest).cv()
		d.Since = now.Add(e.Since - age)
		d.Envelope = s.bursts.read(age)
	}
	if base.left > 0 {
		w.Known, w.Mean = true, seconds(base.waits/base.left)
		w.P50, w.P95, w.P99 = s.quantiles(int64(age / bucketLength))
	}
	if base.slots >= leastExposure.Seconds()*math.Exp(-leastExposure.Seconds()/fade.Seconds()) {
		use = plan.Busy{Known: true, Share: min(base.busy/base.slots, 1)}
	}
	return d, w, use
}

// sum adds the buckets up, with weights.
func (s *signals) sum(age time.Duration, busy, slots int) (base weighed) {
	current := int64(age / bucketLength)
	for k := max(current-buckets+1, 0); k <= current; k++ {
		from := time.Duration(k) * bucketLength
		to := min(from+bucketLength, age)
		weight := math.Exp(-(age - (from+to)/2).Seconds() / fade.Seconds())
		var b bucket
		if k <= s.newest {
			b = s.ring[k%buckets]
		}
		if since := max(from, s.at); since < to { // not covered by a tick yet
			b.occupy(to-since, busy, slots)
		}
		base.add(b, weight)
	}
	return base
}

// weighed is a sum of weighted buckets. Times are in seconds.
type weighed struct{ left, waits, busy, slots float64 }

func (w *weighed) add(b bucket, weight float64) {
	w.left += weight * float64(b.left)
	w.waits += weight * b.waits / float64(time.Second)
	w.busy += weight * b.busy.Seconds()
	w.slots += weight * b.slots.Seconds()
}

// quantiles merges the sketches of the window's parts up to bucket k.
func (s *signals) quantiles(k int64) (p50, p95, p99 time.Duration) {
	newest := s.newest / perPart
	if span := [2]int64{max(k/perPart-parts+1, 0), newest}; span != s.pasts {
		s.pasts = span
		s.past.Reset()
		for i := span[0]; i < newest; i++ {
			s.past.Merge(&s.waits[i%parts])
		}
	}
	all := &s.all
	all.Reset()
	all.Merge(&s.past)
	if newest >= s.pasts[0] {
		all.Merge(&s.waits[newest%parts])
	}
	return all.Quantile(0.50), all.Quantile(0.95), all.Quantile(0.99)
}

// The CV for sizing is that of all gaps, also of gaps at different rates: it must grow if the rate
// itself changes by the second. The CV of package rate has no trace of such changes.
//
// The sums of gaps fade more slowly than those of waits, because the CV depends on rare long gaps.
// For example, if a stage calls the next stage once per item, arrivals come in bursts, with one
// long gap per burst. At 5 arrivals/s and a CV of 4, sums that fade in 5 s estimate a CV of 3.4; in
// 20 s, 3.8; in a minute, 4.0. But if sums fade in a minute, a step of the rate looks like bursts
// for a minute.
const (
	gapFade    = 20 * time.Second
	longestGap = time.Minute // a longer gap means idle, not bursty
	fewestGaps = 5           // needed to know the CV
	// Number of gaps that make up most of the time. One burst, however large, has at most one.
	fewestLong  = 1.5
	leastCovers = time.Second // time that all gaps together must cover
)

// gaps holds faded sums of the gaps between arrivals, in nanoseconds.
type gaps struct{ n, sum, squares float64 }

func (g *gaps) add(gap time.Duration) {
	if gap > longestGap {
		return
	}
	s := float64(gap)
	g.n++
	g.sum += s
	g.squares += s * s
}

// faded returns g as it is the given number of buckets later.
func (g gaps) faded(by int64) gaps {
	if by <= 0 {
		return g
	}
	f := math.Exp(-(time.Duration(min(by, 1e6)) * bucketLength).Seconds() / gapFade.Seconds())
	return gaps{g.n * f, g.sum * f, g.squares * f}
}

// cv returns the coefficient of variation; 0: too little is known. sum²/squares is the effective
// number of gaps: n for n equal gaps, n/(1+CV²) in general.
func (g gaps) cv() float64 {
	if g.n < fewestGaps || g.sum < float64(leastCovers) || g.sum*g.sum < fewestLong*g.squares {
		return 0
	}
	return cv(g.n, g.sum, g.squares)
}
