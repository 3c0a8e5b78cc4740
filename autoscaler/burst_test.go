package autoscaler

import (
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// row returns a pipeline of eight equal stages with bursty arrivals. Each stage measures a
// different CV.
func row() (plan.Snapshot, plan.Domain) {
	s, d := plan.Snapshot{At: t0}, plan.Domain{Pipelines: []string{"p"}}
	p := plan.Pipeline{Name: "p", SLO: 800 * time.Millisecond}
	for i := range 8 {
		f := timed(fmt.Sprintf("s%d", i), 50*time.Millisecond)
		f.Replicas = replicas(4, plan.Ready)
		f.Demand.Rate, f.Demand.CV, f.Max = 40, []float64{4, 3.5, 2, 3, 1, 2.5, 3.9, 0.5}[i], 50
		s.Functions = append(s.Functions, f)
		p.Stages, d.Functions = append(p.Stages, f.Name), append(d.Functions, f.Name)
	}
	s.Pipelines = []plan.Pipeline{p}
	return s, d
}

// TestEqualStagesPayForABurstOnce checks that equal stages get equal counts for bursts, although
// each measures a different CV. The same holds if a budget cuts the counts. The counts must be far
// smaller than if each stage had to wait for the burst.
func TestEqualStagesPayForABurstOnce(t *testing.T) {
	s, d := row()
	// λ=40/s, e=7.5, patience 400 ms/ln(10)·7.5/8.5 = 153 ms. So
	// C=(40+√(1600+4·7.5·40/0.153))/2=68.5/s, at 20/s per replica.
	m, err := newModel(&s, d, Config{Attainment: 0.9}.meanPart())
	if err != nil {
		t.Fatal(err)
	}
	for i := range m.stages {
		if n := m.stages[i].forBursts(math.MaxInt32); n != 4 {
			t.Errorf("stage %d: %d for bursts, want 4", i, n)
		}
	}
	asked, _, err := NewSizer(Config{Attainment: 0.9}).Allocate(s, d, nil)
	if err != nil {
		t.Fatal(err)
	}
	s.Budget = 24
	shared, err := Gain{}.Share(s, slices.Clone(asked))
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range shared {
		if l.Count != 3 {
			t.Errorf("%s: %d (%s) of a budget of 24, want 3", l.Function, l.Count, l.Why)
		}
	}
}

// TestSearchFromFindsTheSmallest checks all guesses, limits and results up to 20.
func TestSearchFromFindsTheSmallest(t *testing.T) {
	for limit := range 20 {
		for low := range limit + 1 {
			for guess := range 25 {
				for first := range 25 {
					want := min(max(first, low), limit)
					if got := searchFrom(low, guess, limit, func(n int) bool { return n >= first }); got != want {
						t.Fatalf("%d, of %d to %d from %d on, guess %d: want %d", got, low, limit, first, guess, want)
					}
				}
			}
		}
	}
}

// TestWithoutBurstEachStageWaitsForBursts checks the switch NoBurst. Stages then wait for the
// bursts that they measure: one with a CV of 4 gets more replicas than one with less than 1. All
// together get more than if bursts were waited for once.
func TestWithoutBurstEachStageWaitsForBursts(t *testing.T) {
	s, d := row()
	total := map[bool]int{}
	for _, off := range []bool{false, true} {
		a, _, err := NewSizer(Config{Attainment: 0.9, NoBurst: off}).Allocate(s, d, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range a {
			total[off] += l.Count
		}
		if spread := a[0].Count - a[7].Count; off != (spread > 1) {
			t.Errorf("NoBurst %t: %d replicas with a CV of 4, %d with one of 0.5", off, a[0].Count, a[7].Count)
		}
	}
	if total[true] <= total[false] {
		t.Errorf("%d replicas if each stage waits for bursts, %d if bursts are waited for once; want more", total[true], total[false])
	}
}
