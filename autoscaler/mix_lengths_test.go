package autoscaler

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// byLengths returns a stage whose best lane takes inputs up to 128, and the share of longer ones.
func byLengths(rate, long float64) (plan.Snapshot, plan.Domain) {
	s, _ := twoStages(rate, 400*time.Millisecond)
	s.Functions = s.Functions[:2]
	s.Functions[0].Accuracy, s.Functions[0].Service.Mean = 0.9, 150*time.Millisecond
	s.Functions[1].Accuracy, s.Functions[1].Service.Mean, s.Functions[1].MaxLength = 0.99, 80*time.Millisecond, 128
	for i := range s.Functions {
		s.Functions[i].Lengths = []plan.LengthShare{{MaxLength: 128, Share: 1 - long}, {Share: long}}
	}
	s.Pipelines[0].Stages, s.Pipelines[0].Edges = []string{"a"}, nil
	return s, plan.Domains(s)[0]
}

var wide = plan.Budget{Replicas: 100, CPUMilli: 1 << 30, Memory: 1 << 40}

// TestMixFollowsLengths checks that each lane has the replicas for the inputs that it must take.
func TestMixFollowsLengths(t *testing.T) {
	t.Parallel()
	before := 0
	for _, long := range []float64{0, 0.1, 0.3, 0.5, 0.8, 1} {
		s, d := byLengths(100, long)
		mix, _, err := NewGreedyMix(Config{}).Mix(s, d, wide, nil)
		if err != nil {
			t.Fatal(err)
		}
		any, short := mix.Alloc[0].Count, mix.Alloc[1].Count
		if float64(any) < 100*long*0.15 || float64(short) < 100*(1-long)*0.08 || any < before {
			t.Errorf("%g long: %d and %d replicas, want at least %.1f and %.1f, and no fewer than %d", long, any, short, 100*long*0.15, 100*(1-long)*0.08, before)
		}
		before = any
		levels := mix.Tables[0].Rows[0].Levels
		if long == 1 {
			continue // nobody needs the best lane
		}
		if len(levels) != 2 || levels[0].Shares[0].Lane != "a-fast" || levels[0].Shares[0].Part < 0.99 || levels[1].Shares[0] != (plan.Share{Lane: "a", Part: 1}) {
			t.Errorf("%g long: levels %+v, want short inputs at the best lane, and long ones at the other", long, levels)
		}
	}
	s, d := byLengths(100, 0.5)
	for i := range s.Functions {
		s.Functions[i].Lengths = nil
	}
	mix, _, err := NewGreedyMix(Config{}).Mix(s, d, wide, nil)
	if err != nil || mix.Alloc[0].Count > 2 {
		t.Errorf("with unknown lengths: %+v, %v, want the best lane to serve all, as far as anybody knows", mix.Alloc, err)
	}
}

// TestNoLaneGetsInputsThatAreTooLong checks random stages: flows respect lengths, and add up.
func TestNoLaneGetsInputsThatAreTooLong(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(3, 4))
	for range 300 {
		s, d := twoStages(1+500*rng.Float64(), time.Second)
		var bounds []int
		for i := range s.Functions {
			if f := &s.Functions[i]; rng.IntN(2) == 0 {
				f.MaxLength = 10 * (1 + rng.IntN(4))
			}
			s.Functions[i].Accuracy = 0.5 + rng.Float64()/2
		}
		for _, stage := range []int{0, 2} {
			bounds = bounds[:0]
			for _, f := range s.Functions[stage : stage+2] {
				if f.MaxLength > 0 {
					bounds = append(bounds, f.MaxLength)
				}
			}
			slices.Sort(bounds)
			var lengths []plan.LengthShare
			if sum := 0.0; rng.IntN(4) > 0 {
				for _, b := range append(slices.Compact(bounds), 0) {
					lengths = append(lengths, plan.LengthShare{MaxLength: b, Share: rng.Float64()})
					sum += lengths[len(lengths)-1].Share
				}
				for i := range lengths {
					lengths[i].Share /= sum
				}
			}
			s.Functions[stage].Lengths, s.Functions[stage+1].Lengths = lengths, lengths
		}
		mx, err := newMixing(&s, d, 0.3)
		if err != nil {
			t.Fatal(err)
		}
		counts := make([]int, len(mx.lanes))
		for i := range counts {
			counts[i] = rng.IntN(20)
		}
		e := mx.effect(counts)
		for i := range mx.stages {
			st, sum := &mx.stages[i], 0.0
			for at := range st.sources {
				for class := range st.classes {
					for k, flow := range e.row(st, i, mixTasks{at, class}) {
						if sum += flow; flow > 0 && !st.classes[class].takes[k] || flow < 0 {
							t.Fatalf("%g/s of class %+v go to %+v", flow, st.classes[class], mx.lanes[st.lanes[k]].f)
						}
					}
				}
			}
			if math.Abs(sum-st.rate) > 1e-6*st.rate {
				t.Fatalf("stage %s: %g/s of %g/s have a lane", st.name, sum, st.rate)
			}
		}
		mix, _, err := NewGreedyMix(Config{}).Mix(s, d, wide, nil)
		if err == nil {
			err = s.RouteFaults(d, mix.Tables, mix.Excluded)
		}
		if err != nil {
			t.Fatalf("%v: %+v", err, s.Functions)
		}
	}
}
