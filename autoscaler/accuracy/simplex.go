package accuracy

import (
	"math"
	"slices"
)

// simplex solves: minimise cost·x, where rows·x = right and low <= x <= high. All bounds are
// finite, so that any basis is dual feasible with the other columns at the right bounds. The dual
// simplex method needs no other start, also after bounds have changed.
//
// The last columns are the slacks, one per row. The inverse of the basis is kept as a dense matrix,
// because problems have at most a few hundred rows.
type simplex struct {
	rows      int
	start     []int32 // of each column but the slacks, in index and value
	index     []int32
	value     []float64
	low, high []float64
	cost      []float64
	right     []float64

	head    []int32 // columns of the basis, by row
	state   []int8  // of each column
	x       []float64
	d       []float64 // reduced costs
	inverse []float64 // rows × rows
	weights []float64 // by row, for the choice of the row that leaves

	scratch
	pivots int     // since the inverse was made
	work   float64 // operations so far
}

// scratch is memory of a step.
type scratch struct {
	alpha, col, change []float64 // of columns; of rows; of rows
	nonzero            []int32   // columns with alpha
	order              []candidate
}

const (
	atLow int8 = iota
	atHigh
	basic
)

// candidate is a column that may enter the basis.
type candidate struct {
	ratio float64
	col   int32
}

const (
	primalTol   = 1e-9 // a value may be outside its bounds by this
	pivotTol    = 1e-8 // smaller elements are no pivots
	mostRound   = 200  // pivots between two new inverses
	leastWeight = 1e-12
	never       = 1e300 // a cutoff that no cost reaches
)

// verdict is the result of a solve.
type verdict int8

const (
	optimal verdict = iota
	infeasible
	cutOff // the cost is above the cutoff
	stuck  // numbers were too bad, or the work was used up
)

// column returns the rows and values of a column that is no slack.
func (s *simplex) column(j int) ([]int32, []float64) {
	return s.index[s.start[j]:s.start[j+1]], s.value[s.start[j]:s.start[j+1]]
}

func (s *simplex) columns() int { return len(s.start) - 1 }

// prepare allocates the state, with the slacks as the basis.
func (s *simplex) prepare() {
	n := s.columns() + s.rows
	s.head, s.state = make([]int32, s.rows), make([]int8, n)
	s.x, s.d, s.alpha = make([]float64, n), make([]float64, n), make([]float64, n)
	s.inverse = make([]float64, s.rows*s.rows)
	s.weights, s.col, s.change = make([]float64, s.rows), make([]float64, s.rows), make([]float64, s.rows)
	for i := range s.rows {
		s.head[i] = int32(s.columns() + i)
		s.state[s.columns()+i] = basic
		s.inverse[i*s.rows+i], s.weights[i] = 1, 1
	}
}

// gradient computes the reduced costs.
func (s *simplex) gradient() {
	y := s.change
	for k := range y {
		y[k] = 0
	}
	for i, j := range s.head {
		if c := s.cost[j]; c != 0 {
			row := s.inverse[i*s.rows : (i+1)*s.rows]
			for k, v := range row {
				y[k] += c * v
			}
		}
	}
	for j := range s.columns() {
		rows, values := s.column(j)
		d := s.cost[j]
		for k, r := range rows {
			d -= y[r] * values[k]
		}
		s.d[j] = d
	}
	for i := range s.rows {
		s.d[s.columns()+i] = s.cost[s.columns()+i] - y[i]
	}
	for _, j := range s.head {
		s.d[j] = 0
	}
	s.work += float64(s.rows*s.rows + len(s.index))
}

// price computes the reduced costs, and puts columns outside the basis at the right bounds.
func (s *simplex) price() {
	s.gradient()
	for j, st := range s.state {
		switch {
		case st == basic:
		case s.d[j] > 0:
			s.state[j] = atLow
		case s.d[j] < 0:
			s.state[j] = atHigh
		}
	}
}

// values computes x from the bounds of the columns outside the basis.
func (s *simplex) values() {
	b := s.change
	copy(b, s.right)
	for j, st := range s.state {
		if st == basic {
			continue
		}
		v := s.low[j]
		if st == atHigh {
			v = s.high[j]
		}
		s.x[j] = v
		if v == 0 {
			continue
		}
		if j >= s.columns() {
			b[j-s.columns()] -= v
			continue
		}
		rows, values := s.column(j)
		for k, r := range rows {
			b[r] -= v * values[k]
		}
	}
	for i, j := range s.head {
		row, sum := s.inverse[i*s.rows:(i+1)*s.rows], 0.0
		for k, v := range row {
			sum += v * b[k]
		}
		s.x[j] = sum
	}
	s.work += float64(s.rows*s.rows + len(s.index))
}

