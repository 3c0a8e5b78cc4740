package autoscaler

import (
	"math"
	"testing"
)

// erlangB returns B(c) for an offered load of a.
func erlangB(c int, a float64) float64 {
	b := 1.0
	for k := 1; k <= c; k++ {
		b = nextB(b, k, a)
	}
	return b
}

// TestErlangBAgainstTheSum compares the recursion with the definition: a^c/c! over the sum of
// a^k/k!.
func TestErlangBAgainstTheSum(t *testing.T) {
	for c := range 20 {
		for _, a := range []float64{0, 0.3, 1, 5, 17} {
			term, sum := 1.0, 1.0
			for k := 1; k <= c; k++ {
				term *= a / float64(k)
				sum += term
			}
			if got, want := erlangB(c, a), term/sum; math.Abs(got-want) > 1e-12 {
				t.Errorf("B(%d,%g) = %v, want %v", c, a, got, want)
			}
		}
	}
}

func TestLargeLoadsDoNotOverflow(t *testing.T) {
	for _, a := range []float64{1e3, 1e4, 1e5} {
		c := int(a) + int(3*math.Sqrt(a))
		if got := erlangC(c, a); !(got > 0 && got < 0.01) { // three standard deviations of spare servers
			t.Errorf("C(%d,%g) = %v, want above 0 and under 0.01", c, a, got)
		}
	}
	if got := erlangB(10, math.Inf(1)); got == 0 {
		t.Errorf("B(10,∞) = %v", got)
	}
}
