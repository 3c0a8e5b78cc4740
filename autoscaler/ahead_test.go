package autoscaler

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// behind returns a pipeline a, b, c whose stages take 100 ms each. Tasks arrive at a four times as
// fast as it serves them.
func behind() (plan.Snapshot, plan.Domain) {
	s := plan.Snapshot{
		At: t0,
		Functions: []plan.Function{
			timed("a", 100*time.Millisecond), timed("b", 100*time.Millisecond), timed("c", 100*time.Millisecond),
		},
		Pipelines: []plan.Pipeline{{Name: "p", Stages: []string{"a", "b", "c"}, Edges: []plan.Edge{{From: 0, To: 1}, {From: 1, To: 2}}, SLO: time.Second}},
	}
	for i, rate := range []float64{40, 9, 8} {
		s.Functions[i].Demand.Rate, s.Functions[i].Replicas = rate, replicas(1, plan.Ready)
	}
	return s, plan.Domain{Pipelines: []string{"p"}, Functions: []string{"a", "b", "c"}}
}

func counts(t *testing.T, s plan.Snapshot, d plan.Domain, m Memory) (out [3]int, a plan.Alloc, next Memory) {
	t.Helper()
	a, next, err := NewSizer(Config{}).Allocate(s, d, m)
	if err != nil {
		t.Fatal(err)
	}
	for i := range out {
		out[i] = a[i].Count
	}
	return out, a, next
}

// TestStagesBehindAnOverloadStartWithIt checks that the stages behind an overloaded stage start
// together with it. They are sized for the rate that will get through once the overloaded stage has
// its replicas.
func TestStagesBehindAnOverloadStartWithIt(t *testing.T) {
	ratio := func(b, c float64) Memory {
		return Memory{"b": {Learned: Learned{At: t0, Ratio: b}}, "c": {Learned: Learned{At: t0, Ratio: c}}}
	}
	for name, tc := range map[string]struct {
		memory Memory
		change func(*plan.Snapshot)
		want   [3]int // least counts
		most   [3]int
	}{
		"all at once":               {nil, func(*plan.Snapshot) {}, [3]int{5, 5, 5}, [3]int{7, 7, 7}},
		"a call an item":            {ratio(3, 1.0/3), func(*plan.Snapshot) {}, [3]int{5, 13, 5}, [3]int{7, 15, 7}},
		"a tenth goes on":           {ratio(0.1, 1), func(*plan.Snapshot) {}, [3]int{5, 2, 2}, [3]int{7, 3, 3}},
		"no more than gets through": {nil, func(s *plan.Snapshot) { s.Functions[0].Max = 2 }, [3]int{2, 3, 3}, [3]int{2, 4, 4}},
		"what waits as well":        {nil, func(s *plan.Snapshot) { s.Functions[0].Demand.Rate, s.Functions[0].Waiting = 9, 80 }, [3]int{5, 5, 5}, [3]int{6, 7, 7}},
		"an entry": {nil, func(s *plan.Snapshot) {
			s.Pipelines = append(s.Pipelines, plan.Pipeline{Name: "q", Stages: []string{"b"}, SLO: time.Minute})
		}, [3]int{5, 2, 2}, [3]int{7, 3, 3}},
		"not behind": {nil, func(s *plan.Snapshot) { s.Functions[0].Replicas = replicas(8, plan.Ready) }, [3]int{4, 1, 1}, [3]int{7, 3, 3}},
	} {
		t.Run(name, func(t *testing.T) {
			s, d := behind()
			tc.change(&s)
			if len(s.Pipelines) > 1 {
				d.Pipelines = append(d.Pipelines, "q")
			}
			got, a, _ := counts(t, s, d, tc.memory)
			for i := range got {
				if got[i] < tc.want[i] || got[i] > tc.most[i] {
					t.Errorf("%v (%s), want %v to %v", got, a[i].Why, tc.want, tc.most)
				}
			}
			if told := strings.Contains(a[1].Why, "held up before it"); told != (got[1] > 3) && name != "no more than gets through" {
				t.Errorf("%v: %s", got, a[1].Why)
			}
		})
	}
}

