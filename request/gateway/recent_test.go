package gateway

import (
	"math"
	"net/http"
	"testing"
	"time"
)

// TestRecentWindowExpires fills a window with known latencies and lets it expire.
func TestRecentWindowExpires(t *testing.T) {
	var r recent
	t0 := time.Unix(1000, 0)
	for i := range 300 { // 1 to 100 ms, over three seconds
		r.add(t0.Add(time.Duration(i)*10*time.Millisecond), http.StatusOK, time.Duration(1+i%100)*time.Millisecond)
	}
	for range 100 {
		r.add(t0.Add(2*time.Second), http.StatusTooManyRequests, time.Millisecond)
	}
	now := t0.Add(3 * time.Second)
	got := r.read(now, 50*time.Millisecond)
	near := func(what string, got, want, by float64) {
		t.Helper()
		if math.Abs(got-want) > by*want {
			t.Errorf("%s %g, want %g within %g", what, got, want, by)
		}
	}
	near("rate", got.Rate, 400.0/recentSeconds, 1e-9)
	near("p50", got.P50.Seconds(), 0.050, 0.2)
	near("p99", got.P99.Seconds(), 0.099, 0.2)
	near("failed", got.Failed, 0.25, 1e-9)
	near("within the objective", got.Within, 0.375, 0.05)
	if got := r.read(now, 0); got.Within != 0.75 {
		t.Errorf("without an objective %g are good, want 0.75", got.Within)
	}
	if got := r.read(now.Add(recentSeconds*time.Second), time.Second); got != (Recent{Within: 1}) {
		t.Errorf("after the window: %+v, want nothing", got)
	}
	for _, d := range []time.Duration{0, time.Microsecond, time.Hour} {
		r.add(now, http.StatusOK, d) // exactly on the bounds
	}
}
