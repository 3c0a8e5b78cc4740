package baseline

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// TestProportionalGivesEqualParts checks counts that were computed by hand. Each function gets the
// same part of what it asks for beyond one replica.
func TestProportionalGivesEqualParts(t *testing.T) {
	for _, tc := range []struct {
		about             string
		budget            int
		asked, min, there []int
		want              []int
	}{
		{"enough for all", 12, []int{6, 6}, nil, nil, []int{6, 6}},
		{"no budget", 0, []int{60, 6}, nil, nil, []int{60, 6}},
		{"the same to all", 12, []int{11, 11, 11, 11}, nil, nil, []int{3, 3, 3, 3}},
		{"whatever they have", 12, []int{11, 11, 11, 11}, nil, []int{9, 1, 1, 1}, []int{3, 3, 3, 3}},
		{"half of ten and of four", 9, []int{11, 5}, nil, nil, []int{6, 3}},
		{"5 of 13: 3.08 and 1.92", 7, []int{9, 6}, nil, nil, []int{4, 3}},
		{"the first of equals has what is left", 3, []int{9, 9}, nil, nil, []int{2, 1}},
		{"less than the fewest", 1, []int{9, 9}, []int{2, 1}, nil, []int{2, 1}},
		{"three of eight and of four beyond the fewest", 9, []int{10, 5}, []int{2, 1}, nil, []int{6, 3}},
		{"none is asked for", 4, []int{0, 9}, nil, nil, []int{0, 4}},
	} {
		s := plan.Snapshot{Budget: tc.budget}
		var a plan.Alloc
		for i, n := range tc.asked {
			f := plan.Function{Name: fmt.Sprint(i), Max: 100}
			if tc.min != nil {
				f.Min = tc.min[i]
			}
			for r := range append(tc.there, make([]int, len(tc.asked))...)[i] {
				f.Replicas = append(f.Replicas, plan.Replica{Name: fmt.Sprint(i, r), State: plan.Ready})
			}
			s.Functions = append(s.Functions, f)
			a = append(a, plan.Line{Function: f.Name, Count: n})
		}
		out, err := Proportional{}.Share(s, a)
		if err != nil {
			t.Fatal(err)
		}
		var got []int
		for _, l := range out {
			got = append(got, l.Count)
		}
		if !slices.Equal(got, tc.want) {
			t.Errorf("%s: %d of %d, want %d", tc.about, got, tc.asked, tc.want)
		}
	}
	if _, err := (Proportional{}).Share(plan.Snapshot{}, plan.Alloc{{Function: "x"}}); err == nil {
		t.Error("a line of no function: no error")
	}
}
