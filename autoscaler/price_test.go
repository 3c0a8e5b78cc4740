package autoscaler

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan/plantest"
)

func TestSizerWithAPriceIsAnAllocator(t *testing.T) {
	t.Parallel()
	plantest.Run(t, NewSizer(Config{Price: 3}))
}

// priced sizes a domain at a price, without a past.
func priced(t *testing.T, price float64, s plan.Snapshot, d plan.Domain) plan.Alloc {
	t.Helper()
	a, _, err := NewSizer(Config{Price: price}).Allocate(s, d, nil)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// one returns a snapshot and a domain of a single function.
func one(f plan.Function) (plan.Snapshot, plan.Domain) {
	return plan.Snapshot{At: t0, Functions: []plan.Function{f}}, plan.Domain{Functions: []string{f.Name}}
}

// TestReplicasAreAddedWhileTheyAreWorthTheirPrice compares counts with a search one by one, over
// the formula of Sojourn.
func TestReplicasAreAddedWhileTheyAreWorthTheirPrice(t *testing.T) {
	for _, cv := range []float64{0.5, 1, 2, 4} {
		for _, price := range []float64{0.01, 0.5, 2, 30, 1e4} {
			f := loaded()
			f.Demand.CV, f.Max = cv, 60
			s, d := one(f)
			base := priced(t, 0, s, d)[0].Count
			sojourn := func(c int) float64 {
				return Sojourn(f.Demand.Rate, 5, c, squared(cv), 1, 0).Seconds()
			}
			want := base
			for want < f.Max && price*f.Demand.Rate*(sojourn(want)-sojourn(want+1)) > 1 {
				want++
			}
			got := priced(t, price, s, d)[0]
			if got.Count != want {
				t.Errorf("CV %g, price %g: %d (%s), want %d", cv, price, got.Count, got.Why, want)
			}
			if text := fmt.Sprintf(", %d with %d for the price; was 0", want, want-base); strings.Contains(got.Why, text) != (want > base) {
				t.Errorf("CV %g, price %g: %q, want %q if %d > %d", cv, price, got.Why, text, want, base)
			}
		}
	}
}

// TestWhatHasNoPrice checks functions to which no price adds a replica, and the bounds of the
// others.
func TestWhatHasNoPrice(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*plan.Function)
		price  float64
		want   int // beyond what the function has without a price
	}{
		"unknown service time": {func(f *plan.Function) { f.Service = plan.Service{} }, MostPrice, 0},
		"no arrivals":          {func(f *plan.Function) { f.Demand.Rate = 0 }, MostPrice, 0},
		"asleep":               {func(f *plan.Function) { f.Zero, f.Min, f.Running, f.Demand.Last = true, 0, 0, t0.Add(-time.Hour) }, MostPrice, 0},
		"max":                  {func(f *plan.Function) { f.Max = 10 }, MostPrice, 1},
		"a price that is none": {func(*plan.Function) {}, math.NaN(), 0},
		"a negative price":     {func(*plan.Function) {}, -1, 0},
		"an infinite price":    {func(*plan.Function) {}, math.Inf(1), 0},
		"a usual price":        {func(*plan.Function) {}, 5, 3},
	} {
		t.Run(name, func(t *testing.T) {
			f := loaded()
			tc.change(&f)
			s, d := one(f)
			if before, after := priced(t, 0, s, d)[0], priced(t, tc.price, s, d)[0]; after.Count != before.Count+tc.want {
				t.Errorf("%d (%s) without a price, %d (%s) with it, want %d more", before.Count, before.Why, after.Count, after.Why, tc.want)
			}
		})
	}
}

