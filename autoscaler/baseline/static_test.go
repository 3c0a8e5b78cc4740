package baseline

import (
	"fmt"
	"math"
	"testing"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan/plantest"
)

func TestStaticIsAnAllocator(t *testing.T) { plantest.Run(t, Static{Level: 2.6}) }

// TestStaticGivesExtraReplicasToTheFirstStages checks a fractional level. Its extra replicas go to
// the first stages in the pipeline's order.
func TestStaticGivesExtraReplicasToTheFirstStages(t *testing.T) {
	s := plan.Snapshot{Pipelines: []plan.Pipeline{{Name: "p", Stages: []string{"d", "gone", "b", "a"}}, {Name: "q", Stages: []string{"a", "e"}}}}
	for _, name := range []string{"a", "b", "c", "d", "e"} {
		s.Functions = append(s.Functions, plan.Function{Name: name, Min: 1, Max: 6})
	}
	// in the order d, b, a, e, c
	d := plan.Domain{Pipelines: []string{"p", "q"}, Functions: []string{"a", "b", "c", "d", "e"}}
	for level, want := range map[float64][5]int{
		0:           {1, 1, 1, 1, 1},
		3:           {3, 3, 3, 3, 3},
		3.2:         {3, 3, 3, 4, 3},
		3.6:         {4, 4, 3, 4, 3},
		3.95:        {4, 4, 4, 4, 4},
		0.4:         {1, 1, 1, 1, 1}, // two of them, but none sleeps
		9:           {6, 6, 6, 6, 6},
		-1:          {1, 1, 1, 1, 1},
		math.Inf(1): {6, 6, 6, 6, 6},
		math.NaN():  {1, 1, 1, 1, 1},
	} {
		a, _, err := Static{Level: level}.Allocate(s, d, struct{}{})
		if err != nil {
			t.Fatal(err)
		}
		for i, l := range a {
			if l.Count != want[i] || l.Function != d.Functions[i] {
				t.Errorf("level %g: %+v, want %d of %s", level, l, want[i], d.Functions[i])
			}
		}
	}
	if _, _, err := (Static{}).Allocate(s, plan.Domain{Functions: []string{"x"}}, struct{}{}); err == nil {
		t.Error("no error for a function that is not there")
	}
}

// copies returns n replicas in a state, since began.
func copies(n int, state plan.State) (out []plan.Replica) {
	for i := range n {
		out = append(out, plan.Replica{Name: fmt.Sprintf("%v-%d", state, i), Revision: 1, State: state, Since: began})
	}
	return out
}
