package sim

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
)

// static is the name of an allocator with fixed numbers of replicas.
const static = "static"

// fixed is a plan.Allocator with the numbers of replicas that a scenario gives, by key.
type fixed map[string]int

// Allocate implements plan.Allocator.
func (z fixed) Allocate(s plan.Snapshot, d plan.Domain, m struct{}) (plan.Alloc, struct{}, error) {
	find := s.Finder()
	out := make(plan.Alloc, 0, len(d.Functions))
	for _, name := range d.Functions {
		i, ok := find.Index(name)
		if !ok {
			return nil, m, fmt.Errorf("function %q of the domain: not in snapshot %d, want domains of the same snapshot", name, s.Rev)
		}
		f := &s.Functions[i]
		least, most := f.Bounds()
		count := min(max(z[name], least), most)
		out = append(out, plan.Line{Function: name, Count: count, Batch: f.Batch, Why: fmt.Sprintf("%d, as the scenario has it", count)})
	}
	return out, m, nil
}

// choose returns the policies that spec names, or its fixed numbers of replicas.
func (spec *Policy) choose() (policy.Set, error) {
	names := spec.Names
	if len(spec.Replicas) > 0 {
		names.Corrector = cmp.Or(names.Corrector, "none")
	}
	set, err := names.Choose()
	if err != nil || len(spec.Replicas) == 0 {
		return set, err
	}
	counts := fixed{}
	for _, r := range spec.Replicas {
		counts[keyOf(r.Stage)] = r.Count
	}
	return policy.WithAllocator(set, static, counts), nil
}

// checkReplicas checks the fixed numbers of replicas of a policy.
func (m *Model) checkReplicas(spec *Policy, path string, p *problems) {
	if len(spec.Replicas) == 0 {
		return
	}
	if spec.Allocator != "" || spec.Make != nil {
		p.add(path+".allocator", "%q beside replicas, want one of both", spec.Allocator)
	}
	for i, r := range spec.Replicas {
		at := fmt.Sprintf("%s.replicas[%d]", path, i)
		within(p, at+".count", r.Count, 0, maxReplicas)
		if !slices.ContainsFunc(m.functions, func(f declared) bool { return f.Name == r.Stage }) {
			p.add(at+".stage", "%q, want a stage or variant of the scenario", r.Stage)
		}
	}
}
