package plan

import (
	"strings"
	"testing"
	"time"
)

const ms = time.Millisecond

// profiled returns a function that chooses its batch up to most, with the time of 1, 2, 4, … calls
// at one core.
func profiled(name string, most int, times ...time.Duration) Function {
	f := Function{Name: name, CPULimit: 1000, Batch: 1}
	f.AutoBatch = most
	for i, d := range times {
		f.Profile = append(f.Profile, Point{CPUMilli: 1000, Batch: 1 << i, Mean: d, N: 10})
	}
	return f
}

func TestAutoBatchIsTheLargestThatFitsTheShare(t *testing.T) {
	linear := []time.Duration{10 * ms, 20 * ms, 40 * ms, 80 * ms}
	measured := Function{Name: "b", Service: Service{Known: true, Mean: 30 * ms}}
	learned := Function{Name: "c"}
	learned.Learned.Known, learned.Learned.Mean = true, 40*ms
	chain := Pipeline{Name: "p", Stages: []string{"a", "b", "c"}, Edges: []Edge{{From: 0, To: 1}, {From: 1, To: 2}}, SLO: 800 * ms}
	variant := profiled("v", 8, 20*ms, 40*ms, 80*ms, 160*ms)
	variant.VariantOf = "a"
	alone := profiled("a", 8, linear...)
	alone.Objective = 90 * ms
	quotas := profiled("a", 8, linear...)
	quotas.CPULimit, quotas.Objective = 600, time.Second
	quotas.Profile = []Point{{CPUMilli: 250, Batch: 1, Mean: ms}, {CPUMilli: 500, Batch: 1, Mean: 10 * ms}, {CPUMilli: 500, Batch: 2, Mean: 20 * ms}, {CPUMilli: 1000, Batch: 8, Mean: ms}}
	throttled := quotas
	throttled.CPUNow = 300
	lengths := profiled("a", 8, linear...)
	lengths.Objective = 90 * ms
	lengths.Profile = []Point{
		{CPUMilli: 1000, Batch: 1, Length: 8, Mean: ms},
		{CPUMilli: 1000, Batch: 1, Length: 64, Mean: 10 * ms},
		{CPUMilli: 1000, Batch: 4, Length: 8, Mean: 4 * ms},
		{CPUMilli: 1000, Batch: 4, Length: 64, Mean: 60 * ms},
	}
	falling := profiled("a", 8, 100*ms, 80*ms, 30*ms, 260*ms)
	falling.Objective = 250 * ms
	little := profiled("a", 8, 100*ms, 91*ms, 100*ms, 260*ms)
	little.Objective = 250 * ms
	slow := profiled("a", 8, 100*ms, 200*ms)
	slow.Objective = 150 * ms
	branches := Pipeline{Name: "q", Stages: []string{"a", "b", "c"}, Edges: []Edge{{From: 0, To: 1}, {From: 0, To: 2}}, SLO: 500 * ms}
	for name, tc := range map[string]struct {
		functions []Function
		pipelines []Pipeline
		want      int
		why       string
	}{
		"alone":                       {[]Function{alone}, nil, 4, "batch 4 of up to 8: it takes 40ms, at most half of the share 90ms of the objective 90ms"},
		"no profile":                  {[]Function{profiled("a", 8)}, nil, 1, "no profile"},
		"no objective":                {[]Function{profiled("a", 8, linear...)}, []Pipeline{{Name: "p", Stages: []string{"a"}}}, 1, "no objective"},
		"in another pipeline":         {[]Function{profiled("a", 8, linear...)}, []Pipeline{{Name: "p", Stages: []string{"x"}, SLO: time.Hour}}, 1, "no objective"},
		"a limit":                     {[]Function{profiled("a", 3, linear...)}, []Pipeline{{Name: "p", Stages: []string{"a"}, SLO: time.Hour}}, 2, "batch 2 of up to 3: it takes 20ms, at most half of the share 1h0m0s of the objective 1h0m0s; a batch of 8 would be in time too"},
		"an eighth of a chain":        {[]Function{profiled("a", 8, linear...), measured, learned}, []Pipeline{chain}, 4, "share 100ms of the objective 800ms"},
		"in the middle of a chain":    {[]Function{profiled("a", 8, linear...), measured, learned}, []Pipeline{{Name: "p", Stages: []string{"b", "a", "c"}, Edges: chain.Edges, SLO: 800 * ms}}, 4, "share 100ms of the objective 800ms"},
		"the longest branch":          {[]Function{profiled("a", 8, linear...), measured, learned}, []Pipeline{branches}, 4, "share 100ms of the objective 500ms"},
		"the smallest share":          {[]Function{profiled("a", 8, linear...), measured, learned}, []Pipeline{{Name: "r", Stages: []string{"a"}, SLO: 40 * ms}, chain}, 2, "share 40ms of the objective 40ms"},
		"stages of unknown time":      {[]Function{profiled("a", 8, linear...)}, []Pipeline{chain}, 8, "share 800ms"},
		"a variant":                   {[]Function{variant, profiled("a", 8, linear...), measured, learned}, []Pipeline{chain}, 4, "share 177.8ms"},
		"the quota below the limit":   {[]Function{quotas}, nil, 2, "it takes 20ms"},
		"a quota that a plan lowered": {[]Function{throttled}, nil, 1, "it takes 1ms"},
		"the slowest length":          {[]Function{lengths}, nil, 1, "it takes 10ms"},
		"times that fall":             {[]Function{falling}, nil, 4, "it takes 100ms, at most half of the share 250ms of the objective 250ms; the profile says that a batch of 2 takes less than a smaller one"},
		"times that fall a little":    {[]Function{little}, nil, 4, "of the objective 250ms"},
		"one call is too slow":        {[]Function{slow}, nil, 1, "one call takes 100ms, more than half of the share 150ms"},
	} {
		s := Snapshot{Functions: tc.functions, Pipelines: tc.pipelines}
		got, why := s.AutoBatch(0)
		if got != tc.want || !strings.Contains(why, tc.why) {
			t.Errorf("%s: %d, %q, want %d and %q", name, got, why, tc.want, tc.why)
		}
	}
}

func TestOnlyFunctionsThatAskChooseTheirBatch(t *testing.T) {
	fixed := profiled("b", 0, 10*ms, 20*ms)
	fixed.Batch, fixed.Objective = 7, time.Hour
	auto := profiled("a", 2, 10*ms, 20*ms)
	auto.Objective = time.Hour
	s := Snapshot{Functions: []Function{auto, fixed}}
	s.ChooseBatches()
	if a, b := s.Functions[0].Batch, s.Functions[1].Batch; a != 2 || b != 7 {
		t.Errorf("batches %d and %d, want 2 and 7", a, b)
	}
}
