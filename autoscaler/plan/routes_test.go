package plan

import (
	"reflect"
	"strings"
	"testing"
	"time"
)

// lanedSnapshot has a diamond whose stages left and end have variants, and a variant of a variant.
func lanedSnapshot() Snapshot {
	var s Snapshot
	for _, f := range [][2]string{{"end", ""}, {"end-2", "end"}, {"left", ""}, {"left-2", "left"}, {"odd", "left-2"}, {"right", ""}, {"start", ""}} {
		s.Functions = append(s.Functions, Function{Name: f[0], Variant: Variant{VariantOf: f[1]}, Max: 1})
	}
	s.Pipelines = []Pipeline{{
		Name: "p", Stages: []string{"start", "left", "right", "end"}, SLO: time.Second,
		Edges: []Edge{{From: 0, To: 1}, {From: 0, To: 2}, {From: 1, To: 3}, {From: 2, To: 3}},
	}}
	return s
}

func TestLanesAndSources(t *testing.T) {
	t.Parallel()
	s := lanedSnapshot()
	d := Domains(s)
	if len(d) != 1 || len(d[0].Functions) != 7 {
		t.Fatalf("domains %+v, want one with every function", d)
	}
	lanes := s.Lanes()
	if want := []Lanes{{"end", []string{"end", "end-2"}}, {"left", []string{"left", "left-2"}}}; !reflect.DeepEqual(lanes, want) || !reflect.DeepEqual(s.LanesIn(d[0]), want) {
		t.Errorf("lanes %+v, want %+v", lanes, want)
	}
	steps := s.Steps(d[0])
	for stage, want := range map[string][]string{"start": {""}, "left": {"", "start"}, "end": {"", "*"}} {
		if got := Sources(steps, lanes, stage); !reflect.DeepEqual(got, want) {
			t.Errorf("sources of %s: %q, want %q", stage, got, want)
		}
	}
	s.Pipelines[0].Edges = s.Pipelines[0].Edges[:3] // no join
	if got := Sources(s.Steps(d[0]), lanes, "end"); !reflect.DeepEqual(got, []string{"", "left", "left-2"}) {
		t.Errorf("sources of end without a join: %q, want each lane of left", got)
	}
}

// TestVariantsOfAMissingStageAreInItsDomain removes the stage's own function, in and outside a
// pipeline.
func TestVariantsOfAMissingStageAreInItsDomain(t *testing.T) {
	t.Parallel()
	s := Snapshot{Functions: []Function{{Name: "a"}, {Name: "x", Variant: Variant{VariantOf: "gone"}}, {Name: "y", Variant: Variant{VariantOf: "gone"}}}}
	names := func() (out []string) {
		for _, d := range Domains(s) {
			out = append(out, strings.Join(d.Functions, " "))
		}
		return out
	}
	if got := names(); !reflect.DeepEqual(got, []string{"a", "x y"}) {
		t.Errorf("domains %q, want the variants in one", got)
	}
	s.Pipelines = []Pipeline{{Name: "p", Stages: []string{"a", "gone"}}}
	if got := names(); !reflect.DeepEqual(got, []string{"a x y"}) {
		t.Errorf("domains %q, want one for the pipeline", got)
	}
	if got := s.Lanes(); !reflect.DeepEqual(got, []Lanes{{"gone", []string{"x", "y"}}}) {
		t.Errorf("lanes %+v, want both variants", got)
	}
}

