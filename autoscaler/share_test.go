package autoscaler

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan/plantest"
)

func TestGainIsASharer(t *testing.T) { plantest.RunSharer(t, Gain{}) }

func TestFixedIsAnAllocator(t *testing.T) { plantest.Run(t, Fixed{}) }
func TestUniformIsAnAllocator(t *testing.T) {
	t.Parallel()
	plantest.Run(t, NewUniform(Config{}))
}

// served returns a function that gets requests of 100 ms at the given rate, and has the given
// number of ready replicas.
func served(name string, rate float64, ready int) plan.Function {
	f := calm()
	f.Name, f.Demand.Rate, f.Replicas, f.Memory = name, rate, replicas(ready, plan.Ready), 1<<30
	return f
}

// slow sets a function's service time to one second.
func slow(f plan.Function) plan.Function {
	f.Service.Mean = time.Second
	return f
}

// sleeper returns a function without replicas that may have none.
func sleeper(name string) plan.Function {
	f := served(name, 1, 0)
	f.Min, f.Zero = 0, true
	return f
}

// expected returns a sleeping function that requests are on their way to.
func expected(name string) plan.Function {
	f := sleeper(name)
	f.Demand, f.Expected = plan.Demand{}, 1
	return f
}

// TestGainSaysWhyAFunctionGetsNothing checks that the line of a function that gets nothing has the
// reason and what to do. No other line may have such a text.
func TestGainSaysWhyAFunctionGetsNothing(t *testing.T) {
	s := plan.Snapshot{Budget: 1, Functions: []plan.Function{served("a", 10, 1), sleeper("b")}}
	for budget, want := range map[int]string{1: "the budget of 1 replicas is used up by the fewest that other functions may have: raise it (--budget)", 2: ""} {
		s.Budget = budget
		got, err := Gain{}.Share(s, plan.Alloc{{Function: "a", Count: 3}, {Function: "b", Count: 1}})
		if err != nil || got[0].Denied != "" || !strings.HasPrefix(got[1].Denied, want) || (want == "") != (got[1].Denied == "") {
			t.Errorf("budget %d: %+v, %v, want %q denied to b", budget, got, err, want)
		}
	}
}

