package baseline

import (
	"fmt"
	"math"
	"slices"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
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
	whole, more := level(z.Level, len(d.Functions))
	order := topological(&s, d)
	out, _, err := each(&s, d, nil, func(f *plan.Function, _ struct{}, _ bool) (int, struct{}, string) {
		count := whole
		if slices.Index(order, f.Name) < more {
			count++
		}
		return count, struct{}{}, fmt.Sprintf("%d, %g a stage, whatever comes", count, z.Level)
	})
	return out, m, err
}

// level splits a level of replicas a stage: each of n stages has so many, and the first few one more.
func level(v float64, n int) (each, more int) {
	if !(v > 0) {
		return 0, 0
	}
	v = min(v, math.MaxInt32)
	whole := math.Floor(v)
	return int(whole), int(math.Round((v - whole) * float64(n)))
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
