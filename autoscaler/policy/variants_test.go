package policy

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan/plantest"
)

// TestPlansWithVariantsAreValidThroughHistories decides in random worlds with variants, whose
// pipelines ask for different policies. Decisions with an encoded memory are the same.
func TestPlansWithVariantsAreValidThroughHistories(t *testing.T) {
	t.Parallel()
	asked := []plan.Chosen{{}, {Allocator: "accuracy"}, {Allocator: "sizer", Rank: "fair"}, {Route: "even", Rank: "least-slack"}}
	for _, names := range []Names{{}, {Allocator: "accuracy", Placer: "first-fit"}, {Corrector: none, Sharer: none, Route: "even"}} {
		set, err := names.Choose()
		if err != nil {
			t.Fatal(err)
		}
		tables := 0
		for seed := range uint64(16) {
			w := plantest.NewVariantWorld(seed, asked...)
			var m Memory
			for range 15 {
				w.Step()
				s := w.Snapshot()
				if seed%4 > 0 {
					s.Budget = 5 + int(seed)
				}
				p, next, stay, err := set.Decide(s, m)
				if err != nil || len(stay) > 0 {
					t.Fatalf("%+v, world %d, snapshot %d: %v, held %v", names, seed, s.Rev, err, stay)
				}
				b, err := json.Marshal(m)
				if err != nil {
					t.Fatal(err)
				}
				decoded, err := set.DecodeMemory(b)
				if err != nil {
					t.Fatal(err)
				}
				if again, _, _, err := set.Decide(s, decoded); err != nil || !reflect.DeepEqual(again, p) {
					t.Fatalf("%+v, world %d, snapshot %d: %+v, %v with an encoded memory, want %+v", names, seed, s.Rev, again, err, p)
				}
				tables += len(p.Tables)
				m = next
				w.Apply(p.Wants)
			}
		}
		if tables == 0 {
			t.Errorf("%+v: no world had a table", names)
		}
	}
}

var t0 = time.Date(2026, 6, 1, 12, 0, 0, 0, time.UTC)

// laned returns a cluster with one pipeline, whose second stage has a cheap and an accurate
// variant.
func laned() plan.Snapshot {
	f := func(name string, rate float64, ms int) plan.Function {
		return plan.Function{
			Name: name, Revision: 1, Min: 1, Max: 20, Batch: 1, Slots: 1, Memory: 1 << 20,
			Demand:  plan.Demand{Known: rate > 0, Rate: rate, Last: t0},
			Service: plan.Service{Known: true, Mean: time.Duration(ms) * time.Millisecond, CV: 0.5},
		}
	}
	stage := plan.Demand{Known: true, Rate: 40, CV: 1, Last: t0}
	detect, read, small := f("detect.ns", 40, 10), f("read.ns", 40, 100), f("small.ns", 0, 20)
	read.Accuracy, read.Stage = 0.95, stage
	small.Accuracy, small.Stage, small.VariantOf = 0.8, stage, "read.ns"
	return plan.Snapshot{
		Rev: 1, Epoch: 1, At: t0, Nodes: []plan.Node{{Name: "n", Memory: 1 << 40, CPUMilli: 64000}},
		Functions: []plan.Function{detect, read, small},
		Pipelines: []plan.Pipeline{{Name: "p.ns", Stages: []string{"detect.ns", "read.ns"}, Edges: []plan.Edge{{From: 0, To: 1}}, SLO: time.Second}},
	}
}

func (s Set) mustDecide(t *testing.T, snap plan.Snapshot, m Memory) (plan.Plan, Memory) {
	t.Helper()
	p, next, held, err := s.Decide(snap, m)
	if err != nil || len(held) > 0 {
		t.Fatalf("%v, held %v", err, held)
	}
	return p, next
}

func choose(t *testing.T, n Names) Set {
	t.Helper()
	set, err := n.Choose()
	if err != nil {
		t.Fatal(err)
	}
	return set
}

