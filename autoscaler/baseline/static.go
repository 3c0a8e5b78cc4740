package baseline

import (
	"fmt"
	"math"
	"slices"

	"github.com/stagecoach-serving/stagecoach/plan"
)

// Static is a plan.Allocator that gives each stage the same fixed count, whatever comes: provisioning for a peak that was known
// beforehand, as serverful systems have it (QUART, ICDCS'24, §2.2, sets itself against it).
type Static struct {
	// Level is how many replicas a stage has, on average over the domain's. Of a level that is not whole, as 3.5, the first stages have one
	// more, so that every budget can be spent. 0: each stage's minimum.
	Level float64
}

// Allocate implements plan.Allocator.
func (z Static) Allocate(s plan.Snapshot, d plan.Domain, m struct{}) (plan.Alloc, struct{}, error) {
	n := len(d.Functions)
	level := min(max(z.Level, 0), math.MaxInt32)
	whole := math.Floor(level)
	more := int(math.Round((level - whole) * float64(n)))
	order := topological(&s, d)
	out, _, err := each(&s, d, nil, func(f *plan.Function, _ struct{}, _ bool) (int, struct{}, string) {
		count := int(whole)
		if slices.Index(order, f.Name) < more {
			count++
		}
		return count, struct{}{}, fmt.Sprintf("%d, %g a stage, whatever comes", count, level)
	})
	return out, m, err
}

// topological sorts the functions of d as they are in its pipelines, one pipeline after another; those of none come last.
func topological(s *plan.Snapshot, d plan.Domain) []string {
	order := make([]string, 0, len(d.Functions))
	add := func(names []string) {
		for _, name := range names {
			if _, ok := slices.BinarySearch(d.Functions, name); ok && !slices.Contains(order, name) {
				order = append(order, name)
			}
		}
	}
	for _, name := range d.Pipelines {
		if p, ok := s.Pipeline(name); ok {
			add(p.Stages)
		}
	}
	add(d.Functions)
	return order
}
