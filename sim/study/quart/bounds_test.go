package quart

import (
	"bytes"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/golden"
	"github.com/stagecoach-serving/stagecoach/sim/study"
)

// TestBounds checks that the studies are valid. The budget of every cell must be enough for one
// replica of each stage.
func TestBounds(t *testing.T) {
	full, quick := Bounds(), QuickBounds()
	for _, c := range full.Contenders {
		if n := len(c.Candidates(full.Candidates)); n != 8 && n != 1 {
			t.Errorf("%s: %d configurations, want all eight", c.Name, n)
		}
	}
	for s, want := range map[*study.Study]int{&full: 100, &quick: 8} {
		if err := s.Check(); err != nil {
			t.Error(err)
		}
		if len(s.Settings) != want {
			t.Errorf("%s: %d cells, want %d", s.Title, len(s.Settings), want)
		}
		for _, x := range s.Settings {
			if warm := x.Scenario(false).Warmup; strings.Contains(x.Name, "starts 30×") && warm != 160*time.Second {
				t.Errorf("%s: warms up for %v, want more where starts take longer: 160 s", x.Name, warm)
			}
			if least := len(x.Scenario(false).Stages); float64(least) > x.Budget || x.Budget > draining*gpus {
				t.Errorf("%s: %d stages on a budget of %g GPUs, of %d", x.Name, least, x.Budget, gpus)
			}
		}
	}
}

// TestScenariosMatchTheirCells checks that the scenarios of cells have the work, the stages, the
// slow stage and the start costs that the cells' labels promise.
func TestScenariosMatchTheirCells(t *testing.T) {
	for name, c := range map[string]condition{
		"usual":  usual,
		"load":   with(func(c *condition) { c.work = 36 }),
		"stages": with(func(c *condition) { c.parts = 16 }),
		"one":    with(func(c *condition) { c.parts = 1 }),
		"uneven": with(func(c *condition) { c.slow = 4 }),
		"starts": with(func(c *condition) { c.start = 30 }),
		"bursts": with(func(c *condition) { c.burst = 160 * time.Second }),
	} {
		s := c.scenario(name)
		var sum, most, least float64
		for i, st := range s.Stages {
			mean := st.Service.Profile[0].Mean.Seconds()
			if sum += mean; i == 0 {
				most, least = mean, mean
			}
			most, least = max(most, mean), min(least, mean)
		}
		source, err := s.Pipelines[0].Arrivals.Make(1)
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for at, ok := source.Next(); ok; at, ok = source.Next() {
			if at >= s.Warmup {
				n++
			}
		}
		near := func(what string, got, want float64) {
			if math.Abs(got-want) > 0.001*want {
				t.Errorf("%s: %s %g, want %g", name, what, got, want)
			}
		}
		near("time", sum, c.model().Time.Seconds())
		near("slowest stage", most/least, c.slow)
		near("work", sum*float64(n)/(s.Duration-s.Warmup).Seconds(), c.work)
		near("stages", float64(len(s.Stages)), float64(c.parts))
		b := s.Stages[0].Parameters
		near("fork", c.starts(b).Fork.Seconds(), c.start*keptStart(b).Fork.Seconds())
		near("counted", (s.Duration - s.Warmup).Seconds(), max(100, 3*c.burst.Seconds()))
	}
}

func with(set func(*condition)) condition {
	c := usual
	set(&c)
	return c
}

// TestArrive checks the arrivals of a run. The counted time has the requested number, gaps have the
// requested CV, and bursts the requested length. The arrivals of the warm-up are those of the part
// of the circle before the run.
func TestArrive(t *testing.T) {
	const n = 2000
	all := func(c condition, seed uint64) (early, counts []float64) {
		source := c.arrive(n, seed)
		last := time.Duration(0)
		for at, ok := source.Next(); ok; at, ok = source.Next() {
			if at < last {
				t.Fatalf("%v after %v", at, last)
			}
			if last = at; at < c.warmup {
				early = append(early, at.Seconds())
			} else {
				counts = append(counts, (at - c.warmup).Seconds())
			}
		}
		return early, counts
	}
	for _, cv := range cvs {
		c := with(func(c *condition) { c.cv, c.warmup = cv, 250*time.Second })
		early, counts := all(c, 7)
		if len(counts) != n {
			t.Errorf("CV %g: %d count, want %d", cv, len(counts), n)
		}
		tail := counts[len(counts)-len(early)%n:] // two and a half laps
		for i, at := range early[:len(tail)] {
			if math.Abs(at-(tail[i]-50)) > 1e-6 {
				t.Fatalf("CV %g: %g s in the warm-up, want what comes at %g s once more", cv, at, tail[i])
			}
		}
		mean, squares := c.length().Seconds()/n, 0.0
		for i := range counts[1:] {
			apart := counts[i+1] - counts[i] - mean
			squares += apart * apart / n
		}
		if got := math.Sqrt(squares) / mean; math.Abs(got-cv) > 0.2*cv {
			t.Errorf("CV %g, want %g", got, cv)
		}
	}
	c := with(func(c *condition) { c.burst = time.Second })
	_, counts := all(c, 7)
	silent, times := 0.0, 0 // gaps that no burst at three times the rate has
	for i := range counts[1:] {
		if gap := counts[i+1] - counts[i]; gap > 0.2 {
			silent += gap
			times++
		}
	}
	if len(counts) != n || math.Abs(silent-200./3) > 10 || times < 22 || times > 33 {
		t.Errorf("%d requests, %g s silent, %d times; want %d, about two thirds of 100 s, after most of 33 bursts", len(counts), silent, times, n)
	}
	c.burst = 160 * time.Second // a single burst: its length is known
	if _, counts := all(c, 7); len(counts) != n || longest(counts, c.length()) < 319 {
		t.Errorf("%d requests, silent for %g s; want %d and 320 s", len(counts), longest(counts, c.length()), n)
	}
}