// TestTablesKeepTheirVersionWhileTheyRouteAlike decides again and again while nothing, little and
// much changes.
func TestTablesKeepTheirVersionWhileTheyRouteAlike(t *testing.T) {
	t.Parallel()
	set, s := choose(t, Names{}), laned()
	p, m := set.mustDecide(t, s, nil)
	if len(p.Tables) != 1 || p.Tables[0].Version != 1 {
		t.Fatalf("got tables %+v, want one of version 1", p.Tables)
	}
	if got := p.Tables[0].Row("detect.ns").Levels[0].Shares; !reflect.DeepEqual(got, []plan.Share{{Lane: "read.ns", Part: 1}}) {
		t.Errorf("shares %v, want all for the most accurate", got)
	}
	s.Rev = 2
	p, m = set.mustDecide(t, s, m)
	if p.Tables[0].Version != 1 {
		t.Errorf("version %d of the same table, want 1", p.Tables[0].Version)
	}
	s.Rev, s.Functions[2].Accuracy = 3, 0.99
	p, m = set.mustDecide(t, s, m)
	if p.Tables[0].Version != 3 || p.Tables[0].Row("detect.ns").Levels[0].Shares[0].Lane != "small.ns" {
		t.Errorf("got %+v once the other variant is better, want it, and version 3", p.Tables[0])
	}
	// Equal accuracies share by capacity. A small change of the capacity is no new table.
	s.Rev, s.Functions[1].Accuracy = 4, 0.99
	p, m = set.mustDecide(t, s, m)
	version := p.Tables[0].Version
	s.Rev, s.Functions[2].Service.Mean = 5, 21*time.Millisecond
	if p, _ = set.mustDecide(t, s, m); version != 4 || p.Tables[0].Version != 4 {
		t.Errorf("versions %d and %d, want 4 for both", version, p.Tables[0].Version)
	}
}

// TestALaneIsSizedForThePartThatItsTableSends gives the first decision to a lane that has had no
// task yet.
func TestALaneIsSizedForThePartThatItsTableSends(t *testing.T) {
	t.Parallel()
	set, s := choose(t, Names{Route: "even"}), laned()
	for i := range s.Functions {
		s.Functions[i].Stage.Rate = 400
	}
	first, m := set.mustDecide(t, s, nil)
	s.Rev, s.At = 2, t0.Add(time.Second)
	p, _ := set.mustDecide(t, s, m)
	before, after := len(first.Wants[2].Slots), len(p.Wants[2].Slots)
	// 200 tasks of 20 ms per second
	if p.Wants[2].Function != "small.ns" || before != 1 || after < 4 || after > 6 {
		t.Errorf("%d replicas, then %d (%s), want 1, then about 5 for half of the stage's tasks", before, after, p.Wants[2].Why)
	}
}

// TestALaneOfLongInputsIsSizedForItsOwnDemand gives a lane that takes long inputs a few of them.
// The table alone would send it half of the stage's tasks.
func TestALaneOfLongInputsIsSizedForItsOwnDemand(t *testing.T) {
	t.Parallel()
	set, s := choose(t, Names{}), laned()
	for i := range s.Functions {
		s.Functions[i].Stage.Rate = 400
	}
	s.Functions[1].Demand.Rate = 10 // read: 100 ms per task, any length
	s.Functions[2].Demand = plan.Demand{Known: true, Rate: 390, Last: t0}
	s.Functions[2].Accuracy, s.Functions[2].MaxLength = s.Functions[1].Accuracy, 64
	p, m := set.mustDecide(t, s, nil)
	if levels := p.Tables[0].Rows[0].Levels; len(levels) != 2 {
		t.Fatalf("levels %+v, want one up to 64 and one for any length", levels)
	}
	s.Rev, s.At = 2, t0.Add(time.Second)
	p, _ = set.mustDecide(t, s, m)
	if n := len(p.Wants[1].Slots); p.Wants[1].Function != "read.ns" || n > 4 {
		t.Errorf("%d replicas (%s), want at most 4 for 10 tasks per second", n, p.Wants[1].Why)
	}
}

