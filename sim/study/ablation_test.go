package study

import (
	"bytes"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/sim"
)

// TestReportSaysWhereAPartChangesNoDecision checks that an ablation that decides as the whole is
// named, and that one that decides otherwise in some runs is counted.
func TestReportSaysWhereAPartChangesNoDecision(t *testing.T) {
	s := small()
	same := s.Contenders[2] // on the setting "busy"
	other := same
	other.Name, other.Title = "other", "OTHER"
	other.Apply = func(x sim.Scenario, k []float64) sim.Scenario {
		x = same.Apply(x, k)
		x.Stages[1].Min++
		x.Stages[1].Max++
		return x
	}
	s.Contenders = append(s.Contenders, other)
	r := run2(t, s)
	if n, of := differ(r, "part", settingsOf(r, "load 80")); n != 0 || of != 3 {
		t.Errorf("the same decisions: %d of %d runs differ, want 0 of 3", n, of)
	}
	if n, of := differ(r, "other", settingsOf(r, "load 80")); n != 3 || of != 3 {
		t.Errorf("one replica more: %d of %d runs differ, want 3 of 3", n, of)
	}
	var b bytes.Buffer
	if err := r.WriteMarkdown(&b); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"say nothing about the part: PART (3 runs).", "| 0 of 3 ", "| 3 of 3 "} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("the report has no %q", want)
		}
	}
}
