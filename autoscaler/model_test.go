package autoscaler

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// timed returns a function with this service time (0: unknown) and ten requests per second.
func timed(name string, mean time.Duration) plan.Function {
	return plan.Function{
		Name: name, Revision: 1, Min: 1, Max: 20, Batch: 1, Slots: 1,
		Demand: plan.Demand{Known: true, Rate: 10, Last: t0}, Service: plan.Service{Known: mean > 0, Mean: mean},
	}
}

func TestBudgetIsPartOfTheTimeLeftByTheObjective(t *testing.T) {
	row := []plan.Edge{{From: 0, To: 1}, {From: 1, To: 2}, {From: 2, To: 3}}
	diamond := []plan.Edge{{From: 0, To: 1}, {From: 0, To: 2}, {From: 1, To: 3}, {From: 2, To: 3}}
	for name, tc := range map[string]struct {
		stages          []string
		edges           []plan.Edge
		slo             time.Duration
		service, budget float64
		reached         bool
	}{
		"a row":                      {[]string{"a", "b", "c", "a2"}, row, time.Second, 0.6, 0.2, true},
		"no edges are a row":         {[]string{"a", "b", "c", "a2"}, nil, time.Second, 0.6, 0.2, true},
		"branches go side by side":   {[]string{"a", "b", "c", "a2"}, diamond, time.Second, 0.4, 0.3, true},
		"absurd edges count as none": {[]string{"a", "b", "c", "a2"}, []plan.Edge{{From: 1, To: 0}, {From: -1, To: 2}, {From: 0, To: 9}, {From: 2, To: 2}}, time.Second, 0.6, 0.2, true},
		"unknown counts as the mean": {[]string{"a", "c", "u"}, nil, time.Second, 0.45, 0.275, true},
		"so does what is absent":     {[]string{"a", "c", "gone"}, nil, time.Second, 0.45, 0.275, true},
		"out of reach":               {[]string{"a", "c"}, nil, 250 * time.Millisecond, 0.3, 0.03, false},
		"no time to wait":            {[]string{"a", "c"}, nil, 300 * time.Millisecond, 0.3, 0.03, false},
		"hardly any":                 {[]string{"a", "c"}, nil, 301 * time.Millisecond, 0.3, 0.03, true},
	} {
		t.Run(name, func(t *testing.T) {
			s := plan.Snapshot{
				Functions: []plan.Function{
					timed("a", 100*time.Millisecond), timed("a2", 100*time.Millisecond), timed("b", 200*time.Millisecond), timed("c", 200*time.Millisecond), timed("u", 0),
				},
				Pipelines: []plan.Pipeline{{Name: "p", Stages: tc.stages, Edges: tc.edges, SLO: tc.slo}},
			}
			p := modelOf(t, s, plan.Domain{Pipelines: []string{"p"}, Functions: []string{"a", "a2", "b", "c", "u"}}).pipes[0]
			if math.Abs(p.service-tc.service) > 1e-9 || math.Abs(p.budget-tc.budget) > 1e-9 || p.reached != tc.reached {
				t.Errorf("service %g s, budget %g s, in reach %v, want %g, %g, %v", p.service, p.budget, p.reached, tc.service, tc.budget, tc.reached)
			}
		})
	}
}

// TestWaitWithoutObjectiveIsTheServiceTime checks that a task of a function without an objective
// may wait as long as it is served. A function whose service time is unknown is in no pipe.
func TestWaitWithoutObjectiveIsTheServiceTime(t *testing.T) {
	s := plan.Snapshot{
		Functions: []plan.Function{timed("a", 100*time.Millisecond), timed("u", 0)},
		Pipelines: []plan.Pipeline{{Name: "none", Stages: []string{"a"}}, {Name: "unknown", Stages: []string{"u"}, SLO: time.Second}},
	}
	m := modelOf(t, s, plan.Domain{Pipelines: []string{"gone", "none", "unknown"}, Functions: []string{"a", "u"}})
	if len(m.pipes) != 1 || m.pipes[0].budget != 0.1 || m.pipes[0].objective() != "a wait of 100ms" {
		t.Errorf("pipelines %+v, want one of a alone", m.pipes)
	}
	if _, err := newModel(&s, plan.Domain{Functions: []string{"b"}}, 0.5); err == nil || !strings.Contains(err.Error(), `"b"`) {
		t.Errorf("%v, want the function to be named", err)
	}
}

func TestStagePredictionsMatchTheTextbook(t *testing.T) {
	f := timed("f", 200*time.Millisecond)
	f.Slots, f.Demand.Rate, f.Demand.CV, f.Waiting = 2, 18, 2, 100
	s := plan.Snapshot{Functions: []plan.Function{f, timed("u", 0)}}
	g := modelOf(t, s, plan.Domain{Functions: []string{"f", "u"}}).stages
	if got := g[0].stable(); got != 2 { // 3.6 of 4 servers
		t.Errorf("%d replicas are stable, want 2", got)
	}
	// from the textbook; Ca² beyond 1 is bursts
	if got, want := g[0].wait(2), 0.3939; math.Abs(got-want) > 1e-3 {
		t.Errorf("wait %g s, want %g", got, want)
	}
	// 100 wait before it, at 20 per second
	if got, want := g[0].sojourn(2), 5200*time.Millisecond; got != want {
		t.Errorf("sojourn %v, want %v", got, want)
	}
	for target, want := range map[time.Duration]int{2 * time.Second: 2, 300 * time.Millisecond: 3, 200 * time.Millisecond: 9, 0: 9} {
		if got := g[0].least(target, 9); got != want {
			t.Errorf("%d replicas for %v, want %d", got, target, want)
		}
	}
	if got := g[0].least(time.Second, 1); got != 1 {
		t.Errorf("%d replicas of at most one", got)
	}
	if u := &g[1]; u.stable() != 0 || u.wait(1) != 0 || u.sojourn(1) != 0 || u.least(time.Second, 5) != 0 {
		t.Error("a function without a service time has a prediction")
	}
}

func TestUnmetDescribesMissedObjectives(t *testing.T) {
	s := plan.Snapshot{
		Functions: []plan.Function{timed("a", 100*time.Millisecond), timed("b", 100*time.Millisecond), timed("c", 300*time.Millisecond), timed("d", 100*time.Millisecond)},
		Pipelines: []plan.Pipeline{
			{Name: "p", Stages: []string{"a", "b", "c"}, Edges: []plan.Edge{{From: 0, To: 1}, {From: 0, To: 2}}, SLO: time.Second},
			{Name: "q", Stages: []string{"d"}, SLO: 90 * time.Millisecond},
		},
	}
	m := modelOf(t, s, plan.Domain{Pipelines: []string{"p", "q"}, Functions: []string{"a", "b", "c", "d"}})
	counts := []int{2, 2, 3, 9}
	got := m.unmet(counts, m.waits(counts))
	if got[1] != "" || got[0] != got[2] || !strings.Contains(got[0], "; p's 1s is at risk: ") || got[3] != "; q's 90ms is out of reach: it serves for 100ms" {
		t.Errorf("%q", got)
	}
}
