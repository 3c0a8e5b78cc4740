package autoscaler

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// chain returns a pipeline of n random stages in a row, in a domain of its own.
func chain(rng *rand.Rand, n int) (plan.Snapshot, plan.Domain) {
	s := plan.Snapshot{Rev: 1, At: t0}
	p := plan.Pipeline{Name: "p.ns"}
	var service float64
	for i := range n {
		mean := 0.02 + rng.ExpFloat64()*0.2
		service += mean
		s.Functions = append(s.Functions, plan.Function{
			Name: fmt.Sprintf("f%d.ns", i), Revision: 1, Min: 1, Max: 6, Batch: 1, Slots: 1 + rng.IntN(5)/4,
			Demand:  plan.Demand{Known: true, Rate: 0.1 + rng.Float64()*5.5/mean, CV: rng.Float64() * 3, Last: t0},
			Service: plan.Service{Known: true, Mean: time.Duration(mean * 1e9), CV: rng.Float64()},
		})
		p.Stages = append(p.Stages, s.Functions[i].Name)
		if i > 0 {
			p.Edges = append(p.Edges, plan.Edge{From: i - 1, To: i})
		}
	}
	p.SLO = time.Duration(service * (1.02 + rng.ExpFloat64()/3) * 1e9)
	s.Pipelines = []plan.Pipeline{p}
	return s, plan.Domains(s)[0]
}

