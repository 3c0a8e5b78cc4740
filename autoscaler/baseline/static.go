package baseline

import (
	"fmt"
	"math"
	"slices"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// Static is a plan.Allocator that gives each stage a fixed count. That is how serverful systems
// provision for a peak that is known beforehand. QUART argues against it (ICDCS'24, §2.2).
type Static struct {
	// Level is the mean number of replicas per stage in a domain. If Level is not whole, for example
	// 3.5, the first stages have one replica more than the others, so that every budget can be spent.
	// 0: each stage's minimum.
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

// level splits v replicas per stage among n stages. It returns the whole part of v, which each
// stage gets, and the number of stages that get one more: the first ones.
func level(v float64, n int) (each, more int) {
	if !(v > 0) {
		return 0, 0
	}
	v = min(v, math.MaxInt32)
	whole := math.Floor(v)
	return int(whole), int(math.Round((v - whole) * float64(n)))
}

// topological returns the names of the functions of d in the order of its pipelines, one pipeline
// after another. Functions in no pipeline come last.
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
