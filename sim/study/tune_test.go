package study

import (
	"bytes"
	"encoding/json"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// TestHalton checks the first numbers of two bases against values computed by hand. In base 3, the
// digits 1 and 2 are swapped.
func TestHalton(t *testing.T) {
	for base, want := range map[int][]float64{2: {0.5, 0.25, 0.75, 0.125}, 3: {2. / 3, 1. / 3, 2. / 9, 8. / 9, 5. / 9}} {
		for i, w := range want {
			if got := halton(i+1, base); math.Abs(got-w) > 1e-12 {
				t.Errorf("number %d of base %d: %g, want %g", i+1, base, got, w)
			}
		}
	}
}

// TestCandidatesSpreadOverTheSpace checks that defaults come first, that no candidate comes twice,
// and that all are in the space and spread over it.
func TestCandidatesSpreadOverTheSpace(t *testing.T) {
	c := Contender{
		Space: []Knob{
			{Name: "line", Low: -1, High: 1},
			{Name: "log", Low: 0.001, High: 1000, Log: true},
			{Name: "whole", Low: 1, High: 4, Whole: true},
			{Name: "whole log", Low: 1, High: 64, Whole: true, Log: true},
			{Name: "listed", Values: []float64{3, 7, 11}},
		},
		Defaults: []float64{5, 5, 5, 5, 5}, // published values may be outside
	}
	all := c.Candidates(24)
	if len(all) != 24 || !slices.Equal(all[0], c.Defaults) || !reflect.DeepEqual(all, c.Candidates(24)) || !reflect.DeepEqual(all[:7], c.Candidates(7)) {
		t.Fatalf("%d candidates from %v on, want 24, the defaults first, always the same", len(all), all[0])
	}
	var below [5]int // of the 23 others, the number in the lower half
	var seen [2]map[float64]int
	seen[0], seen[1] = map[float64]int{}, map[float64]int{}
	for i, p := range all[1:] {
		for d, middle := range []float64{0, 1, 2.5, 8, 7} {
			if p[d] < middle {
				below[d]++
			}
		}
		if p[0] < -1 || p[0] > 1 || p[1] < 0.001 || p[1] > 1000 || p[3] < 1 || p[3] > 64 || p[3] != math.Floor(p[3]) {
			t.Errorf("candidate %d: %v", i+1, p)
		}
		seen[0][p[2]]++
		seen[1][p[4]]++
		if slices.IndexFunc(all, func(q []float64) bool { return slices.Equal(p, q) }) != i+1 {
			t.Errorf("%v twice", p)
		}
	}
	for d, n := range below[:4] {
		if n < 9 || n > 14 {
			t.Errorf("%s: %d of 23 in the lower half", c.Space[d].Name, n)
		}
	}
	for i, want := range []int{4, 3} {
		if len(seen[i]) != want {
			t.Errorf("got %v, want %d values", seen[i], want)
		}
	}
	little := Contender{Space: []Knob{{Name: "level", Low: 1, High: 3, Whole: true}}, Defaults: []float64{2}}
	if got := little.Candidates(24); len(got) != 3 {
		t.Errorf("%v, want the three there are", got)
	}
	if got := (Contender{}).Candidates(24); len(got) != 1 || len(got[0]) != 0 {
		t.Errorf("%v, want one without knobs", got)
	}
}

// TestChooseTakesTheBestWithinTheBudget checks that the smallest score within the budget is chosen,
// or the fewest GPUs if no point is within it. Of equal points, the first is chosen.
func TestChooseTakesTheBestWithinTheBudget(t *testing.T) {
	for name, tc := range map[string]struct {
		points []Point
		want   int
	}{
		"one":                    {[]Point{{GPUs: 99}}, 0},
		"least score":            {[]Point{{GPUs: 10, Score: 2}, {GPUs: 24, Score: 1}, {GPUs: 5, Score: 3}}, 1},
		"over the budget":        {[]Point{{GPUs: 10, Score: 2}, {GPUs: 24.1, Score: 0}, {GPUs: 20, Score: 1}}, 2},
		"the default is over it": {[]Point{{GPUs: 30, Score: 0}, {GPUs: 24, Score: 5}, {GPUs: 26, Score: 1}}, 1},
		"all are over it":        {[]Point{{GPUs: 30, Score: 0}, {GPUs: 26, Score: 5}, {GPUs: 28, Score: 1}}, 1},
		"equals":                 {[]Point{{GPUs: 10, Score: 2}, {GPUs: 9, Score: 1}, {GPUs: 8, Score: 1}}, 1},
	} {
		if got := Choose(tc.points, 24); got != tc.want {
			t.Errorf("%s: point %d, want %d", name, got, tc.want)
		}
	}
}

// TestMergeRefusesChoicesMadeInAnotherWay checks that Merge replaces older choices by newer ones
// only if both were made in the same way, and that a file with wrong content is refused.
func TestMergeRefusesChoicesMadeInAnotherWay(t *testing.T) {
	choice := func(group, contender string, gpus float64) Choice {
		return Choice{Group: group, Contender: contender, Knobs: []string{"level", "spare"}, Points: []Point{{Knobs: []float64{1, 0}, GPUs: gpus}}}
	}
	older := Tuned{Schema: TunedSchema, Study: "small", Choices: []Choice{choice("load 80", "one", 1), choice("load 10", "two", 1)}}
	newer := Tuned{Schema: TunedSchema, Study: "small", Choices: []Choice{choice("load 10", "two", 2), choice("load 10", "one", 2)}}
	got, err := older.Merge(newer)
	want := []Choice{choice("load 80", "one", 1), choice("load 10", "two", 2), choice("load 10", "one", 2)}
	if err != nil || !reflect.DeepEqual(got.Choices, want) || older.Choices[1].Points[0].GPUs != 1 {
		t.Errorf("%v: got %+v, want %+v", err, got.Choices, want)
	}
	newer.Budget = 7
	if _, err := older.Merge(newer); err == nil || !strings.Contains(err.Error(), "want as before") {
		t.Errorf("got %v, want that it was another budget", err)
	}
	read := func(t2 Tuned, study string) (Tuned, error) {
		text, err := json.Marshal(t2)
		if err != nil {
			t.Fatal(err)
		}
		return ReadTuned(bytes.NewReader(text), study)
	}
	if back, err := read(got, "small"); err != nil || !reflect.DeepEqual(back, got) {
		t.Errorf("%v: %+v came back as %+v", err, got, back)
	}
	if _, err := read(got, "large"); err == nil || !strings.Contains(err.Error(), `of study "small", want`) {
		t.Errorf("got %v, want that it is another study's", err)
	}
	for _, chosen := range []int{-1, 1} {
		got.Choices[0].Chosen = chosen
		if _, err := read(got, "small"); err == nil || !strings.Contains(err.Error(), "of 1, want one with 2 knobs") {
			t.Errorf("point %d of one: got %v", chosen, err)
		}
	}
	if _, err := ReadTuned(strings.NewReader(`{"schemes": 1}`), "small"); err == nil {
		t.Error("an unknown field is an error")
	}
}

func FuzzCandidates(f *testing.F) {
	f.Add(1.0, 64.0, true, true, uint8(24))
	f.Add(0.001, 1000.0, true, false, uint8(5))
	f.Add(-3.0, 9.0, false, true, uint8(100))
	f.Fuzz(func(t *testing.T, low, high float64, log, whole bool, n uint8) {
		k := Knob{Name: "x", Low: low, High: high, Log: log, Whole: whole}
		if k.check() != nil || n == 0 {
			return
		}
		all := (Contender{Space: []Knob{k}, Defaults: []float64{low}}).Candidates(int(n))
		if len(all) > int(n) {
			t.Fatalf("%d candidates, want at most %d", len(all), n)
		}
		for i, p := range all {
			slack := 1e-5 * max(math.Abs(low), math.Abs(high)) // six digits are kept
			if !(p[0] >= low-slack && p[0] <= high+slack) || slices.IndexFunc(all, func(q []float64) bool { return q[0] == p[0] }) != i {
				t.Fatalf("candidate %d of %+v: %v", i, k, p)
			}
		}
	})
}