func modelOf(t *testing.T, s plan.Snapshot, d plan.Domain) *model {
	t.Helper()
	m, err := newModel(&s, d, 0.5)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// bounds returns the smallest and the largest count of each stage of m.
func bounds(m *model) (least, most []int) {
	for i := range m.stages {
		_, limit := m.stages[i].f.Bounds()
		most = append(most, limit)
		least = append(least, min(max(m.stages[i].stable(), 1), limit))
	}
	return least, most
}

// fits reports whether every path of every pipeline is within its limit, and no stage's wait for
// bursts is longer than the stage's patience.
func fits(m *model, counts []int) bool {
	wait := m.waits(counts)
	for k := range m.pipes {
		p := &m.pipes[k]
		if slices.Max(p.waitsIn(make([]float64, 3*len(p.steps)), wait)) > p.limit-p.patience {
			return false
		}
	}
	for i := range m.stages {
		if g := &m.stages[i]; g.patient >= 0 && g.burstWait(counts[i]) > g.patience*(1+1e-9) {
			return false
		}
	}
	return true
}

func total(counts []int) (n int) {
	for _, c := range counts {
		n += c
	}
	return n
}

// fewest tries all allocations and returns the smallest total that fits. ok is false if none fits.
func fewest(m *model, least, most []int) (best int, ok bool) {
	counts := slices.Clone(least)
	for {
		if n := total(counts); (!ok || n < best) && fits(m, counts) {
			best, ok = n, true
		}
		i := 0
		for ; i < len(counts) && counts[i] == most[i]; i++ {
			counts[i] = least[i]
		}
		if i == len(counts) {
			return best, ok
		}
		counts[i]++
	}
}

// TestAllocateAgainstBruteForce compares allocations with all possible ones, for pipelines of two
// to four stages with up to six replicas each. If an allocation can meet the objective, allocate
// must meet it too, with the smallest possible total. There are few exceptions: allocate gives up
// if each stage is at its maximum or has a negligible wait.
func TestAllocateAgainstBruteForce(t *testing.T) {
	met, missed := 0, 0
	for seed := range uint64(3000) {
		rng := rand.New(rand.NewPCG(seed, 7))
		s, d := chain(rng, 2+rng.IntN(3))
		m := modelOf(t, s, d)
		least, most := bounds(m)
		want, ok := fewest(m, least, most)
		got, _, _ := m.allocate(least, most)
		for i := range got {
			if got[i] < least[i] || got[i] > most[i] {
				t.Fatalf("seed %d: %v, want between %v and %v", seed, got, least, most)
			}
		}
		switch {
		case !ok:
		case !fits(m, got) && given(m, got, most):
			missed++
		default:
			met++
			if !fits(m, got) || total(got) != want {
				t.Errorf("seed %d: %v, within the budget: %v, want a total of %d", seed, got, fits(m, got), want)
			}
		}
	}
	if met < 1000 || met > 2700 || missed > 6 {
		t.Errorf("%d of 3000 pipelines meet their objective, %d others could: these are not the cases to try", met, missed)
	}
}

// given reports whether no stage should get more: each is at its maximum, or its wait is
// negligible.
func given(m *model, counts, most []int) bool {
	for i, w := range m.waits(counts) {
		for _, at := range m.stages[i].in {
			g := &m.stages[i]
			if counts[i] < most[i] && (w > negligible*m.pipes[at.pipe].steps[at.step].share || g.patient >= 0 && g.burstWait(counts[i]) > g.patience) {
				return false
			}
		}
	}
	return true
}

// shared returns a domain of several pipelines. They are graphs with branches, and share stages.
func shared(rng *rand.Rand) (plan.Snapshot, plan.Domain) {
	s, _ := chain(rng, 6)
	s.Pipelines = nil
	for k := range 1 + rng.IntN(3) {
		p := plan.Pipeline{Name: fmt.Sprintf("p%d.ns", k), SLO: time.Duration(rng.ExpFloat64() * 1e9)}
		for i := range s.Functions {
			if i == 0 || rng.IntN(3) > 0 {
				p.Stages = append(p.Stages, s.Functions[i].Name)
			}
		}
		for from := range p.Stages {
			for to := from + 1; to < len(p.Stages); to++ {
				if rng.IntN(2) == 0 {
					p.Edges = append(p.Edges, plan.Edge{From: from, To: to})
				}
			}
		}
		s.Pipelines = append(s.Pipelines, p)
	}
	return s, plan.Domains(s)[0]
}

// TestAllocateMeetsEveryPath checks that each objective is met if it can be. Each stage must get
// what its most demanding path alone would give it.
func TestAllocateMeetsEveryPath(t *testing.T) {
	for seed := range uint64(400) {
		s, d := shared(rand.New(rand.NewPCG(seed, 8)))
		m := modelOf(t, s, d)
		least, most := bounds(m)
		got, by, _ := m.allocate(least, most)
		if fits(m, most) != fits(m, got) && !given(m, got, most) {
			t.Errorf("seed %d: %v within the budget: %v; %v: %v", seed, got, fits(m, got), most, fits(m, most))
		}
		for i := range got {
			if (by[i] >= 0) != (got[i] > least[i]) {
				t.Errorf("seed %d: stage %d: %d, at least %d, for pipeline %d", seed, i, got[i], least[i], by[i])
			}
		}
		if want := pathByPath(m, least, most); !slices.Equal(got, want) {
			t.Errorf("seed %d: %v, path by path %v", seed, got, want)
		}
	}
}

// pathByPath allocates to each path of each pipeline alone, and returns the largest count of each
// stage.
func pathByPath(m *model, least, most []int) []int {
	want := slices.Clone(least)
	for k := range m.pipes {
		p := &m.pipes[k]
		var walk func(path []int)
		walk = func(path []int) {
			alone := &model{stages: slices.Clone(m.stages), pipes: []pipe{{name: p.name, limit: p.limit, budget: p.budget, patience: p.patience}}}
			for i := range alone.stages {
				alone.stages[i].in = nil
			}
			for j, at := range path {
				alone.pipes[0].steps = append(alone.pipes[0].steps, p.steps[at])
				alone.stages[p.steps[at].at].in = []place{{0, j}}
				if j > 0 {
					alone.pipes[0].edges = append(alone.pipes[0].edges, plan.Edge{From: j - 1, To: j})
				}
			}
			got, _, _ := alone.allocate(least, most)
			for i := range want {
				want[i] = max(want[i], got[i])
			}
			for _, e := range p.edges {
				if e.From == path[len(path)-1] {
					walk(append(slices.Clone(path), e.To))
				}
			}
		}
		for at := range p.steps {
			walk([]int{at})
		}
	}
	return want
}

// TestMoreLoadNeverGivesFewerReplicas checks that a stage with more load never gets fewer replicas,
// in any graph. In a pipeline without branches, the total does not fall either.
func TestMoreLoadNeverGivesFewerReplicas(t *testing.T) {
	for seed := range uint64(2000) {
		rng := rand.New(rand.NewPCG(seed, 9))
		world := shared
		if seed%2 == 0 {
			world = func(rng *rand.Rand) (plan.Snapshot, plan.Domain) { return chain(rng, 2+rng.IntN(5)) }
		}
		s, d := world(rng)
		for i := range s.Functions {
			s.Functions[i].Max = 2 + rng.IntN(30)
		}
		sizer := NewSizer(Config{Price: []float64{0, 0.3, 10}[seed/2%3]})
		before, _, err := sizer.Allocate(s, d, nil)
		if err != nil {
			t.Fatal(err)
		}
		i := rng.IntN(len(d.Functions))
		f, _ := s.Function(d.Functions[i])
		f.Demand.Rate *= 1 + rng.ExpFloat64()/5
		f.Waiting += rng.IntN(3) * rng.IntN(20)
		after, _, err := sizer.Allocate(s, d, nil)
		if err != nil {
			t.Fatal(err)
		}
		if after[i].Count < before[i].Count {
			t.Errorf("seed %d: %s: %d (%s), with more to do %d (%s)", seed, f.Name, before[i].Count, before[i].Why, after[i].Count, after[i].Why)
		}
		if sum := func(a plan.Alloc) (n int) {
			for _, l := range a {
				n += l.Count
			}
			return n
		}; seed%2 == 0 && sum(after) < sum(before) && !held(before) {
			t.Errorf("seed %d: %d in all, with more to do %d", seed, sum(before), sum(after))
		}
	}
}

// held reports whether a stage has more than its pipelines ask for because a stage before it is
// overloaded. Such a stage keeps its count when others need less.
func held(a plan.Alloc) bool {
	return slices.ContainsFunc(a, func(l plan.Line) bool { return strings.Contains(l.Why, "held up before it") })
}

// TestObjectiveOutOfReachLeavesBudget checks that an objective that cannot be met does not take the
// whole budget.
func TestObjectiveOutOfReachLeavesBudget(t *testing.T) {
	s, d := chain(rand.New(rand.NewPCG(1, 1)), 3)
	for i := range s.Functions {
		f := &s.Functions[i]
		f.Max, f.Slots, f.Demand.Rate, f.Demand.CV, f.Service.Mean, f.Service.CV = 1000, 1, 10, 1, 100*time.Millisecond, 1
	}
	s.Functions[1].Max = 1 // but it needs two
	for _, slo := range []time.Duration{time.Millisecond, 500 * time.Millisecond} {
		s.Pipelines[0].SLO = slo
		m := modelOf(t, s, d)
		least, most := bounds(m)
		got, _, _ := m.allocate(least, most)
		if got[0] < 3 || got[0] > 5 || got[1] != 1 || got[2] != got[0] {
			t.Errorf("within %v: %v, want one where more may not be, and three to five beside it", slo, got)
		}
	}
}
