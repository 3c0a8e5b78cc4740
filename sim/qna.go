package sim

import (
	"math"
	"slices"

	"github.com/stagecoach-serving/stagecoach/autoscaler"
)

// predict asks Whitt's QNA, as the autoscaler has it, how bursty arrivals at each stage should have been, given those that entered,
// and what each stage's replicas were on average.
func (f *figures) predict(m *Model) {
	n := autoscaler.Network{Stations: make([]autoscaler.Station, len(m.stages))}
	for i, s := range f.rec.stages {
		slots := float64(m.stages[i].spec.Slots)
		n.Stations[i] = autoscaler.Station{
			Rate: s.calls() / f.seconds(), Servers: max(int(math.Round(s.readyNs/1e9/f.seconds()*slots)), 1),
			Rho: min(s.utilisation(slots), 1), CS2: s.service.cv() * s.service.cv(),
		}
	}
	entries := map[int]bool{}
	for i := range m.pipelines {
		p := &m.pipelines[i]
		entry := p.stages[0] // the first in topological order
		entries[entry] = true
		cv := f.rec.stages[entry].gaps.cv()
		n.Stations[entry].CA2 = cv * cv
		for _, e := range edges(p.graph) {
			n.Links = append(n.Links, autoscaler.Link{From: p.stages[e.From], To: p.stages[e.To]})
		}
	}
	slices.SortFunc(n.Links, func(a, b autoscaler.Link) int {
		if a.From != b.From {
			return a.From - b.From
		}
		return a.To - b.To
	})
	n.Links = slices.Compact(n.Links)
	for _, c2 := range (autoscaler.QNA{}).Predict(n) {
		f.qna = append(f.qna, math.Sqrt(c2))
	}
	f.compare(m, entries)
}

// compare measures the predictions, and the guess that a stage's arrivals are as bursty as those of its pipeline's entry.
func (f *figures) compare(m *Model, entries map[int]bool) {
	compared := 0.0
	for i := range m.pipelines {
		entry := f.rec.stages[m.pipelines[i].stages[0]].gaps.cv()
		for _, at := range m.pipelines[i].stages {
			is := f.rec.stages[at].gaps.cv()
			if entries[at] || is == 0 {
				continue
			}
			compared++
			f.errors[0] += math.Abs(f.qna[at]-is) / is
			f.errors[1] += math.Abs(entry-is) / is
		}
	}
	f.errors[0], f.errors[1] = ratio(f.errors[0], compared), ratio(f.errors[1], compared)
}