// renew makes the inverse again from the columns of the basis.
func (s *simplex) renew() bool {
	for i := range s.inverse {
		s.inverse[i] = 0
	}
	old := slices.Clone(s.head)
	for i := range s.rows {
		s.inverse[i*s.rows+i] = 1
		s.head[i] = -1
	}
	for _, j := range old {
		if int(j) >= s.columns() {
			s.head[int(j)-s.columns()] = j
		}
	}
	for _, j := range old {
		if int(j) >= s.columns() {
			continue
		}
		s.enter(int(j))
		at, most := -1, pivotTol
		for i := range s.rows {
			if a := math.Abs(s.col[i]); s.head[i] < 0 && a > most {
				at, most = i, a
			}
		}
		if at < 0 {
			return false
		}
		s.head[at] = j
		s.pivot(at)
	}
	for i := range s.weights {
		s.weights[i] = leastWeight
		for _, v := range s.inverse[i*s.rows : (i+1)*s.rows] {
			s.weights[i] += v * v
		}
	}
	s.pivots = 0
	return true
}

// enter computes col, the column j in terms of the basis.
func (s *simplex) enter(j int) {
	for i := range s.col {
		s.col[i] = 0
	}
	if j >= s.columns() {
		k := j - s.columns()
		for i := range s.col {
			s.col[i] = s.inverse[i*s.rows+k]
		}
		return
	}
	rows, values := s.column(j)
	for i := range s.col {
		row, sum := s.inverse[i*s.rows:(i+1)*s.rows], 0.0
		for k, r := range rows {
			sum += row[r] * values[k]
		}
		s.col[i] = sum
	}
	s.work += float64(s.rows * len(rows))
}

// pivot updates the inverse: the column that col has takes the place of a row's one.
func (s *simplex) pivot(at int) {
	row := s.inverse[at*s.rows : (at+1)*s.rows]
	by := 1 / s.col[at]
	s.nonzero = s.nonzero[:0]
	norm := 0.0
	for k := range row {
		if row[k] != 0 {
			row[k] *= by
			norm += row[k] * row[k]
			s.nonzero = append(s.nonzero, int32(k))
		}
	}
	s.weights[at] = norm
	for i, c := range s.col {
		if i == at || c == 0 {
			continue
		}
		to, dot := s.inverse[i*s.rows:(i+1)*s.rows], 0.0
		for _, k := range s.nonzero {
			dot += to[k] * row[k]
			to[k] -= c * row[k]
		}
		s.weights[i] = max(s.weights[i]+c*(c*norm-2*dot), leastWeight)
		s.work += float64(len(s.nonzero))
	}
	s.pivots++
}

// total returns the cost of x.
func (s *simplex) total() float64 {
	sum := 0.0
	for j, c := range s.cost {
		sum += c * s.x[j]
	}
	return sum
}

// leaving returns the row whose value is furthest outside its bounds; -1: none is.
func (s *simplex) leaving() int {
	at, most := -1, 0.0
	for i, j := range s.head {
		out := max(s.low[j]-s.x[j], s.x[j]-s.high[j])
		if out > primalTol {
			if out = out * out / s.weights[i]; out > most {
				at, most = i, out
			}
		}
	}
	return at
}

// solve finds the best x from the present basis. It ends early if the cost is above the cutoff, or
// if more work than the limit is done.
func (s *simplex) solve(cutoff, limit float64) verdict {
	if s.pivots > mostRound && !s.renew() {
		return stuck
	}
	s.price()
	s.values()
	renewed := false
	for {
		at := s.leaving()
		if at < 0 {
			return optimal
		}
		if cutoff < never && s.total() > cutoff {
			return cutOff
		}
		if s.work > limit {
			return stuck
		}
		switch ok, found := s.step(at); {
		case !found && (renewed || s.pivots == 0):
			return infeasible
		case !ok || !found: // the numbers may be bad
			if renewed && s.pivots == 0 || !s.renew() {
				return stuck
			}
			s.price()
			s.values()
			renewed = true
		case s.pivots > mostRound:
			if !s.renew() {
				return stuck
			}
			s.price()
			s.values()
		}
	}
}

