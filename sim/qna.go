package sim

import (
	"math"
	"slices"

	"github.com/stagecoach-serving/stagecoach/sim/qna"
)

// predict sets, for each stage, the burstiness that Whitt's QNA predicts. The prediction uses the
// measured burstiness of the entering requests and the mean number of each stage's replicas.
func (f *Figures) predict(m *Model, rec *recorder) {
	n := qna.Network{Stations: make([]qna.Station, len(m.stages))}
	for i := range rec.stages {
		n.Stations[i] = f.station(m, rec, i)
	}
	entries := map[int]bool{}
	for i := range m.pipelines {
		p := &m.pipelines[i]
		entry := p.stages[0] // the first in topological order
		entries[entry] = true
		cv := f.Stages[entry].CV
		n.Stations[entry].CA2 = cv * cv
		for _, e := range edges(p.graph) {
			n.Links = append(n.Links, qna.Link{From: p.stages[e.From], To: p.stages[e.To]})
		}
	}
	slices.SortFunc(n.Links, func(a, b qna.Link) int {
		if a.From != b.From {
			return a.From - b.From
		}
		return a.To - b.To
	})
	n.Links = slices.Compact(n.Links)
	for i, c2 := range qna.Predict(n) {
		if m.stages[i].own == i {
			f.Stages[i].Predicted = math.Sqrt(c2)
		}
	}
	f.compare(m, entries)
}

// station returns a stage, with all its lanes, as a station. A variant is an empty one.
func (f *Figures) station(m *Model, rec *recorder, i int) qna.Station {
	var servers, worked float64
	var service moments
	for _, k := range m.stages[i].lanes {
		s := rec.stages[k]
		ready := s.readyNs * float64(m.stages[k].spec.Slots)
		servers, worked = servers+ready, worked+float64(s.worked)
		service.n, service.sum, service.squares = service.n+s.service.n, service.sum+s.service.sum, service.squares+s.service.squares
	}
	if m.stages[i].own != i {
		return qna.Station{Servers: 1}
	}
	cv := service.cv()
	return qna.Station{Rate: f.Stages[i].Rate, Servers: max(int(math.Round(servers/1e9/f.Seconds)), 1), Rho: min(ratio(worked, servers), 1), CS2: cv * cv}
}

// compare measures the error of the predictions. For comparison, it also measures the error of a
// simple guess: every stage's arrivals are as bursty as those of the pipeline's entry stage.
func (f *Figures) compare(m *Model, entries map[int]bool) {
	compared := 0.0
	for i := range m.pipelines {
		entry := f.Stages[m.pipelines[i].stages[0]].CV
		for _, at := range m.pipelines[i].stages {
			is := f.Stages[at].CV
			if entries[at] || is == 0 {
				continue
			}
			compared++
			f.QNAError += math.Abs(f.Stages[at].Predicted-is) / is
			f.SameError += math.Abs(entry-is) / is
		}
	}
	f.QNAError, f.SameError = ratio(f.QNAError, compared), ratio(f.SameError, compared)
}