func TestValidateFindsFaultsOfRoutes(t *testing.T) {
	t.Parallel()
	row := func(lanes ...string) Row {
		var l Level
		for _, lane := range lanes {
			l.Shares = append(l.Shares, Share{lane, 1 / float64(len(lanes))})
		}
		return Row{Levels: []Level{l}}
	}
	left := NewTable("left", 1, map[string]Row{"": row("left", "left-2"), "start": row("left-2")})
	end := NewTable("end", 1, map[string]Row{"": row("end", "end-2"), "*": row("end-2")})
	for name, tc := range map[string]struct {
		tables   []Table
		excluded []Chain
		rank     string
		want     string
	}{
		"sound":           {tables: []Table{end, left}, excluded: []Chain{{"start", "left"}, {"left-2", "end"}, {"start", "left-2", "end"}}, rank: "fair"},
		"no table":        {tables: []Table{left}, want: `stage "end": no table, want one for its lanes end, end-2`},
		"twice":           {tables: []Table{end, end, left}, want: `"end" after "end"`},
		"not laned":       {tables: []Table{end, left, NewTable("right", 1, map[string]Row{"": row("right")})}, want: `table of stage "right": want none`},
		"wrong lane":      {tables: []Table{NewTable("end", 1, map[string]Row{"": row("odd")}), left}, want: `lane "odd"`},
		"routed":          {tables: []Table{end, left}, excluded: []Chain{{"start", "left-2"}}, want: `"start > left-2": the tables route`},
		"routed to join":  {tables: []Table{end, left}, excluded: []Chain{{"start", "left-2", "end-2"}}, want: "the tables route"},
		"never there":     {tables: []Table{end, left}, excluded: []Chain{{"left", "end-2"}}},
		"no step":         {tables: []Table{end, left}, excluded: []Chain{{"start", "end"}}, want: `no step of a pipeline leads from "start" to "end"`},
		"short":           {tables: []Table{end, left}, excluded: []Chain{{"start"}}, want: "at least two lanes"},
		"rank":            {tables: []Table{end, left}, rank: "lifo", want: `rank "lifo", want one of fair, fifo, least-slack`},
		"no table at all": {want: "no table"},
	} {
		s := lanedSnapshot()
		p := Plan{Tables: tc.tables, Excluded: tc.excluded}
		for _, f := range s.Functions {
			p.Wants = append(p.Wants, Want{Function: f.Name, Short: "none", Rank: tc.rank})
		}
		err := p.Validate(s)
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%s: %v, want %q", name, err, tc.want)
		}
	}
}

func TestBudgetsAreExceededByResource(t *testing.T) {
	t.Parallel()
	b := Budget{Replicas: 4, CPUMilli: 1000, Memory: 100, Devices: []DevicePool{{16, 32}, {64, 64}}}
	plain := &Function{Name: "f", CPUMilli: 300, Memory: 30}
	whole, part := &Function{Name: "w", GPU: 1}, &Function{Name: "p", GPU: 1, DeviceMemory: 20}
	for name, tc := range map[string]struct {
		functions []*Function
		counts    []int
		want      string
	}{
		"fits":          {[]*Function{plain}, []int{3}, ""},
		"replicas":      {[]*Function{plain}, []int{5}, "replicas"},
		"cpu":           {[]*Function{plain}, []int{4}, "CPU"},
		"memory":        {[]*Function{{Memory: 60}}, []int{2}, "memory"},
		"whole devices": {[]*Function{whole}, []int{3}, ""},
		"too many":      {[]*Function{whole}, []int{4}, "device memory"},
		"parts":         {[]*Function{part}, []int{3}, ""}, // the small devices are too small
		"too many part": {[]*Function{part}, []int{4}, "device memory"},
		"parts first":   {[]*Function{whole, part}, []int{2, 2}, ""},
		"no room left":  {[]*Function{whole, part}, []int{3, 1}, "device memory"},
	} {
		if got := b.Exceeded(tc.functions, tc.counts); got != tc.want {
			t.Errorf("%s: %q, want %q", name, got, tc.want)
		}
	}
	f := &Function{Name: "f", Min: 2, Max: 9}
	b.Most = []Most{{"e", 1}, {"f", 4}}
	if got := b.AtMost(f); got != 4 {
		t.Errorf("at most %d, want 4", got)
	}
	if b.Most[1].Count = 1; b.AtMost(f) != 2 {
		t.Errorf("at most %d, want the minimum, 2", b.AtMost(f))
	}
}
