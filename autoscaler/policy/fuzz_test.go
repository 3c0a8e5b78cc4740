package policy

import (
	"encoding/json"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler"
	"github.com/stagecoach-serving/stagecoach/autoscaler/baseline"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan/plantest"
)

func init() { // as cmd/stagecoach does
	AddAllocator("hpa", baseline.NewHPA(baseline.HPAConfig{}))
	AddAllocator("kpa", baseline.NewKPA(baseline.KPAConfig{}))
	AddAllocator("infless", baseline.NewINFless(baseline.INFlessConfig{}))
	AddAllocator("cocktail", baseline.NewCocktail(baseline.CocktailConfig{}))
}

// sets are the combinations of policies to test.
var sets = []Names{
	{},
	{Corrector: "none", Sharer: "gain"},
	{Corrector: "quart", Sharer: "gain"},
	{Corrector: "quart-no-pid", Placer: "spread"},
	{Corrector: "quart-no-smooth"},
	{Corrector: "quart-no-cpu", Placer: "first-fit"},
	{Allocator: "uniform", Corrector: "none", Sharer: "gain"},
	{Allocator: "fixed", Corrector: "none", Sharer: "gain"},
	{Allocator: "hpa", Corrector: "none", Sharer: "gain"},
	{Allocator: "kpa", Corrector: "none", Sharer: "gain"},
	{Allocator: "infless", Corrector: "none", Sharer: "gain"},
	{Allocator: "cocktail", Corrector: "none", Sharer: "gain"},
	{Warmer: "none"},
	{Allocator: "accuracy"},
	{Rank: "least-slack", Route: "even"},
	{Price: 5},
	{Price: autoscaler.MostPrice, Corrector: "none"},
}

// told is a placer that remembers its arguments.
type told struct {
	plan.Placer
	alloc plan.Alloc
}

func (p *told) Place(s plan.Snapshot, a plan.Alloc) ([]plan.Want, error) {
	p.alloc = slices.Clone(a)
	return p.Placer.Place(s, a)
}

// FuzzDecide lets a random world live for a while with a set of policies, then makes some of its
// signals impossible. The decision must be valid. A second decision must be the same, even if the
// memory was encoded or the nodes are in another order. More load or a larger budget must never
// reduce a function's replicas, unless an allocator that owns the mix may prefer another variant.
// Every second world has variants.
func FuzzDecide(f *testing.F) {
	for i := range sets {
		f.Add(uint64(i), uint8(i), uint8(8), []byte{})
		for value := range uint8(len(floats)) {
			var absurd []byte
			for kind := range uint8(22) {
				absurd = append(absurd, kind, kind+value, value)
			}
			f.Add(uint64(i+20), uint8(i), value, absurd)
		}
	}
	f.Fuzz(func(t *testing.T, seed uint64, which, steps uint8, absurd []byte) {
		absurd = absurd[:min(len(absurd), 120)]
		set, err := sets[int(which)%len(sets)].Choose()
		if err != nil {
			t.Fatal(err)
		}
		placer := &told{Placer: set.placer}
		set.placer = placer
		w := plantest.NewWorld(seed)
		if seed%2 == 1 {
			w = plantest.NewVariantWorld(seed, plan.Chosen{}, plan.Chosen{Allocator: "accuracy"}, plan.Chosen{Allocator: "sizer", Rank: "fair", Route: "even"}, plan.Chosen{Route: "gone"})
		}
		var m Memory
		for range steps % 16 {
			w.Step()
			p, next, held, err := set.Decide(w.Snapshot(), m)
			if err != nil || len(held) > 0 {
				t.Fatalf("%v, held %v", err, held)
			}
			m = next
			w.Apply(p.Wants)
		}
		w.Step()
		d := &decider{t: t, set: set, placer: placer, memory: m, of: func() plan.Snapshot {
			s := w.Snapshot()
			distort(&s, absurd)
			return s
		}}
		d.check(rand.New(rand.NewPCG(seed, uint64(which))))
	})
}

// decider decides on variants of one snapshot.
type decider struct {
	t      *testing.T
	set    Set
	placer *told
	memory Memory
	of     func() plan.Snapshot // returns a copy
}

func (d *decider) decide(what string, s plan.Snapshot) (plan.Plan, plan.Alloc) {
	d.t.Helper()
	p, next, held, err := d.set.Decide(s, d.memory)
	if err != nil || len(held) > 0 {
		d.t.Fatalf("%s: %v, held %v", what, err, held)
	}
	if _, err := json.Marshal(next); err != nil {
		d.t.Fatalf("%s: the memory cannot be encoded: %v", what, err)
	}
	return p, d.placer.alloc
}

