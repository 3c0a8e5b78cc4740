package main

import (
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench"
)

// startCase is a way to start a replica.
type startCase struct {
	name   string
	path   string // of the KeysManager; empty: it is one of the stage's others
	shares bool   // replicas share memory
	slow   bool
	full   bool // only with --full
}

// way returns what starts replicas in a case.
func (b *benchStage) way(c startCase) starter {
	if c.path == "" {
		return b.others[c.name]
	}
	return b.on(c.path)
}

// startSamples is what several starts took.
type startSamples struct {
	hello, load, place, first, again []time.Duration
	phases                           map[string][]time.Duration
	said                             []string // answers, which are to be the same
}

// add adds a start.
func (s *startSamples) add(r started) {
	s.said = append(s.said, r.said)
	s.first, s.again, s.load = append(s.first, r.first), append(s.again, r.again), append(s.load, r.load)
	if r.conn != nil {
		s.hello, s.place = append(s.hello, r.hello), append(s.place, r.place)
	}
	if s.phases == nil {
		s.phases = map[string][]time.Duration{}
	}
	for _, p := range r.phases {
		s.phases[p.Name] = append(s.phases[p.Name], p.Took)
	}
}

// unlike returns the answers that are not as the first of others.
func (s *startSamples) unlike(others *startSamples) []string {
	return slices.DeleteFunc(slices.Clone(s.said), func(said string) bool { return said == others.said[0] })
}

func (s *startSamples) report(r *bench.Report, name string) {
	r.AddMillis(name, "first_output_p50_ms", s.first, 0.5)
	r.AddMillis(name, "first_output_p99_ms", s.first, 0.99)
	r.AddMillis(name, "hello_p50_ms", s.hello, 0.5)
	r.AddMillis(name, "hello_p99_ms", s.hello, 0.99)
	r.AddMillis(name, "inference_p50_ms", s.again, 0.5)
	for _, phase := range []string{"order", "fork", "spawn"} {
		r.AddMillis(name, phase+"_p50_ms", s.phases[phase], 0.5)
	}
}
