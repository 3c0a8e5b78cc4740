// Package plantest is the test suite for policies of package plan. Call [Run] for an allocator, and
// [RunCorrector], [RunSharer], [RunPlacer] or [RunWarmer] for a policy of another level:
//
//	func TestPolicy(t *testing.T) { plantest.Run(t, autoscaler.NewSizer(autoscaler.Config{})) }
//
// Policies are run through random histories of a [World]. The same arguments must give the same
// answer, the arguments must not change, and the result must be valid.
package plantest

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// histories and steps bound a run of the suite.
const (
	histories = 30
	steps     = 25
)

// Run checks an allocator on random histories:
//
//   - The allocator returns one line per function of its domain, sorted, within the function's
//     bounds, with a reason.
//   - The same arguments give the same lines, even if the memory went through JSON or the nodes are
//     in another order.
//   - The allocator does not change its arguments.
//   - More load never reduces a function's replicas.
func Run[M any](t *testing.T, a plan.Allocator[M]) {
	for seed := range uint64(histories) {
		w := NewWorld(seed)
		rng := rand.New(rand.NewPCG(seed, 2))
		memory := map[string]M{} // by the domain's first function
		for range steps {
			w.Step()
			s := w.Snapshot()
			var all plan.Alloc
			for _, d := range plan.Domains(s) {
				m := memory[d.Functions[0]]
				lines, next, err := a.Allocate(s, d, m)
				if err != nil {
					t.Fatalf("world %d, snapshot %d: %v", seed, s.Rev, err)
				}
				checkLines(t, s, d, lines)
				checkSame(t, a, s, d, m, lines, next, rng)
				checkMoreLoad(t, a, s, d, m, lines, rng)
				if t.Failed() {
					t.Fatalf("world %d, snapshot %d", seed, s.Rev)
				}
				memory[d.Functions[0]] = next
				all = append(all, lines...)
			}
			if checkUnchanged(t, w.Snapshot(), s); t.Failed() {
				t.Fatalf("world %d, snapshot %d", seed, s.Rev)
			}
			slices.SortFunc(all, byFunction)
			w.Apply(anywhere(s, all))
		}
	}
}

func checkLines(t *testing.T, s plan.Snapshot, d plan.Domain, lines plan.Alloc) {
	t.Helper()
	var names []string
	for _, l := range lines {
		names = append(names, l.Function)
		f, ok := s.Function(l.Function)
		if !ok {
			continue
		}
		if least, most := f.Bounds(); l.Count < least || l.Count > most {
			t.Errorf("function %q: %d replicas, want %d to %d", l.Function, l.Count, least, most)
		}
		if l.Why == "" {
			t.Errorf("function %q: no reason", l.Function)
		}
	}
	if !slices.Equal(names, d.Functions) {
		t.Errorf("lines for %q, want one each for %q", names, d.Functions)
	}
}

func checkSame[M any](t *testing.T, a plan.Allocator[M], s plan.Snapshot, d plan.Domain, m M, lines plan.Alloc, next M, rng *rand.Rand) {
	t.Helper()
	stored, remembered := encode(t, m), encode(t, next)
	again := func(what string, s plan.Snapshot, m M) {
		t.Helper()
		l, n, err := a.Allocate(s, d, m)
		if err != nil || !reflect.DeepEqual(l, lines) {
			t.Errorf("%s: lines %+v, %v, want the same as before, %+v", what, l, err, lines)
		}
		if got := encode(t, n); got != remembered {
			t.Errorf("%s: memory %s, want %s", what, got, remembered)
		}
	}
	again("same arguments", s, m)
	if encode(t, m) != stored {
		t.Errorf("the memory was changed to %s, want it left as it was, %s", encode(t, m), stored)
	}
	var decoded M
	if err := json.Unmarshal([]byte(stored), &decoded); err != nil {
		t.Fatalf("memory %s: %v", stored, err)
	}
	again("memory through JSON", s, decoded)
	again("nodes in another order", shuffled(s, rng), m)
}

// checkUnchanged compares snapshots. It compares functions in their encoded form as a last resort,
// because NaN is not equal to itself.
func checkUnchanged(t *testing.T, before, after plan.Snapshot) {
	t.Helper()
	was, is := before.Functions, after.Functions
	before.Functions, after.Functions = nil, nil
	if len(was) != len(is) || !reflect.DeepEqual(before, after) {
		t.Errorf("the snapshot was changed to %+v with %d functions, want it left as it was, %+v with %d", after, len(is), before, len(was))
		return
	}
	for i := range is {
		if reflect.DeepEqual(was[i], is[i]) {
			continue
		}
		if b, a := fmt.Sprintf("%+v", was[i]), fmt.Sprintf("%+v", is[i]); a != b {
			t.Errorf("the snapshot was changed to %s, want it left as it was, %s", a, b)
		}
	}
}