// TestAMixKeepsItsCounts compares the lines of a mixer with what is placed. The corrector and the
// sharer must not change them.
func TestAMixKeepsItsCounts(t *testing.T) {
	t.Parallel()
	s := laned()
	s.Budget = 6
	s.Pipelines[0].Chosen.Allocator = "accuracy"
	other := s.Functions[0] // another domain, with much to do
	other.Name, other.Demand.Rate = "zeal.ns", 4000
	s.Functions = append(s.Functions, other)
	set := choose(t, Names{})
	placer := &told{Placer: set.placer}
	set.placer = placer
	var m Memory
	for range 5 {
		var p plan.Plan
		p, m = set.mustDecide(t, s, m)
		total := 0
		for i, l := range placer.alloc {
			total += l.Count
			if l.Fixed != (l.Function != "zeal.ns") || strings.Contains(l.Why, "budget") != (l.Function == "zeal.ns") || strings.Contains(l.Why, "pid") {
				t.Errorf("line %+v, want those of the pipeline fixed, and the other one shared", l)
			}
			if len(p.Wants[i].Slots) != l.Count {
				t.Errorf("%s: %d slots, want %d", l.Function, len(p.Wants[i].Slots), l.Count)
			}
		}
		if total > s.Budget {
			t.Errorf("%d replicas, want at most %d", total, s.Budget)
		}
		s.Rev, s.At = s.Rev+1, s.At.Add(time.Second)
	}
}

// full is a placer without room for a function.
type full struct {
	plan.Placer
	function string
	room     int
}

func (p full) Place(s plan.Snapshot, a plan.Alloc) ([]plan.Want, error) {
	wants, err := p.Placer.Place(s, a)
	for i := range wants {
		if w := &wants[i]; w.Function == p.function && len(w.Slots) > p.room {
			w.Slots, w.Short = w.Slots[:p.room], "no room"
		}
	}
	return wants, err
}

// TestWhatHasNoPlaceLeavesTheTableAndTheBudget has no room for the accurate variant. Its tasks must
// go to the other one in the same decision. The next decision must not ask for it again, until some
// time has passed.
func TestWhatHasNoPlaceLeavesTheTableAndTheBudget(t *testing.T) {
	t.Parallel()
	s := laned()
	s.Functions[1].Zero, s.Functions[1].ZeroAge = true, time.Hour
	set := choose(t, Names{Allocator: "accuracy"})
	placer := &told{Placer: full{set.placer, "read.ns", 0}}
	set.placer = placer
	shares := func(p plan.Plan) []plan.Share { return p.Tables[0].Row("detect.ns").Levels[0].Shares }
	p, m := set.mustDecide(t, s, nil)
	if asked := placer.alloc[1].Count; asked < 4 {
		t.Fatalf("asked for %d of the accurate variant, want 4 or more for 40 tasks of 100 ms per second", asked)
	}
	if got := shares(p); !reflect.DeepEqual(got, []plan.Share{{Lane: "small.ns", Part: 1}}) {
		t.Errorf("shares %v, want all for the lane with a place", got)
	}
	s.Rev, s.At = 2, t0.Add(time.Second)
	_, m = set.mustDecide(t, s, m)
	if asked := placer.alloc[1].Count; asked > 1 {
		t.Errorf("asked for %d again, want the minimum", asked)
	}
	s.Rev, s.At = 3, t0.Add(2*tightFor)
	set.mustDecide(t, s, m)
	if asked := placer.alloc[1].Count; asked < 4 {
		t.Errorf("asked for %d later, want another try", asked)
	}
}

