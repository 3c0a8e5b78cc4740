// Package arrivals says when requests arrive: Poisson, gamma or even gaps, Markov-modulated Poisson, ramps and steps, and the
// replay of traces.
//
// A [Source] is an iterator over instants, counted from the start of a run. It has no clock and draws chance from a seed alone:
// the same seed gives the same instants, whether a load generator waits for them or a simulator jumps to them.
//
//	p, err := arrivals.ParseProfile("2:10s,2..20:30s,20:1m")
//	s, err := arrivals.Renewal(p, 4, 1) // gaps with a coefficient of variation of 4, seed 1
//	for at, ok := s.Next(); ok; at, ok = s.Next() { … }
//
// # Rates that change
//
// [Renewal] draws a renewal process of rate one in operational time and maps its i-th instant s(i) to the clock with
// t(i) = Λ⁻¹(s(i)), where Λ(t) is the integral of the rate over [0, t]. For exponential gaps that is the inversion method for
// a non-homogeneous Poisson process (Çinlar 1975); for others it keeps the number of arrivals, N(t) = N₁(Λ(t)), so that the
// mean is exactly Λ(t) and the dispersion of counts tends to CV² whatever the rate does (Gerhardt and Nelson 2009,
// "Transforming renewal processes for simulation of nonstationary arrival processes"). Thinning would do the former alone.
// The mean is exact from the first instant on because the first gap is the one that an observer finds who comes at any time
// (the equilibrium distribution): a gap of gamma shape k+1 instead of k, cut at a uniform place.
package arrivals

import "time"

// Source gives instants in ascending order, each counted from the start of a run; false when there are no more, and ever
// after. Some never end: see [Until]. A Source is not safe for concurrent use.
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
