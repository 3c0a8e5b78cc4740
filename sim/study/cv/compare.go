package cv

import (
	"math"

	"github.com/stagecoach-serving/stagecoach/sim"
	"github.com/stagecoach-serving/stagecoach/sim/qna"
)

// Contender is a predictor to compare.
type Contender struct {
	Name    string
	Predict Predictor
}

// Contenders returns all predictors. The attention has the weights of weights.go.
func Contenders() []Contender {
	return []Contender{
		{"QNA", func(n qna.Network) []float64 { return qna.Predict(unlearned(n)) }},
		{"QNA, factor", qna.Predict},
		{"persistence", Persistence},
		{"attention", NewAttention().Predict},
	}
}

// reference is the index of persistence, with which the others are compared.
const reference = 2

// unlearned returns n without the stations' factors.
func unlearned(n qna.Network) qna.Network {
	out := qna.Network{Stations: make([]qna.Station, len(n.Stations)), Links: n.Links}
	for i, s := range n.Stations {
		s.Factor = 0
		out.Stations[i] = s
	}
	return out
}

// Score is the prediction error on a group of stations. Each figure is a mean over runs, with a 95
// % confidence interval.
type Score struct {
	Group string // of stations
	Runs  int
	By    []Error // parallel to the contenders
}

// Error is the error of one contender.
type Error struct {
	Log      sim.Estimate // |ln(predicted CV / measured CV)|
	Relative sim.Estimate // |predicted CV − measured CV| / measured CV
	Versus   sim.Estimate // Log minus that of persistence, run by run
}

// Compare scores contenders on recorded runs. The first group has all stations behind the first
// station of each run. Further groups divide them by the burstiness of requests, by sizing and by
// depth. The first station has its own group, because every contender knows its burstiness from
// measurement.
func Compare(runs []Run, records [][]Recorded, contenders []Contender) []Score {
	groups := []struct {
		name string
		has  func(r *Run, depth int) bool
	}{
		{"all behind the first", func(_ *Run, depth int) bool { return depth > 0 }},
		{"requests' CV below 0.7", func(r *Run, depth int) bool { return depth > 0 && r.steady(0, 0.7) }},
		{"0.7 to 1.5", func(r *Run, depth int) bool { return depth > 0 && r.steady(0.7, 1.5) }},
		{"1.5 to 3", func(r *Run, depth int) bool { return depth > 0 && r.steady(1.5, 3) }},
		{"above 3", func(r *Run, depth int) bool { return depth > 0 && r.steady(3, 99) }},
		{"CV that changes", func(r *Run, depth int) bool { return depth > 0 && r.Load == "changing" }},
		{"Markov-modulated", func(r *Run, depth int) bool { return depth > 0 && r.Load == "modulated" }},
		{"counts fixed", func(r *Run, depth int) bool { return depth > 0 && r.Sizing == "fixed" }},
		{"counts scaled", func(r *Run, depth int) bool { return depth > 0 && r.Sizing != "fixed" }},
		{"the first stage", func(_ *Run, depth int) bool { return depth == 0 }},
		{"the second", func(_ *Run, depth int) bool { return depth == 1 }},
		{"third and fourth", func(_ *Run, depth int) bool { return depth == 2 || depth == 3 }},
		{"fifth to eighth", func(_ *Run, depth int) bool { return depth >= 4 }},
	}
	tallies := make([][][]tally, len(runs)) // by run, group, contender
	for i := range runs {
		tallies[i] = make([][]tally, len(groups))
		for g := range groups {
			tallies[i][g] = make([]tally, len(contenders))
		}
		for _, r := range records[i] {
			for c := range contenders {
				for j, ca2 := range contenders[c].Predict(r.Network) {
					for g := range groups {
						if r.Later[j] > 0 && groups[g].has(&runs[i], r.Depth[j]) {
							tallies[i][g][c].add(bound(ca2), bound(r.Later[j]))
						}
					}
				}
			}
		}
	}
	out := make([]Score, len(groups))
	for g := range groups {
		out[g] = score(groups[g].name, len(contenders), func(run int) []tally { return tallies[run][g] }, len(runs))
	}
	return out
}

// steady reports whether the gaps between requests have one CV, within these bounds.
func (r *Run) steady(from, to float64) bool { return r.Load == "steady" && from <= r.CV && r.CV < to }

func bound(c2 float64) float64 { return min(max(c2, leastC2), mostC2) }

// tally sums up the errors of a run.
type tally struct{ n, log, relative float64 }

func (t *tally) add(predicted, measured float64) {
	ratio := math.Sqrt(predicted / measured)
	t.n++
	t.log += math.Abs(math.Log(ratio))
	t.relative += math.Abs(ratio - 1)
}

// score returns the means of tallies over the runs that have any.
func score(name string, contenders int, tallies func(run int) []tally, runs int) Score {
	out := Score{Group: name, By: make([]Error, contenders)}
	logs, relatives, versus := make([][]float64, contenders), make([][]float64, contenders), make([][]float64, contenders)
	for run := range runs {
		ts := tallies(run)
		if ts[0].n == 0 {
			continue
		}
		out.Runs++
		for c, t := range ts {
			logs[c] = append(logs[c], t.log/t.n)
			relatives[c] = append(relatives[c], t.relative/t.n)
			versus[c] = append(versus[c], t.log/t.n-ts[reference].log/t.n)
		}
	}
	for c := range out.By {
		out.By[c] = Error{sim.NewEstimate(logs[c]), sim.NewEstimate(relatives[c]), sim.NewEstimate(versus[c])}
	}
	return out
}
