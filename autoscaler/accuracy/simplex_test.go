package accuracy

import "testing"

// TestSimplexGoesToBothBounds has one row that holds only if both columns are exactly at their
// upper bounds.
func TestSimplexGoesToBothBounds(t *testing.T) {
	s := simplex{
		rows: 1, start: []int32{0, 1, 2}, index: []int32{0, 0}, value: []float64{1, 1},
		low: []float64{0, 0, 0}, high: []float64{1, 1, 0}, cost: []float64{1, 2, 0}, right: []float64{2},
	}
	s.prepare()
	if v := s.solve(never, 1e6); v != optimal || s.x[0] != 1 || s.x[1] != 1 {
		t.Errorf("verdict %v, x %v, want both at 1", v, s.x)
	}
	s.high[1] = 0.9
	if v := s.solve(never, 1e6); v != infeasible {
		t.Errorf("verdict %v with a lower bound, want infeasible", v)
	}
}

// TestASingularBasisIsNoEnd begins from a basis of two equal columns.
func TestASingularBasisIsNoEnd(t *testing.T) {
	s := simplex{
		rows: 2, start: []int32{0, 2, 4, 5}, index: []int32{0, 1, 0, 1, 1}, value: []float64{1, 1, 1, 1, 1},
		low: []float64{0, 0, 0, 0, 0}, high: []float64{3, 3, 1, 0, 0}, cost: []float64{1, 2, 3, 0, 0}, right: []float64{4, 5},
	}
	s.prepare()
	s.head = []int32{0, 1}
	s.state = []int8{basic, basic, atLow, atHigh, atLow}
	if s.renew() {
		t.Fatal("two equal columns are a basis")
	}
	if v := s.solve(never, 1e6); v != optimal || s.x[0] != 3 || s.x[1] != 1 || s.x[2] != 1 {
		t.Errorf("verdict %v, x %v, want 3, 1 and 1", v, s.x)
	}
}

// drifted returns a simplex whose inverse is half as large again as that of its basis. The first
// column alone fits its row.
func drifted(mostOfSecond float64) *simplex {
	s := &simplex{
		rows: 1, start: []int32{0, 1, 2}, index: []int32{0, 0}, value: []float64{1, 1},
		low: []float64{0, 0, 0}, high: []float64{2, mostOfSecond, 0}, cost: []float64{1, 2, 0}, right: []float64{2},
	}
	s.prepare()
	s.head[0], s.state[0], s.state[2] = 0, basic, atLow
	s.inverse[0], s.pivots = 1.5, 1
	return s
}

// TestOldNumbersProveNothing begins with an inverse that is not that of the basis.
func TestOldNumbersProveNothing(t *testing.T) {
	if v := drifted(2).solve(2.5, 1e6); v == cutOff {
		t.Error("the node is cut off at 2.5, although its cost is 2")
	}
	s := drifted(0.1)
	if v := s.solve(never, 1e6); v != optimal || s.x[0] != 2 || s.x[1] != 0 {
		t.Errorf("verdict %v, x %v, want 2 and 0", v, s.x)
	}
	if s = drifted(0.1); s.impossible(0) || s.least() > 2 {
		t.Errorf("old numbers say that the cost is at least %v, want at most 2 and a proof of nothing else", s.least())
	}
	if s.right[0] = 2.2; !s.impossible(0) {
		t.Error("columns of at most 2 and 0.1 fit a row of 2.2")
	}
}
