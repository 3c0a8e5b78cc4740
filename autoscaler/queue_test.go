package autoscaler

import (
	"math"
	"testing"
	"time"
)

// steadyWait returns the mean wait of M/M/c in seconds, from the textbook. It is infinite if the
// queue is unstable.
func steadyWait(lambda, mu float64, c int) float64 {
	if !(lambda < float64(c)*mu) {
		return math.Inf(1)
	}
	a := lambda / mu
	term, sum := 1.0, 0.0 // a^k/k!, and its sum for k < c
	for k := range c {
		sum += term
		term *= a / float64(k+1)
	}
	last := term / (1 - a/float64(c))
	return last / (sum + last) / (float64(c)*mu - lambda)
}

// TestSojournAgainstTheTextbook compares predictions with published tables. QUART's Eq. 1 gives
// other figures, for example 0.201 s for the last one.
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
		got := Sojourn(tc.lambda, tc.mu, tc.c, 1, 1, 0).Seconds()
		if math.Abs(got-tc.want) > 5e-4*tc.want+5e-5 {
			t.Errorf("W(%g,%g,%d) = %.4f, want %.4f", tc.lambda, tc.mu, tc.c, got, tc.want)
		}
		if want := steadyWait(tc.lambda, tc.mu, tc.c) + 1/tc.mu; math.Abs(got-want) > 1e-8 {
			t.Errorf("W(%g,%g,%d) = %.9f, want %.9f by the definition", tc.lambda, tc.mu, tc.c, got, want)
		}
	}
}

func TestSojournOfGeneralQueues(t *testing.T) {
	for name, tc := range map[string]struct {
		lambda, mu float64
		c          int
		ca2, cs2   float64
		waiting    int
		want       time.Duration
	}{
		"M/M/1":            {8, 10, 1, 1, 1, 0, 500 * time.Millisecond},
		"M/D/1 waits half": {8, 10, 1, 1, 0, 0, 300 * time.Millisecond},
		// GI/M/1 with gamma gaps: (1/μ)/(1−σ), with σ = (1+16·(1−σ)/0.8)^(−1/16)
		"bursts":              {8, 10, 1, 16, 1, 0, 3980404 * time.Microsecond},
		"unknown counts as 1": {8, 10, 1, math.NaN(), -1, 0, 500 * time.Millisecond},
		"nothing arrives":     {0, 10, 1, 1, 1, 0, 100 * time.Millisecond},
		"a line stands":       {0, 10, 2, 1, 1, 20, 1100 * time.Millisecond},
		"a line as is usual":  {8, 10, 1, 1, 1, 4, 500 * time.Millisecond},
		"a longer one":        {8, 10, 1, 1, 1, 10, 1100 * time.Millisecond},
		// 4.9 at 98 %, 2 % of 10 s, and 0.1
		"saturated, one server": {10, 10, 1, 1, 1, 0, 5200 * time.Millisecond},
		"twice too much":        {20, 10, 1, 1, 1, 0, 15200 * time.Millisecond},
		// 10 for the line, 10.2 of growth, 0.1
		"twice too much, and a line":  {20, 10, 1, 1, 1, 100, 20300 * time.Millisecond},
		"no server":                   {1, 10, 0, 1, 1, 0, longest},
		"no service":                  {1, 0, 1, 1, 1, 0, longest},
		"never ending service":        {1, 1e-300, 1, 1, 1, 0, longest},
		"not a number":                {math.NaN(), 10, 1, 1, 1, 0, longest},
		"not a number of services":    {1, math.NaN(), 1, 1, 1, 0, longest},
		"endless":                     {math.Inf(1), 10, 1, 1, 1, 0, longest},
		"less than nothing":           {-1, 10, 1, 1, 1, -1, 100 * time.Millisecond},
		"bursts without end":          {8, 10, 1, math.Inf(1), 1, 0, longest},
		"more servers than are tried": {1e6, 10, 200000, 1, 1, 0, 100 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			got := Sojourn(tc.lambda, tc.mu, tc.c, tc.ca2, tc.cs2, tc.waiting)
			if diff := got - tc.want; diff.Abs() > 10*time.Microsecond {
				t.Errorf("Sojourn(%g/s, %g/s, %d, %g, %g, %d) = %v, want %v", tc.lambda, tc.mu, tc.c, tc.ca2, tc.cs2, tc.waiting, got, tc.want)
			}
		})
	}
}

// TestWaitFallsConvexlyInServers checks that waits are convex in the number of servers, so that
// marginal gain finds the optimum. It also checks that the time saved by one more server rises with
// the rate. Otherwise a stage could lose replicas when its load rises.
func TestWaitFallsConvexlyInServers(t *testing.T) {
	for _, mu := range []float64{0.1, 1, 7} {
		for _, a := range []float64{0.01, 0.3, 0.97, 1, 2.4, 9.7, 40, 300} {
			from := int(math.Ceil(a / saturated))
			for c := from; c < from+60; c++ {
				w := func(c int, a float64) float64 { return meanWait(a*mu, mu, c, 1, 1) }
				fall, next := w(c, a)-w(c+1, a), w(c+1, a)-w(c+2, a)
				if eps := 1e-12 * w(c, a); fall < -eps || next > fall+eps {
					t.Fatalf("a=%g μ=%g: server %d takes off %g, the next %g", a, mu, c+1, fall, next)
				}
				more := a * 1.001
				if more > saturated*float64(c) {
					continue
				}
				if got := w(c, more) - w(c+1, more); got < fall-1e-12*w(c, a) {
					t.Fatalf("a=%g μ=%g: server %d takes off %g, but %g when more arrives", a, mu, c+1, fall, got)
				}
			}
		}
	}
}