// TestDisagreeingEntriesKeepWhatTheDomainHad connects two pipelines by a shared function. The
// memory goes through JSON.
func TestDisagreeingEntriesKeepWhatTheDomainHad(t *testing.T) {
	t.Parallel()
	set, s := choose(t, Names{Rank: "least-slack"}), laned()
	other := s.Functions[0]
	other.Name = "apart.ns"
	s.Functions = append([]plan.Function{other}, s.Functions...)
	s.Pipelines = append(s.Pipelines, plan.Pipeline{Name: "q.ns", Stages: []string{"apart.ns"}, SLO: time.Second, Chosen: plan.Chosen{Rank: "fifo"}})
	s.Pipelines[0].Chosen.Rank = "fair"
	ranks := func(p plan.Plan) (out []string) {
		for _, w := range p.Wants {
			out = append(out, w.Rank)
		}
		return out
	}
	p, m := set.mustDecide(t, s, nil)
	if got := ranks(p); !reflect.DeepEqual(got, []string{"", "fair", "fair", "fair"}) || len(p.Ruled) != 2 || p.Ruled[1].Conflicts != nil {
		t.Fatalf("apart: ranks %q, ruled %+v", got, p.Ruled)
	}
	// They share a function: the first domain's rank stays, as its functions come first.
	s.Pipelines[1].Stages, s.Pipelines[1].Edges = []string{"apart.ns", "read.ns"}, []plan.Edge{{From: 0, To: 1}}
	b, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	if m, err = set.DecodeMemory(b); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		s.Rev++
		p, m = set.mustDecide(t, s, m)
		want := []plan.Ruled{{Domain: "apart.ns", Chosen: plan.Chosen{Allocator: "sizer", Rank: "fifo", Route: "best"}, Conflicts: []plan.Conflict{{Level: "rank", Asked: []string{"fair", "fifo"}, Kept: "fifo"}}}}
		if got := ranks(p); !reflect.DeepEqual(got, []string{"", "", "", ""}) || !reflect.DeepEqual(p.Ruled, want) {
			t.Errorf("together: ranks %q, ruled %+v, want %+v", got, p.Ruled, want)
		}
	}
	// Without a past, and for a name that does not exist, the domain has the flags' policy.
	if p, _ = set.mustDecide(t, s, nil); ranks(p)[0] != "least-slack" {
		t.Errorf("ranks %q without a past, want the flag's", ranks(p))
	}
	s.Pipelines[0].Chosen, s.Pipelines[1].Chosen = plan.Chosen{}, plan.Chosen{Rank: "shortest"}
	if p, _ = set.mustDecide(t, s, m); ranks(p)[0] != "least-slack" || p.Ruled[0].Conflicts[0].Asked[0] != "shortest" {
		t.Errorf("ranks %q, ruled %+v for an unknown rank, want the flag's", ranks(p), p.Ruled)
	}
}

// TestALaneIsSizedForTheSharesOfLengths gives a lane that takes long inputs a part of the stage's
// tasks by their lengths, before it has had any task.
func TestALaneIsSizedForTheSharesOfLengths(t *testing.T) {
	t.Parallel()
	for long, want := range map[float64][2]int{0.05: {2, 5}, 0.5: {21, 32}} {
		set, s := choose(t, Names{}), laned()
		s.Functions[2].Accuracy, s.Functions[2].MaxLength = s.Functions[1].Accuracy, 64
		for i := range s.Functions {
			s.Functions[i].Stage.Rate, s.Functions[i].Max = 400, 100
			s.Functions[i].Lengths = []plan.LengthShare{{MaxLength: 64, Share: 1 - long}, {Share: long}}
		}
		s.Functions[1].Demand = plan.Demand{Known: true, Rate: 1, Last: t0} // 100 ms, any length
		_, m := set.mustDecide(t, s, nil)
		s.Rev, s.At = 2, t0.Add(time.Second)
		p, _ := set.mustDecide(t, s, m)
		if n := len(p.Wants[1].Slots); p.Wants[1].Function != "read.ns" || n < want[0] || n > want[1] {
			t.Errorf("%g long: %d replicas (%s), want %v for %g tasks per second", long, n, p.Wants[1].Why, want, 400*long)
		}
	}
}
