package autoscaler

import (
	"encoding/json"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan/plantest"
)

// TestAccuracyThroughHistories plans in random worlds and checks that each mix is sound, within its
// budget unless minimums exceed it, and the same with the same arguments.
func TestAccuracyThroughHistories(t *testing.T) {
	t.Parallel()
	z := NewAccuracy(Config{})
	exact, greedy, excluded := 0, 0, 0
	for seed := range uint64(80) {
		w, rng := plantest.NewVariantWorld(seed), rand.New(rand.NewPCG(seed, 9))
		memory := map[string]AccuracyMemory{}
		for range 10 {
			w.Step()
			s := w.Snapshot()
			for i := range s.Functions {
				if seed%4 > 0 { // variants for lengths are mixed by the greedy method
					s.Functions[i].MaxLength = 0
				}
			}
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
				if !strings.Contains(mix.Alloc[0].Why, "; greedy: ") {
					exact++
				} else {
					greedy++
				}
				encoded, err := json.Marshal(m)
				if err != nil {
					t.Fatal(err)
				}
				var decoded AccuracyMemory
				if err := json.Unmarshal(encoded, &decoded); err != nil {
					t.Fatal(err)
				}
				if again, _, err := z.Mix(s, d, b, decoded); err != nil || !reflect.DeepEqual(again, mix) {
					t.Errorf("again: %+v, %v, want %+v", again, err, mix)
				}
				if t.Failed() {
					t.Fatalf("world %d, snapshot %d, domain %v, budget %+v", seed, s.Rev, d, b)
				}
				memory[d.Functions[0]] = next
			}
		}
	}
	if exact < 100 || greedy < 100 || excluded == 0 {
		t.Errorf("%d exact and %d greedy mixes with %d excluded chains, want 100, 100 and some", exact, greedy, excluded)
	}
}

// traffic is a pipeline of two stages, of which the second has three variants. Replicas start in
// three seconds.
type trafficWorld struct {
	t      *testing.T
	z      Accuracy
	s      plan.Snapshot
	memory AccuracyMemory
	mix    plan.Mix
	budget plan.Budget
	rng    *rand.Rand
}

func newTraffic(t *testing.T) *trafficWorld {
	f := func(name, of string, accuracy float64, ms int) plan.Function {
		return plan.Function{
			Name: name, Revision: 1, Variant: plan.Variant{VariantOf: of, Accuracy: accuracy}, Zero: true, ZeroAge: time.Second, Max: 40, Batch: 1, Slots: 1,
			Demand:  plan.Demand{Known: true},
			Service: plan.Service{Known: true, Mean: time.Duration(ms) * time.Millisecond},
		}
	}
	return &trafficWorld{t: t, z: NewAccuracy(Config{}), budget: plan.Budget{Replicas: 20}, rng: rand.New(rand.NewPCG(1, 1)), s: plan.Snapshot{
		Rev: 1, At: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC),
		Functions: []plan.Function{f("detect", "", 1, 20), f("read", "", 0.98, 100), f("read-fast", "read", 0.8, 20), f("read-mid", "read", 0.92, 45)},
		Pipelines: []plan.Pipeline{{Name: "traffic", Stages: []string{"detect", "read"}, Edges: []plan.Edge{{From: 0, To: 1}}, SLO: time.Second}},
	}}
}

// run lets seconds pass at a rate, which varies at random by a part. check is called each second.
func (w *trafficWorld) run(seconds int, rate, noise float64, check func()) {
	for range seconds {
		w.s.Rev, w.s.At = w.s.Rev+1, w.s.At.Add(time.Second)
		now := rate * (1 + noise*(2*w.rng.Float64()-1))
		for i := range w.s.Functions {
			f := &w.s.Functions[i]
			if f.VariantOf != "" {
				continue
			}
			f.Demand.Rate, f.Demand.Last = now, w.s.At
			if f.Name == "read" {
				f.Stage = f.Demand
			}
		}
		for i := range w.s.Functions {
			f := &w.s.Functions[i]
			for k := range f.Replicas {
				if r := &f.Replicas[k]; r.State == plan.Starting && w.s.At.Sub(r.Since) >= 3*time.Second {
					r.State = plan.Ready
				}
			}
		}
		d := plan.Domains(w.s)[0]
		mix, next, err := w.z.Mix(w.s, d, w.budget, w.memory)
		if err == nil {
			err = w.s.RouteFaults(d, mix.Tables, mix.Excluded)
		}
		if err != nil {
			w.t.Fatal(err)
		}
		w.mix, w.memory = mix, next
		for i, l := range mix.Alloc {
			f := &w.s.Functions[i]
			for len(f.Replicas) < l.Count {
				f.Replicas = append(f.Replicas, plan.Replica{Revision: 1, State: plan.Starting, Since: w.s.At})
			}
			f.Replicas = f.Replicas[:l.Count:l.Count] // the newest stop first
		}
		if check != nil {
			check()
		}
	}
}

