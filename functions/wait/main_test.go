package main

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

func TestDrawHasTheMeanAndVariationAskedFor(t *testing.T) {
	for _, cv := range []float64{0, 0.5, 2} {
		r := rand.New(rand.NewPCG(1, 2))
		const n = 200_000
		sum, squares := 0.0, 0.0
		for range n {
			v := draw(r, time.Second, cv).Seconds()
			sum += v
			squares += v * v
		}
		mean := sum / n
		got := math.Sqrt(squares/n-mean*mean) / mean
		if math.Abs(mean-1) > 0.03 || math.Abs(got-cv) > 0.05*max(1, cv) {
			t.Errorf("cv %g: mean %.3f s and cv %.3f, want 1 s and %g", cv, mean, got, cv)
		}
	}
}

func TestParseNamesTheVariable(t *testing.T) {
	for k, v := range map[string]string{"wait_mean": "fast", "wait_cv": "-1", "wait_seed": "x"} {
		if _, err := parse(func(name string) string { return map[string]string{k: v}[name] }); err == nil {
			t.Errorf("%s=%q: no error", k, v)
		}
	}
	s, err := parse(func(string) string { return "" })
	if err != nil || s.mean != 200*time.Millisecond || s.cv != 0.5 {
		t.Errorf("defaults: %+v, %v", s, err)
	}
}