// TestRatiosAreLearnedWhileAllArrivalsAreServed checks that ratios are learned slowly, within
// bounds, and only while all arrivals are served.
func TestRatiosAreLearnedWhileAllArrivalsAreServed(t *testing.T) {
	s, d := behind()
	_, _, m := counts(t, s, d, nil)
	if got := m["b"].Learned; got.Ratio != 0 || !got.At.Equal(t0) {
		t.Errorf("behind a stage that is behind: %+v, want nothing", got)
	}
	s.Functions[0].Demand.Rate = 3
	if _, _, m = counts(t, s, d, m); m["a"].Learned.Ratio != 0 || m["b"].Learned.Ratio != 3 || math.Abs(m["c"].Learned.Ratio-8.0/9) > 1e-9 {
		t.Errorf("%+v, want 3 calls for each", m)
	}
	s.Functions[1].Demand.Rate = 6
	s.At = t0.Add(time.Hour) // an update counts a few seconds at most
	if _, _, m = counts(t, s, d, m); !(m["b"].Learned.Ratio < 3 && m["b"].Learned.Ratio > 2.9) {
		t.Errorf("%+v, want a little less than 3", m["b"].Learned)
	}
	s.At = t0 // the clock was set back: nothing to learn
	before := m["b"].Learned.Ratio
	if _, _, m = counts(t, s, d, m); m["b"].Learned.Ratio != before {
		t.Errorf("%v, want %v", m["b"].Learned.Ratio, before)
	}
	s.Functions[0].Demand.Rate = 1e-9
	if _, _, m = counts(t, s, d, nil); m["b"].Learned.Ratio != mostRatio {
		t.Errorf("%+v, want %v at most", m["b"].Learned, mostRatio)
	}
	s.Functions[1].Replicas = append(replicas(1, plan.Ready), replicas(1, plan.Starting)...)
	if _, _, m = counts(t, s, d, nil); m["b"].Learned.Ratio != 0 {
		t.Errorf("while a replica starts: %+v, want nothing", m["b"].Learned)
	}
}

// TestMeanWaitsGetAPartOfTheTimeLeft checks that mean waits get the time to wait, divided by -ln(1
// - Attainment).
func TestMeanWaitsGetAPartOfTheTimeLeft(t *testing.T) {
	for attainment, want := range map[float64]float64{0: 1 / math.Log(100), 0.9: 1 / math.Log(10), 0.999: 1 / math.Log(1000), 0.1: -1 / math.Log(0.9), 1e-6: mostPart, 1: 1 / math.Log(100), math.NaN(): 1 / math.Log(100)} {
		if got := NewSizer(Config{Attainment: attainment}).cfg.meanPart(); math.Abs(got-want) > 1e-12 {
			t.Errorf("%v in time: %v, want %v", attainment, got, want)
		}
	}
}

// TestFunctionCalledTwiceIsNotBehindItself checks a pipeline that calls a function twice. The
// function is one queue, and is not behind itself.
func TestFunctionCalledTwiceIsNotBehindItself(t *testing.T) {
	s, d := behind()
	s.Pipelines[0].Stages = []string{"a", "b", "c", "a"}
	s.Pipelines[0].Edges = append(s.Pipelines[0].Edges, plan.Edge{From: 2, To: 3})
	for i := range s.Functions {
		s.Functions[i].Max = 1000
	}
	got, a, _ := counts(t, s, d, nil)
	for i, n := range got {
		if n < 5 || n > 8 {
			t.Errorf("%d replicas of %s (%s), want 5 to 8 for the 40/s that come", n, a[i].Function, a[i].Why)
		}
	}
}

// TestWithoutFollowStagesGoByTheirOwnArrivals checks the switch NoFollow. A stage behind an
// overloaded one then gets what its own rate needs, and so does one whose learned ratio promises
// more arrivals.
func TestWithoutFollowStagesGoByTheirOwnArrivals(t *testing.T) {
	s, d := behind()
	m := Memory{"b": {Learned: Learned{At: t0, Ratio: 3}}}
	for _, overloaded := range []bool{true, false} {
		if !overloaded {
			s.Functions[0].Replicas = replicas(8, plan.Ready) // its rate is followed
		}
		on, _, err := NewSizer(Config{}).Allocate(s, d, m)
		if err != nil {
			t.Fatal(err)
		}
		off, _, err := NewSizer(Config{NoFollow: true}).Allocate(s, d, m)
		if err != nil {
			t.Fatal(err)
		}
		if off[0].Count != on[0].Count || off[1].Count >= on[1].Count || off[1].Count > 3 {
			t.Errorf("overloaded %t: a has %d and %d, b %d and %d with NoFollow; want equal, and fewer", overloaded, on[0].Count, off[0].Count, on[1].Count, off[1].Count)
		}
	}
}