// counts returns the replicas by function.
func (w *trafficWorld) counts() map[string]int {
	out := map[string]int{}
	for _, l := range w.mix.Alloc {
		out[l.Function] = l.Count
	}
	return out
}

// parts returns the shares of the requests behind detect.
func (w *trafficWorld) parts() map[string]float64 {
	out := map[string]float64{}
	for _, s := range w.mix.Tables[0].Row("detect").Levels[0].Shares {
		out[s.Lane] = s.Part
	}
	return out
}

// TestAccuracyFallsAsDemandRises follows a plan from little to too much demand and back.
func TestAccuracyFallsAsDemandRises(t *testing.T) {
	t.Parallel()
	w := newTraffic(t)
	w.run(60, 30, 0, nil)
	if c, p := w.counts(), w.parts(); c["read"] != 4 || c["detect"] != 1 || p["read"] != 1 {
		t.Errorf("30/s: %v, %v, want 4 accurate replicas for all requests, as 3.3 are busy", c, p)
	}
	w.run(60, 300, 0, nil)
	c, p := w.counts(), w.parts()
	if total := c["detect"] + c["read"] + c["read-mid"] + c["read-fast"]; total != 20 || c["detect"] < 7 || p["read-fast"] < 0.1 {
		t.Errorf("300/s: %v, %v, want 20 replicas, and a part for the fast variant", c, p)
	}
	why := w.mix.Alloc[0].Why
	if !strings.Contains(why, "replicas would serve all with accuracy 0.98") || !strings.Contains(why, "serves 100%") {
		t.Errorf("why: %s, want what would restore the accuracy", why)
	}
	w.run(60, 2000, 0, nil)
	if why = w.mix.Alloc[0].Why; strings.Contains(why, "serves 100%") || w.parts()["read-fast"] < 0.9 {
		t.Errorf("2000/s: %s, %v, want most on the fast variant, and too few served", why, w.parts())
	}
	w.run(160, 30, 0, nil)
	if c, p := w.counts(), w.parts(); c["read"] != 4 || p["read"] != 1 || c["read-fast"] > 1 {
		t.Errorf("30/s again: %v, %v, want full accuracy", c, p)
	}
}

// TestMeasuredChainsCount has a variant that is less accurate alone, and more accurate behind the
// stage before it. The plan counts what was measured of the chains, from the moment at which it is
// known. Routing still prefers the more accurate variant of a stage.
func TestMeasuredChainsCount(t *testing.T) {
	t.Parallel()
	w := newTraffic(t)
	w.run(60, 30, 0, nil)
	if p := w.parts(); p["read"] != 1 {
		t.Fatalf("before: %v, want the variant with the highest accuracy of its own", p)
	}
	w.s.Pipelines[0].Accuracies = []plan.ChainAccuracy{
		{Functions: []string{"detect", "read"}, Accuracy: 0.9, Measured: true},
		{Functions: []string{"detect", "read-fast"}, Accuracy: 0.8},
		{Functions: []string{"detect", "read-mid"}, Accuracy: 0.99, Measured: true},
		{Functions: []string{"detect", "gone"}, Accuracy: 1, Measured: true},
	}
	w.run(160, 30, 0, nil)
	if c, p := w.counts(), w.parts(); c["read"] > 1 || c["read-mid"] < 2 || p["read-mid"] < 0.6 {
		t.Errorf("with measured chains: %v, %v, want replicas of read-mid, and one of the stage's own function", c, p)
	}
}

// TestMinAccuracyOfAPipeline lets requests be dropped where answers would be too bad.
func TestMinAccuracyOfAPipeline(t *testing.T) {
	t.Parallel()
	w := newTraffic(t)
	w.s.Pipelines[0].MinAccuracy = 0.97
	w.run(40, 300, 0, nil)
	if why, p := w.mix.Alloc[0].Why, w.parts(); strings.Contains(why, "serves 100%") || p["read"] < 0.8 {
		t.Errorf("%s, %v, want mostly the accurate variant, and drops", why, p)
	}
}

// TestPlansDoNotFlap varies the demand by chance around the edge of what four accurate replicas
// carry.
func TestPlansDoNotFlap(t *testing.T) {
	t.Parallel()
	w := newTraffic(t)
	w.run(60, 36.4, 0.2, nil)
	had := w.memory.Switches
	w.run(300, 36.4, 0.2, nil)
	if n := w.memory.Switches - had; n > 2 {
		t.Errorf("%d switches in 300 s of the same demand, want at most 2", n)
	}
	if w.memory.Switches == 0 {
		t.Error("no switch was counted")
	}
}