// step takes a row out of the basis. found is false if no column can enter: no x is feasible. ok is
// false if the numbers are bad.
func (s *simplex) step(at int) (ok, found bool) {
	out := int(s.head[at])
	excess := s.x[out] - s.high[out]
	sign, to := 1.0, s.high[out]
	if s.x[out] < s.low[out] {
		excess, sign, to = s.low[out]-s.x[out], -1, s.low[out]
	}
	s.ratios(at, sign)
	in, flips := -1, 0
	for k := range s.order {
		s.next(k)
		j := s.order[k].col
		span := math.Abs(s.alpha[j]) * (s.high[j] - s.low[j])
		if excess-span <= primalTol {
			in, flips = s.largest(k), k
			break
		}
		excess -= span
	}
	if in < 0 {
		return true, false
	}
	s.enter(in)
	if a := s.col[at]; math.Abs(a) < pivotTol || math.Abs(a-s.alpha[in]) > 1e-6*(1+math.Abs(a)) {
		return false, true
	}
	s.flip(flips)
	s.exchange(at, in, out, to, sign)
	return true, true
}

// ratios computes alpha, a row of the basis' inverse times all columns, and the columns that may
// enter for it.
func (s *simplex) ratios(at int, sign float64) {
	row := s.inverse[at*s.rows : (at+1)*s.rows]
	s.order = s.order[:0]
	n := s.columns()
	for j, st := range s.state {
		if st == basic {
			continue
		}
		if s.low[j] == s.high[j] { // its reduced cost is computed by price, when it is free again
			s.alpha[j] = 0
			continue
		}
		a := 0.0
		if j >= n {
			a = row[j-n]
		} else {
			for k := s.start[j]; k < s.start[j+1]; k++ {
				a += row[s.index[k]] * s.value[k]
			}
		}
		s.alpha[j] = a
		if a *= sign; st == atLow && a > pivotTol || st == atHigh && a < -pivotTol {
			s.order = append(s.order, candidate{max(s.d[j]/a, 0), int32(j)})
		}
	}
	s.work += float64(len(s.index) + len(s.state))
}

// next moves the candidate with the smallest ratio, of those from index k on, to index k.
func (s *simplex) next(k int) {
	least := k
	for i := k + 1; i < len(s.order); i++ {
		if a, b := &s.order[i], &s.order[least]; a.ratio < b.ratio || a.ratio == b.ratio && a.col < b.col {
			least = i
		}
	}
	s.order[k], s.order[least] = s.order[least], s.order[k]
}

// largest returns the column with the largest alpha of those with about the same ratio as the k-th
// candidate, which has the smallest ratio from index k on. It moves that column to index k.
func (s *simplex) largest(k int) int {
	best, ratio := k, s.order[k].ratio+1e-12
	for i := k + 1; i < len(s.order); i++ {
		if s.order[i].ratio <= ratio && math.Abs(s.alpha[s.order[i].col]) > math.Abs(s.alpha[s.order[best].col]) {
			best = i
		}
	}
	s.order[k], s.order[best] = s.order[best], s.order[k]
	return int(s.order[k].col)
}

// flip moves the first candidates to their other bounds.
func (s *simplex) flip(n int) {
	if n == 0 {
		return
	}
	for i := range s.change {
		s.change[i] = 0
	}
	for _, c := range s.order[:n] {
		j := int(c.col)
		by := s.high[j] - s.low[j]
		s.x[j] = s.high[j]
		if s.state[j] == atHigh {
			by, s.x[j] = -by, s.low[j]
		}
		s.state[j] = 1 - s.state[j]
		if j >= s.columns() {
			s.change[j-s.columns()] += by
			continue
		}
		rows, values := s.column(j)
		for k, r := range rows {
			s.change[r] += by * values[k]
		}
	}
	for i, j := range s.head {
		row, sum := s.inverse[i*s.rows:(i+1)*s.rows], 0.0
		for k, v := range s.change {
			if v != 0 {
				sum += row[k] * v
			}
		}
		s.x[j] -= sum
	}
	s.work += float64(s.rows * s.rows)
}

// exchange lets a column enter the basis for that of a row, which goes to a bound.
func (s *simplex) exchange(at, in, out int, to, sign float64) {
	theta := (s.x[out] - to) / s.col[at]
	for i, j := range s.head {
		if c := s.col[i]; c != 0 {
			s.x[j] -= theta * c
		}
	}
	s.x[in] += theta
	s.x[out] = to
	t := s.d[in] / s.col[at]
	if t != 0 {
		for j, st := range s.state {
			if st != basic && s.alpha[j] != 0 {
				s.d[j] -= t * s.alpha[j]
			}
		}
	}
	s.d[in], s.d[out] = 0, -t
	s.state[in] = basic
	s.state[out] = atHigh
	if sign < 0 {
		s.state[out] = atLow
	}
	s.head[at] = int32(in)
	s.pivot(at)
}
