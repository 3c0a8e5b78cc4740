package starts

import (
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench"
)

// Case is a way to start a replica.
type Case struct {
	Name   string
	Path   string // of the KeysManager; empty: it is one of the stage's others
	Shares bool   // replicas share memory
	Slow   bool
	Full   bool // only with --full
}

// Way returns the Starter of a case.
func (b *Stage) Way(c Case) Starter {
	if c.Path == "" {
		return b.Others[c.Name]
	}
	return b.on(c.Path)
}

// Samples has the figures of several starts.
type Samples struct {
	Hello, Load, Place, First, again []time.Duration
	phases                           map[string][]time.Duration
	Said                             []string // answers, which should be equal
}

// Add adds a start.
func (s *Samples) Add(r Started) {
	s.Said = append(s.Said, r.said)
	s.First, s.again, s.Load = append(s.First, r.first), append(s.again, r.again), append(s.Load, r.load)
	if r.conn != nil {
		s.Hello, s.Place = append(s.Hello, r.hello), append(s.Place, r.place)
	}
	if s.phases == nil {
		s.phases = map[string][]time.Duration{}
	}
	for _, p := range r.phases {
		s.phases[p.Name] = append(s.phases[p.Name], p.Took)
	}
}

// Unlike returns the answers that differ from the first answer of others.
func (s *Samples) Unlike(others *Samples) []string {
	return slices.DeleteFunc(slices.Clone(s.Said), func(said string) bool { return said == others.Said[0] })
}

// Report adds the figures of a case to a report.
func (s *Samples) Report(r *bench.Report, name string) {
	r.AddMillis(name, "first_output_p50_ms", s.First, 0.5)
	r.AddMillis(name, "first_output_p99_ms", s.First, 0.99)
	r.AddMillis(name, "hello_p50_ms", s.Hello, 0.5)
	r.AddMillis(name, "hello_p99_ms", s.Hello, 0.99)
	r.AddMillis(name, "inference_p50_ms", s.again, 0.5)
	for _, phase := range []string{"order", "fork", "spawn"} {
		r.AddMillis(name, phase+"_p50_ms", s.phases[phase], 0.5)
	}
}