func TestGainGivesReplicasWhereTheyGainMost(t *testing.T) {
	ask := func(counts ...int) (a plan.Alloc) {
		for i, n := range counts {
			a = append(a, plan.Line{Function: string(rune('a' + i)), Count: n, Why: "so it is"})
		}
		return a
	}
	room := func(gib int64) []plan.Node { return []plan.Node{{Name: "n", Memory: gib << 30, CPUMilli: 64000}} }
	for name, tc := range map[string]struct {
		s    plan.Snapshot
		ask  plan.Alloc
		want string
		why  string // of the first line that was trimmed
	}{
		"no budget":                       {plan.Snapshot{Functions: []plan.Function{served("a", 10, 0), served("b", 10, 0)}, Nodes: room(64)}, ask(4, 4), "4 4", ""},
		"budget for all":                  {plan.Snapshot{Budget: 8, Functions: []plan.Function{served("a", 10, 0), served("b", 10, 0)}, Nodes: room(64)}, ask(4, 4), "4 4", ""},
		"alike":                           {plan.Snapshot{Budget: 6, Functions: []plan.Function{served("a", 10, 0), served("b", 10, 0)}, Nodes: room(64)}, ask(4, 4), "3 3", "3 of these, as the budget of 6 gains more elsewhere"},
		"by load":                         {plan.Snapshot{Budget: 6, Functions: []plan.Function{served("a", 5, 0), served("b", 25, 0)}, Nodes: room(64)}, ask(4, 4), "2 4", "2 of these"},
		"stability first":                 {plan.Snapshot{Budget: 8, Functions: []plan.Function{served("a", 0.1, 0), served("b", 100, 0)}, Nodes: room(64)}, ask(4, 12), "1 7", "1 of these"},
		"stability before a greater gain": {plan.Snapshot{Budget: 5, Functions: []plan.Function{served("a", 9.5, 0), slow(served("b", 3, 0))}, Nodes: room(64)}, ask(4, 5), "1 4", "1 of these"},
		"less than minima":                {plan.Snapshot{Budget: 1, Functions: []plan.Function{served("a", 10, 0), served("b", 10, 0)}, Nodes: room(64)}, ask(4, 4), "1 1", "1 of these, as the budget of 1 is used up by minimums"},
		"nothing for a sleeper":           {plan.Snapshot{Budget: 1, Functions: []plan.Function{served("a", 10, 1), sleeper("b")}, Nodes: room(64)}, ask(1, 1), "1 0", "none, as the budget is used up by minimums"},
		"what is there":                   {plan.Snapshot{Budget: 5, Functions: []plan.Function{served("a", 10, 1), served("b", 9.5, 4)}, Nodes: room(64)}, ask(4, 4), "2 3", "2 of these"},
		"memory for one":                  {plan.Snapshot{Functions: []plan.Function{served("a", 10, 1), served("b", 18, 1)}, Nodes: room(1)}, ask(3, 3), "1 2", "1 of these, as memory is short and gains more elsewhere"},
		"memory, alone":                   {plan.Snapshot{Functions: []plan.Function{served("a", 10, 1), served("b", 18, 1)}, Nodes: room(1)}, ask(3, 1), "3 1", ""},
		"ahead in a free budget":          {plan.Snapshot{Budget: 5, Functions: []plan.Function{served("a", 30, 4), expected("b")}, Nodes: room(64)}, ask(4, 1), "4 1", ""},
		"one ahead":                       {plan.Snapshot{Functions: []plan.Function{expected("a")}, Nodes: room(64)}, ask(4), "1", "1 of these before its task comes"},
		"ahead takes no replica":          {plan.Snapshot{Budget: 4, Functions: []plan.Function{served("a", 30, 4), expected("b")}, Nodes: room(64)}, ask(4, 1), "4 0", "none before its task comes, as the budget of 4 gains more elsewhere"},
		"ahead takes no growth":           {plan.Snapshot{Budget: 5, Functions: []plan.Function{served("a", 30, 4), expected("b"), sleeper("c")}, Nodes: room(64)}, ask(5, 1, 1), "4 0 1", "4 of these"},
		"ahead takes no short memory":     {plan.Snapshot{Functions: []plan.Function{served("a", 30, 3), expected("b"), served("c", 30, 3)}, Nodes: room(1)}, ask(4, 1, 4), "4 0 3", "0 of these, as memory is short and gains more elsewhere"},
		"ahead moves nothing":             {plan.Snapshot{Functions: []plan.Function{served("a", 5, 3), expected("b"), served("c", 80, 3)}, Nodes: room(1)}, ask(3, 1, 6), "3 1 6", ""},
		"first is placer's":               {plan.Snapshot{Functions: []plan.Function{served("a", 10, 0), served("b", 18, 0)}, Nodes: room(0)}, ask(3, 3), "1 1", "1 of these, as memory"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := Gain{}.Share(tc.s, tc.ask)
			if err != nil {
				t.Fatal(err)
			}
			counts, why := []string{}, ""
			for i, l := range got {
				counts = append(counts, strconv.Itoa(l.Count))
				if l.Count < tc.ask[i].Count && why == "" {
					why = l.Why
				}
			}
			if c := strings.Join(counts, " "); c != tc.want || !strings.Contains(why, tc.why) {
				t.Errorf("%s (%s), want %s (%s)", c, why, tc.want, tc.why)
			}
		})
	}
	if _, err := (Gain{}).Share(plan.Snapshot{}, ask(1)); err == nil {
		t.Error("a line of no function: no error")
	}
}

// TestGainWeighsPipelines checks that a stage counts with the requests of its pipeline, not only
// with its own rate.
func TestGainWeighsPipelines(t *testing.T) {
	s := plan.Snapshot{Budget: 6, Nodes: []plan.Node{{Name: "n", Memory: 64 << 30}}, Functions: []plan.Function{served("a", 2, 0), served("b", 10, 0), served("c", 10, 0)}}
	s.Functions[0].Max, s.Functions[0].Service.Mean = 1, time.Millisecond
	a := plan.Alloc{{Function: "a", Count: 1}, {Function: "b", Count: 4}, {Function: "c", Count: 4}}
	even, err := Gain{}.Share(s, a)
	if err != nil || even[1].Count != 3 || even[2].Count != 2 {
		t.Fatalf("%v, %v, want the odd one for the first of two that are alike", even, err)
	}
	s.Functions[0].Demand.Rate = 40
	s.Pipelines = []plan.Pipeline{{Name: "p", Stages: []string{"a", "c"}}}
	got, err := Gain{}.Share(s, a)
	if err != nil || got[2].Count <= got[1].Count {
		t.Errorf("%v, %v, want more for the one that a pipeline of 40/s waits for", got, err)
	}
}

