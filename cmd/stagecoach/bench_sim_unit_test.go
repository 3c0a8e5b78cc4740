package main

import (
	"math"
	"slices"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench"
)

// TestSimCases: each case is one that the simulator takes.
func TestSimCases(t *testing.T) {
	for _, c := range simCases(6 * time.Second) {
		got, err := simulate(t.Context(), &c, costs{time.Millisecond, time.Millisecond, 20 * time.Millisecond}, 1)
		if err != nil || got.requests < 20 || got.failed > 0 || got.mean <= 0 {
			t.Errorf("%s: %+v, %v", c.name, got, err)
		}
	}
}

// TestReportPairs: medians, differences round by round, verdicts.
func TestReportPairs(t *testing.T) {
	is := func(mean, p99 float64) outcome { return outcome{requests: 9, mean: mean, p50: math.NaN(), p99: p99} }
	var r bench.Report
	reportPairs(&r, "x", [][2]outcome{{is(1, 1), is(1.04, 1)}, {is(2, 1), is(1.8, 1.2)}, {is(4, 1), is(4.24, 1.2)}})
	of := func(name, metric string) float64 {
		i := slices.IndexFunc(r.Results, func(f bench.Result) bool { return f.Case == name && f.Metric == metric })
		if i < 0 {
			return math.NaN()
		}
		return math.Round(r.Results[i].Value*1e6) / 1e6
	}
	if of("x mean_ms", "real") != 2000 || of("x mean_ms", "simulated") != 1800 || of("x mean_ms", "difference_percent") != 4 {
		t.Errorf("mean: %+v", r.Results)
	}
	if !math.IsNaN(of("x p50_ms", "real")) || of("x requests", "difference_percent") != 0 || of("x failed", "real") != 0 {
		t.Errorf("%+v", r.Results)
	}
	if len(r.Goals) != 2 || !r.Goals[0].Met || r.Goals[1].Met {
		t.Errorf("goals %+v, want that of the mean met at 4 %%, and that of p99 missed at 20 %%", r.Goals)
	}
}
