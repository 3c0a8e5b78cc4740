package quart

import (
	"fmt"
	"math"
	"math/rand/v2"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench/load/arrivals"
	"github.com/stagecoach-serving/stagecoach/sim"
)

// shape is how the rate of a load changes over time.
type shape struct {
	name    string
	counted time.Duration // the part of a run that counts: several changes
	// multiples returns the rate over time, at least for length, as a multiple of the mean rate.
	multiples func(length time.Duration, r *rand.Rand) arrivals.Profile
}

// The rates of loads that jump: half of the mean, and twice the mean for a third of the time.
const (
	lowRate, highRate = 0.5, 2
	highPart          = (1 - lowRate) / (highRate - lowRate)
)

// shapes returns the shapes of load, from steady to slowly changing.
func shapes() []shape {
	return []shape{
		{"steady", counted, func(length time.Duration, _ *rand.Rand) arrivals.Profile {
			return arrivals.Profile{{Length: length, From: 1, To: 1}}
		}},
		{"second", counted, jumps(6 * time.Second)},
		{"minute", 5 * time.Minute, jumps(time.Minute)},
		{"diurnal", 10 * time.Minute, diurnal(10*time.Minute, 0.8)},
	}
}

// jumps returns rates that jump up and down. A period up and one down take this long on average;
// each is half to one and a half times as long, and a run begins anywhere in the first.
func jumps(period time.Duration) func(time.Duration, *rand.Rand) arrivals.Profile {
	return func(length time.Duration, r *rand.Rand) arrivals.Profile {
		var out arrivals.Profile
		var at time.Duration
		for up, begin := r.Float64() < highPart, r.Float64(); at < length; up, begin = !up, 0 {
			rate, share := lowRate, 1-highPart
			if up {
				rate, share = highRate, highPart
			}
			d := part(period, share*(0.5+r.Float64())*(1-begin))
			if d > 0 {
				out, at = append(out, arrivals.Segment{Length: d, From: rate, To: rate}), at+d
			}
		}
		return out
	}
}

// diurnal returns a rate that goes up and down like a sine, as over a day. It is made of straight
// pieces. A run begins anywhere in the period.
func diurnal(period time.Duration, amplitude float64) func(time.Duration, *rand.Rand) arrivals.Profile {
	return func(length time.Duration, r *rand.Rand) arrivals.Profile {
		const pieces = 40
		piece, begin := period/pieces, r.Float64()
		rate := func(i int) float64 { return 1 + amplitude*math.Sin(2*math.Pi*(begin+float64(i)/pieces)) }
		var out arrivals.Profile
		for i := 0; time.Duration(i)*piece < length; i++ {
			out = append(out, arrivals.Segment{Length: piece, From: rate(i), To: rate(i + 1)})
		}
		return out
	}
}

// put gives a scenario arrivals of this shape. In the part that counts, their mean rate is rate in
// each run.
func (h shape) put(s *sim.Scenario, rate float64) {
	s.Duration = s.Warmup + h.counted
	s.Pipelines[0].Arrivals = sim.Arrivals{Make: func(seed uint64) (arrivals.Source, error) {
		p, err := h.profile(s.Warmup, s.Duration, seed)
		if err != nil {
			return nil, err
		}
		return arrivals.Renewal(p.Scale(rate), 1, seed)
	}}
}

// profile returns the rate over time of a run, as a multiple of the mean rate from the end of the
// warm-up on.
func (h shape) profile(warmup, length time.Duration, seed uint64) (arrivals.Profile, error) {
	p := h.multiples(length, rand.New(rand.NewPCG(seed, 1)))
	mean := (p.Expected(length) - p.Expected(warmup)) / (length - warmup).Seconds()
	if !(mean > 0) {
		return nil, fmt.Errorf("shape %s, seed %d: a mean rate of %g, want more", h.name, seed, mean)
	}
	return p.Scale(1 / mean), nil
}