func encode(t *testing.T, v any) string {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatalf("memory: %v", err)
	}
	return string(b)
}

func shuffled(s plan.Snapshot, rng *rand.Rand) plan.Snapshot {
	s = clone(s)
	rng.Shuffle(len(s.Nodes), func(i, j int) { s.Nodes[i], s.Nodes[j] = s.Nodes[j], s.Nodes[i] })
	return s
}

func checkMoreLoad[M any](t *testing.T, a plan.Allocator[M], s plan.Snapshot, d plan.Domain, m M, lines plan.Alloc, rng *rand.Rand) {
	t.Helper()
	i := rng.IntN(len(d.Functions))
	more := clone(s)
	f, _ := more.Function(d.Functions[i])
	what := moreLoad(f, rng)
	got, _, err := a.Allocate(more, d, m)
	if err != nil || len(got) != len(lines) || got[i].Count < lines[i].Count {
		t.Errorf("function %q, %s: %+v, %v, want at least %d, as before (%s)", f.Name, what, got, err, lines[i].Count, lines[i].Why)
	}
}

// moreLoad gives a function more load, and returns a description.
func moreLoad(f *plan.Function, rng *rand.Rand) string {
	if f.Demand.Known && f.Demand.Rate > 0 && rng.IntN(2) == 0 {
		f.Demand.Rate *= 2
		return "twice the rate"
	}
	f.Waiting += 1 + rng.IntN(20)
	return "more waiting"
}

// anywhere places an allocation without regard to capacity, which is enough for a history.
func anywhere(s plan.Snapshot, a plan.Alloc) []plan.Want {
	var wants []plan.Want
	for _, l := range a {
		f, _ := s.Function(l.Function)
		w := plan.Want{Function: l.Function, Revision: f.Revision}
		for _, r := range f.Replicas {
			if r.State != plan.Draining && r.Revision == f.Revision && len(w.Slots) < l.Count {
				w.Slots = append(w.Slots, plan.Slot{Replica: r.Name, Node: r.Node, Device: r.Device})
			}
		}
		for len(w.Slots) < l.Count {
			w.Slots = append(w.Slots, plan.Slot{Node: s.Nodes[len(w.Slots)%len(s.Nodes)].Name})
		}
		wants = append(wants, w)
	}
	return wants
}

// RunPlacer checks a placer on random histories:
//
//   - The placer returns one want per line, and a plan of the wants is valid.
//   - A want has as many slots as the line's count, or the reason why it has fewer.
//   - The placer keeps all existing replicas that it can keep, and uses no unhealthy or barred
//     devices.
//   - The same arguments give the same wants, even if the nodes are in another order.
func RunPlacer(t *testing.T, p plan.Placer) {
	for seed := range uint64(histories) {
		w := NewWorld(seed)
		rng := rand.New(rand.NewPCG(seed, 3))
		for range steps {
			w.Step()
			s := w.Snapshot()
			a := randomAlloc(s, rng)
			wants, err := p.Place(s, a)
			if err != nil {
				t.Fatalf("world %d, snapshot %d: %v", seed, s.Rev, err)
			}
			if before := w.Snapshot(); !reflect.DeepEqual(before, s) {
				t.Errorf("the snapshot was changed to %+v, want it left as it was, %+v", s, before)
			}
			if err := (plan.Plan{Epoch: s.Epoch, Rev: s.Rev, At: s.At, Wants: wants}).Validate(s); err != nil {
				t.Error(err)
			}
			checkWants(t, s, a, wants)
			for _, other := range []plan.Snapshot{s, shuffled(s, rng)} {
				if again, err := p.Place(other, a); err != nil || !reflect.DeepEqual(again, wants) {
					t.Errorf("again: %+v, %v, want the same as before, %+v", again, err, wants)
				}
			}
			if t.Failed() {
				t.Fatalf("world %d, snapshot %d", seed, s.Rev)
			}
			w.Apply(wants)
		}
	}
}