// TestNoStageLosesItsCapacity changes the plan completely in a full budget. At each moment, at
// least half of the ready replicas of a stage must stay, and the budget holds.
func TestNoStageLosesItsCapacity(t *testing.T) {
	t.Parallel()
	w := newTraffic(t)
	ready := func() int {
		n := 0
		for i := range w.s.Functions {
			if f := &w.s.Functions[i]; f.Name != "detect" {
				r, _ := f.Current()
				n += r
			}
		}
		return n
	}
	had := 0
	check := func() {
		total := 0
		for i := range w.s.Functions {
			total += len(w.s.Functions[i].Replicas)
		}
		if total > 20 {
			t.Errorf("%d replicas, want at most 20", total)
		}
		is := ready()
		if had > 1 && 2*is < had {
			t.Errorf("%d ready replicas after %d", is, had)
		}
		had = is
		for _, s := range w.mix.Tables[0].Row("detect").Levels[0].Shares {
			f, _ := w.s.Function(s.Lane)
			if r, _ := f.Current(); r == 0 && is > 0 {
				t.Errorf("%v of the requests go to %s, which has no ready replica", s.Part, s.Lane)
			}
		}
	}
	w.run(60, 120, 0, check)
	if c := w.counts(); c["read"] < 12 {
		t.Fatalf("%v, want most replicas on the accurate variant", c)
	}
	w.run(60, 400, 0, check)
	if c := w.counts(); c["read-fast"] < 6 {
		t.Errorf("%v, want most replicas on the fast variant", c)
	}
	w.run(160, 120, 0, check)
	if c := w.counts(); c["read"] < 12 {
		t.Errorf("%v, want most replicas on the accurate variant again", c)
	}
}

// TestAccuracySaysWhyItIsGreedy has domains that cannot be planned for exactly.
func TestAccuracySaysWhyItIsGreedy(t *testing.T) {
	t.Parallel()
	for name, of := range map[string]struct {
		change func(w *trafficWorld)
		want   string
	}{
		"objective":  {func(w *trafficWorld) { w.s.Pipelines[0].SLO = 50 * time.Millisecond }, "objective 0.05 s is below that of the fastest chain of variants, want at least 0.082 s"},
		"none":       {func(w *trafficWorld) { w.s.Pipelines[0].SLO = 0 }, "has no objective"},
		"lengths":    {func(w *trafficWorld) { w.s.Functions[2].MaxLength = 64 }, "take different lengths"},
		"work":       {func(w *trafficWorld) { w.z.work = 1 }, "no good plan was found in time"},
		"unmeasured": {func(w *trafficWorld) { clearServices(w) }, "no service time is known"},
	} {
		w := newTraffic(t)
		of.change(w)
		w.run(3, 30, 0, nil)
		for _, l := range w.mix.Alloc {
			if !strings.Contains(l.Why, of.want) {
				t.Errorf("%s: %q, want %q", name, l.Why, of.want)
			}
		}
	}
}

func clearServices(w *trafficWorld) {
	for i := range w.s.Functions {
		w.s.Functions[i].Service = plan.Service{}
	}
}

// TestADominatedVariantIsNeverUsed adds a variant that is slower and less accurate than another
// one.
func TestADominatedVariantIsNeverUsed(t *testing.T) {
	t.Parallel()
	w := newTraffic(t)
	bad := w.s.Functions[3]
	bad.Name, bad.Accuracy, bad.Service.Mean = "read-old", 0.9, 50*time.Millisecond
	w.s.Functions = append(w.s.Functions, bad)
	w.run(60, 250, 0, nil)
	i := slices.IndexFunc(w.mix.Alloc, func(l plan.Line) bool { return l.Function == "read-old" })
	if l := w.mix.Alloc[i]; l.Count != 0 || !strings.Contains(l.Why, "never used, because read-mid is as accurate and as fast") || w.parts()["read-old"] != 0 {
		t.Errorf("%+v, %v, want it unused", l, w.parts())
	}
}

// TestWaitsNeedMoreReplicas compares the two ways to leave time for waits.
func TestWaitsNeedMoreReplicas(t *testing.T) {
	t.Parallel()
	total := func(z Accuracy) int {
		w := newTraffic(t)
		w.z, w.s.Pipelines[0].SLO = z, 300*time.Millisecond
		w.run(40, 60, 0, nil)
		n := 0
		for _, c := range w.counts() {
			n += c
		}
		return n
	}
	if half, model := total(NewAccuracy(Config{})), total(NewAccuracyWithWaits(Config{})); model <= half {
		t.Errorf("%d replicas with the predicted waits, %d with half of the objective, want more", model, half)
	}
}
