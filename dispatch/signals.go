package dispatch

import (
	"math"
	"time"

	"github.com/stagecoach-serving/stagecoach/plan"
	"github.com/stagecoach-serving/stagecoach/sketch"
)

// The window over arrivals, waits and slots.
//
// Erlang C turns the rate into a number of replicas, and the two ways to be wrong are not alike: too low a rate leaves a
// queue that grows for as long as the error lasts, too high a rate costs a replica that idles. So the rate must rise
// within a second or two, before the line is long, and may fall slowly; but it must not follow chance, because each
// wiggle starts or stops a replica. One window cannot do both: n arrivals estimate a rate with a relative error of
// 1/sqrt(n), so a window of 2 s is too noisy to size by and one of 15 s sees half a step only after 5 s.
//
// Hence two. The base is a window of 15 s in which an arrival's weight fades with exp(-age/5s): steady, and a burst is
// gone from it when it leaves the window. Over it, the last 2 s count instead when they hold more arrivals than chance
// explains at the base's rate: more than three standard deviations of a count, sqrt(mean) each as of a Poisson process, or CV times that
// of bursty arrivals. For these there are longer windows: see rates. A doubling of 50/s then shows as 1.7 times as much after 1 s, with a
// CV of 2 after 4 s and with one of 4 after 14 s (means of 20 runs): until then it may be a burst, and what waits says that it is long.
//
// Means of waits and of busy slots are of the base, with its weights; quantiles of waits are of the last 12 to 15 s, for all alike.
const (
	bucketLength   = 500 * time.Millisecond
	buckets        = 30
	fade           = 5 * time.Second
	recent         = 4 // buckets, the one being filled included
	surprise       = 3 // standard deviations
	leastExposure  = time.Second
	fewestArrivals = 5 // to know the rate at once
	parts          = 5 // of the window, a sketch each
	perPart        = buckets / parts
	farthest       = 1 << 62 * time.Nanosecond // 146 years
)

// signals measures demand, waits and slots in bounded memory. The zero value is ready. It never knows less time to have passed
// than before: a clock that goes backwards stands still.
type signals struct {
	first  time.Time     // when it began to measure: bucket 0 starts there
	at     time.Duration // since then, of the latest tick
	newest int64         // number of the bucket of then
	ring   [buckets]bucket
	waits  [parts]sketch.Sketch
	all    sketch.Sketch // scratch of quantiles
	past   sketch.Sketch // of the waits before the newest part, which are those of pasts
	pasts  [2]int64      // from one part to before another

	total   uint64        // arrivals
	arrived time.Duration // the latest
	began   time.Duration // the first
	gaps    gaps
	rates   rates
	bursts  bursts
}

// bucket is what happened in half a second.
type bucket struct {
	arrived     int           // tasks
	left        int           // tasks that left the line
	waits       float64       // nanoseconds that these had waited, together
	busy, slots time.Duration // that slots were taken, and there, together
}

// tick says that since the latest tick so many slots were taken, and there. All else that is told is of this instant.
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

// spread gives each bucket from one instant to another its part of the time in between.
func (s *signals) spread(from, to time.Duration, busy, slots int) {
	for from = max(from, to-buckets*bucketLength); from < to; {
		k := int64(from / bucketLength)
		s.turn(k)
		end := min(time.Duration(k+1)*bucketLength, to)
		s.ring[k%buckets].occupy(end-from, busy, slots)
		from = end
	}
}

// turn makes k the newest bucket, and those between empty.
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
	s.current().arrived++
	if s.total == 0 {
		s.began = s.at
	} else {
		s.gaps.add(s.at - s.arrived)
	}
	s.arrived = s.at
	s.rates.add(s.at)
	s.total++
	s.bursts.add(s.at)
}

// leave counts a task that left the line, for a replica or at its deadline, after so long.
func (s *signals) leave(wait time.Duration) {
	b := s.current()
	b.left++
	b.waits += float64(wait)
	s.waits[s.newest/perPart%parts].Add(wait)
}