// TestWaitRisesWithoutAStep checks that the wait rises without a step through saturation.
func TestWaitRisesWithoutAStep(t *testing.T) {
	for _, c := range []int{1, 3, 40} {
		for _, waiting := range []int{0, 5, 500} {
			mu, last := 10.0, time.Duration(0)
			for load := 0.9; load < 1.2; load += 1e-5 {
				got := Sojourn(load*float64(c)*mu, mu, c, 2, 1, waiting)
				if last > 0 && (got < last || got-last > last/500+time.Millisecond) {
					t.Fatalf("%d servers at %g, %d waiting: %v after %v", c, load, waiting, got, last)
				}
				last = got
			}
		}
	}
}

func TestServersReturnsTheFewestWithinTheWait(t *testing.T) {
	for name, tc := range map[string]struct {
		lambda, mu float64
		ca2        float64
		wait       time.Duration
		limit      int
		want       int
	}{
		"nothing arrives":            {0, 10, 1, time.Second, 8, 0},
		"load just under one server": {9, 10, 1, time.Second, 8, 1},
		"tight wait buys a second":   {9, 10, 1, 50 * time.Millisecond, 8, 2},
		"so do bursts":               {9, 10, 9, time.Second, 8, 2},
		"unstable up to the limit":   {1000, 1, 1, time.Second, 8, 8},
		"saturated":                  {9.9, 10, 1, time.Hour, 8, 2},
		"no wait at all":             {1, 1, 1, 0, 8, 8},
		"no service":                 {1, 0, 1, time.Second, 8, 8},
		"no limit":                   {1, 1, 1, time.Second, 0, 0},
		"not a number":               {math.NaN(), 1, 1, time.Second, 8, 8},
		"endless":                    {math.Inf(1), 1, 1, time.Second, 8, 8},
		"very many":                  {1e6, 10, 1, time.Second, 1 << 30, 102041},
	} {
		t.Run(name, func(t *testing.T) {
			if got := Servers(tc.lambda, tc.mu, tc.ca2, 1, tc.wait, tc.limit); got != tc.want {
				t.Errorf("Servers(%g/s, %g/s, %g, 1, %v, %d) = %d, want %d", tc.lambda, tc.mu, tc.ca2, tc.wait, tc.limit, got, tc.want)
			}
		})
	}
}

// FuzzServers checks that Servers returns the smallest c whose wait is within the target, and that
// more load never gives a smaller c.
func FuzzServers(f *testing.F) {
	f.Add(38.2, 5.0, 1.0, 1.0, int64(200), 20)
	f.Add(38.2, 5.0, 16.0, 0.0, int64(200), 20)
	f.Add(0.0, 0.0, -1.0, math.NaN(), int64(-1), -1)
	f.Fuzz(func(t *testing.T, lambda, mu, ca2, cs2 float64, millis int64, limit int) {
		limit = min(limit, 500)
		wait := time.Duration(millis%1e6) * time.Millisecond
		c := Servers(lambda, mu, ca2, cs2, wait, limit)
		if lambda <= 0 || !(mu > 1e-6) || !(lambda < 1e9) || math.IsInf(mu, 0) {
			return
		}
		ca2, cs2 = factors(ca2, cs2)
		if c < limit {
			if w := meanWait(lambda, mu, c, ca2, cs2); !(w <= wait.Seconds()) || lambda >= float64(c)*mu {
				t.Errorf("Servers(%g,%g,%g,%g,%v,%d) = %d waits %v", lambda, mu, ca2, cs2, wait, limit, c, w)
			}
		}
		if c > 1 && c <= limit {
			if w := meanWait(lambda, mu, c-1, ca2, cs2); w < wait.Seconds()*(1-1e-9) && lambda < saturated*float64(c-1)*mu {
				t.Errorf("Servers(%g,%g,%g,%g,%v,%d) = %d, but one less waits only %v", lambda, mu, ca2, cs2, wait, limit, c, w)
			}
		}
		if more := Servers(lambda*2, mu, ca2, cs2, wait, limit); more < c {
			t.Errorf("Servers(2·%g,%g,%g,%g,%v,%d) = %d, fewer than %d", lambda, mu, ca2, cs2, wait, limit, more, c)
		}
	})
}

// FuzzSojourn checks that any arguments give a valid time. More load or fewer servers must never
// make it shorter.
func FuzzSojourn(f *testing.F) {
	f.Add(38.2, 5.0, 8, 1.0, 1.0, 0)
	f.Add(40.0, 5.0, 8, 16.0, 0.2, 100)
	f.Add(math.Inf(1), math.NaN(), -1, -1.0, math.Inf(1), math.MinInt)
	f.Fuzz(func(t *testing.T, lambda, mu float64, c int, ca2, cs2 float64, waiting int) {
		c = min(c, 1<<20)
		got := Sojourn(lambda, mu, c, ca2, cs2, waiting)
		if got < 0 || got > longest {
			t.Fatalf("Sojourn(%g,%g,%d,%g,%g,%d) = %v", lambda, mu, c, ca2, cs2, waiting, got)
		}
		if math.IsNaN(lambda) || math.IsNaN(mu) || waiting > 1<<40 {
			return
		}
		eps := got/1e9 + 1
		for what, more := range map[string]time.Duration{
			"a higher rate":    Sojourn(lambda+math.Abs(lambda)/100, mu, c, ca2, cs2, waiting),
			"a longer line":    Sojourn(lambda, mu, c, ca2, cs2, max(waiting, 0)+7),
			"one server fewer": Sojourn(lambda, mu, c-1, ca2, cs2, waiting),
		} {
			if more < got-eps {
				t.Errorf("Sojourn(%g,%g,%d,%g,%g,%d) = %v, but only %v with %s", lambda, mu, c, ca2, cs2, waiting, got, more, what)
			}
		}
	})
}
