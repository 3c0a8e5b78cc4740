package accuracy

// least returns a cost that no x is below, by the duality of linear programs: from the prices of
// the rows. It holds for any prices, so errors in the inverse make it lower, but not wrong.
func (s *simplex) least() float64 {
	prices := s.prices()
	sum := 0.0
	for i, right := range s.right {
		sum += prices[i] * right
	}
	for j := range s.state {
		d := s.cost[j]
		if j >= s.columns() {
			d -= prices[j-s.columns()]
		} else {
			rows, values := s.column(j)
			for k, r := range rows {
				d -= prices[r] * values[k]
			}
		}
		if d > 0 {
			sum += d * s.low[j]
		} else {
			sum += d * s.high[j]
		}
	}
	s.work += float64(len(s.index))
	return sum
}

// prices returns what a unit of each row costs with the present basis.
func (s *simplex) prices() []float64 {
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
	s.work += float64(s.rows * s.rows)
	return y
}

// impossible reports whether no x fits the sum of all rows, each times its value in a row of the
// inverse. This holds for any values, so errors in the inverse do not make it wrong.
func (s *simplex) impossible(at int) bool {
	y := s.inverse[at*s.rows : (at+1)*s.rows]
	right, low, high := 0.0, 0.0, 0.0
	for i, r := range s.right {
		right += y[i] * r
	}
	for j := range s.state {
		a := 0.0
		if j >= s.columns() {
			a = y[j-s.columns()]
		} else {
			rows, values := s.column(j)
			for k, r := range rows {
				a += y[r] * values[k]
			}
		}
		if a > 0 {
			low, high = low+a*s.low[j], high+a*s.high[j]
		} else {
			low, high = low+a*s.high[j], high+a*s.low[j]
		}
	}
	s.work += float64(len(s.index))
	return right < low-primalTol || right > high+primalTol
}
