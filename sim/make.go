package sim

import (
	"fmt"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
	"github.com/stagecoach-serving/stagecoach/bench/load/arrivals"
)

// policy returns the policies of a run.
func (m *Model) policy(p int, seed uint64) (policy.Set, error) {
	spec := &m.scenario.Policies[p]
	if spec.Make == nil {
		return m.policies[p], nil
	}
	set, err := spec.Make(Run{Seed: seed, Arrivals: func(pipeline string) ([]time.Duration, error) { return m.arrivals(pipeline, seed) }})
	if err != nil {
		return set, fmt.Errorf("policies[%d], %s: %w", p, spec.Name, err)
	}
	return set, nil
}

// arrivals returns when the requests of a pipeline arrive.
func (m *Model) arrivals(name string, seed uint64) ([]time.Duration, error) {
	i := slices.IndexFunc(m.pipelines, func(p pipe) bool { return p.spec.Name == name })
	if i < 0 {
		return nil, fmt.Errorf("arrivals of %q: no such pipeline", name)
	}
	source, err := m.pipelines[i].source(seed)
	if err != nil {
		return nil, fmt.Errorf("arrivals of %q: %w", name, err)
	}
	var all []time.Duration
	for source := arrivals.Until(source, m.duration); ; {
		at, ok := source.Next()
		if !ok {
			return all, nil
		}
		all = append(all, at)
	}
}
