package arrivals

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// Segment is a period in which the rate changes linearly from From to To, both per second.
type Segment struct {
	Length   time.Duration
	From, To float64
}

// Profile is a rate over time, as consecutive segments. After the last one, its To applies for
// ever.
type Profile []Segment

// maxRate is the largest rate per second. The gaps of higher rates would be too short for
// nanoseconds.
const maxRate = 1e7

// Validate checks that rates are 0 to 10 million per second and not all 0, and that no length is
// negative.
func (p Profile) Validate() error {
	var errs []error
	some := false
	for i, s := range p {
		for _, r := range []float64{s.From, s.To} {
			if !(r >= 0 && r <= maxRate) {
				errs = append(errs, fmt.Errorf("segment %d: rate %g, want 0 to %g per second", i+1, r, maxRate))
			}
			some = some || r > 0
		}
		if s.Length < 0 {
			errs = append(errs, fmt.Errorf("segment %d: length %v, want 0 or more", i+1, s.Length))
		}
	}
	if !some {
		errs = append(errs, errors.New("every rate is 0, want one above 0"))
	}
	return errors.Join(errs...)
}

// Length returns the sum of the segments' lengths.
func (p Profile) Length() (d time.Duration) {
	for _, s := range p {
		d += s.Length
	}
	return d
}

// Scale multiplies every rate by a factor.
func (p Profile) Scale(by float64) Profile {
	out := make(Profile, len(p))
	for i, s := range p {
		out[i] = Segment{s.Length, s.From * by, s.To * by}
	}
	return out
}

// Expected returns Λ(t), the expected number of arrivals in [0, t].
func (p Profile) Expected(t time.Duration) float64 {
	sum, left := 0.0, t.Seconds()
	for i, s := range p {
		length := s.Length.Seconds()
		if left <= length {
			return sum + s.area(left)
		}
		sum, left = sum+s.area(length), left-length
		if i == len(p)-1 {
			sum += s.To * left
		}
	}
	return sum
}

// area returns the integral of the rate over the first u seconds.
func (s Segment) area(u float64) float64 {
	if s.Length <= 0 {
		return 0
	}
	return s.From*u + (s.To-s.From)*u*u/(2*s.Length.Seconds())
}

// inverse returns the u for which area(u) is y. y must be at most the whole area.
func (s Segment) inverse(y float64) float64 {
	if y <= 0 {
		return 0
	}
	root := math.Sqrt(max(0, s.From*s.From+2*(s.To-s.From)*y/s.Length.Seconds()))
	// This form of the quadratic's root loses no digits.
	return min(2*y/(s.From+root), s.Length.Seconds())
}

// inverter computes Λ⁻¹ for ascending arguments.
type inverter struct {
	p          Profile
	i          int
	begin, sum float64 // start of segment i in seconds, and Λ there
}

// at returns Λ⁻¹(y) in seconds, or false if the rate becomes 0 for ever before y.
func (v *inverter) at(y float64) (float64, bool) {
	for ; v.i < len(v.p); v.i++ {
		s := v.p[v.i]
		whole := s.area(s.Length.Seconds())
		if y-v.sum < whole {
			return v.begin + s.inverse(y-v.sum), true
		}
		v.begin, v.sum = v.begin+s.Length.Seconds(), v.sum+whole
	}
	last := v.p[len(v.p)-1].To
	if last <= 0 {
		return 0, false
	}
	return v.begin + (y-v.sum)/last, true
}

// ParseProfile parses a rate such as "20", or segments separated by commas, as in
// "2:10s,2..20:30s,20:1m". The segment "RATE:LENGTH" is a constant rate, and "FROM..TO:LENGTH" is a
// ramp. Rates are per second, and lengths are Go durations. The last segment needs no length unless
// it is a ramp.
func ParseProfile(text string) (Profile, error) {
	var p Profile
	parts := strings.Split(text, ",")
	for i, part := range parts {
		rates, length, timed := strings.Cut(strings.TrimSpace(part), ":")
		s := Segment{}
		var err error
		if timed {
			if s.Length, err = time.ParseDuration(length); err != nil || s.Length <= 0 {
				return nil, fmt.Errorf("rate %q: length %q, want a duration such as 30s", text, length)
			}
		} else if i < len(parts)-1 {
			return nil, fmt.Errorf("rate %q: segment %q has no length, want RATE:LENGTH such as 2:10s", text, part)
		}
		from, to, ramp := strings.Cut(rates, "..")
		if !ramp {
			to = from
		} else if !timed {
			return nil, fmt.Errorf("rate %q: ramp %q has no length, want FROM..TO:LENGTH such as 2..20:30s", text, part)
		}
		if s.From, err = strconv.ParseFloat(from, 64); err != nil {
			return nil, fmt.Errorf("rate %q: got %q, want a number per second", text, from)
		}
		if s.To, err = strconv.ParseFloat(to, 64); err != nil {
			return nil, fmt.Errorf("rate %q: got %q, want a number per second", text, to)
		}
		p = append(p, s)
	}
	if err := p.Validate(); err != nil {
		return nil, fmt.Errorf("rate %q: %w", text, err)
	}
	return p, nil
}

// String returns the form that [ParseProfile] parses.
func (p Profile) String() string {
	var parts []string
	for _, s := range p {
		t := strconv.FormatFloat(s.From, 'g', -1, 64)
		if s.To != s.From {
			t += ".." + strconv.FormatFloat(s.To, 'g', -1, 64)
		}
		if s.Length > 0 {
			t += ":" + s.Length.String()
		}
		parts = append(parts, t)
	}
	return strings.Join(parts, ",")
}
