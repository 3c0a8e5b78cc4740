package study

import (
	"math"
	"slices"
	"testing"

	"github.com/stagecoach-serving/stagecoach/sim"
)

// madeUp returns an outcome of two seeds.
func madeUp(setting, contender string, gpus float64, mean, goodput, inTime [2]float64) Outcome {
	s := func(v [2]float64) Sample { return sample(v[:]) }
	return Outcome{
		Setting: setting, Contender: contender, Mean: s(mean), P99: s([2]float64{10 * mean[0], 10 * mean[1]}), Goodput: s(goodput),
		InTime: []Sample{s([2]float64{}), s(inTime)}, GPUs: s([2]float64{gpus, gpus}), GPUSeconds: s([2]float64{100 * gpus, 100 * gpus}),
		Failed: s([2]float64{}),
	}
}

func madeUpResult() *Result {
	return &Result{
		Ours: "ours", Budget: 10, Seeds: Seeds{1, 2}, Multiples: []float64{1, 2}, Objective: 2,
		Settings:   []SettingInfo{{Name: "x", Group: "g", Service: 1, Seconds: 100}, {Name: "y", Group: "g", Service: 1, Seconds: 100}},
		Contenders: []ContendInfo{{Name: "ours", Ours: true}, {Name: "lean"}, {Name: "rich"}, {Name: "oracle", Oracle: true}},
		Outcomes: []Outcome{
			madeUp("x", "ours", 10, [2]float64{1, 2}, [2]float64{8, 8}, [2]float64{0.9, 0.8}),
			madeUp("x", "lean", 8, [2]float64{4, 4}, [2]float64{4, 4}, [2]float64{0.5, 0.6}),
			madeUp("x", "rich", 12, [2]float64{2, 2}, [2]float64{8, 8}, [2]float64{0.8, 0.8}),
			madeUp("x", "oracle", 5, [2]float64{1, 1}, [2]float64{9, 9}, [2]float64{1, 1}),
			madeUp("y", "ours", 10, [2]float64{8, 4}, [2]float64{2, 1}, [2]float64{0.3, 0.2}),
			madeUp("y", "lean", 8, [2]float64{8, 8}, [2]float64{0, 0}, [2]float64{0, 0}),
			madeUp("y", "rich", 10.5, [2]float64{4, 4}, [2]float64{2, 2}, [2]float64{0.4, 0.4}),
		},
	}
}

// TestCompareAveragesPairsOfRuns checks ratios of pairs and their intervals against values computed
// by hand. With two values, the half-width of an interval is 12.706 times half of their difference:
// 12.706 is Student's quantile for one degree of freedom.
func TestCompareAveragesPairsOfRuns(t *testing.T) {
	r := madeUpResult()
	near := func(what string, got, want Interval) {
		t.Helper()
		for _, p := range [][2]float64{{got.Value, want.Value}, {got.Low, want.Low}, {got.High, want.High}} {
			if math.Abs(p[0]-p[1]) > 1e-4*math.Abs(p[1]) || got.N != want.N {
				t.Errorf("%s: %+v, want %+v", what, got, want)
				return
			}
		}
	}
	around := func(v, apart float64) Interval { return Interval{v, v - 12.706*apart/2, v + 12.706*apart/2, 2} }
	factor := func(v, apart float64) Interval {
		f := math.Exp(12.706 * apart / 2)
		return Interval{v, v / f, v * f, 2}
	}
	// One setting: the seeds' ratios are 1/4 and 2/4.
	c, ok := r.Compare("ours", "lean", "x")
	near("mean on x", c.Mean, factor(math.Sqrt(0.125), math.Log(2)))
	near("p99 on x", c.P99, factor(math.Sqrt(0.125), math.Log(2)))
	near("goodput on x", c.Goodput, factor(2, 0))
	near("GPUs on x", c.GPUSeconds, factor(1.25, 0))
	near("in time on x", c.InTime, around(0.3, 0.2)) // 0.4 and 0.2
	if !ok || len(c.Settings) != 1 {
		t.Errorf("%v, compared on %v, want x", ok, c.Settings)
	}
	// With both settings: on the setting y, the ratios are 8/8 and 4/8. So the means over settings
	// are √(1/4·1) for one seed and √(1/2·1/2) for the other. On y, the contender lean has no good
	// request in 100 s, which counts as one. So ours has 200 and 100 times lean's goodput there.
	c, _ = r.Compare("ours", "lean")
	near("mean", c.Mean, factor(0.5, 0))
	near("goodput", c.Goodput, factor(math.Sqrt(2*math.Sqrt(200*100)), math.Log(2)/2))
	near("in time", c.InTime, around((0.4+0.3+0.2+0.2)/4, 0.15))
	// There is no pair where only one of the two was evaluated.
	if c, ok := r.Compare("ours", "oracle"); !ok || len(c.Settings) != 1 {
		t.Errorf("with the oracle on %v, want x", c.Settings)
	}
	if _, ok := r.Compare("oracle", "ours", "y"); ok {
		t.Error("there is nothing to compare on y")
	}
}

