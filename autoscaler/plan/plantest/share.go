package plantest

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// RunSharer checks a sharer on random histories. Every third history has impossible signals. The
// checks are:
//
//   - The sharer only removes replicas, gives a reason, and leaves each function its minimum.
//   - The total is within the budget, unless the minimums exceed it.
//   - The same arguments give the same lines, even if the nodes are in another order.
//   - The sharer does not change its arguments.
//   - A smaller budget never gives a function more replicas, and more load never gives it fewer.
func RunSharer(t *testing.T, sh plan.Sharer) {
	for seed := range uint64(histories) {
		w := NewWorld(seed)
		rng := rand.New(rand.NewPCG(seed, 6))
		for range steps {
			w.Step()
			s := w.Snapshot()
			if seed%3 == 0 {
				absurd(&s, rng)
			}
			if rng.IntN(3) > 0 {
				s.Budget = 1 + rng.IntN(60)
			}
			a := randomAlloc(s, rng)
			before, given := clone(s), slices.Clone(a)
			got, err := sh.Share(s, a)
			if err != nil {
				t.Fatalf("world %d, snapshot %d: %v", seed, s.Rev, err)
			}
			if !slices.Equal(a, given) {
				t.Errorf("the lines were changed to %+v, want them left as they were, %+v", a, given)
			}
			checkUnchanged(t, before, s)
			checkShared(t, s, given, got)
			for _, other := range []plan.Snapshot{s, shuffled(s, rng)} {
				if again, err := sh.Share(other, a); err != nil || !slices.Equal(again, got) {
					t.Errorf("again: %+v, %v, want the same as before, %+v", again, err, got)
				}
			}
			checkMoreBudget(t, sh, s, a, got, rng)
			checkMoreShared(t, sh, s, a, got, rng)
			if t.Failed() {
				t.Fatalf("world %d, snapshot %d", seed, s.Rev)
			}
			w.Apply(anywhere(s, got))
		}
	}
}

func checkShared(t *testing.T, s plan.Snapshot, before, after plan.Alloc) {
	t.Helper()
	if len(after) != len(before) {
		t.Fatalf("%d lines, want %d, as before", len(after), len(before))
	}
	total, needed := 0, 0
	for i, b := range before {
		a := after[i]
		f, _ := s.Function(b.Function)
		least, _ := f.Bounds()
		least = min(least, b.Count)
		total, needed = total+a.Count, needed+least
		if a.Function != b.Function || a.CPUMilli != b.CPUMilli || a.Batch != b.Batch || a.Key != b.Key {
			t.Errorf("line %+v, want all but count and reason as in %+v", a, b)
		}
		if a.Count < least || a.Count > b.Count {
			t.Errorf("function %q: %d replicas, want %d to %d", a.Function, a.Count, least, b.Count)
		}
		if a.Count < b.Count && a.Why == b.Why {
			t.Errorf("function %q: %d replicas, %d were asked for, and the reason is the same, %s", a.Function, a.Count, b.Count, a.Why)
		}
	}
	if s.Budget > 0 && total > max(s.Budget, needed) {
		t.Errorf("%d replicas, want the budget of %d or the %d that are the least", total, s.Budget, needed)
	}
}

func checkMoreBudget(t *testing.T, sh plan.Sharer, s plan.Snapshot, a, got plan.Alloc, rng *rand.Rand) {
	t.Helper()
	if s.Budget <= 0 {
		return
	}
	s.Budget += 1 + rng.IntN(5)
	if rng.IntN(4) == 0 {
		s.Budget = 0
	}
	more, err := sh.Share(s, a)
	if err != nil {
		t.Error(err)
	}
	for i := range min(len(more), len(got)) {
		if more[i].Count < got[i].Count {
			t.Errorf("function %q, with a budget of %d: %+v, want at least the %d of a smaller one", a[i].Function, s.Budget, more[i], got[i].Count)
		}
	}
}

func checkMoreShared(t *testing.T, sh plan.Sharer, s plan.Snapshot, a, got plan.Alloc, rng *rand.Rand) {
	t.Helper()
	i := rng.IntN(len(a))
	more := clone(s)
	f, _ := more.Function(a[i].Function)
	what := moreLoad(f, rng)
	l, err := sh.Share(more, a)
	if err != nil || len(l) != len(got) || l[i].Count < got[i].Count {
		t.Errorf("function %q, %s: %+v, %v, want at least %d, as before (%s)", f.Name, what, l, err, got[i].Count, got[i].Why)
	}
}
