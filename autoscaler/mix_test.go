package autoscaler

import (
	"encoding/json"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan/plantest"
)

// randomBudget returns a budget of any size.
func randomBudget(rng *rand.Rand) plan.Budget {
	b := plan.Budget{Replicas: rng.IntN(60), CPUMilli: rng.IntN(10_000), Memory: rng.Int64N(16 << 30)}
	for range rng.IntN(3) {
		b.Devices = append(b.Devices, plan.DevicePool{Memory: int64(16*(1+len(b.Devices))) << 30, Free: rng.Int64N(128 << 30)})
	}
	return b
}

// more returns a budget that has at least what b has.
func more(b plan.Budget, rng *rand.Rand) plan.Budget {
	b.Replicas += rng.IntN(5)
	b.CPUMilli += rng.IntN(2000)
	b.Memory += rng.Int64N(2 << 30)
	b.Devices = slices.Clone(b.Devices)
	for i := range b.Devices {
		b.Devices[i].Free += rng.Int64N(32 << 30)
	}
	return b
}

// TestGreedyMixThroughHistories mixes in random worlds and checks that each mix is sound, within
// its budget unless minimums exceed it, and the same with the same arguments. A larger budget must
// not make answers less accurate.
func TestGreedyMixThroughHistories(t *testing.T) {
	t.Parallel()
	z, excluded := NewGreedyMix(Config{}), 0
	for seed := range uint64(120) {
		w, rng := plantest.NewVariantWorld(seed), rand.New(rand.NewPCG(seed, 9))
		memory := map[string]Memory{}
		for range 12 {
			w.Step()
			s := w.Snapshot()
			for _, d := range plan.Domains(s) {
				b, m := randomBudget(rng), memory[d.Functions[0]]
				mix, next, err := z.Mix(s, d, b, m)
				if err == nil {
					err = s.RouteFaults(d, mix.Tables, mix.Excluded)
				}
				if err != nil {
					t.Fatalf("world %d, snapshot %d: %v", seed, s.Rev, err)
				}
				checkMix(t, &s, d, mix, b)
				excluded += len(mix.Excluded)
				encoded, err := json.Marshal(m)
				if err != nil {
					t.Fatal(err)
				}
				var decoded Memory
				if err := json.Unmarshal(encoded, &decoded); err != nil {
					t.Fatal(err)
				}
				if again, _, err := z.Mix(s, d, b, decoded); err != nil || !reflect.DeepEqual(again, mix) {
					t.Errorf("again: %+v, %v, want %+v", again, err, mix)
				}
				checkMoreAccurate(t, &s, d, b, more(b, rng), m)
				if t.Failed() {
					t.Fatalf("world %d, snapshot %d, domain %v, budget %+v", seed, s.Rev, d, b)
				}
				memory[d.Functions[0]] = next
			}
		}
	}
	if excluded == 0 {
		t.Error("no chain was excluded in any world")
	}
}

func checkMix(t *testing.T, s *plan.Snapshot, d plan.Domain, mix plan.Mix, b plan.Budget) {
	t.Helper()
	var functions []*plan.Function
	var counts, least []int
	for i, l := range mix.Alloc {
		if l.Function != d.Functions[i] || l.Why == "" {
			t.Errorf("line %+v, want one for %q with a reason", l, d.Functions[i])
		}
		f, _ := s.Function(l.Function)
		low, high := f.Bounds()
		if l.Count < low || l.Count > high {
			t.Errorf("%d replicas of %q, want %d to %d", l.Count, f.Name, low, high)
		}
		functions, counts = append(functions, f), append(counts, l.Count)
		least = append(least, low)
		if f.Zero { // one that is in use has one
			least[i] = min(high, max(f.Min, 1))
		}
	}
	if what := b.Exceeded(functions, counts); what != "" && b.Exceeded(functions, least) == "" {
		t.Errorf("counts %v of %v exceed %s of %+v, want them within, as %v are", counts, d.Functions, what, b, least)
	}
}

// checkMoreAccurate compares what the mixes of two budgets serve, and how accurately.
func checkMoreAccurate(t *testing.T, s *plan.Snapshot, d plan.Domain, small, large plan.Budget, m Memory) {
	t.Helper()
	of := func(b plan.Budget) effect {
		mx, err := newMixing(s, d, NewSizer(Config{}).cfg.meanPart())
		if err != nil {
			t.Fatal(err)
		}
		for i := range mx.lanes {
			var past Past
			if p := m[mx.lanes[i].f.Name]; p != nil {
				past = *p
			}
			mx.lanes[i].bound(&past, &b, *s)
		}
		_, e := mx.best(&b)
		return e
	}
	if x, y := of(small), of(large); x.above(y) {
		t.Errorf("budget %+v serves %v with accuracy %v, %+v %v with %v: want no less", small, x.served, x.value, large, y.served, y.value)
	}
}

var mixT0 = time.Date(2026, 6, 1, 12, 0, 0, 0, time.UTC)

// twoStages returns a pipeline of two stages, each with a slow, accurate lane and a fast variant.
func twoStages(rate float64, slo time.Duration) (plan.Snapshot, plan.Domain) {
	f := func(name, of string, accuracy float64, ms int) plan.Function {
		return plan.Function{
			Name: name, Variant: plan.Variant{VariantOf: of, Accuracy: accuracy}, Revision: 1, Zero: true, ZeroAge: time.Hour, Max: 50, Slots: 1,
			Passing: plan.Passing{Stage: plan.Demand{Known: true, Rate: rate, CV: 1, Last: mixT0}},
			Service: plan.Service{Known: true, Mean: time.Duration(ms) * time.Millisecond, CV: 1},
		}
	}
	s := plan.Snapshot{
		Rev: 1, At: mixT0,
		Functions: []plan.Function{f("a", "", 0.9, 200), f("a-fast", "a", 0.7, 50), f("b", "", 0.95, 200), f("b-fast", "b", 0.6, 50)},
		Pipelines: []plan.Pipeline{{Name: "p", Stages: []string{"a", "b"}, Edges: []plan.Edge{{From: 0, To: 1}}, SLO: slo}},
	}
	return s, plan.Domains(s)[0]
}