// read returns all of it as of now, when so many slots are taken and there. The rate is known after a few arrivals, or some time
// after the first; then a rate of zero is a measurement.
func (s *signals) read(now time.Time, busy, slots int) (plan.Demand, plan.Wait, plan.Busy) {
	var d plan.Demand
	var w plan.Wait
	var use plan.Busy
	if s.first.IsZero() {
		return d, w, use
	}
	age := max(min(now.Sub(s.first), farthest), s.at)
	base, last, exposure := s.sum(age, busy, slots)
	if s.total > 0 {
		d.Last = now.Add(s.arrived - age)
	}
	if s.total >= fewestArrivals || s.total > 0 && age-s.began >= recent*bucketLength {
		d.Known = true
		d.Rate = base.arrived / max(exposure.base, leastExposure.Seconds())
		d.CV = s.gaps.faded(int64(age/bucketLength) - s.newest).cv()
		if chance := d.Rate * exposure.last; last > chance+surprise*math.Sqrt(chance*max(d.CV*d.CV, 1)) {
			d.Rate = max(d.Rate, last/max(exposure.last, leastExposure.Seconds()))
		} else if ca2 := d.CV * d.CV; ca2 > 1 {
			d.Rate = s.rates.faded(age).rate(d.Rate, ca2, age-s.began, age-s.arrived)
		}
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

// sum adds the buckets up with their weights; last is the arrivals of the latest ones without, and exposure, in seconds, is the time
// since the first arrival that is in either.
func (s *signals) sum(age time.Duration, busy, slots int) (base weighed, last float64, exposure struct{ base, last float64 }) {
	current := int64(age / bucketLength)
	for k := max(current-buckets+1, 0); k <= current; k++ {
		from := time.Duration(k) * bucketLength
		to := min(from+bucketLength, age)
		seen := max(from, min(s.began, to))
		weight := math.Exp(-(age - (from+to)/2).Seconds() / fade.Seconds())
		exposure.base += weight * (to - seen).Seconds()
		var b bucket
		if k <= s.newest {
			b = s.ring[k%buckets]
		}
		if since := max(from, s.at); since < to { // that no tick has told of
			b.occupy(to-since, busy, slots)
		}
		base.add(b, weight)
		if k > current-recent {
			last += float64(b.arrived)
			exposure.last += (to - seen).Seconds()
		}
	}
	return base, last, exposure
}

// weighed is a sum of buckets, each with its weight; times are in seconds.
type weighed struct{ arrived, left, waits, busy, slots float64 }

func (w *weighed) add(b bucket, weight float64) {
	w.arrived += weight * float64(b.arrived)
	w.left += weight * float64(b.left)
	w.waits += weight * b.waits / float64(time.Second)
	w.busy += weight * b.busy.Seconds()
	w.slots += weight * b.slots.Seconds()
}

// quantiles merges what parts of the window there are up to bucket k.
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

// The variation of the times between arrivals fades slower than their rate: its estimate needs the rare long gaps, and with
// arrivals in bursts, as from a stage that calls the next one for each item, there is one long gap a burst. Over 5 s a CV of 4 is
// estimated as 3.4 at 5 arrivals/s, over 20 s as 3.8, and over a minute as 4.0, but then a step of the rate looks like bursts for a
// minute.
const (
	gapFade     = 20 * time.Second
	longestGap  = time.Minute // a longer one says idle, not uneven
	fewestGaps  = 5           // to know the CV
	fewestLong  = 1.5         // gaps that make up most of the time: of one burst, however large, there is one at most
	leastCovers = time.Second // by all gaps together
)

// gaps are faded sums of the times between arrivals, in nanoseconds.
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

// faded returns g so many buckets later.
func (g gaps) faded(by int64) gaps {
	if by <= 0 {
		return g
	}
	f := math.Exp(-(time.Duration(min(by, 1e6)) * bucketLength).Seconds() / gapFade.Seconds())
	return gaps{g.n * f, g.sum * f, g.squares * f}
}

// cv returns the coefficient of variation; 0: too little is known. sum²/squares is how many gaps the sample is worth: n of n equal
// ones, n/(1+CV²) in general.
func (g gaps) cv() float64 {
	if g.n < fewestGaps || g.sum < float64(leastCovers) || g.sum*g.sum < fewestLong*g.squares {
		return 0
	}
	return cv(g.n, g.sum, g.squares)
}
