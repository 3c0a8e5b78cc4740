package autoscaler

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// Fixed is a plan.Allocator for comparison that never changes a count. Each function gets an equal
// part of the cluster's budget, or its minimum if there is no budget.
type Fixed struct{}

// Allocate implements plan.Allocator.
func (Fixed) Allocate(s plan.Snapshot, d plan.Domain, m struct{}) (plan.Alloc, struct{}, error) {
	out := make(plan.Alloc, 0, len(d.Functions))
	for _, name := range d.Functions {
		i, ok := slices.BinarySearchFunc(s.Functions, name, func(f plan.Function, n string) int { return cmp.Compare(f.Name, n) })
		if !ok {
			return nil, m, fmt.Errorf("function %q of the domain: not in snapshot %d, want domains of the same snapshot", name, s.Rev)
		}
		f := &s.Functions[i]
		least, most := f.Bounds()
		count, why := max(f.Min, 1), "the minimum, whatever comes"
		if s.Budget > 0 {
			count = s.Budget / len(s.Functions)
			if i < s.Budget%len(s.Functions) {
				count++
			}
			why = fmt.Sprintf("an equal part of %d replicas, whatever comes", s.Budget)
		}
		out = append(out, plan.Line{Function: name, Count: min(max(count, least), most), Batch: f.Batch, Why: why})
	}
	return out, m, nil
}

// Uniform is a plan.Allocator for comparison that scales pipelines as a whole: all stages of a
// domain get the same count. It is the largest count that the [Sizer] gives any of them, but at
// most an equal part of the cluster's budget. A function's own bounds still apply.
type Uniform struct{ sizer Sizer }

// NewUniform returns a Uniform.
func NewUniform(cfg Config) Uniform { return Uniform{NewSizer(cfg)} }

// Merge joins the memories of two domains that have become one.
func (u Uniform) Merge(a, b Memory) Memory { return u.sizer.Merge(a, b) }

// Allocate implements plan.Allocator.
func (u Uniform) Allocate(s plan.Snapshot, d plan.Domain, m Memory) (plan.Alloc, Memory, error) {
	out, next, err := u.sizer.Allocate(s, d, m)
	if err != nil || len(d.Pipelines) == 0 && s.Budget <= 0 {
		return out, next, err
	}
	most := slices.MaxFunc(out, func(x, y plan.Line) int { return cmp.Compare(x.Count, y.Count) })
	level := most.Count
	if s.Budget > 0 {
		level = min(level, max(s.Budget/len(s.Functions), 1))
	}
	for i := range out {
		f, _ := s.Function(out[i].Function)
		l, h := f.Bounds()
		if count := min(max(level, l), h); count != out[i].Count {
			out[i].Why += fmt.Sprintf("; %d, as each stage: %s needs %d", count, most.Function, most.Count)
			out[i].Count = count
		}
	}
	return out, next, nil
}
