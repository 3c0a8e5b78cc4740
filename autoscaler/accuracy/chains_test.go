package accuracy

import (
	"errors"
	"testing"
)

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

// TestListingChainsEnds has problems with so many ways through the first stages that not all can be
// tried.
func TestListingChainsEnds(t *testing.T) {
	many := Stage{Name: "many"}
	for k := range 40 {
		many.Variants = append(many.Variants, Variant{Accuracy: 0.5 + 0.01*float64(k), Batches: []Batch{{Size: 1, Time: 0.001 + 1e-6*float64(k)}}})
	}
	slow := Stage{Name: "slow", Variants: []Variant{{Accuracy: 0.9, Batches: []Batch{{Size: 1, Time: 1}}}}}
	p := &Problem{Replicas: 10, Stages: []Stage{many, many, many, many, many, many, slow}, Pipelines: []Pipeline{{
		Objective: 1.006002, Demand: 1,
		Steps: []Step{{From: 0, To: 1}, {From: 1, To: 2}, {From: 2, To: 3}, {From: 3, To: 4}, {From: 4, To: 5}, {From: 5, To: 6}},
	}}}
	c, err := newChoices(p)
	if err != nil {
		t.Fatal(err)
	}
	if c.full != 28 || c.grown > 1000 { // as ways to divide 2 µs or less between 6 stages
		t.Errorf("%d chains of %d places, want 28 of at most 1,000", c.full, c.grown)
	}
	p.Pipelines[0].Objective = 2
	if _, err := newChoices(p); !errors.Is(err, errTooMany) {
		t.Errorf("4e9 chains: %v, want %v", err, errTooMany)
	}
	// The way to the last leaf comes after those that are too many.
	p.Pipelines[0].Steps = []Step{{From: 0, To: 2}, {From: 2, To: 3}, {From: 3, To: 4}, {From: 4, To: 5}, {From: 5, To: 6}, {From: 0, To: 1}}
	if _, err := newChoices(p); !errors.Is(err, errTooMany) {
		t.Errorf("1e8 chains: %v, want %v", err, errTooMany)
	}
}
