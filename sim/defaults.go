package sim

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// The defaults of a scenario. Those of stages are the defaults of OpenFaaS and Stagecoach.
const (
	defaultSeeds = 5
	defaultTick  = time.Second
	// docs/RESULTS.md: a function behind `up` takes 150 µs more than a bare echo, both ways together
	defaultHop      = 50 * time.Microsecond
	defaultDuration = 10 * time.Minute
	defaultTimeout  = 30 * time.Second
	defaultQueue    = 1000
)

// complete fills in the defaults. It copies the lists that it changes, because several scenarios
// may share them.
func (s *Scenario) complete() {
	s.Policies, s.Nodes, s.Pipelines, s.Stages = slices.Clone(s.Policies), slices.Clone(s.Nodes), slices.Clone(s.Pipelines), slices.Clone(s.Stages)
	s.Seed, s.Seeds = cmp.Or(s.Seed, 1), cmp.Or(s.Seeds, defaultSeeds)
	s.Tick = cmp.Or(s.Tick, defaultTick)
	if s.Hop == nil {
		s.Hop = pointer(defaultHop)
	}
	if len(s.Policies) == 0 {
		s.Policies = []Policy{{}}
	}
	for i := range s.Policies {
		p := &s.Policies[i]
		if len(p.Replicas) > 0 {
			p.Name = cmp.Or(p.Name, static)
		}
		p.Name = cmp.Or(p.Name, p.Corrector, p.Allocator, "default")
	}
	for i := range s.Nodes {
		n := &s.Nodes[i]
		n.Name, n.Count = cmp.Or(n.Name, fmt.Sprintf("node%d", i+1)), cmp.Or(n.Count, 1)
	}
	for i := range s.Pipelines {
		p := &s.Pipelines[i]
		p.Timeout, p.Items = cmp.Or(p.Timeout, defaultTimeout), cmp.Or(p.Items, 1)
		p.Arrivals.Trace.Speed, p.Arrivals.Trace.Scale = cmp.Or(p.Arrivals.Trace.Speed, 1), cmp.Or(p.Arrivals.Trace.Scale, 1)
		if p.Arrivals.CV == nil {
			p.Arrivals.CV = pointer(1.0)
		}
	}
	for i := range s.Pipelines {
		s.Pipelines[i].Weight = cmp.Or(s.Pipelines[i].Weight, 1)
		s.Pipelines[i].Length.complete()
	}
	for i := range s.Stages {
		s.Stages[i].complete()
	}
	if len(s.Stages) > 0 && len(s.Pipelines) > 0 {
		for i := range s.Stages {
			if len(s.Stages[i].Pipelines) > 0 {
				continue
			}
			s.Stages[i].Pipelines = nil
			for _, p := range s.Pipelines {
				s.Stages[i].Pipelines = append(s.Stages[i].Pipelines, p.Name)
			}
		}
	}
}

func (s *Stage) complete() {
	if len(s.Outputs.kinds()) == 0 {
		s.Items = cmp.Or(s.Items, 1)
	}
	s.Outputs.complete()
	if s.AutoBatch {
		s.Batch = cmp.Or(s.Batch, pipeline.AutoBatch)
	}
	s.Batch, s.Slots = cmp.Or(s.Batch, 1), cmp.Or(s.Slots, 1)
	s.QueueLimit = cmp.Or(s.QueueLimit, defaultQueue)
	if !s.Zero {
		s.Min = cmp.Or(s.Min, pipeline.DefaultMin)
	}
	s.Max = cmp.Or(s.Max, max(pipeline.DefaultMax, s.Min))
	s.ZeroAge = cmp.Or(s.ZeroAge, pipeline.DefaultZeroAge)
	s.Start.Fork = cmp.Or(s.Start.Fork, s.Start.Cold)
	s.Accuracy = cmp.Or(s.Accuracy, 1)
	s.Service.complete()
}

func (v *Service) complete() {
	if len(v.Profile) > 0 || v.ProfileFile != "" {
		v.Dist = cmp.Or(v.Dist, Lognormal)
	}
	v.Dist = cmp.Or(v.Dist, Exponential)
	if v.CV == nil && (v.Dist == Gamma || v.Dist == Lognormal) && (len(v.Profile) > 0 || v.ProfileFile == "") {
		v.CV = pointer(1.0)
		if len(v.Profile) > 0 {
			v.CV = pointer(v.Profile[0].CV)
		}
	}
	if v.BatchCost == nil {
		v.BatchCost = pointer(1.0)
	}
}

func pointer[T any](v T) *T { return &v }