// TestBestBaselineIsTheFastestWithinTheBudget checks that the best baseline is the fastest
// contender within 1.05 times the budget that is neither ours nor an oracle.
func TestBestBaselineIsTheFastestWithinTheBudget(t *testing.T) {
	r := madeUpResult()
	for setting, want := range map[string]string{"x": "lean", "y": "rich", "z": ""} {
		if got := r.BestBaseline(setting); got != want {
			t.Errorf("%s: %q, want %q", setting, got, want)
		}
	}
	c, ok := r.Compare("ours", BestBaseline)
	if want := math.Sqrt(math.Sqrt(0.25*0.5) * math.Sqrt(2*1)); !ok || math.Abs(c.Mean.Value-want) > 1e-5 {
		t.Errorf("against the best of each: %v, want %g", c.Mean, want)
	}
	r.Outcomes[0].GPUs.Mean = 13 // ours takes more than the budget: then others may, too
	if got := r.BestBaseline("x"); got != "rich" {
		t.Errorf("%q, want rich, which takes fewer GPUs than ours", got)
	}
	r.Outcomes[0].GPUs.Mean = 10
	r.Settings[0].Budget = 12 // its own budget
	if got := r.BestBaseline("x"); got != "rich" {
		t.Errorf("%q, want rich, which x has GPUs enough for", got)
	}
}

// TestGoals checks the results of goals on a setting, on a group and on all settings, against the
// strongest opponent of the group, which is lean, and against the oracle.
func TestGoals(t *testing.T) {
	r := madeUpResult()
	r.Goals = Goals{Latency: 0.6, Goodput: 2, GoodputIn: "g", Attained: 0.85}
	got := map[string]Reached{}
	for _, x := range r.reach() {
		got[x.On+": "+x.Goal] = x.Reached
	}
	for what, want := range map[string]Reached{
		"x: mean latency":           Open,   // 1/4 and 2/4 of lean's: two seeds prove little
		"x: goodput":                Dearer, // twice lean's on each seed, with 1.25 times its GPUs
		"x: GPU-seconds":            Missed,
		"x: in time, of the most":   Met, // 8/9 on each seed
		"y: mean latency":           Open,
		"y: goodput":                Open,
		"y: GPU-seconds":            Missed,
		"y: in time, of the most":   "", // the oracle was not run there
		"all settings: GPU-seconds": Missed,
		"g: mean latency":           Dearer, // half of lean's on each seed
	} {
		if got[what] != want {
			t.Errorf("%s: %q, want %q", what, got[what], want)
		}
	}
	// lean has more in time than the oracle
	r.Outcomes[1].InTime[1].Mean, r.Outcomes[1].Goodput = 1.1, sample([]float64{16, 16})
	for _, x := range r.reach() {
		if x.On == "x" && x.Goal == goalAttained && (x.Reached != Missed || x.Value != 0.5) {
			t.Errorf("%+v, want half of what lean has in time", x)
		}
	}
	r.Goals = Goals{Latency: 0.6, LatencyIn: []string{"elsewhere"}, Steady: 1.03, SteadyIn: []string{"g"}}
	for _, x := range r.reach() {
		if x.Goal == goalLatency || x.On == "g" && x.Goal == goalSteady && x.Reached != Dearer {
			t.Errorf("%+v, want no goal for less latency on g, and that g, which is steady, is no slower", x)
		}
	}
	if r.Goals = (Goals{}); len(r.reach()) != 0 {
		t.Error("goals were reached that there are not")
	}
}

