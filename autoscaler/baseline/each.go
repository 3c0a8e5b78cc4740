package baseline

import (
	"fmt"
	"maps"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// each returns one line per function of d, with the count that decide returns, held within the
// function's bounds. decide gets the function and what is remembered about it; known is false if
// nothing is remembered. each does not change the memory that decide returns. So if decide
// remembers the count, it must hold the count within the bounds itself.
func each[P any](s *plan.Snapshot, d plan.Domain, m map[string]P, decide func(f *plan.Function, past P, known bool) (count int, next P, why string)) (plan.Alloc, map[string]P, error) {
	out, next := make(plan.Alloc, len(d.Functions)), make(map[string]P, len(d.Functions))
	finder := s.Finder()
	for i, name := range d.Functions {
		f, ok := finder.Function(name)
		if !ok {
			return nil, m, fmt.Errorf("function %q of the domain: not in snapshot %d, want domains of the same snapshot", name, s.Rev)
		}
		past, known := m[name]
		count, past, why := decide(f, past, known)
		next[name] = past
		least, most := f.Bounds()
		out[i] = plan.Line{Function: name, Count: min(max(count, least), most), Batch: max(f.Batch, 1), Why: why}
	}
	return out, next, nil
}

// merged joins the memories of two domains that have become one.
func merged[M ~map[string]P, P any](a, b M) M {
	m := make(M, len(a)+len(b))
	maps.Copy(m, a)
	maps.Copy(m, b)
	return m
}
