package plantest

import (
	"fmt"
	"slices"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// NewVariantWorld returns a world in which some stages have variants, with accuracies and
// max-lengths. A few variants have no stage, or are variants of a variant. Some pipelines ask for
// policies of these names; an empty name asks for none.
func NewVariantWorld(seed uint64, policies ...plan.Chosen) *World {
	w := NewWorld(seed)
	for i := range 1 + w.rng.IntN(6) {
		of := fmt.Sprintf("f%02d.ns", w.rng.IntN(14)) // some are not deployed
		if i > 0 && w.rng.IntN(12) == 0 {
			of = "v00.ns"
		}
		f := w.s.Functions[w.rng.IntN(len(w.s.Functions))]
		f.Name, f.VariantOf = fmt.Sprintf("v%02d.ns", i), of
		f.Replicas, f.Demand, f.Service = nil, plan.Demand{}, plan.Service{}
		w.s.Functions = append(w.s.Functions, f)
	}
	for i := range w.s.Functions {
		f := &w.s.Functions[i]
		f.Accuracy = []float64{0, 0.7, 0.8, 0.9, 1}[w.rng.IntN(5)]
		f.MaxLength = []int{0, 0, 64, 128}[w.rng.IntN(4)]
	}
	if len(policies) > 0 {
		for i := range w.s.Pipelines {
			w.s.Pipelines[i].Chosen = policies[w.rng.IntN(len(policies))]
		}
	}
	return w
}

// stages measures the demand of stages with variants: the sum of their lanes'.
func (w *World) stages() {
	for i := range w.s.Functions {
		w.s.Functions[i].Stage = plan.Demand{}
	}
	for _, l := range w.s.Lanes() {
		var sum plan.Demand
		for i := range w.s.Functions {
			f := &w.s.Functions[i]
			if slices.Contains(l.Functions, f.Name) && f.Demand.Known {
				sum.Known, sum.Rate, sum.CV = true, sum.Rate+f.Demand.Rate, max(sum.CV, f.Demand.CV)
				if f.Demand.Last.After(sum.Last) {
					sum.Last = f.Demand.Last
				}
			}
		}
		for _, name := range l.Functions {
			f, _ := w.s.Function(name)
			f.Stage = sum
		}
	}
}