// TestIntervalsAreStudents compares intervals with values computed by hand. 1, 2, 3 have the
// standard deviation 1, and Student's quantile for two degrees of freedom is 4.303.
func TestIntervalsAreStudents(t *testing.T) {
	for what, tc := range map[string]struct{ got, want Interval }{
		"mean":           {Mean([]float64{1, 2, 3}), Interval{2, -0.484338, 4.48434, 3}},
		"one value":      {Mean([]float64{7}), Interval{7, 7, 7, 1}},
		"geometric mean": {GeometricMean([]float64{1, 10, 100}), Interval{10, 0.0327836, 3050.31, 3}},
		"in a unit":      {sample([]float64{2, 4, 6}).Interval(2), Interval{2, -0.48434, 4.48434, 3}},
	} {
		for _, p := range [][2]float64{{tc.got.Value, tc.want.Value}, {tc.got.Low, tc.want.Low}, {tc.got.High, tc.want.High}} {
			if math.Abs(p[0]-p[1]) > 1e-4*math.Abs(p[1]) || tc.got.N != tc.want.N {
				t.Errorf("%s: %+v, want %+v", what, tc.got, tc.want)
			}
		}
	}
	for _, tc := range []struct{ got, want string }{
		{Interval{0.52, 0.48, 0.57, 3}.String(), "0.520 (0.480 to 0.570)"},
		{Interval{0.52, 0.48, 0.57, 3}.Change(), "-48.0 % (-52.0 to -43.0)"},
		{Interval{0.12, 0.09, 0.15, 3}.Points(), "+12.0 points (9.0 to 15.0)"},
		{Interval{123.4, 123.4, 123.4, 1}.String(), "123"},
		{Interval{1.5, 1.5, 1.5, 1}.Change(), "+50 %"},
		{Interval{140, 20, 1000, 3}.String(), "140 (20 to 1000)"},
		{sample([]float64{2, 4, 6}).with(1), "4.0 ± 5.0"},
	} {
		if tc.got != tc.want {
			t.Errorf("%q, want %q", tc.got, tc.want)
		}
	}
}

// TestStartsAreSummedByPath checks that starts are summed over the seeds, by path, with those of
// key stages last.
func TestStartsAreSummedByPath(t *testing.T) {
	seed := func(starts ...sim.StartFigures) run { return run{Stages: []stageRun{{Starts: starts}}} }
	got := starts([]run{
		seed(sim.StartFigures{Path: "cold", N: 1, Mean: 8}, sim.StartFigures{Path: "fork", Key: true, N: 2, Mean: 1}),
		seed(sim.StartFigures{Path: "fork", N: 1, Mean: 5}, sim.StartFigures{Path: "fork", Key: true, N: 2, Mean: 2}),
		seed(sim.StartFigures{Path: "cold", N: 3, Mean: 4}),
	}, 0)
	want := []Start{{Path: "cold", N: 4, Mean: 5}, {Path: "fork", N: 1, Mean: 5}, {Path: "fork", Key: true, N: 4, Mean: 1.5}}
	if !slices.Equal(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}
