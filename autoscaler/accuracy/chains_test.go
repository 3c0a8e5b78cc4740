package accuracy

import "testing"

// falling is a variant whose replicas serve less in larger batches, as is usual on CPUs.
func falling(name string, accuracy, seconds float64) Variant {
	return Variant{Name: name, Accuracy: accuracy, Batches: []Batch{{Size: 1, Time: seconds}, {Size: 2, Time: 2.5 * seconds}}}
}

// TestNoVariantDominatesItself plans for variants of which a larger batch serves less.
func TestNoVariantDominatesItself(t *testing.T) {
	for name, of := range map[string]struct {
		variants []Variant
		want     []Dominated
	}{
		"alone":     {[]Variant{falling("a", 0.9, 0.01)}, nil},
		"equal":     {[]Variant{falling("a", 0.9, 0.01), falling("b", 0.9, 0.01)}, nil},
		"better":    {[]Variant{falling("a", 0.9, 0.01), falling("b", 0.8, 0.01)}, []Dominated{{0, 1, 0}}},
		"faster":    {[]Variant{falling("a", 0.9, 0.02), falling("b", 0.9, 0.01)}, []Dominated{{0, 0, 1}}},
		"different": {[]Variant{falling("a", 0.9, 0.02), falling("b", 0.8, 0.01)}, nil},
	} {
		p := &Problem{Replicas: 3, Stages: []Stage{{Name: "s", Variants: of.variants}}, Pipelines: []Pipeline{{Name: "p", Objective: 1, Demand: 10}}}
		if got := p.Dominated(); len(got) != len(of.want) || len(got) > 0 && got[0] != of.want[0] {
			t.Errorf("%s: dominated %v, want %v", name, got, of.want)
			continue
		}
		if s, err := p.Solve(); err != nil || !s.Proved() || s.Served < 1-1e-6 || s.Accuracy < 0.9-1e-6 {
			t.Errorf("%s: %+v, %v, want all served with the best accuracy", name, s, err)
		}
	}
}
