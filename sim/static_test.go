package sim

import (
	"strings"
	"testing"
)

// fixedCounts is a scenario whose stages have fixed numbers of replicas, under a load that would
// need more of one and fewer of the other.
const fixedCounts = `
duration: 30s
seeds: 1
policies:
- {replicas: [{stage: a, count: 3}, {stage: v, count: 2}]}
- {name: corrected, corrector: quart, replicas: [{stage: a, count: 1}]}
nodes: [{memory: 8Gi, cpu: 8}]
pipelines: [{name: p, slo: 100ms, arrivals: {rate: "30"}}]
stages:
- {name: a, next: b, service: {mean: 10ms}, variants: [{name: v, accuracy: 0.9, service: {mean: 5ms}}]}
- {name: b, max: 2, service: {mean: 200ms}}
`

// TestAPolicyCanBeNumbersOfReplicas checks fixed counts, the minimum of other stages, and bounds.
func TestAPolicyCanBeNumbersOfReplicas(t *testing.T) {
	t.Parallel()
	r := simulate(t, fixedCounts)
	p := r.Policies[0]
	if p.Name != "static" || p.Policies.Allocator != "static" || p.Policies.Corrector != "none" || r.Policies[1].Policies.Corrector != "quart" {
		t.Errorf("%s: %+v, then %+v", p.Name, p.Policies, r.Policies[1].Policies)
	}
	for i, want := range []float64{3, 1, 2} {
		if got := p.Stages[i].Replicas.Mean; got != want {
			t.Errorf("%v replicas of %s, want %v", got, p.Stages[i].Name, want)
		}
	}
	for name, tc := range map[string]struct{ from, to, want string }{
		"no stage":     {"stage: v", "stage: w", `policies[0].replicas[1].stage: "w", want a stage or variant`},
		"too few":      {"count: 3", "count: -1", "policies[0].replicas[0].count: -1, want 0 to"},
		"an allocator": {"{replicas", "{allocator: sizer, replicas", `policies[0].allocator: "sizer" beside replicas`},
	} {
		s, err := Parse(strings.NewReader(strings.Replace(fixedCounts, tc.from, tc.to, 1)))
		if err == nil {
			_, err = s.Model(nil)
		}
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: got %v, want %q", name, err, tc.want)
		}
	}
}