func TestFixedAndUniformKeepToTheBudget(t *testing.T) {
	s := plan.Snapshot{At: t0, Functions: []plan.Function{served("a", 2, 0), served("b", 38, 0), served("c", 1, 0)}, Pipelines: []plan.Pipeline{{Name: "p", Stages: []string{"a", "b", "c"}, SLO: time.Second}}}
	s.Functions[2].Max = 2
	d := plan.Domains(s)[0]
	for _, tc := range []struct {
		budget         int
		fixed, uniform string
	}{{0, "1 1 1", "5 5 2"}, {7, "3 2 2", "2 2 2"}, {12, "4 4 2", "4 4 2"}, {1, "1 1 1", "1 1 1"}} {
		s.Budget = tc.budget
		fixed, _, err := Fixed{}.Allocate(s, d, struct{}{})
		uniform, _, err2 := NewUniform(Config{}).Allocate(s, d, nil)
		if err != nil || err2 != nil {
			t.Fatal(err, err2)
		}
		if got := fmt.Sprint(fixed[0].Count, fixed[1].Count, fixed[2].Count); got != tc.fixed {
			t.Errorf("budget %d: fixed %s, want %s", tc.budget, got, tc.fixed)
		}
		if got := fmt.Sprint(uniform[0].Count, uniform[1].Count, uniform[2].Count); got != tc.uniform {
			t.Errorf("budget %d: uniform %s (%s), want %s", tc.budget, got, uniform[0].Why, tc.uniform)
		}
	}
}

// TestGainRisesWithLoad checks that a function gets no fewer replicas if its rate is higher. By
// predicted waits alone, a queue that cannot catch up even with one more replica would gain less
// than a queue that can.
func TestGainRisesWithLoad(t *testing.T) {
	for budget := 4; budget < 16; budget++ {
		had := 0
		for rate := 0.5; rate < 12; rate += 0.02 {
			s := plan.Snapshot{Budget: budget, Nodes: []plan.Node{{Name: "n", Memory: 64 << 30}}, Functions: []plan.Function{slow(served("a", rate, 0)), slow(served("b", 4.5, 0))}}
			a, err := Gain{}.Share(s, plan.Alloc{{Function: "a", Count: 12}, {Function: "b", Count: 12}})
			if err != nil || a[0].Count < had {
				t.Errorf("budget %d, %.2f/s: %v, %v, want at least the %d of a lower rate", budget, rate, a, err, had)
			}
			had = a[0].Count
		}
	}
}

// TestGainCountsWholeDevices checks that a function that declares no device memory takes a whole
// device.
func TestGainCountsWholeDevices(t *testing.T) {
	s := plan.Snapshot{Functions: []plan.Function{served("a", 10, 1), served("b", 10, 1)}, Nodes: []plan.Node{{Name: "n", Memory: 64 << 30, CPUMilli: 64000}}}
	for i := range s.Functions {
		s.Functions[i].GPU = 1
	}
	for i := range 4 { // two are taken
		s.Nodes[0].Devices = append(s.Nodes[0].Devices, plan.Device{ID: string(rune('0' + i)), Memory: 40 << 30, MemoryUsed: int64(i/2) * 40 << 30})
	}
	got, err := Gain{}.Share(s, plan.Alloc{{Function: "a", Count: 4}, {Function: "b", Count: 4}})
	if err != nil || got[0].Count != 2 || got[1].Count != 2 {
		t.Errorf("%+v, %v, want two each", got, err)
	}
}

// TestGainCountsDevicesOfAnySize checks that a function that takes whole devices may also get small
// ones where there are large ones.
func TestGainCountsDevicesOfAnySize(t *testing.T) {
	s := plan.Snapshot{Functions: []plan.Function{served("a", 100, 0), served("b", 100, 0)}, Nodes: []plan.Node{{Name: "n", Memory: 64 << 30, CPUMilli: 64000}}}
	for i := range s.Functions {
		s.Functions[i].GPU = 1
	}
	for i := range 11 {
		d := plan.Device{ID: strconv.Itoa(i), Memory: 24 << 30}
		if i == 0 {
			d.Memory = 80 << 30
		}
		s.Nodes[0].Devices = append(s.Nodes[0].Devices, d)
	}
	got, err := Gain{}.Share(s, plan.Alloc{{Function: "a", Count: 10}, {Function: "b", Count: 10}})
	if err != nil || got[0].Count+got[1].Count != 11 {
		t.Errorf("%+v, %v, want a replica for each of 11 devices", got, err)
	}
}