func (d *decider) check(rng *rand.Rand) {
	t, s := d.t, d.of()
	want, lines := d.decide("as it is", s)
	same := func(what string, s plan.Snapshot) {
		t.Helper()
		if got, _ := d.decide(what, s); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, want %+v", what, got, want)
		}
	}
	same("again", d.of())
	shuffled := d.of()
	rng.Shuffle(len(shuffled.Nodes), func(i, j int) { shuffled.Nodes[i], shuffled.Nodes[j] = shuffled.Nodes[j], shuffled.Nodes[i] })
	same("nodes in another order", shuffled)
	b, err := json.Marshal(d.memory)
	if err != nil {
		t.Fatal(err)
	}
	kept := d.memory
	if d.memory, err = d.set.DecodeMemory(b); err != nil {
		t.Fatal(err)
	}
	same("memory through JSON", d.of())
	d.memory = kept

	if d.mixes(&s) {
		return
	}
	i := rng.IntN(len(s.Functions))
	more := d.of()
	f := &more.Functions[i]
	if f.Demand.Known && f.Demand.Rate > 0 && rng.IntN(2) == 0 {
		f.Demand.Rate *= 1 + rng.Float64()
	} else {
		f.Waiting = min(max(f.Waiting, 0), math.MaxInt-20) + 1 + rng.IntN(20)
	}
	if _, got := d.decide("more to do", more); got[i].Count < lines[i].Count {
		t.Errorf("%s: %+v, with less to do %+v", f.Name, got[i], lines[i])
	}

	larger := d.of()
	// Other policies may ask for more if there is more.
	if larger.Budget <= 0 || d.set.names.Sharer == none || d.set.names.Allocator != "sizer" {
		return
	}
	larger.Budget = min(larger.Budget, math.MaxInt-5) + 1 + rng.IntN(5)
	if rng.IntN(4) == 0 {
		larger.Budget = 0 // no budget
	}
	_, got := d.decide("a larger budget", larger)
	for i := range got {
		if got[i].Count < lines[i].Count {
			t.Errorf("budget %d: %+v, of %d it was %+v", larger.Budget, got[i], s.Budget, lines[i])
		}
	}
}

// mixes reports whether an allocator owns the mix of some domain.
func (d *decider) mixes(s *plan.Snapshot) bool {
	if _, owns := d.set.allocator.(mixer); owns {
		return true
	}
	return slices.ContainsFunc(s.Pipelines, func(p plan.Pipeline) bool { return p.Chosen.Allocator == "accuracy" })
}

// Values that no signal should have, and some that it may have.
var (
	floats    = []float64{math.NaN(), math.Inf(1), math.Inf(-1), -1, 0, 1e-300, 1e300, 0.5, 40}
	durations = []time.Duration{math.MinInt64, math.MaxInt64, -1, 0, 1, time.Nanosecond * 999, time.Hour, 100 * time.Millisecond}
	ints      = []int{math.MinInt, math.MaxInt, -1, 0, 1, 7, 1 << 40}
)

// distort changes signals of s. Three bytes select the object, the signal and the value.
func distort(s *plan.Snapshot, absurd []byte) {
	for ; len(absurd) >= 3; absurd = absurd[3:] {
		f := &s.Functions[int(absurd[1])%len(s.Functions)]
		v := int(absurd[2])
		x, d, n := floats[v%len(floats)], durations[v%len(durations)], ints[v%len(ints)]
		switch absurd[0] % 22 {
		case 0:
			f.Demand.Known, f.Demand.Rate = true, x
		case 1:
			f.Demand.CV = x
		case 2:
			f.Demand.Last = s.At.Add(d)
		case 3:
			f.Service.Known, f.Service.Mean = true, d
		case 4:
			f.Service.CV = x
		case 5:
			f.Wait = plan.Wait{Known: true, Mean: d, P50: d, P95: d, P99: d, Oldest: d}
		case 6:
			f.Busy = plan.Busy{Known: true, Share: x}
		case 7:
			f.Starts = []plan.Start{{Path: "cold", Mean: d, N: n}}
		case 8:
			f.Target = plan.Target{Type: "rps", Value: x, Load: floats[(v+1)%len(floats)], Known: true}
		case 9:
			f.Waiting = n
		case 10:
			f.Running = n
		case 11:
			f.CPULimit, f.CPUNow = n, ints[(v+3)%len(ints)]
		case 12:
			s.Budget = n
		case 13:
			s.Budget = 1 + v
		case 14:
			s.At = s.At.Add(min(max(d, -48*time.Hour), 48*time.Hour))
		case 15:
			f.Slots, f.Batch = n, max(n, 0)
		case 16:
			f.Profile = append(f.Profile, plan.Point{CPUMilli: n, Batch: 1, Mean: d, Err: -d, N: n, CV: x})
		case 17:
			if len(s.Pipelines) > 0 {
				p := &s.Pipelines[int(absurd[1])%len(s.Pipelines)]
				p.SLO, p.Edges = d, append(p.Edges, plan.Edge{From: n, To: v})
			}
		case 18:
			f.Expected = n
		case 19:
			f.Stage = plan.Demand{Known: true, Rate: x, CV: floats[(v+2)%len(floats)]}
		case 20:
			f.Accuracy, f.MaxLength, f.Items = x, n, plan.Items{Known: true, Mean: x}
		case 21:
			f.Service.Batches = []plan.Batched{{Size: 1 + v%9, Mean: 80 * time.Millisecond, N: 9}, {Size: n, Mean: d, N: ints[(v+4)%len(ints)]}}
		}
	}
}
