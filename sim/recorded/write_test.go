package recorded

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/sim"
)

// TestAnyNameIsReadAsItWas writes names that YAML could take for something else.
func TestAnyNameIsReadAsItWas(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"true", "No", "null", "film", "a.shop", "1", "-", "a: b", "a #b", "{x}", "é\n\t\"q\"", "a,b", " "} {
		run := Run{Scenario: sim.Scenario{Name: name, Hop: pointer(time.Duration(0)), Stages: []sim.Stage{{Variant: sim.Variant{Name: name}, Next: []string{name, "x"}}}}}
		var text bytes.Buffer
		if err := run.WriteScenario(&text, "x"); err != nil {
			t.Fatal(err)
		}
		got, err := sim.Parse(strings.NewReader(text.String()))
		if err != nil || got.Name != name || got.Stages[0].Name != name || got.Stages[0].Next[0] != name || got.Hop == nil {
			t.Errorf("%q: %v, %+v\n%s", name, err, got, text.String())
		}
	}
}

// TestEachPanelHasItsStage changes the replicas of one stage, recorded and simulated.
func TestEachPanelHasItsStage(t *testing.T) {
	t.Parallel()
	draw := func(recorded, simulated int) string {
		r := Report{Recorded: Outcome{T: []float64{0, 1}, Stages: []StageOutcome{{Name: "b", Replicas: []int{1, recorded}}}}}
		r.Simulated.Stages = []string{"a", "b"}
		r.Simulated.Policies = []sim.PolicyResult{{Name: "p", Series: sim.Series{
			T: []float64{0, 1}, Offered: []float64{1, 1}, Latency: []float64{1, 0}, Replicas: [][]int{{1, 1}, {1, simulated}},
		}}}
		var svg bytes.Buffer
		if err := r.WriteSVG(&svg); err != nil {
			t.Fatal(err)
		}
		return svg.String()
	}
	if same := draw(2, 3); draw(3, 3) == same || draw(2, 2) == same || draw(2, 3) != same {
		t.Error("the panel of b does not show its replicas")
	}
}