// TestGainLevelsCapacitiesOfAPipelineBehind checks that the stages of a pipeline that is behind get
// equal capacities, wherever its tasks wait. The reason is that all waiting requests go through all
// stages. A replica that one stage has too many must go to another. Here devices are short, not the
// budget.
func TestGainLevelsCapacitiesOfAPipelineBehind(t *testing.T) {
	for name, tc := range map[string]struct {
		mean  [3]time.Duration
		ready [3]int
		want  string
	}{
		"alike":            {[3]time.Duration{100, 100, 100}, [3]int{10, 1, 1}, "[4 4 4]"},
		"one is slower":    {[3]time.Duration{100, 400, 100}, [3]int{4, 4, 4}, "[2 8 2]"},
		"there are enough": {[3]time.Duration{100, 100, 100}, [3]int{4, 4, 4}, "[4 4 4]"},
	} {
		t.Run(name, func(t *testing.T) {
			s := plan.Snapshot{
				Budget: 20, Nodes: []plan.Node{{Name: "n", Memory: 64 << 30, CPUMilli: 64000}},
				Pipelines: []plan.Pipeline{{Name: "p", Stages: []string{"a", "b", "c"}, Edges: []plan.Edge{{From: 0, To: 1}, {From: 1, To: 2}}}},
			}
			var ask plan.Alloc
			for i, stage := range s.Pipelines[0].Stages {
				f := served(stage, 40, tc.ready[i]) // no more than the first stage lets through
				f.Service.Mean, f.GPU = tc.mean[i]*time.Millisecond, 1
				s.Functions = append(s.Functions, f)
				ask = append(ask, plan.Line{Function: stage, Count: 20})
			}
			s.Functions[0].Demand.Rate, s.Functions[0].Waiting = 200, 700
			for i := range 12 {
				s.Nodes[0].Devices = append(s.Nodes[0].Devices, plan.Device{ID: strconv.Itoa(i), Memory: 40 << 30, MemoryUsed: 40 << 30})
			}
			got, err := Gain{}.Share(s, ask)
			if err != nil {
				t.Fatal(err)
			}
			if counts := fmt.Sprint([]int{got[0].Count, got[1].Count, got[2].Count}); counts != tc.want {
				t.Errorf("%s, want %s", counts, tc.want)
			}
		})
	}
}

// TestGainKeepsReplicasWhereABurstArrives checks how three stages that are alike share six replicas
// while calls wait at one of them. If starts are slow, the stages behind the line keep theirs,
// because the calls arrive there before a replica could start. If starts are quick, replicas follow
// the line.
func TestGainKeepsReplicasWhereABurstArrives(t *testing.T) {
	for name, tc := range map[string]struct {
		start   time.Duration
		waiting [3]int
		want    string
	}{
		"at the first, slow starts":  {2 * time.Second, [3]int{16, 0, 0}, "[2 2 2]"},
		"at the first, quick starts": {10 * time.Millisecond, [3]int{16, 0, 0}, "[4 1 1]"},
		"at the last, slow starts":   {2 * time.Second, [3]int{0, 0, 16}, "[1 1 4]"},
		"at the last, quick starts":  {10 * time.Millisecond, [3]int{0, 0, 16}, "[1 1 4]"},
	} {
		t.Run(name, func(t *testing.T) {
			s := plan.Snapshot{
				Budget: 6, Nodes: []plan.Node{{Name: "n", Memory: 64 << 30, CPUMilli: 64000}},
				Pipelines: []plan.Pipeline{{Name: "p", Stages: []string{"a", "b", "c"}, Edges: []plan.Edge{{From: 0, To: 1}, {From: 1, To: 2}}}},
			}
			var ask plan.Alloc
			for i, stage := range s.Pipelines[0].Stages {
				f := served(stage, 1, 2)
				f.Waiting, f.Starts = tc.waiting[i], []plan.Start{{N: 1, Mean: tc.start}}
				s.Functions = append(s.Functions, f)
				ask = append(ask, plan.Line{Function: stage, Count: 4})
			}
			got, err := Gain{}.Share(s, ask)
			if err != nil {
				t.Fatal(err)
			}
			if counts := fmt.Sprint([]int{got[0].Count, got[1].Count, got[2].Count}); counts != tc.want {
				t.Errorf("%s, want %s", counts, tc.want)
			}
		})
	}
}
