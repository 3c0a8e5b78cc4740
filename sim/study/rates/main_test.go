package main

import (
	"bytes"
	"strings"
	"testing"
)

// TestStepsAreFollowed measures some cells of docs/rates.md with fewer seeds.
func TestStepsAreFollowed(t *testing.T) {
	for _, c := range []change{
		{Kind: "step", Rate: 20, CV: 1, Factor: 4},
		{Kind: "step", Rate: 20, CV: 1, Factor: 0.25},
		{Kind: "step", Rate: 100, CV: 4, Factor: 0.25},
		{Kind: "ramp", Rate: 20, CV: 2, Factor: 4},
		{Kind: "spike", Rate: 20, CV: 1, Factor: 1},
	} {
		c.measure(40)
		if c.Now.Within < 0.8 {
			t.Errorf("%+v: want most runs within the goal", c)
		}
		if c.Kind == "step" && c.Now.Seconds > 5 {
			t.Errorf("%+v: want the step seen within 5 s", c)
		}
		if c.Factor < 1 && c.Before.Within > 0.5 {
			t.Errorf("%+v: want the rule of before to miss it, as in the table", c)
		}
	}
}

func TestSteadyRatesHaveFewFalseChanges(t *testing.T) {
	s := steady{Rate: 20, CV: 2}
	s.measure(2 * 3600)
	if s.FalseHr > 1 || s.Now > 0.2 || s.Before > 0.1 || s.CVs < 1.8 || s.CVs > 2.2 {
		t.Errorf("%+v, want at most one false change per hour, and small errors", s)
	}
}

func TestTablesHaveAllCells(t *testing.T) {
	var b bytes.Buffer
	in := tables{
		Changes: []change{{Kind: "step", Rate: 20, CV: 2, Factor: 4, Before: follow{0.21, 2}, Now: follow{0.95, 1}}},
		Steady:  []steady{{Rate: 20, CV: 2, Before: 0.07, Now: 0.1, FalseHr: 0.3, CVs: 2}},
	}
	if err := write(&b, in); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"| 2 | 20 |", "21 → 95 (2 → 1 s)", "| 2 | 20 | 7 % | 10 % | 0.30 | 2.00 |"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in\n%s", want, b.String())
		}
	}
}