// longest returns the longest gap on a circle.
func longest(at []float64, length time.Duration) float64 {
	out := at[0] + length.Seconds() - at[len(at)-1]
	for i := range at[1:] {
		out = max(out, at[i+1]-at[i])
	}
	return out
}

// TestFixedCountsUseUpTheBudget checks that fixed counts use up the budget where the work is.
func TestFixedCountsUseUpTheBudget(t *testing.T) {
	for name, tc := range map[string]struct {
		c    condition
		want []int
	}{
		"even":       {usual, []int{3, 3, 3, 3, 3, 3, 3, 3}},
		"slow":       {with(func(c *condition) { c.slow = 4 }), []int{3, 2, 2, 2, 9, 2, 2, 2}},
		"no more":    {with(func(c *condition) { c.work = 4 }), []int{1, 1, 1, 1, 1, 1, 1, 1}},
		"all":        {with(func(c *condition) { c.work = 36 }), []int{6, 6, 6, 6, 6, 6, 6, 6}},
		"not evenly": {with(func(c *condition) { c.work = 5 }), []int{2, 2, 1, 1, 1, 1, 1, 1}},
	} {
		var got []int
		for _, st := range tc.c.stay(tc.c.scenario(name), name).Stages {
			got = append(got, st.Min)
		}
		if !slices.Equal(got, tc.want) {
			t.Errorf("%s: %v, want %v", name, got, tc.want)
		}
	}
	if got := usual.stay(whole(usual.scenario("x")), "x").Stages; len(got) != 1 || got[0].Min != 24 {
		t.Errorf("copies of the whole: %+v, want 24", got)
	}
}

// TestCompareBounds checks that the best of the others is within the budget.
func TestCompareBounds(t *testing.T) {
	made := func(contender string, mean, gpus float64) study.Outcome {
		s := func(v float64) study.Sample { return study.Sample{Mean: v, Seeds: []float64{v, v}} }
		return study.Outcome{Setting: "x", Contender: contender, Mean: s(mean), GPUs: s(gpus), GPUSeconds: s(100 * gpus)}
	}
	r := &study.Result{
		Ours: byStages, Budget: 99, Settings: []study.SettingInfo{{Name: "x", Budget: 10}},
		Contenders: []study.ContendInfo{{Name: byStages, Ours: true}, {Name: byPipelines}, {Name: byModel}, {Name: byCounts}},
		Outcomes: []study.Outcome{
			made(byStages, 2, 5), made(byPipelines, 3, 10), made(byModel, 15.5, 8), made(byCounts, 1, 11),
		},
	}
	v := compareBounds(r, "x", "")
	if v.other != byPipelines || v.latency.Value != 1.5 || v.gpus.Value != 2 {
		t.Errorf("%+v, want pipelines with 1.5 times the latency for twice the GPUs", v)
	}
	if v := compareBounds(r, "x", byModel); math.Abs(v.latency.Value-7.75) > 1e-3 {
		t.Errorf("%+v, want 15.5 s over 2 s", v)
	}
	if v := compareBounds(r, "x", byCounts); v.other != "" {
		t.Errorf("%+v, want nothing: it is over the budget", v)
	}
	r.Outcomes[0] = made(byStages, 2, 11)
	if v := compareBounds(r, "x", ""); v.other != "" {
		t.Errorf("%+v, want nothing: ours is over the budget", v)
	}
}

// TestBoundsReport writes a cell of two maps, of a model in two stages, as tables and figures.
func TestBoundsReport(t *testing.T) {
	maps := boundsMaps()
	maps = []boundsMap{maps[0], maps[3]}
	for i := range maps {
		m := &maps[i]
		m.rows, m.columns = m.rows[1+3*i:2+3*i], m.columns[2:3]
		m.base.work, m.base.parts, m.base.warmup, m.base.counted = 8, 2, 20*time.Second, 15*time.Second
	}
	s := boundsOf(maps)
	s.Candidates, s.Test.N = 2, 2
	tuned, err := s.Tune(t.Context(), none, nil)
	if err != nil {
		t.Fatal(err)
	}
	r, err := s.Evaluate(t.Context(), tuned, none, nil)
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	if err := WriteBounds(r, &b); err != nil {
		t.Fatal(err)
	}
	golden.Compare(t, "bounds.txt", b.String())
	figures, err := drawBounds(r)
	if err != nil || len(figures) != 2 || figures[0].Name != "bounds-load" || figures[1].Name != "bounds-uneven" {
		t.Fatalf("%d figures, %v; want load and uneven", len(figures), err)
	}
	for _, f := range figures {
		if n := bytes.Count(f.SVG, []byte("</svg>")); n != 1 || !bytes.Contains(f.SVG, []byte("fixed copies of the model")) {
			t.Errorf("%s: %d drawings, want one with who is compared", f.Name, n)
		}
	}
}
