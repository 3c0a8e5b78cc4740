package accuracy

import "math"

// improve goes from a basis whose values are within their bounds to the best one, by the primal
// simplex method. It reports false if the basis is not within its bounds, or if it gives up; then
// the dual method has to begin from any basis.
func (s *simplex) improve(most int) bool {
	s.gradient()
	s.values()
	if s.leaving() >= 0 {
		return false
	}
	for range most {
		in := s.entering()
		if in < 0 {
			return true
		}
		if !s.raise(in) || s.pivots > mostRound && !s.renew() {
			return false
		}
		if s.pivots == 0 {
			s.gradient()
			s.values()
		}
	}
	return false
}

// dualTol is a reduced cost that is as good as 0.
const dualTol = 1e-12

// entering returns the column that lowers the cost most per unit; -1: none does.
func (s *simplex) entering() int {
	in, most := -1, dualTol
	for j, st := range s.state {
		if st == basic || s.low[j] == s.high[j] {
			continue
		}
		d := s.d[j]
		if st == atLow {
			d = -d
		}
		if d > most {
			in, most = j, d
		}
	}
	return in
}

// raise moves a column from its bound until another one is at a bound, which leaves the basis. It
// reports whether the numbers are good.
func (s *simplex) raise(in int) bool {
	s.enter(in)
	sign := 1.0 // of the column's change
	if s.state[in] == atHigh {
		sign = -1
	}
	at, step, toHigh := -1, s.high[in]-s.low[in], false
	for i, c := range s.col {
		c *= sign
		if math.Abs(c) < pivotTol {
			continue
		}
		j := s.head[i]
		room, high := s.x[j]-s.low[j], false
		if c < 0 {
			room, high = s.high[j]-s.x[j], true
		}
		room = max(room, 0) / math.Abs(c)
		if room < step-1e-12 || at >= 0 && room <= step+1e-12 && math.Abs(c) > math.Abs(s.col[at]) {
			at, step, toHigh = i, min(room, step), high
		}
	}
	if at < 0 {
		for i, j := range s.head {
			s.x[j] -= sign * step * s.col[i]
		}
		s.state[in] = 1 - s.state[in]
		s.x[in] += sign * step
		return true
	}
	out := int(s.head[at])
	s.order = s.order[:0]
	s.ratios(at, 1)
	if math.Abs(s.col[at]-s.alpha[in]) > 1e-6*(1+math.Abs(s.col[at])) {
		return false
	}
	to, side := s.low[out], -1.0
	if toHigh {
		to, side = s.high[out], 1
	}
	s.exchange(at, in, out, to, side)
	return true
}
