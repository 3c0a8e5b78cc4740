package cv

import (
	"fmt"
	"math"
	"math/rand/v2"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
	"github.com/stagecoach-serving/stagecoach/bench/load/arrivals"
	"github.com/stagecoach-serving/stagecoach/sim"
)

// Run is a simulation for training or comparison.
type Run struct {
	Shape string
	// steady, changing (its CV changes at some time) or modulated (a Markov-modulated Poisson process)
	Load   string
	CV     float64 // of the times between requests, if Load is steady
	Sizing string  // allocator: fixed, sizer or uniform

	scenario sim.Scenario
}

// source describes the space from which runs are drawn.
type source struct {
	runs   int
	seed   uint64
	shapes []string
	cvs    []float64
	states []arrivals.States // for modulated load
	rates  [2]float64
}

// modulated returns the states of a load that alternates between two rates, in requests per second.
// for1 and for2 are the mean times, in seconds, that the first and the second rate last.
func modulated(rate, for1, rate2, for2 float64) arrivals.States {
	second := float64(time.Second)
	return arrivals.States{{Rate: rate, Mean: time.Duration(for1 * second)}, {Rate: rate2, Mean: time.Duration(for2 * second)}}
}

// changing returns a source whose gaps have one CV before a time, and another CV after it.
func changing(rate, before, after float64, at time.Duration) func(seed uint64) (arrivals.Source, error) {
	return func(seed uint64) (arrivals.Source, error) {
		profile, err := arrivals.ParseProfile(fmt.Sprintf("%.3g", rate))
		if err != nil {
			return nil, err
		}
		first, err := arrivals.Renewal(profile, before, seed)
		if err != nil {
			return nil, err
		}
		second, err := arrivals.Renewal(profile, after, seed+1)
		return &inTurn{arrivals.Until(first, at), second, at}, err
	}
}

// inTurn is one source before a time, and another source after it.
type inTurn struct {
	first, second arrivals.Source
	at            time.Duration
}

// Next implements arrivals.Source.
func (s *inTurn) Next() (time.Duration, bool) {
	if at, ok := s.first.Next(); ok {
		return at, true
	}
	at, ok := s.second.Next()
	return s.at + at, ok
}

// The seeds of all random choices.
const (
	trainingSeed   = 1_000
	validationSeed = 2_000
	heldBackSeed   = 3_000
	weightsSeed    = 4_000
)

// TrainingRuns returns the runs to which weights are fitted.
func TrainingRuns() []Run { return training(300, trainingSeed).make() }

// ValidationRuns returns the runs that decide when training stops.
func ValidationRuns() []Run { return training(60, validationSeed).make() }

func training(runs int, seed uint64) source {
	return source{
		runs: runs, seed: seed, shapes: []string{"chain3", "chain4", "chain6", "chain7", "diamond"}, cvs: []float64{0.1, 0.35, 0.7, 1.4, 2.8, 5.6, 8},
		states: []arrivals.States{modulated(4, 10, 30, 5), modulated(10, 30, 25, 10), modulated(1, 5, 40, 2)}, rates: [2]float64{4, 60},
	}
}

// HeldBackRuns returns the runs of the comparison. No choice was based on them.
func HeldBackRuns(runs int) []Run {
	return source{
		runs: runs, seed: heldBackSeed, shapes: []string{"chain5", "chain8", "wide"}, cvs: []float64{0.2, 0.5, 1, 2, 4, 6.8},
		states: []arrivals.States{modulated(8, 20, 45, 6), modulated(2, 8, 20, 4), modulated(12, 15, 36, 15)}, rates: [2]float64{5, 50},
	}.make()
}

func (s source) make() []Run {
	out := make([]Run, s.runs)
	for k := range out {
		r := rand.New(rand.NewPCG(s.seed, uint64(k)))
		run := Run{Shape: s.shapes[r.IntN(len(s.shapes))], CV: s.cvs[r.IntN(len(s.cvs))], Sizing: []string{"fixed", "sizer", "uniform"}[k%3]}
		rate := between(r, s.rates[0], s.rates[1])
		run.Load = []string{"steady", "steady", "steady", "steady", "changing", "modulated"}[r.IntN(6)]
		requests := sim.Arrivals{Rate: fmt.Sprintf("%.3g", rate), CV: &run.CV}
		switch run.Load {
		case "changing":
			requests = sim.Arrivals{Make: changing(rate, run.CV, s.cvs[r.IntN(len(s.cvs))], time.Duration(between(r, 70, 170)*float64(time.Second)))}
		case "modulated":
			states := s.states[r.IntN(len(s.states))]
			requests, rate = sim.Arrivals{MMPP: states.String()}, states.Mean()
		}
		run.scenario = scenario(r, run, requests, rate)
		run.scenario.Seed = s.seed + uint64(k) + 1
		out[k] = run
	}
	return out
}

// Each run is simulated for runLength, and recorded after warmup.
const (
	runLength = 240 * time.Second
	warmup    = 40 * time.Second
)

func scenario(r *rand.Rand, run Run, requests sim.Arrivals, rate float64) sim.Scenario {
	s := sim.Scenario{Name: run.Shape, Duration: runLength, Warmup: warmup, Seeds: 1, Nodes: []sim.Node{{Memory: 1 << 50, CPU: 10_000_000}}}
	longest := time.Duration(0)
	for name, next := range graph(run.Shape) {
		mean := time.Duration(between(r, 0.01, 0.25) * float64(time.Second)).Round(time.Microsecond)
		longest += mean
		cv := []float64{0.1, 0.2, 0.5, 1, 1.5}[r.IntN(5)]
		start := time.Duration(between(r, 0.02, 5) * float64(time.Second)).Round(time.Millisecond)
		st := sim.Stage{Variant: sim.Variant{
			Name: fmt.Sprintf("s%d", name), Service: sim.Service{Dist: sim.Gamma, Mean: mean, CV: &cv}, Start: sim.Start{Cold: start, Fork: start}, Max: 200,
		}}
		for _, to := range next {
			st.Next = append(st.Next, fmt.Sprintf("s%d", to))
		}
		if run.Sizing == "fixed" {
			utilisation := 0.2 + 0.7*r.Float64()
			st.Min = max(int(math.Ceil(rate*mean.Seconds()/utilisation)), 1)
			st.Max = st.Min
		}
		s.Stages = append(s.Stages, st)
	}
	s.Pipelines = []sim.Pipeline{{Name: "p", Arrivals: requests, SLO: time.Duration(between(r, 1.5, 5) * float64(longest)).Round(time.Millisecond)}}
	return s
}

// names returns the run's policies. Their corrector is replaced by the recorded one.
func (r Run) names() policy.Names {
	if r.Sizing == "uniform" {
		return policy.Names{Allocator: "uniform"}
	}
	return policy.Names{}
}

// graph returns the successors of each stage.
func graph(shape string) [][]int {
	switch shape {
	case "diamond":
		return [][]int{{1, 2}, {3}, {3}, {}}
	case "wide":
		return [][]int{{1}, {2, 3, 4}, {5}, {6}, {6}, {6}, {}}
	}
	n := int(shape[len(shape)-1] - '0') // the names of chains end with their length
	out := make([][]int, n)
	for k := range n - 1 {
		out[k] = []int{k + 1}
	}
	return out
}

// between draws a value from low to high, evenly in logarithms.
func between(r *rand.Rand, low, high float64) float64 {
	return low * math.Exp(r.Float64()*math.Log(high/low))
}