// TestGreedyMixExcludesChainsThatAreTooSlowTogether has an objective that only one slow lane fits.
func TestGreedyMixExcludesChainsThatAreTooSlowTogether(t *testing.T) {
	t.Parallel()
	s, d := twoStages(20, 400*time.Millisecond) // 200+200 do not fit, 200+50 do
	mix, _, err := NewGreedyMix(Config{}).Mix(s, d, plan.Budget{Replicas: 1000}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if want := []plan.Chain{{"a", "b"}}; !reflect.DeepEqual(mix.Excluded, want) {
		t.Errorf("excluded %v, want %v", mix.Excluded, want)
	}
	b := mix.Tables[1]
	if got := b.Row("a").Lanes(); !slices.Equal(got, []string{"b-fast"}) {
		t.Errorf("behind a: %v, want b-fast alone", got)
	}
	if got := b.Row("a-fast").Levels[0].Shares[0].Lane; got != "b" {
		t.Errorf("behind a-fast: %s, want b", got)
	}
	s.Pipelines[0].SLO = time.Second
	if mix, _, err = NewGreedyMix(Config{}).Mix(s, d, plan.Budget{Replicas: 1000}, nil); err != nil || mix.Excluded != nil {
		t.Errorf("excluded %v, %v with time enough, want none", mix.Excluded, err)
	}
}

// TestGreedyMixUsesCheapVariantsForWhatTheBudgetLacks shrinks the budget of one stage.
func TestGreedyMixUsesCheapVariantsForWhatTheBudgetLacks(t *testing.T) {
	t.Parallel()
	s, d := twoStages(40, 10*time.Second)
	last := 2.0
	for _, replicas := range []int{40, 16, 12, 8, 5} {
		mix, _, err := NewGreedyMix(Config{}).Mix(s, d, plan.Budget{Replicas: replicas}, nil)
		if err != nil {
			t.Fatal(err)
		}
		total, accuracy := 0, 0.0
		for _, l := range mix.Alloc {
			total += l.Count
		}
		for _, table := range mix.Tables {
			for _, share := range table.Row(plan.FromClient).Levels[0].Shares {
				f, _ := s.Function(share.Lane)
				accuracy += share.Part * f.Accuracy / float64(len(mix.Tables))
			}
		}
		if total > replicas || accuracy > last+1e-9 || replicas == 40 && accuracy != 0.925 || replicas == 5 && accuracy > 0.75 {
			t.Errorf("budget %d: %d replicas, accuracy %.3f after %.3f: %+v", replicas, total, accuracy, last, mix.Alloc)
		}
		last = accuracy
	}
}

// TestBudgetsFollowWorkNotThePresentMix has two domains with the same work. One of them answers
// with its cheap variants at present.
func TestBudgetsFollowWorkNotThePresentMix(t *testing.T) {
	t.Parallel()
	s, _ := twoStages(10, time.Second)
	s.Pipelines = nil
	s.Functions[0].Demand.Rate, s.Functions[1].Demand.Rate = 10, 0
	s.Functions[2].Demand.Rate, s.Functions[3].Demand.Rate = 0, 10
	s.Functions[3].Service.Mean = 10 * time.Millisecond // the cheap variant is cheaper there
	s.Budget = 31
	s.Nodes = []plan.Node{{Name: "n", Memory: 100, MemoryUsed: 20, CPUMilli: 1000, Devices: []plan.Device{{ID: "g", Memory: 64}}}, {Name: "off", Memory: 1 << 40, Unavailable: "gone"}}
	s.Functions[0].Memory, s.Functions[0].GPU = 10, 1
	s.Functions[0].Replicas = []plan.Replica{{Name: "r", Node: "n", State: plan.Ready}, {Name: "x", Node: "n", State: plan.Draining}}
	all := plan.Domains(s)
	got, err := Gain{}.Budgets(s, all)
	if err != nil || len(got) != 2 {
		t.Fatal(got, err)
	}
	if got[0].Replicas != 15 || got[1].Replicas != 15 {
		t.Errorf("replicas %d and %d, want half of 31 each", got[0].Replicas, got[1].Replicas)
	}
	want := plan.Budget{Replicas: 15, Memory: 90, Devices: []plan.DevicePool{{Memory: 64, Free: 64}}}
	if !reflect.DeepEqual(got[0], want) || got[1].Memory != 0 {
		t.Errorf("got %+v and %+v, want %+v, and no memory for the other, which uses none", got[0], got[1], want)
	}
}

// TestGainLeavesFixedLines shares a budget beside a line that is fixed.
func TestGainLeavesFixedLines(t *testing.T) {
	t.Parallel()
	s := plan.Snapshot{At: mixT0, Budget: 10}
	a := plan.Alloc{{Function: "a", Count: 7, Fixed: true}, {Function: "b", Count: 9}}
	for _, l := range a {
		s.Functions = append(s.Functions, plan.Function{Name: l.Function, Min: 1, Max: 20, Slots: 1, Demand: plan.Demand{Known: true, Rate: 100}, Service: plan.Service{Known: true, Mean: time.Second}})
	}
	got, err := Gain{}.Share(s, a)
	if err != nil || got[0].Count != 7 || got[1].Count != 3 {
		t.Errorf("got %+v, %v, want 7 as fixed, and the 3 that are left", got, err)
	}
}
