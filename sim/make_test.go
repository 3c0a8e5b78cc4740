package sim

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
	"github.com/stagecoach-serving/stagecoach/bench/load/arrivals"
)

// coded returns a scenario as studies build it, with required fields only.
func coded(policies ...Policy) Scenario {
	return Scenario{
		Duration: time.Minute, Seeds: 3, Policies: policies,
		Nodes:     []Node{{Memory: 64 << 30, CPU: 16000}},
		Pipelines: []Pipeline{{Name: "p", SLO: time.Second, Arrivals: Arrivals{Rate: "20"}}},
		Stages:    []Stage{plainStage("a", 20*time.Millisecond, "b"), plainStage("b", 30*time.Millisecond)},
	}
}

func plainStage(name string, mean time.Duration, next ...string) Stage {
	return Stage{Variant: Variant{Name: name, Service: Service{Mean: mean}}, Next: next}
}

// TestScenarioInCodeGetsTheDefaults checks that a scenario built by a program gets the same
// defaults as a parsed one. The original must not change.
func TestScenarioInCodeGetsTheDefaults(t *testing.T) {
	s := coded()
	m, err := s.Model(nil)
	if err != nil {
		t.Fatal(err)
	}
	r, err := m.Run(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	parsed := simulate(t, `
duration: 1m
seeds: 3
nodes: [{memory: 64Gi, cpu: 16}]
pipelines: [{name: p, slo: 1s, arrivals: {rate: "20"}}]
stages: [{name: a, next: b, service: {mean: 20ms}}, {name: b, service: {mean: 30ms}}]
`)
	if toJSON(t, r) != toJSON(t, parsed) {
		t.Errorf("got %s, parsed %s", toJSON(t, r), toJSON(t, parsed))
	}
	if s.Hop != nil || s.Stages[0].Max != 0 || s.Nodes[0].Count != 0 || s.Pipelines[0].Timeout != 0 {
		t.Errorf("the scenario was changed: %+v", s)
	}
}

// timely is an allocator that records the instants of its snapshots.
type timely struct {
	autoscaler.Fixed
	last *time.Time
}

func (a timely) Allocate(s plan.Snapshot, d plan.Domain, m struct{}) (plan.Alloc, struct{}, error) {
	*a.last = s.At
	return a.Fixed.Allocate(s, d, m)
}

// TestPolicyMadeInCodeIsUsed checks a policy that is made in code: the run calls it, the result
// shows its names, and it can see the run's arrivals.
func TestPolicyMadeInCodeIsUsed(t *testing.T) {
	var mu sync.Mutex
	known := map[uint64][]time.Duration{}
	asked := map[uint64]*time.Time{}
	s := coded(Policy{Name: "plain"}, Policy{Name: "seer", Make: func(r Run) (policy.Set, error) {
		all, err := r.Arrivals("p")
		if _, unknown := r.Arrivals("q"); err != nil || unknown == nil {
			t.Errorf("arrivals: %v; of a pipeline that is not there: no error", err)
		}
		last := new(time.Time)
		mu.Lock()
		known[r.Seed], asked[r.Seed] = all, last
		mu.Unlock()
		set, err := policy.Names{Corrector: "none", Warmer: "none"}.Choose()
		return policy.WithAllocator(set, "timely", timely{last: last}), err
	}})
	m, err := s.Model(nil)
	if err != nil {
		t.Fatal(err)
	}
	runs, err := m.Runs(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	for i, seed := range []uint64{1, 2, 3} {
		is := runs[1][i]
		if is.Complaint != "" {
			t.Error(is.Complaint)
		}
		if got := float64(len(known[seed])); got == 0 || got != is.Pipelines[0].Offered || got != runs[0][i].Pipelines[0].Offered || !slices.IsSorted(known[seed]) {
			t.Errorf("seed %d: %g arrivals were told, %g came", seed, got, is.Pipelines[0].Offered)
		}
		if is.Seed != seed || is.Policy != "seer" || is.Policies.Allocator != "timely" || is.Policies.Warmer != "none" || asked[seed].Before(epoch.Add(50*time.Second)) {
			t.Errorf("seed %d: %q of seed %d by %+v, asked until %v", seed, is.Policy, is.Seed, is.Policies, asked[seed])
		}
	}
	if r := m.Result(runs); r.Policies[1].Policies.Allocator != "timely" || r.Policies[0].Policies.Allocator != "sizer" {
		t.Errorf("the result's names are %+v and %+v", r.Policies[0].Policies, r.Policies[1].Policies)
	}
}

// TestArrivalsMadeInCodeAreUsed checks that requests arrive as the study's source for the seed
// says.
func TestArrivalsMadeInCodeAreUsed(t *testing.T) {
	s := coded()
	s.Pipelines[0].Arrivals = Arrivals{Make: func(seed uint64) (arrivals.Source, error) {
		return arrivals.Renewal(arrivals.Profile{{Length: time.Second, From: float64(seed), To: float64(seed)}}, 0, seed)
	}}
	m, err := s.Model(nil)
	if err != nil {
		t.Fatal(err)
	}
	runs, err := m.Runs(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	for i, f := range runs[0] {
		if got, want := f.Pipelines[0].Offered, 60*float64(i+1); got != want {
			t.Errorf("seed %d: %g requests, want %g", f.Seed, got, want)
		}
	}
}

// TestErrorsOfMakeNameThePolicyOrPipeline checks that errors from a study's functions name the
// policy or pipeline.
func TestErrorsOfMakeNameThePolicyOrPipeline(t *testing.T) {
	none := errors.New("none today")
	s := coded(Policy{Name: "mine", Make: func(Run) (policy.Set, error) { return policy.Set{}, none }})
	m, err := s.Model(nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.Runs(context.Background(), nil); !errors.Is(err, none) || !strings.Contains(err.Error(), "policies[0], mine: ") {
		t.Errorf("a policy that cannot be made: %v", err)
	}
	s.Policies[0].Allocator = "fixed"
	s.Pipelines[0].Arrivals = Arrivals{Make: func(uint64) (arrivals.Source, error) { return nil, none }}
	if _, err := s.Model(nil); !errors.Is(err, none) && !strings.Contains(err.Error(), "pipelines[0].arrivals: none today") || !strings.Contains(err.Error(), "policies[0]: names beside Make") {
		t.Errorf("got %v", err)
	}
}
