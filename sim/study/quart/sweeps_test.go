package quart

import (
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench/load/arrivals"
	"github.com/stagecoach-serving/stagecoach/sim"
	"github.com/stagecoach-serving/stagecoach/sim/study"
)

// swept returns the scenario of a point with a contender.
func swept(t *testing.T, group, contender string) sim.Scenario {
	t.Helper()
	s := sweeps()
	i := slices.IndexFunc(s.Settings, func(x study.Setting) bool { return x.Group == group })
	k := slices.IndexFunc(s.Contenders, func(c study.Contender) bool { return c.Name == contender })
	if i < 0 || k < 0 {
		t.Fatalf("no %s on %s", contender, group)
	}
	x, c := &s.Settings[i], &s.Contenders[k]
	out := c.Apply(x.Scenario(false), c.Defaults)
	if x.Then != nil {
		out = x.Then(out)
	}
	return out
}

// TestStartsAreAlikeForAll checks that the sweep of start costs gives all contenders equal starts.
func TestStartsAreAlikeForAll(t *testing.T) {
	for _, c := range []string{oursName, "kpa8", "infless8"} {
		for _, st := range swept(t, "starts 0.3 s", c).Stages {
			if st.Start != (sim.Start{Cold: 300 * time.Millisecond, Fork: 300 * time.Millisecond}) {
				t.Errorf("%s: a start takes %+v, want 300 ms on each path", c, st.Start)
			}
		}
	}
}

// TestStagesScaleWithCoresAsNamed checks the times of a stage with four and with eight cores.
func TestStagesScaleWithCoresAsNamed(t *testing.T) {
	for group, want := range map[string]float64{
		"cores linear": 0.5, "cores Amdahl 0.9": (0.1 + 0.9/8) / (0.1 + 0.9/4), "cores Amdahl 0.5": (0.5 + 0.5/8) / (0.5 + 0.5/4), "cores none": 1,
	} {
		s := swept(t, group, oursName)
		if got := alone(declaring(s, mostCores).Stages[0]).Seconds() / alone(declaring(s, cores).Stages[0]).Seconds(); !near(got, want, 1e-6) {
			t.Errorf("%s: eight cores take %g of four, want %g", group, got, want)
		}
		declared := 0.0
		for _, st := range declaring(s, cores).Stages {
			declared += alone(st).Seconds()
		}
		if !near(declared, Models()[0].Time.Seconds(), 1e-6) {
			t.Errorf("%s: %g s with the declared cores, want the model's time", group, declared)
		}
	}
}

// TestBudgetsFollowTheLoad checks that a point with more work has a budget in proportion.
func TestBudgetsFollowTheLoad(t *testing.T) {
	n := 0
	for _, x := range sweeps().Settings {
		if !strings.HasPrefix(x.Group, sweepLoad) {
			continue
		}
		n++
		p, err := arrivals.ParseProfile(x.Scenario(false).Pipelines[0].Arrivals.Rate)
		if err != nil {
			t.Fatal(err)
		}
		if gpus := p.Expected(time.Second) * x.Service.Seconds(); !near(x.Budget, 2*gpus, 1e-6) {
			t.Errorf("%s: %g GPUs of work, a budget of %g, want twice as much", x.Group, gpus, x.Budget)
		}
	}
	if n != 5 {
		t.Errorf("%d loads, want 5", n)
	}
}

// TestShapesHaveTheirMeanAndTheirChanges checks that each run of a shape has the mean rate in the
// part that counts, that rates stay in their range, and that runs differ.
func TestShapesHaveTheirMeanAndTheirChanges(t *testing.T) {
	changes := map[string][2]int{"steady": {0, 0}, "second": {45, 80}, "minute": {7, 15}}
	for _, h := range shapes() {
		seen := map[string]bool{}
		length := warmup + h.counted
		for seed := uint64(1); seed <= 5; seed++ {
			p, err := h.profile(warmup, length, seed)
			if err != nil {
				t.Fatal(err)
			}
			if mean := (p.Expected(length) - p.Expected(warmup)) / h.counted.Seconds(); math.Abs(mean-1) > 1e-9 {
				t.Errorf("%s, seed %d: a mean of %g, want 1", h.name, seed, mean)
			}
			if n, ok := changes[h.name]; ok && (len(p)-1 < n[0] || len(p)-1 > n[1]) {
				t.Errorf("%s, seed %d: %d changes, want %d to %d", h.name, seed, len(p)-1, n[0], n[1])
			}
			least, most := math.Inf(1), 0.0
			for _, s := range p {
				least, most = min(least, s.From), max(most, s.From)
			}
			if h.name != "steady" && (most < 2*least || most > 10*least) {
				t.Errorf("%s, seed %d: rates of %g to %g, want changes", h.name, seed, least, most)
			}
			seen[p.String()] = true
		}
		if h.name != "steady" && len(seen) != 5 {
			t.Errorf("%s: %d different runs of 5", h.name, len(seen))
		}
	}
}

// TestSweepsUseKnownConfigurations checks that each point that is not tuned itself names a group of
// the full evaluation, and that goals and expectations name groups that there are.
func TestSweepsUseKnownConfigurations(t *testing.T) {
	full, err := Full(none)
	if err != nil {
		t.Fatal(err)
	}
	groups := map[string]bool{}
	for _, tr := range traces() {
		groups[tr.Name] = true
	}
	for _, x := range full.Settings {
		groups[x.Group] = true
	}
	points := map[string]bool{}
	for _, x := range full.More.Settings {
		if points[x.Group] = true; !groups[x.TunedAs] {
			t.Errorf("%s: configurations of %q, want a group that is tuned", x.Group, x.TunedAs)
		}
	}
	known := func(g string) bool { return groups[g] || points[g] }
	for _, g := range slices.Concat(changing, steady) {
		if !known(g) {
			t.Errorf("a goal on %q, which is no group", g)
		}
	}
	for _, e := range expectations() {
		against := e.Against == study.Strongest || slices.ContainsFunc(full.Contenders, func(c study.Contender) bool { return c.Name == e.Against })
		if !known(e.Group) || !against {
			t.Errorf("an expectation on %q against %q, want a group and a contender", e.Group, e.Against)
		}
	}
}

// TestShortMemoryIsShort checks that servers of the memory sweep hold fewer stages than the model
// has, and that its slow stage has the time of three.
func TestShortMemoryIsShort(t *testing.T) {
	s := swept(t, "memory 24 GiB", oursName)
	var sum, slowest time.Duration
	for _, st := range s.Stages {
		sum, slowest = sum+alone(st), max(slowest, alone(st))
		if whole := s.Nodes[0].Memory * 85 / 100; st.Parameters*3 > whole || st.Parameters*5 < whole {
			t.Errorf("%s has %d bytes of parameters, want that a server of %d holds three or four", st.Name, st.Parameters, s.Nodes[0].Memory)
		}
	}
	if !near(sum.Seconds(), Models()[0].Time.Seconds(), 1e-6) || !near(float64(slowest)/float64(sum), 0.3, 0.02) {
		t.Errorf("stages take %v, the slowest %v; want the model's time, and three tenths of it", sum, slowest)
	}
}
