package baseline

import (
	"slices"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan/plantest"
)

func TestHPAIsAnAllocator(t *testing.T) {
	t.Parallel()
	plantest.Run(t, NewHPA(HPAConfig{}))
}

// TestHPARecommends has the examples of Kubernetes' documentation, its blog (configurable
// tolerance, v1.33) and the tests of its replica calculator (TestReplicaCalcScaleUp and so on).
func TestHPARecommends(t *testing.T) {
	for name, tc := range map[string]struct {
		ready, starting, young int
		usage, target          float64
		want                   int
	}{
		"twice the target, twice the pods": {4, 0, 0, 0.6, 0.3, 8},
		"half the target, half the pods":   {4, 0, 0, 0.25, 0.5, 2},
		"50 at 90 %, wanted 75 %":          {50, 0, 0, 0.90, 0.75, 60},
		"3 at 50 %, wanted 30 %":           {3, 0, 0, 0.50, 0.30, 5},
		"one of 3 unready: less":           {2, 1, 0, 0.60, 0.30, 4},
		"one of 3 too young: less":         {2, 0, 1, 0.60, 0.30, 4},
		"two of 3 unready: no change":      {1, 2, 0, 0.40, 0.30, 3},
		"5 at 28 %, wanted 50 %":           {5, 0, 0, 0.28, 0.50, 3},
		"unready ones are not scaled down": {4, 1, 0, 0.28, 0.50, 3},
		"within the tolerance, above":      {10, 0, 0, 0.549, 0.50, 10},
		"within the tolerance, below":      {10, 0, 0, 0.451, 0.50, 10},
		"beyond the tolerance":             {10, 0, 0, 0.56, 0.50, 12},
		"no pod has been measured":         {0, 1, 2, 0.90, 0.50, -1},
		"close enough with the unready":    {10, 1, 0, 0.58, 0.50, 11}, // 1.16 of ten is 1.05 of eleven
		"nothing to do":                    {7, 0, 0, 0, 0.50, 0},
	} {
		t.Run(name, func(t *testing.T) {
			f := plan.Function{Name: "f", Revision: 1, Busy: plan.Busy{Known: true, Share: tc.usage}}
			now := began.Add(time.Minute)
			f.Replicas = append(copies(tc.ready, plan.Ready), copies(tc.starting, plan.Starting)...)
			for range tc.young {
				f.Replicas = append(f.Replicas, plan.Replica{Revision: 1, State: plan.Ready, Since: now.Add(-hpaWindow + time.Millisecond)})
			}
			if got, why := NewHPA(HPAConfig{Target: tc.target}).desired(&f, now, tc.ready+tc.starting+tc.young); got != tc.want {
				t.Errorf("%d (%s), want %d", got, why, tc.want)
			}
		})
	}
}

// TestHPALimitsTheRateOfChange checks one decision every 15 s. A count at most doubles or grows by
// four, and falls only to the largest recommendation within five minutes.
func TestHPALimitsTheRateOfChange(t *testing.T) {
	h, m := NewHPA(HPAConfig{Target: 0.5}), HPAMemory{}
	f := plan.Function{Name: "f", Revision: 1, Min: 1, Max: 30, Replicas: copies(1, plan.Ready)}
	var got []int
	for second := 0; second <= 600; second += 5 {
		f.Busy = plan.Busy{Known: true, Share: 1}
		switch {
		case second >= 120:
			f.Busy.Share = 0.05
		case second == 60: // the usage drops for one decision
			f.Busy.Share = 0.1
		}
		s := plan.Snapshot{At: began.Add(time.Duration(second) * time.Second), Functions: []plan.Function{f}}
		a, next, err := h.Allocate(s, plan.Domain{Functions: []string{"f"}}, m)
		if err != nil {
			t.Fatal(err)
		}
		if m = next; second%15 > 0 && a[0].Count != got[len(got)-1] {
			t.Errorf("%d s: %d, want no change between decisions", second, a[0].Count)
		} else if second%15 == 0 {
			got = append(got, a[0].Count)
		}
		f.Replicas = copies(a[0].Count, plan.Ready) // they have always been ready
		if m["f"].Recommended == nil || len(m["f"].Recommended) > 21 {
			t.Fatalf("%d s: %d recommendations, want those of 5 minutes", second, len(m["f"].Recommended))
		}
	}
	// At 0 s no replica has been ready for 15 s. 30 is held until 300 s after it was last recommended,
	// at 105 s.
	want := []int{1, 2, 4, 8, 8, 16, 30, 30}
	want = append(want, slices.Repeat([]int{30}, 19)...)
	want = append(want, slices.Repeat([]int{3}, 14)...) // recommended while there were 30
	if !slices.Equal(got, want) {
		t.Errorf("got %d, want %d", got, want)
	}
}
