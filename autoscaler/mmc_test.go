package autoscaler

import (
	"math"
	"testing"
	"time"
)

// erlangB is B(c) for an offered load of a.
func erlangB(c int, a float64) float64 {
	b := 1.0
	for k := 1; k <= c; k++ {
		b = nextB(b, k, a)
	}
	return b
}

// mean returns the mean time in seconds that a call waits for one of c servers; ok is false when the queue is not stable.
func mean(lambda, mu float64, c int) (wait float64, ok bool) {
	if !(mu > 0) || !(lambda >= 0) || !(lambda < float64(c)*mu) {
		return math.Inf(1), false
	}
	return erlangC(c, lambda/mu) / (float64(c)*mu - lambda), true
}

// sojourn is the mean time in seconds that a call waits and is served. QUART's Eq. 1 wants to be this; package doc says where
// it differs.
func sojourn(lambda, mu float64, c int) (seconds float64, ok bool) {
	w, ok := mean(lambda, mu, c)
	return w + 1/mu, ok
}

func TestSojournAgainstTheTextbook(t *testing.T) {
	for _, tc := range []struct {
		lambda, mu float64
		c          int
		want       float64
	}{
		{18, 5, 4, 0.5939},
		{8, 5, 2, 0.5556},
		{3, 5, 1, 0.5},
		{5, 5, 4, 0.2014},
		{38, 5, 8, 0.622},
	} {
		got, ok := sojourn(tc.lambda, tc.mu, tc.c)
		if !ok || math.Abs(got-tc.want) > 5e-4*tc.want+5e-5 {
			t.Errorf("W(%g,%g,%d) = %.4f, %v, want %.4f", tc.lambda, tc.mu, tc.c, got, ok, tc.want)
		}
	}
}

func TestOneServerIsMM1(t *testing.T) {
	for _, lambda := range []float64{0, 0.1, 1, 4, 9.9} {
		if got, ok := sojourn(lambda, 10, 1); !ok || math.Abs(got-1/(10-lambda)) > 1e-12 {
			t.Errorf("W(%g,10,1) = %v, %v, want %v", lambda, got, ok, 1/(10-lambda))
		}
	}
}

func TestUnstableIsSaid(t *testing.T) {
	for _, tc := range []struct {
		lambda, mu float64
		c          int
	}{{10, 5, 2}, {11, 5, 2}, {1, 0, 3}, {1, 5, 0}, {math.NaN(), 5, 1}, {-1, 5, 1}, {1, math.NaN(), 1}} {
		if got, ok := sojourn(tc.lambda, tc.mu, tc.c); ok {
			t.Errorf("W(%g,%g,%d) = %v, want not stable", tc.lambda, tc.mu, tc.c, got)
		}
	}
}

// TestErlangBAgainstTheSum compares the recursion with the definition, a^c/c! over the sum of a^k/k!.
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

func TestMonotone(t *testing.T) {
	for _, mu := range []float64{0.1, 1, 7} {
		for c := 1; c < 30; c++ {
			last := 0.0
			for load := 0.05; load < 1; load += 0.05 {
				lambda := load * mu * float64(c)
				w, _ := mean(lambda, mu, c)
				if w < last {
					t.Fatalf("wait(%g,%g,%d) = %v, less than %v at a lower rate", lambda, mu, c, w, last)
				}
				if next, _ := mean(lambda, mu, c+1); next > w {
					t.Fatalf("wait(%g,%g,%d) = %v, more than %v with one server less", lambda, mu, c+1, next, w)
				}
				last = w
			}
		}
	}
}

func TestServers(t *testing.T) {
	for name, tc := range map[string]struct {
		lambda, mu float64
		wait       time.Duration
		limit      int
		want       int
	}{
		"nothing arrives":            {0, 10, time.Second, 8, 0},
		"load just under one server": {9, 10, time.Second, 8, 1},
		"tight wait buys a second":   {9, 10, 50 * time.Millisecond, 8, 2},
		"unstable up to the limit":   {1000, 1, time.Second, 8, 8},
		"no wait at all":             {1, 1, 0, 8, 8},
		"no service":                 {1, 0, time.Second, 8, 8},
		"no limit":                   {1, 1, time.Second, 0, 0},
		"not a number":               {math.NaN(), 1, time.Second, 8, 8},
		"endless":                    {math.Inf(1), 1, time.Second, 8, 8},
	} {
		t.Run(name, func(t *testing.T) {
			if got := Servers(tc.lambda, tc.mu, 1, 1, tc.wait, tc.limit); got != tc.want {
				t.Errorf("Servers(%g/s, %g/s, %v, %d) = %d, want %d", tc.lambda, tc.mu, tc.wait, tc.limit, got, tc.want)
			}
		})
	}
}

// FuzzServers holds Servers to its words: the least c whose wait is within the target.
func FuzzServers(f *testing.F) {
	f.Add(38.2, 5.0, int64(200), 20)
	f.Add(0.0, 0.0, int64(-1), -1)
	f.Fuzz(func(t *testing.T, lambda, mu float64, millis int64, limit int) {
		limit = min(limit, 500)
		wait := time.Duration(millis%1e6) * time.Millisecond
		c := Servers(lambda, mu, 1, 1, wait, limit)
		if lambda <= 0 || !(mu > 1e-6) || !(lambda < 1e9) || math.IsInf(mu, 0) {
			return
		}
		if c < limit {
			if w, ok := mean(lambda, mu, c); !ok || w > wait.Seconds()*(1+1e-9) {
				t.Errorf("Servers(%g,%g,%v,%d) = %d waits %v", lambda, mu, wait, limit, c, w)
			}
		}
		if c > 1 && c <= limit {
			if w, ok := mean(lambda, mu, c-1); ok && w < wait.Seconds()*(1-1e-9) {
				t.Errorf("Servers(%g,%g,%v,%d) = %d, but one less waits only %v", lambda, mu, wait, limit, c, w)
			}
		}
		if more := Servers(lambda*2, mu, 1, 1, wait, limit); more < c {
			t.Errorf("Servers(2·%g,%g,%v,%d) = %d, fewer than %d", lambda, mu, wait, limit, more, c)
		}
	})
}
