package quart

import (
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench/load/arrivals"
	"github.com/stagecoach-serving/stagecoach/sim"
	"github.com/stagecoach-serving/stagecoach/sim/study"
)

// TestEachOpponentHasATwinWithEqualMeans checks that each opponent is there with the cores that
// ours may use. The twin must have the same candidates, and must differ in the cores only.
func TestEachOpponentHasATwinWithEqualMeans(t *testing.T) {
	all := contenders()
	find := func(name string) study.Contender {
		i := slices.IndexFunc(all, func(c study.Contender) bool { return c.Name == name })
		if i < 0 {
			t.Fatalf("no contender %q", name)
		}
		return all[i]
	}
	var twins []string
	for _, c := range all {
		if c.Ours || c.Oracle || c.Cores != cores {
			continue
		}
		twin := find(c.Name + "8")
		twins = append(twins, twin.Name)
		if twin.Cores != mostCores || !reflect.DeepEqual(c.Candidates(candidates), twin.Candidates(candidates)) {
			t.Errorf("%s: %d cores, want %d, and the candidates of %s", twin.Name, twin.Cores, mostCores, c.Name)
		}
		usual, most := applied(c), applied(twin)
		for i := range most.Stages {
			u, m := &usual.Stages[i], &most.Stages[i]
			if m.CPU != 2*u.CPU || m.CPULimit != 2*u.CPULimit {
				t.Errorf("%s: a stage declares %d, want twice the %d of %s", twin.Name, m.CPU, u.CPU, c.Name)
			}
			m.CPU, m.CPULimit = u.CPU, u.CPULimit
		}
		if usual.Policies, most.Policies = nil, nil; !reflect.DeepEqual(withoutLoad(usual), withoutLoad(most)) {
			t.Errorf("%s differs from %s in more than cores", twin.Name, c.Name)
		}
	}
	want := "static8 uniform8 hpa8 kpa8 infless8 inferline8 cocktail8"
	if got := strings.Join(twins, " "); got != want {
		t.Errorf("twins %s, want %s", got, want)
	}
	if own := find(oursName); own.Cores != mostCores {
		t.Errorf("ours may use %d cores, want %d", own.Cores, mostCores)
	}
}

// applied returns the scenario of a contender with its defaults.
func applied(c study.Contender) sim.Scenario {
	return c.Apply(gammaSetting(Models()[3], 4).Scenario(false), c.Defaults)
}

// withoutLoad returns s without the pointers that differ between two calls.
func withoutLoad(s sim.Scenario) sim.Scenario {
	s.Pipelines = slices.Clone(s.Pipelines)
	s.Pipelines[0].Arrivals = sim.Arrivals{}
	return s
}

// TestInferLinePlansWithItsCores checks that InferLine plans with the times of the cores that its
// stages declare: a batch takes as long as the profile says.
func TestInferLinePlansWithItsCores(t *testing.T) {
	for _, c := range []sim.Milli{cores, mostCores} {
		s := declaring(gammaSetting(Models()[0], 4).Scenario(false), c)
		for i, x := range row(s) {
			for _, p := range s.Stages[i].Service.Profile {
				if p.CPU == c*1000 && (x.Batches[p.Batch-1]-p.Mean).Abs() > time.Microsecond {
					t.Errorf("%s with %d cores: a batch of %d takes %v in the plan, want %v", x.Function, c, p.Batch, x.Batches[p.Batch-1], p.Mean)
				}
			}
		}
	}
}

// TestSeedsAreApart checks that no seed has two purposes: comparison, tuning, or the sample that a
// contender may know. Reported seeds are from 3001 on.
func TestSeedsAreApart(t *testing.T) {
	in := func(s study.Seeds, seed uint64) bool { return seed >= s.First && seed < s.First+uint64(s.N) }
	if testSeeds.First <= 1000 || in(testSeeds, sampleSeed) || in(trainSeeds, sampleSeed) {
		t.Errorf("comparison %+v, tuning %+v, sample %d: want the comparison above 1000, and the sample in neither", testSeeds, trainSeeds, uint64(sampleSeed))
	}
	tr := trace{Name: "made", first: 4 * window}
	all := arrivals.Trace{Length: 20 * window, Times: []time.Duration{0}}
	for at := time.Second; at < all.Length; at += time.Second + at/1000 { // fewer and fewer
		all.Times = append(all.Times, at)
	}
	seen := map[int]bool{}
	for i := range uint64(testSeeds.N) {
		s, err := tr.play(all, 1, false, testSeeds.First+i)
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, ok := s.Next(); ok; _, ok = s.Next() {
			n++
		}
		seen[n] = true
	}
	if len(seen) < testSeeds.N-2 { // two windows may have equally many by chance
		t.Errorf("%d different loads for %d seeds: %v", len(seen), testSeeds.N, seen)
	}
	if _, err := tr.play(all, 1, false, trainSeeds.First); err == nil {
		t.Error("a seed of the tuning plays a window of the comparison")
	}
}

// TestAPriceBuysReplicas checks that the price of latency reaches the sizing of ours, of each
// ablation, and of whole pipelines. At CV 1, the objective needs two replicas per stage. A high
// price buys more, and shortens the mean latency.
func TestAPriceBuysReplicas(t *testing.T) {
	for _, c := range contenders() {
		price := slices.Index(knobNames(c), "price")
		if price < 0 {
			continue
		}
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			of := func(v float64) sim.Figures {
				knobs := slices.Clone(c.Defaults)
				knobs[price] = v
				s := gammaSetting(Models()[0], 1).Scenario(true)
				s.Warmup, s.Duration = 20*time.Second, 25*time.Second
				m, err := c.Apply(s, knobs).Model(none)
				if err != nil {
					t.Fatal(err)
				}
				f, err := m.One(t.Context(), 0, 7)
				if err != nil {
					t.Fatal(err)
				}
				return f
			}
			free, paid := of(0), of(30)
			if paid.DeviceSeconds < 1.2*free.DeviceSeconds || paid.Pipelines[0].Mean >= free.Pipelines[0].Mean {
				t.Errorf("price 30: %.0f GPU-seconds and %.4f s, without a price %.0f and %.4f s; want a fifth more, and less latency",
					paid.DeviceSeconds, paid.Pipelines[0].Mean, free.DeviceSeconds, free.Pipelines[0].Mean)
			}
		})
	}
}

func knobNames(c study.Contender) []string {
	var out []string
	for _, k := range c.Space {
		out = append(out, k.Name)
	}
	return out
}
