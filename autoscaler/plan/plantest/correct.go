package plantest

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// corrected turns a corrector of given lines into an allocator, so that the same checks apply.
type corrected[M any] struct {
	plan.Corrector[M]
	lines plan.Alloc
}

func (c corrected[M]) Allocate(s plan.Snapshot, d plan.Domain, m M) (plan.Alloc, M, error) {
	return c.Correct(s, d, c.lines, m)
}

// RunCorrector checks a corrector on random histories. Clocks jump, and every third history has
// impossible signals. The checks are:
//
//   - The corrector changes only count, CPU and the key-stage mark of its lines, and gives reasons.
//     Counts stay within bounds.
//   - The same arguments give the same lines, even if the memory went through JSON or the nodes are
//     in another order.
//   - The corrector does not change its arguments.
//   - More load never reduces a function's replicas. An overloaded function keeps all replicas that
//     it was allocated.
func RunCorrector[M any](t *testing.T, c plan.Corrector[M]) {
	for seed := range uint64(histories) {
		w := NewWorld(seed)
		rng := rand.New(rand.NewPCG(seed, 5))
		memory := map[string]M{} // by the domain's first function
		base := randomAlloc(w.Snapshot(), rng)
		for range steps {
			w.Step()
			if rng.IntN(15) == 0 {
				w.Jump()
			}
			s := w.Snapshot()
			if seed%3 == 0 {
				absurd(&s, rng)
			}
			drift(s, base, rng)
			before := clone(s)
			var all plan.Alloc
			for _, d := range plan.Domains(s) {
				m := memory[d.Functions[0]]
				lines := of(base, d)
				given := slices.Clone(lines)
				got, next, err := c.Correct(s, d, lines, m)
				if err != nil {
					t.Fatalf("world %d, snapshot %d: %v", seed, s.Rev, err)
				}
				if !slices.Equal(lines, given) {
					t.Errorf("the lines were changed to %+v, want them left as they were, %+v", lines, given)
				}
				checkLines(t, s, d, got)
				checkCorrected(t, s, given, got)
				same := corrected[M]{c, given}
				checkSame(t, same, s, d, m, got, next, rng)
				checkMoreLoad(t, same, s, d, m, got, rng)
				checkOverload(t, same, s, d, m, rng)
				if t.Failed() {
					t.Fatalf("world %d, snapshot %d", seed, s.Rev)
				}
				memory[d.Functions[0]] = next
				all = append(all, got...)
			}
			if checkUnchanged(t, before, s); t.Failed() {
				t.Fatalf("world %d, snapshot %d", seed, s.Rev)
			}
			slices.SortFunc(all, byFunction)
			w.Apply(anywhere(s, all))
		}
	}
}

// of returns the lines of a domain's functions.
func of(a plan.Alloc, d plan.Domain) plan.Alloc {
	var lines plan.Alloc
	for _, l := range a {
		if slices.Contains(d.Functions, l.Function) {
			lines = append(lines, l)
		}
	}
	return lines
}

// drift changes an allocation as an allocator would: most counts stay.
func drift(s plan.Snapshot, a plan.Alloc, rng *rand.Rand) {
	for i := range a {
		if rng.IntN(3) > 0 {
			continue
		}
		f, _ := s.Function(a[i].Function)
		least, most := f.Bounds()
		a[i].Count = min(max(a[i].Count+rng.IntN(7)-3, least), most)
	}
}

// checkCorrected checks that a corrector changed only what it may change.
func checkCorrected(t *testing.T, s plan.Snapshot, before, after plan.Alloc) {
	t.Helper()
	for i := range min(len(before), len(after)) {
		b, a := before[i], after[i]
		if a.Function != b.Function || a.Batch != b.Batch {
			t.Errorf("line %+v, want function and batch of %+v", a, b)
		}
		f, _ := s.Function(a.Function)
		if a.CPUMilli != 0 && a.CPUMilli < max(plan.LeastCPU, f.CPULimit) {
			t.Errorf("function %q: cpu %dm, want at least the declared %dm", a.Function, a.CPUMilli, f.CPULimit)
		}
		for _, r := range f.Replicas {
			for _, n := range s.Nodes {
				if n.Name == r.Node && n.CPUMilli > 0 && a.CPUMilli > n.CPUMilli {
					t.Errorf("function %q: cpu %dm, want at most the %dm of node %s", a.Function, a.CPUMilli, n.CPUMilli, n.Name)
				}
			}
		}
	}
}

// checkOverload checks that a heavily overloaded function keeps all allocated replicas.
func checkOverload[M any](t *testing.T, c corrected[M], s plan.Snapshot, d plan.Domain, m M, rng *rand.Rand) {
	t.Helper()
	i := rng.IntN(len(d.Functions))
	over := clone(s)
	f, _ := over.Function(d.Functions[i])
	line := c.lines[i]
	if line.Count == 0 {
		return
	}
	f.Service = plan.Service{Known: true, Mean: 100 * time.Millisecond, CV: 1}
	f.Demand = plan.Demand{Known: true, Rate: float64(30 * line.Count * max(f.Slots, 1)), CV: 1, Last: s.At}
	f.Waiting, f.Running = 1000, line.Count*max(f.Slots, 1)
	f.Wait = plan.Wait{Known: true, Mean: 10 * time.Second, P50: 10 * time.Second, P95: 20 * time.Second, P99: 20 * time.Second, Oldest: 20 * time.Second}
	f.Busy = plan.Busy{Known: true, Share: 1}
	got, _, err := c.Allocate(over, d, m)
	if err != nil || len(got) != len(c.lines) || got[i].Count < line.Count {
		t.Errorf("function %q, overloaded: %+v, %v, want at least the %d that were allocated", f.Name, got, err, line.Count)
	}
}

// byFunction compares lines by function.
func byFunction(x, y plan.Line) int { return cmp.Compare(x.Function, y.Function) }
