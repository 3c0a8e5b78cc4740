package arrivals

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"
)

// maxCV is the largest coefficient of variation of gaps. Above it, nearly all gaps are shorter than
// a nanosecond.
const maxCV = 30

// Renewal returns arrivals at the rates of p. cv is the coefficient of variation of the gaps, which
// are independent at a constant rate. Gaps are equal if cv is 0, exponential if it is 1 (a Poisson
// process), and otherwise gamma with shape 1/cv². The mean is exact (see the package comment). The
// source ends only if the last rate is 0.
func Renewal(p Profile, cv float64, seed uint64) (Source, error) {
	if err := p.Validate(); err != nil {
		return nil, err
	}
	if !(cv >= 0 && cv <= maxCV) {
		return nil, fmt.Errorf("cv %g, want 0 to %d", cv, maxCV)
	}
	r := &renewal{to: inverter{p: p}, cv: cv, rand: rand.New(rand.NewPCG(seed, 0))}
	switch k := 1 / (cv * cv); cv {
	case 0:
		// The first of n even arrivals is half a gap after the start, the last one half a gap
		// before the end.
		r.due = 0.5
	case 1:
		r.due = r.gap()
	default:
		// The rest of the gap that an observer finds.
		r.due = Gamma(r.rand, k+1) / k * r.rand.Float64()
	}
	return r, nil
}

type renewal struct {
	to    inverter
	cv    float64
	rand  *rand.Rand
	due   float64 // the next arrival in operational time
	ended bool
}

// gap draws a gap with mean 1.
func (r *renewal) gap() float64 {
	switch r.cv {
	case 0:
		return 1
	case 1:
		return r.rand.ExpFloat64()
	}
	k := 1 / (r.cv * r.cv)
	return Gamma(r.rand, k) / k
}

func (r *renewal) Next() (time.Duration, bool) {
	if r.ended {
		return 0, false
	}
	t, ok := r.to.at(r.due)
	r.due += r.gap()
	if !ok || t > math.MaxInt64/float64(2*time.Second) {
		r.ended = true
		return 0, false
	}
	return time.Duration(t * float64(time.Second)), true
}

// Gamma draws from the gamma distribution of shape k and scale 1 (Marsaglia and Tsang 2000). For k
// below 1, it uses their method with a power of a uniform number.
func Gamma(r *rand.Rand, k float64) float64 {
	if k < 1 {
		return Gamma(r, k+1) * math.Pow(1-r.Float64(), 1/k)
	}
	d := k - 1.0/3
	c := 1 / math.Sqrt(9*d)
	for {
		x := r.NormFloat64()
		v := 1 + c*x
		if v <= 0 {
			continue
		}
		v = v * v * v
		if math.Log(1-r.Float64()) < x*x/2+d-d*v+d*math.Log(v) {
			return d * v
		}
	}
}

// State is a state of a Markov-modulated Poisson process: arrivals at Rate per second, for an
// exponential time with the given Mean.
type State struct {
	Rate float64
	Mean time.Duration
}

// States are the states of a Markov-modulated Poisson process. Each other state is equally likely
// to follow.
type States []State

// Validate checks that there are at least two states of 1 ms or more, with rates of 0 to 10 million
// per second that are not all 0.
func (s States) Validate() error {
	if len(s) < 2 {
		return fmt.Errorf("%d states, want 2 or more", len(s))
	}
	var errs []error
	for i, x := range s {
		if !(x.Rate >= 0 && x.Rate <= maxRate) {
			errs = append(errs, fmt.Errorf("state %d: rate %g, want 0 to %g per second", i+1, x.Rate, maxRate))
		}
		if x.Mean < time.Millisecond {
			errs = append(errs, fmt.Errorf("state %d: mean time %v, want 1ms or more", i+1, x.Mean))
		}
	}
	if s.Mean() == 0 {
		errs = append(errs, errors.New("every rate is 0, want one above 0"))
	}
	return errors.Join(errs...)
}

// Mean returns the mean rate per second. Each state is visited equally often.
func (s States) Mean() float64 {
	arrivals, length := 0.0, 0.0
	for _, x := range s {
		arrivals += x.Rate * x.Mean.Seconds()
		length += x.Mean.Seconds()
	}
	return arrivals / length
}

// Scale multiplies every rate by a factor.
func (s States) Scale(by float64) States {
	out := make(States, len(s))
	for i, x := range s {
		out[i] = State{x.Rate * by, x.Mean}
	}
	return out
}

// ParseStates parses "RATE:MEAN,RATE:MEAN", such as "5:10s,50:2s".
func ParseStates(text string) (States, error) {
	var out States
	for part := range strings.SplitSeq(text, ",") {
		rate, mean, _ := strings.Cut(strings.TrimSpace(part), ":")
		r, err := strconv.ParseFloat(rate, 64)
		if err != nil {
			return nil, fmt.Errorf("mmpp %q: state %q: got rate %q, want a number per second", text, part, rate)
		}
		m, err := time.ParseDuration(mean)
		if err != nil {
			return nil, fmt.Errorf("mmpp %q: state %q: got mean time %q, want a duration such as 10s", text, part, mean)
		}
		out = append(out, State{r, m})
	}
	if err := out.Validate(); err != nil {
		return nil, fmt.Errorf("mmpp %q: %w", text, err)
	}
	return out, nil
}

// String returns the form that [ParseStates] parses.
func (s States) String() string {
	var parts []string
	for _, x := range s {
		parts = append(parts, strconv.FormatFloat(x.Rate, 'g', -1, 64)+":"+x.Mean.String())
	}
	return strings.Join(parts, ",")
}

// MMPP returns arrivals of a Markov-modulated Poisson process that starts in its equilibrium. It
// never ends.
func MMPP(s States, seed uint64) (Source, error) {
	if err := s.Validate(); err != nil {
		return nil, err
	}
	m := &mmpp{states: s, rand: rand.New(rand.NewPCG(seed, 0))}
	total := 0.0
	for _, x := range s {
		total += x.Mean.Seconds()
	}
	for at := m.rand.Float64() * total; m.i < len(s)-1 && at >= s[m.i].Mean.Seconds(); m.i++ {
		at -= s[m.i].Mean.Seconds()
	}
	m.left = m.rand.ExpFloat64() * s[m.i].Mean.Seconds()
	return m, nil
}

type mmpp struct {
	states States
	rand   *rand.Rand
	i      int
	now    float64 // seconds
	left   float64 // seconds left in the state
}

func (m *mmpp) Next() (time.Duration, bool) {
	for need := m.rand.ExpFloat64(); ; {
		rate := m.states[m.i].Rate
		if need < rate*m.left {
			m.now, m.left = m.now+need/rate, m.left-need/rate
			return time.Duration(m.now * float64(time.Second)), true
		}
		need -= rate * m.left
		m.now += m.left
		other := m.rand.IntN(len(m.states) - 1)
		if other >= m.i {
			other++
		}
		m.i = other
		m.left = m.rand.ExpFloat64() * m.states[m.i].Mean.Seconds()
	}
}
