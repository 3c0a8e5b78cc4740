// Package arrivals computes when requests arrive: Poisson, gamma or even gaps, Markov-modulated
// Poisson, ramps and steps, and the replay of traces.
//
// A [Source] is an iterator over instants since the start of a run. It has no clock, and its only
// randomness comes from a seed. The same seed gives the same instants to a load generator, which
// waits for them, and to a simulator, which jumps to them.
//
//	p, err := arrivals.ParseProfile("2:10s,2..20:30s,20:1m")
//	s, err := arrivals.Renewal(p, 4, 1) // gaps with a coefficient of variation of 4, seed 1
//	for at, ok := s.Next(); ok; at, ok = s.Next() { … }
//
// # Rates that change
//
// [Renewal] first draws a renewal process of rate one. Its i-th instant s(i) then becomes the time
// t(i) = Λ⁻¹(s(i)), where Λ(t) is the integral of the rate over [0, t]. For exponential gaps, that
// is the inversion method for a non-homogeneous Poisson process (Çinlar 1975).
//
// For other gaps, the method keeps the number of arrivals: N(t) = N₁(Λ(t)), where N₁ counts the
// process of rate one. So the mean is exactly Λ(t). The dispersion of counts tends to CV², however
// the rate changes (Gerhardt and Nelson 2009, "Transforming renewal processes for simulation of
// nonstationary arrival processes"). Thinning would keep only the mean.
//
// The mean is exact from the first instant on, because the first gap has the equilibrium
// distribution: that of the time that an observer, who comes at a random time, waits for the next
// arrival. For gamma gaps of shape k, that is a gap of shape k+1 multiplied by a uniform random
// number.
package arrivals

import "time"

// Source returns instants in ascending order, as times since the start of a run. After the last
// instant, every call of Next returns false. Some sources never end (see [Until]). A Source is not
// safe for concurrent use.
type Source interface {
	Next() (at time.Duration, ok bool)
}

// Until ends s before the first instant at or after end.
func Until(s Source, end time.Duration) Source { return &until{s, end} }

type until struct {
	s   Source
	end time.Duration
}

func (u *until) Next() (time.Duration, bool) {
	at, ok := u.s.Next()
	if !ok || at >= u.end {
		u.end = 0
		return 0, false
	}
	return at, true
}