// diamond returns a pipeline with a branch of 400 ms beside a branch of 50 ms. Each stage gets
// calls calls per request, of which there are 10 per second.
func diamond(calls float64) (plan.Snapshot, plan.Domain) {
	s := plan.Snapshot{Rev: 1, At: t0}
	for name, millis := range map[string]int{"a": 50, "b": 400, "c": 50, "d": 50} {
		f := loaded()
		f.Name, f.Max, f.Service.Mean, f.Demand.Rate = name, 500, time.Duration(millis)*time.Millisecond, 10
		if name == "c" {
			f.Demand.Rate = 10 * calls
		}
		s.Functions = append(s.Functions, f)
	}
	slices.SortFunc(s.Functions, func(a, b plan.Function) int { return strings.Compare(a.Name, b.Name) })
	s.Pipelines = []plan.Pipeline{{
		Name: "p", SLO: 30 * time.Second, Stages: []string{"a", "b", "c", "d"},
		Edges: []plan.Edge{{From: 0, To: 1}, {From: 0, To: 2}, {From: 1, To: 3}, {From: 2, To: 3}},
	}}
	return s, plan.Domains(s)[0]
}

// TestWaitsBesideALongerBranchAreWorthLess compares equal stages, one of them beside a longer
// branch: requests are not late until they wait for longer than the branch takes.
func TestWaitsBesideALongerBranchAreWorthLess(t *testing.T) {
	s, d := diamond(1)
	a := priced(t, 50, s, d)
	if a[2].Count >= a[0].Count || a[0].Count != a[3].Count || a[1].Count <= a[0].Count {
		t.Errorf("%d, %d, %d and %d replicas, want as many for the first and the last stage, fewer for the short branch", a[0].Count, a[1].Count, a[2].Count, a[3].Count)
	}
}

// TestARequestCountsOnceForAllItsCalls checks the rate of requests at a stage that gets 20 calls of
// each of them.
func TestARequestCountsOnceForAllItsCalls(t *testing.T) {
	s, d := diamond(20)
	m := modelOf(t, s, d)
	for i, want := range []passing{{10, 0}, {10, 0}, {10, 0.35}, {10, 0}} {
		ways := m.passing(&m.stages[i])
		if len(ways) != 1 || math.Abs(ways[0].rate-want.rate) > 1e-9 || math.Abs(ways[0].slack-want.slack) > 1e-9 {
			t.Errorf("stage %d: %+v, want %+v", i, ways, want)
		}
	}
	// Of the requests of two pipelines, a function gets no more than its own calls.
	s.Pipelines = append(s.Pipelines, plan.Pipeline{Name: "q", SLO: time.Second, Stages: []string{"a"}})
	m = modelOf(t, s, plan.Domains(s)[0])
	if ways := m.passing(&m.stages[0]); len(ways) != 2 || math.Abs(ways[0].rate+ways[1].rate-10) > 1e-9 {
		t.Errorf("%+v, want 10 requests per second in all", ways)
	}
}

// TestAHigherPriceNeverGivesFewer sizes random domains at rising prices. Without a price, the
// result is that of a Sizer that knows no prices.
func TestAHigherPriceNeverGivesFewer(t *testing.T) {
	rng := rand.New(rand.NewPCG(11, 12))
	added := 0
	for n := range 300 {
		s, d := chain(rng, 1+rng.IntN(6))
		if n%2 == 1 {
			s, d = shared(rng)
		}
		for i := range s.Functions {
			f := &s.Functions[i]
			f.Max, f.Waiting, f.Service.Known = 1+rng.IntN(200), rng.IntN(3), rng.IntN(8) > 0
			f.Replicas = replicas(rng.IntN(10), plan.Ready)
		}
		memories := make([]Memory, 8)
		for step := range 3 {
			s.At = t0.Add(time.Duration(step) * time.Second)
			for i := range s.Functions {
				s.Functions[i].Demand.Rate *= 0.5 + rng.Float64()
			}
			var before plan.Alloc
			for k, price := range []float64{0, 1e-3, 0.1, 1, 7, 50, 1e3, MostPrice} {
				a, next, err := NewSizer(Config{Price: price}).Allocate(s, d, memories[k])
				if err != nil {
					t.Fatal(err)
				}
				memories[k] = next
				for i, l := range a {
					f, _ := s.Function(l.Function)
					_, most := f.Bounds()
					if l.Count > most || l.Count < 0 || l.Worth > most || l.Worth > l.Count {
						t.Fatalf("price %g: %+v, want at most %d", price, l, most)
					}
					if k > 0 && l.Count < before[i].Count {
						t.Fatalf("price %g: %d (%s), %d (%s) at the price before", price, l.Count, l.Why, before[i].Count, before[i].Why)
					}
					if k > 0 {
						added += l.Count - before[i].Count
					}
					if price == 0 && (l.Worth != 0 || strings.Contains(l.Why, "price")) {
						t.Fatalf("%+v, want no price", l)
					}
				}
				before = a
			}
		}
	}
	if added < 1000 {
		t.Errorf("%d replicas for prices, want many", added)
	}
}

