package study

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
	"github.com/stagecoach-serving/stagecoach/internal/golden"
	"github.com/stagecoach-serving/stagecoach/sim"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// small returns a study of two loads on a chain of two stages. Each contender has a fixed number of
// replicas, which is tuned. The contender "two" has replicas with two GPUs, which are twice as
// fast. The contender "part" is an ablation: it uses the configuration of the contender "one", and
// runs on one of the loads only.
func small() *Study {
	load := func(name, rate string) Setting {
		return Setting{
			Name: name, Model: "toy", Group: "load " + rate, Service: 60 * time.Millisecond, Train: true,
			Scenario: func(bool) sim.Scenario {
				stage := func(name string, next ...string) sim.Stage {
					return sim.Stage{Next: next, Variant: sim.Variant{
						Name: name, GPU: 1, Service: sim.Service{Dist: sim.Deterministic, Mean: 30 * time.Millisecond},
						Start: sim.Start{Cold: 100 * time.Millisecond}, CPULimit: 2000,
					}}
				}
				return sim.Scenario{
					Name: name, Duration: 4 * time.Second, Warmup: time.Second,
					Nodes:     []sim.Node{{Count: 2, Memory: 64 << 30, CPU: 64000, GPUs: 8, GPUMemory: 40 << 30}},
					Pipelines: []sim.Pipeline{{Name: "p", Timeout: time.Second, SLO: 120 * time.Millisecond, Arrivals: sim.Arrivals{Rate: rate}}},
					Stages:    []sim.Stage{stage("a", "b"), stage("b")},
				}
			},
		}
	}
	fixed := func(name string, gpus int, faster time.Duration) Contender {
		return Contender{
			Name: name, Title: strings.ToUpper(name), Source: "this test",
			Space: []Knob{{Name: "level", Low: 1, High: 5, Whole: true}, {Name: "spare", Values: []float64{0, 1}}}, Defaults: []float64{1, 0},
			Apply: func(s sim.Scenario, k []float64) sim.Scenario {
				for i := range s.Stages {
					st := &s.Stages[i]
					st.Min = int(k[0] + k[1])
					st.Max, st.GPU, st.Service.Mean = st.Min, gpus, st.Service.Mean/faster
				}
				s.Policies = []sim.Policy{{Name: name, Names: policy.Names{Allocator: "fixed", Corrector: "none"}}}
				return s
			},
		}
	}
	part := fixed("part", 1, 1)
	part.Like, part.Ours = "one", true
	part.In = func(s Setting) bool { return s.Name == "busy" }
	one := fixed("one", 1, 1)
	one.Ours = true
	return &Study{
		Name: "small", Title: "A small study", Settings: []Setting{load("idle", "10"), load("busy", "80")},
		Contenders: []Contender{one, fixed("two", 2, 2), part}, Ours: "one",
		Budget: 8, Candidates: 5, Train: Seeds{101, 2}, Test: Seeds{1, 3}, Multiples: []float64{1.5, 2, 3}, Objective: 2,
		About: "Which of two is faster.", Goals: Goals{Latency: 0.6, Goodput: 2, GoodputIn: "load 80", Attained: 0.85},
	}
}