// unfit returns why a replica of f cannot be on these devices of a node, or "".
func unfit(s plan.Snapshot, f *plan.Function, node, device string) string {
	for i := range s.Nodes {
		if s.Nodes[i].Name == node {
			return cmp.Or(s.Nodes[i].Unfit(device), f.Barred(node, device))
		}
	}
	return "there is no node"
}

func randomAlloc(s plan.Snapshot, rng *rand.Rand) plan.Alloc {
	var a plan.Alloc
	for _, f := range s.Functions {
		least, most := f.Bounds()
		a = append(a, plan.Line{Function: f.Name, Count: least + rng.IntN(most-least+1), Batch: f.Batch, Why: "chance"})
	}
	return a
}

func checkWants(t *testing.T, s plan.Snapshot, a plan.Alloc, wants []plan.Want) {
	t.Helper()
	if len(wants) != len(a) {
		t.Fatalf("%d wants, want %d, one a line", len(wants), len(a))
	}
	for i, l := range a {
		w := wants[i]
		if w.Function != l.Function || w.CPUMilli != l.CPUMilli || w.Batch != l.Batch || w.Key != l.Key || w.Why != l.Why {
			t.Errorf("want %+v, want function, CPU, batch, key stage or not, and reason of the line %+v", w, l)
		}
		f, _ := s.Function(l.Function)
		fit, kept, moving, stay := 0, 0, 0, 0
		for _, r := range f.Replicas {
			switch live := r.State != plan.Draining && r.Revision == f.Revision; {
			case live && unfit(s, f, r.Node, r.Device) == "":
				fit++
			case live && unfit(settled(s), f, r.Node, r.Device) == "":
				moving++
			}
		}
		for _, slot := range w.Slots {
			if slot.Replica != "" && unfit(s, f, slot.Node, slot.Device) != "" && unfit(settled(s), f, slot.Node, slot.Device) == "" {
				stay++
				continue
			}
			if slot.Replica != "" {
				kept++
			}
			if why := unfit(s, f, slot.Node, slot.Device); why != "" {
				t.Errorf("function %q: a slot where %s", l.Function, why)
			}
		}
		if want := min(fit, l.Count); kept != want {
			t.Errorf("function %q: %d replicas kept, want %d", l.Function, kept, want)
		}
		placed := len(w.Slots) - stay
		if short := placed < l.Count; len(w.Slots) > l.Count || short != (w.Short != "") {
			t.Errorf("function %q: %d slots, short %q, want %d or why there are fewer", l.Function, placed, w.Short, l.Count)
		}
		if want := min(moving, l.Count-placed); stay != want {
			t.Errorf("function %q: %d replicas stay on nodes that are being drained, want %d", l.Function, stay, want)
		}
	}
}

// settled returns a snapshot whose nodes are not being drained.
func settled(s plan.Snapshot) plan.Snapshot {
	s.Nodes = slices.Clone(s.Nodes)
	for i := range s.Nodes {
		s.Nodes[i].Moving = false
	}
	return s
}

// RunWarmer checks a warmer after a placer: the plan is valid, and the same for the same arguments,
// even if the nodes are in another order.
func RunWarmer(t *testing.T, p plan.Placer, warmer plan.Warmer) {
	for seed := range uint64(histories) {
		w := NewWorld(seed)
		rng := rand.New(rand.NewPCG(seed, 4))
		for range steps {
			w.Step()
			s := w.Snapshot()
			wants, err := p.Place(s, randomAlloc(s, rng))
			if err != nil {
				t.Fatal(err)
			}
			warm, err := warmer.Warm(s, wants)
			if err != nil {
				t.Fatalf("world %d, snapshot %d: %v", seed, s.Rev, err)
			}
			if before := w.Snapshot(); !reflect.DeepEqual(before, s) {
				t.Errorf("the snapshot was changed to %+v, want it left as it was, %+v", s, before)
			}
			if err := (plan.Plan{Epoch: s.Epoch, Rev: s.Rev, At: s.At, Wants: wants, Warm: warm}).Validate(s); err != nil {
				t.Error(err)
			}
			for _, other := range []plan.Snapshot{s, shuffled(s, rng)} {
				if again, err := warmer.Warm(other, wants); err != nil || !reflect.DeepEqual(again, warm) {
					t.Errorf("again: %+v, %v, want the same as before, %+v", again, err, warm)
				}
			}
			if t.Failed() {
				t.Fatalf("world %d, snapshot %d", seed, s.Rev)
			}
			w.Apply(wants)
		}
	}
}
