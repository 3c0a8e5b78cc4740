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