func run2(t *testing.T, s *Study) *Result {
	t.Helper()
	tuned, err := s.Tune(t.Context(), nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	r, err := s.Evaluate(t.Context(), tuned, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestStudyDoesNotDependOnProcessors compares the result of a small study with golden files, as
// JSON and as Markdown. The number of processors must not change it.
func TestStudyDoesNotDependOnProcessors(t *testing.T) {
	s := small()
	if err := s.Check(); err != nil {
		t.Fatal(err)
	}
	s.Judge = func(r *Result) []Claim {
		c, _ := r.Compare("one", "two", "busy")
		return []Claim{{ID: "S1", What: "one is slower than two", Paper: "+100 %", Ours: c.Mean.Change(), Values: []Value{{"mean", c.Mean}}, Verdict: Holds, Why: "a | b"}}
	}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	alone := run2(t, s)
	runtime.GOMAXPROCS(4)
	if several := run2(t, s); !reflect.DeepEqual(alone, several) {
		t.Error("with several processors other figures come out than with one")
	}
	var text, report bytes.Buffer
	e := json.NewEncoder(&text)
	e.SetIndent("", " ")
	if err := errors.Join(e.Encode(alone), alone.WriteMarkdown(&report)); err != nil {
		t.Fatal(err)
	}
	golden.Compare(t, "small.json", text.String())
	golden.Compare(t, "small.md", report.String())
	for _, c := range alone.Tuned.Choices {
		if len(c.Points) != 5 || !reflect.DeepEqual(c.Points[0].Knobs, []float64{1, 0}) {
			t.Errorf("%s in %s: %d candidates from %v, want 5 from the defaults", c.Contender, c.Group, len(c.Points), c.Points[0].Knobs)
		}
	}
	if part, one := alone.Outcome("busy", "part"), alone.Outcome("busy", "one"); part == nil || !reflect.DeepEqual(part.Mean, one.Mean) || alone.Outcome("idle", "part") != nil {
		t.Errorf("part has %+v, want what one has, and on one setting", part)
	}
}

// TestProgressReportsEachRunOnce checks that each run is reported once, in order.
func TestProgressReportsEachRunOnce(t *testing.T) {
	s := small()
	s.Candidates = 3
	var seen []Progress
	tuned, err := s.Tune(t.Context(), nil, func(p Progress) { seen = append(seen, p) })
	if err != nil {
		t.Fatal(err)
	}
	const tried = 2 * 2 * 3 * 2 // groups, contenders, candidates, seeds
	for i, p := range seen {
		if want := (Progress{"tune", tried, i + 1}); p != want {
			t.Fatalf("report %d: %+v, want %+v", i, p, want)
		}
	}
	if len(seen) != tried {
		t.Errorf("%d reports, want %d", len(seen), tried)
	}
	seen = nil
	if _, err := s.Evaluate(t.Context(), tuned, nil, func(p Progress) { seen = append(seen, p) }); err != nil || len(seen) != 5*3 || seen[14].Done != 15 {
		t.Errorf("evaluated with %v, %d reports, want 15", err, len(seen))
	}
}

// TestCanceledStudyLeavesNoGoroutine checks that a cancelled study ends early with the context's
// error, and leaves no goroutine.
func TestCanceledStudyLeavesNoGoroutine(t *testing.T) {
	defer goleak.VerifyNone(t)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	last := 0
	_, err := small().Tune(ctx, nil, func(p Progress) {
		if last = p.Done; p.Done == 3 {
			stop()
		}
	})
	if !errors.Is(err, context.Canceled) || last > 3+runtime.GOMAXPROCS(0) {
		t.Errorf("after %d runs: %v, want %v after 3 and those under way", last, err, context.Canceled)
	}
}

// TestErrorNamesItsContender checks that an error names its contender and ends all runs.
func TestErrorNamesItsContender(t *testing.T) {
	s := small()
	apply := s.Contenders[1].Apply
	s.Contenders[1].Apply = func(x sim.Scenario, k []float64) sim.Scenario {
		if x = apply(x, k); k[0] > 1 {
			x.Nodes = nil
		}
		return x
	}
	_, err := s.Tune(t.Context(), nil, nil)
	if err == nil || !strings.Contains(err.Error(), "tune: two on ") || !strings.Contains(err.Error(), "nodes: none") {
		t.Errorf("got %v, want one that names the contender and what is wrong", err)
	}
	s.Contenders[1].Apply = func(x sim.Scenario, k []float64) sim.Scenario { return x }
	if _, err := s.Evaluate(t.Context(), Tuned{}, nil, nil); err == nil || !strings.Contains(err.Error(), "0 policies, want one of each") {
		t.Errorf("got %v, want that there is no policy", err)
	}
}

// TestUntunedContendersRunWithDefaults checks contenders without a choice, or with a choice for
// other knobs. They must run with their defaults, and their outcomes must be marked.
func TestUntunedContendersRunWithDefaults(t *testing.T) {
	s := small()
	tuned := Tuned{Choices: []Choice{
		{Group: "load 10", Contender: "one", Knobs: []string{"level", "spare"}, Chosen: 1, Points: []Point{{Knobs: []float64{1, 0}}, {Knobs: []float64{3, 0}}}},
		{Group: "load 10", Contender: "two", Knobs: []string{"level"}, Points: []Point{{Knobs: []float64{3}}}},
	}}
	r, err := s.Evaluate(t.Context(), tuned, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		setting, contender string
		untuned            bool
		gpus               float64
	}{{"idle", "one", false, 6}, {"idle", "two", true, 4}, {"busy", "one", true, 2}} {
		if o := r.Outcome(tc.setting, tc.contender); o.Untuned != tc.untuned || o.GPUs.Mean != tc.gpus {
			t.Errorf("%s on %s: untuned %v with %g GPUs, want %v with %g", tc.contender, tc.setting, o.Untuned, o.GPUs.Mean, tc.untuned, tc.gpus)
		}
	}
}

// TestFailedRequestsCountWithTheirTimeout checks that a request without an answer counts with its
// timeout, and that the outcome is marked.
func TestFailedRequestsCountWithTheirTimeout(t *testing.T) {
	s := small()
	s.Settings = s.Settings[1:]
	scenario := s.Settings[0].Scenario
	s.Settings[0].Scenario = func(train bool) sim.Scenario {
		x := scenario(train)
		x.Pipelines[0].Timeout = 50 * time.Millisecond // less than T
		return x
	}
	r := run2(t, s)
	o := r.Outcome("busy", "one")
	if o.Failed.Mean != 1 || o.Mean.Mean != 0.05 || o.P99.Mean != 0.05 || o.Goodput.Mean != 0 || o.InTime[2].Mean != 0 || !o.Fails() {
		t.Errorf("%+v, want that all failed after 50 ms", o)
	}
	if best := r.BestBaseline("busy"); best != "two" {
		t.Errorf("best baseline %q, want two, which fails as well but is the only one", best)
	}
	c, ok := r.Compare("one", BestBaseline)
	if !ok || c.To != BestBaseline || c.Goodput.Value >= 1 || c.Goodput.Value <= 0 {
		t.Errorf("goodput of nothing is %v of that of two, want a small part", c.Goodput)
	}
}

// TestOnlyKeepsMatchingNames checks a pattern for settings and one for contenders.
func TestOnlyKeepsMatchingNames(t *testing.T) {
	for pattern, want := range map[string]string{
		"": "idle busy/one two part", "^b": "busy/one two part", "/two|part": "idle busy/two part", "^b/t": "busy/two part",
	} {
		s := small()
		if err := s.Only(pattern); err != nil {
			t.Fatal(err)
		}
		var settings, contenders []string
		for _, x := range s.Settings {
			settings = append(settings, x.Name)
		}
		for _, c := range s.Contenders {
			contenders = append(contenders, c.Name)
		}
		if got := strings.Join(settings, " ") + "/" + strings.Join(contenders, " "); got != want {
			t.Errorf("%q: %s, want %s", pattern, got, want)
		}
	}
	for pattern, want := range map[string]string{"(": "missing closing", "none": "want some of idle, busy", "/none": "want some of one, two, part"} {
		if err := small().Only(pattern); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %v, want %s", pattern, err, want)
		}
	}
}

// TestCheckNamesEachMistake checks that each mistake is named.
func TestCheckNamesEachMistake(t *testing.T) {
	for want, spoil := range map[string]func(s *Study){
		`setting "idle": want a name of its own`:                       func(s *Study) { s.Settings[1].Name = "idle" },
		`setting "idle": service 0s`:                                   func(s *Study) { s.Settings[0].Service = 0 },
		`contender "one": want a name of its own`:                      func(s *Study) { s.Contenders[1].Name = "one" },
		`contender "one": 1 defaults for 2 knobs`:                      func(s *Study) { s.Contenders[0].Defaults = []float64{1} },
		`knob level: from 1 to 1, want a range`:                        func(s *Study) { s.Contenders[0].Space[0].High = 1 },
		`knob level: from 1.5 to 5, want whole numbers`:                func(s *Study) { s.Contenders[0].Space[0].Low = 1.5 },
		`knob level: from 0, want more than 0`:                         func(s *Study) { s.Contenders[0].Space[0].Low, s.Contenders[0].Space[0].Log = 0, true },
		`contender "part": like "nobody"`:                              func(s *Study) { s.Contenders[2].Like = "nobody" },
		`ours: "nobody"`:                                               func(s *Study) { s.Ours = "nobody" },
		`seeds: 2 from 2 on for training and 3 from 1 on for the test`: func(s *Study) { s.Train.First = 2 },
		`0 candidates`:                           func(s *Study) { s.Candidates = 0 },
		`seeds for the test: -1 from 1 on, want`: func(s *Study) { s.Test.N = -1 },
		`objective 4, want one of the multiples`: func(s *Study) { s.Objective = 4 },
		`setting "busy": a budget of 5 GPUs`:     func(s *Study) { s.Settings[1].Group, s.Settings[1].Budget = s.Settings[0].Group, 5 },
	} {
		s := small()
		spoil(s)
		if err := s.Check(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
		}
	}
}
