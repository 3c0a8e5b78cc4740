package dispatch

import (
	"math"
	"time"

	"github.com/stagecoach-serving/stagecoach/plan"
)

// The window over arrivals.
//
// Erlang C turns the rate into a number of replicas, and the two ways to be wrong are not alike: too low a rate leaves a
// queue that grows for as long as the error lasts, too high a rate costs a replica that idles. So the rate must rise
// within a second or two, before the line is long, and may fall slowly; but it must not follow chance, because each
// wiggle starts or stops a replica. One window cannot do both: n arrivals estimate a rate with a relative error of
// 1/sqrt(n), so a window of 2 s is too noisy to size by and one of 15 s sees half a step only after 5 s.
//
// Hence two. The base is a window of 15 s in which an arrival's weight fades with exp(-age/5s): steady, and a burst is
// gone from it when it leaves the window. Over it, the last 2 s count instead when they hold more arrivals than chance
// explains at the base's rate: more than three standard deviations of a Poisson count, sqrt(mean) each.
const (
	bucketLength   = 500 * time.Millisecond
	buckets        = 30
	arrivalFade    = 5 * time.Second
	recent         = 4 // buckets, the one being filled included
	surprise       = 3 // standard deviations
	leastExposure  = time.Second
	fewestArrivals = 5  // to know the rate at once
	fewestGaps     = 10 // to know the CV
)

// arrivals measures demand in bounded memory. The zero value is ready.
type arrivals struct {
	first, last time.Time
	total       uint64
	newest      int64 // number of the bucket of the latest arrival; bucket 0 starts with the first arrival
	ring        [buckets]arrivalBucket
}

// arrivalBucket counts arrivals, and the gaps that ended with them in seconds.
type arrivalBucket struct {
	n, gaps, sum, squares float64
}

// add counts an arrival at now.
func (a *arrivals) add(now time.Time) {
	if a.total == 0 {
		a.first, a.last = now, now
	}
	k := max(int64(now.Sub(a.first)/bucketLength), a.newest)
	for i := max(a.newest+1, k-buckets+1); i <= k; i++ {
		a.ring[i%buckets] = arrivalBucket{}
	}
	a.newest = k
	b := &a.ring[k%buckets]
	b.n++
	if gap := now.Sub(a.last); a.total > 0 && gap < buckets*bucketLength { // a longer one says idle, not uneven
		b.gaps++
		b.sum += gap.Seconds()
		b.squares += gap.Seconds() * gap.Seconds()
	}
	a.last = now
	a.total++
}

// read returns the demand as of now. It is known after a few arrivals, or some time after the first; then a rate of zero
// is a measurement.
func (a *arrivals) read(now time.Time) plan.Demand {
	d := plan.Demand{Last: a.last}
	age := now.Sub(a.first)
	if a.total == 0 || a.total < fewestArrivals && age < recent*bucketLength {
		return d
	}
	var base, last arrivalBucket // weighted, and as counted
	var baseTime, lastTime, gaps float64
	current := max(int64(age/bucketLength), a.newest)
	for k := max(current-buckets+1, 0); k <= current; k++ {
		from := time.Duration(k) * bucketLength
		to := max(min(from+bucketLength, age), from)
		weight := math.Exp(-(age - (from+to)/2).Seconds() / arrivalFade.Seconds())
		length := (to - from).Seconds()
		baseTime += weight * length
		if k > current-recent {
			lastTime += length
		}
		if k > a.newest {
			continue
		}
		b := a.ring[k%buckets]
		base.n += weight * b.n
		base.gaps += weight * b.gaps
		base.sum += weight * b.sum
		base.squares += weight * b.squares
		gaps += b.gaps
		if k > current-recent {
			last.n += b.n
		}
	}
	d.Known = true
	d.Rate = base.n / max(baseTime, leastExposure.Seconds())
	if chance := d.Rate * lastTime; last.n > chance+surprise*math.Sqrt(chance) {
		d.Rate = max(d.Rate, last.n/max(lastTime, leastExposure.Seconds()))
	}
	if gaps >= fewestGaps {
		d.CV = cv(base.gaps, base.sum, base.squares)
	}
	return d
}

// The fading of service times. They belong to the model and not to the hour, so that the last few stay known however
// long ago they were: a function that comes back from zero is sized by them.
const (
	serviceFade   = 30 * time.Second
	serviceKeep   = 20 // batches that never fade
	fewestBatches = 3  // to know the mean
)

// services measures how long a slot is busy, in bounded memory. The zero value is ready.
type services struct {
	last           time.Time
	batches, tasks float64 // faded counts
	busy, squares  float64 // seconds; squares of a task's share, a task each
}

// add counts a batch of n tasks that kept its slot busy until now.
func (s *services) add(now time.Time, busy time.Duration, n int) {
	if s.batches > serviceKeep {
		fade := max(math.Exp(-now.Sub(s.last).Seconds()/serviceFade.Seconds()), serviceKeep/s.batches)
		s.batches, s.tasks, s.busy, s.squares = s.batches*fade, s.tasks*fade, s.busy*fade, s.squares*fade
	}
	s.last = now
	share := busy.Seconds() / float64(n)
	s.batches++
	s.tasks += float64(n)
	s.busy += busy.Seconds()
	s.squares += share * share * float64(n)
}

// read returns the service time of a task: its share of its batch's.
func (s *services) read() plan.Service {
	if s.batches < fewestBatches {
		return plan.Service{}
	}
	out := plan.Service{Known: true, Mean: seconds(s.busy / s.tasks)}
	if s.batches >= fewestGaps {
		out.CV = cv(s.tasks, s.busy, s.squares)
	}
	return out
}

// perBatch returns the mean of a batch; 0: not yet known.
func (s *services) perBatch() time.Duration {
	if s.batches < fewestBatches {
		return 0
	}
	return seconds(s.busy / s.batches)
}

// cv returns the coefficient of variation of n values from their sum and their sum of squares.
func cv(n, sum, squares float64) float64 {
	mean := sum / n
	if mean <= 0 {
		return 0
	}
	return math.Sqrt(max(squares/n-mean*mean, 0)) / mean
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