// TestSmootherLeavesWhatIsWorthItsPrice makes decisions in a row for a calm function. Without a
// price, the smoother takes replicas until 3 are left.
func TestSmootherLeavesWhatIsWorthItsPrice(t *testing.T) {
	for price, want := range map[float64]int{0: 3, 100: 4} {
		f := calm()
		f.Wait.Mean, f.Min = time.Millisecond, 1
		s, d := one(f)
		var m Memory
		q := QuartMemory{}
		for step := range 120 {
			s.At = t0.Add(time.Duration(step) * time.Second)
			a, next, err := NewSizer(Config{Price: price}).Allocate(s, d, m)
			if err != nil {
				t.Fatal(err)
			}
			worth := a[0].Worth
			a[0].Count = max(a[0].Count, 6) // more than any price pays for
			if a, q, err = NewQuart(QuartConfig{}).Correct(s, d, a, q); err != nil {
				t.Fatal(err)
			}
			if m = next; step == 119 && (a[0].Count != want || price > 0 && worth != want) {
				t.Errorf("price %g: %d replicas (%s), %d worth it, want %d", price, a[0].Count, a[0].Why, worth, want)
			}
		}
	}
}

// FuzzLateness checks that any arguments give a finite number, which falls with more replicas, and
// a count that rises with the price.
func FuzzLateness(f *testing.F) {
	f.Add(38.2, int64(200), 1.0, 1.0, 1, 0.0, 5.0)
	f.Add(2000.0, int64(300), 4.0, 0.2, 3, 0.5, 1e6)
	f.Add(math.Inf(1), int64(1), 10.0, math.NaN(), -1, math.Inf(1), 1e-300)
	f.Add(4.0, int64(90_000), 1.0, 1.0, 1, 0.05, 5.0) // every wait is cut off at a day
	f.Add(0.001, int64(90_000), 0.1, 0.0, 8, 1e-9, math.NaN())
	f.Fuzz(func(t *testing.T, rate float64, millis int64, ca, cs float64, slots int, slack, price float64) {
		g := newStage(&plan.Function{
			Slots: min(slots, 64), Demand: plan.Demand{Known: true, Rate: rate, CV: ca},
			Service: plan.Service{Known: true, Mean: time.Duration(millis%1e6) * time.Millisecond, CV: cs},
		})
		if !g.known || !(g.lambda > 0) || !(slack >= 0) {
			return
		}
		ways := []passing{{g.lambda, slack}}
		const limit = 2000
		last := math.Inf(1)
		for n := 1; n <= limit; n += 1 + n/3 {
			v := g.lateness(ways, n)
			if !(v >= 0) || math.IsInf(v, 0) || v > last*(1+1e-9) {
				t.Fatalf("%g with %d replicas, %g with fewer", v, n, last)
			}
			last = v
		}
		low, high := g.pays(price, ways, limit), g.pays(2*price, ways, limit)
		if price > 0 && (low < 1 || low > high || high > limit) {
			t.Errorf("%d replicas at price %g, %d at twice the price", low, price, high)
		}
	})
}
