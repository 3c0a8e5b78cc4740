package sim

import (
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench"
	"github.com/stagecoach-serving/stagecoach/bench/running"
	"github.com/stagecoach-serving/stagecoach/sim"
)

// TestSimCases: each case is one that the simulator takes.
func TestSimCases(t *testing.T) {
	for _, c := range simCases(6 * time.Second) {
		got, err := Simulate(t.Context(), &c, Costs{time.Millisecond, time.Millisecond, 20 * time.Millisecond}, 1)
		if err != nil || got.Requests < 20 || got.Failed > 0 || got.Mean <= 0 {
			t.Errorf("%s: %+v, %v", c.Name, got, err)
		}
	}
}

// TestReportPairs: medians, differences round by round, verdicts.
func TestReportPairs(t *testing.T) {
	is := func(mean, p99 float64) running.Outcome {
		return running.Outcome{Requests: 9, Mean: mean, P50: math.NaN(), P99: p99}
	}
	var r bench.Report
	reportPairs(&r, "x", [][2]running.Outcome{{is(1, 1), is(1.04, 1)}, {is(2, 1), is(1.8, 1.2)}, {is(4, 1), is(4.24, 1.2)}})
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

// TestVariantsUseAllLanes checks that each function of the case variants has a third of the tasks
// in the simulator, and that its goals are wider.
func TestVariantsUseAllLanes(t *testing.T) {
	cases := simCases(time.Minute)
	c := &cases[slices.IndexFunc(cases, func(c running.Case) bool { return c.Name == "variants" })]
	s, err := sim.Parse(strings.NewReader(scenario(c, Costs{}, 1)))
	if err != nil {
		t.Fatal(err)
	}
	m, err := s.Model(nil)
	if err != nil {
		t.Fatal(err)
	}
	r, err := m.Run(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	lanes := 0
	for _, f := range r.Policies[0].Stages {
		if f.Lane == nil {
			continue
		}
		if lanes++; math.Abs(f.Lane.Share.Mean-1./3) > 0.05 {
			t.Errorf("%s has %g of the tasks, want a third", f.Name, f.Lane.Share.Mean)
		}
	}
	if lanes != 3 {
		t.Errorf("%d lanes, want 3", lanes)
	}
	is := func(v float64) running.Outcome { return running.Outcome{Requests: 9, Mean: v, P50: v, P99: v} }
	var report bench.Report
	reportPairs(&report, c.Name, [][2]running.Outcome{{is(1), is(1.09)}})
	if len(report.Goals) != 3 || !report.Goals[0].Met || !report.Goals[1].Met || !report.Goals[2].Met {
		t.Errorf("goals %+v, want three that a difference of 9 %% meets", report.Goals)
	}
	if i := slices.IndexFunc(report.Results, func(f bench.Result) bool { return f.Metric == "ratio" }); i < 0 || math.Abs(report.Results[i].Value-1.09) > 1e-9 {
		t.Errorf("results %+v, want the ratio 1.09", report.Results)
	}
}
