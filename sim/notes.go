package sim

import (
	"fmt"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// notes returns what a reader of the result should know about the scenario: objectives that no
// number of replicas can meet, and profiles that the autoscaler does not take as they are.
func (m *Model) notes() (out []string) {
	for i := range m.pipelines {
		p := &m.pipelines[i]
		if serves := p.serves(m); p.spec.SLO > 0 && serves > p.spec.SLO {
			out = append(out, fmt.Sprintf("%s: its objective of %v is out of reach: its stages serve single calls for %v on average, without any waiting",
				p.spec.Name, p.spec.SLO, serves.Round(time.Microsecond)))
		}
	}
	for i := range m.stages {
		s := &m.stages[i]
		f := plan.Function{Batch: s.spec.Batch, CPULimit: int(s.spec.CPULimit), Profile: s.service.points()}
		if falls := f.FallingBatch(); falls > 0 {
			out = append(out, s.spec.Name+": "+plan.Falls(falls))
		}
	}
	return out
}

// serves returns how long the slowest path of a pipeline serves single calls of length 0, on
// average. A stage with several functions counts with the fastest.
func (p *pipe) serves(m *Model) time.Duration {
	ends := make([]float64, len(p.stages)) // on the slowest path to the end of each stage, in ns
	before := make([]float64, len(p.stages))
	graph := edges(p.graph) // sorted by From
	for i, at := range p.stages {
		var fastest []float64
		for _, lane := range m.stages[at].lanes {
			fastest = append(fastest, m.stages[lane].service.base(1, 0, 0))
		}
		ends[i] = before[i] + slices.Min(fastest)
		for _, e := range graph {
			if e.From == i {
				before[e.To] = max(before[e.To], ends[i])
			}
		}
	}
	return time.Duration(slices.Max(ends))
}
