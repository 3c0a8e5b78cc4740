package scale

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
	"github.com/stagecoach-serving/stagecoach/bench"
)

// TestDecisionsAreThoseOfTheProduct checks that the timed policies decide as the default ones do,
// that all replicas get a place, and that a plan that was carried out leaves nothing to do.
func TestDecisionsAreThoseOfTheProduct(t *testing.T) {
	z := sized(40)
	m, err := newMeter()
	if err != nil {
		t.Fatal(err)
	}
	set, err := policy.Names{}.Choose()
	if err != nil {
		t.Fatal(err)
	}
	s := z.cluster()
	var memory policy.Memory
	for round := range 4 {
		want, _, _, err := set.Decide(s, memory)
		if err != nil {
			t.Fatal(err)
		}
		got, next, err := m.decide(s, memory)
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("round %d: %+v, want %+v", round, got, want)
		}
		slots, fresh := 0, 0
		for _, w := range got.Wants {
			slots += len(w.Slots)
			if w.Short != "" {
				t.Errorf("round %d: %s is short: %s", round, w.Function, w.Short)
			}
			for _, slot := range w.Slots {
				if slot.Replica == "" {
					fresh++
				}
			}
		}
		if most := z.replicas * 6 / 5; slots < z.replicas*4/5 || slots > most {
			t.Errorf("round %d: %d replicas, want about %d", round, slots, z.replicas)
		}
		if round == 3 && fresh > 0 {
			t.Errorf("%d new replicas, want none: nothing has changed", fresh)
		}
		s, memory = apply(s, got), next
	}
}

// TestRunReportsEachStage runs the bench on small clusters.
func TestRunReportsEachStage(t *testing.T) {
	svg := filepath.Join(t.TempDir(), "scale.svg")
	var out strings.Builder
	if err := Run(t.Context(), []string{"--json", "--nodes", "5,10", "--runs", "2", "--svg", svg}, &out); err != nil {
		t.Fatal(err)
	}
	var report bench.Report
	if err := json.Unmarshal([]byte(out.String()), &report); err != nil {
		t.Fatal(err)
	}
	if want := 2 * 2 * 2 * len(stages); len(report.Results) != want { // sizes, states, time and memory
		t.Errorf("%d figures, want %d: %+v", len(report.Results), want, report.Results)
	}
	for _, r := range report.Results {
		if r.Value < 0 || r.Value == 0 && strings.HasSuffix(r.Metric, "decide_ms") {
			t.Errorf("%s of %s is %v", r.Metric, r.Case, r.Value)
		}
	}
	if b, err := os.ReadFile(svg); err != nil || !strings.Contains(string(b), "validate") {
		t.Errorf("chart: %d bytes, %v", len(b), err)
	}
	if err := Run(t.Context(), []string{"--nodes", "0"}, &out); err == nil {
		t.Error("no error for 0 nodes")
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Run(ended, []string{"--nodes", "5"}, &out); err == nil {
		t.Error("no error after the context has ended")
	}
}

// BenchmarkDecide measures one decision from nothing.
func BenchmarkDecide(b *testing.B) {
	m, err := newMeter()
	if err != nil {
		b.Fatal(err)
	}
	s := sized(300).cluster()
	for b.Loop() {
		if _, _, _, err := m.set.Decide(s, nil); err != nil {
			b.Fatal(err)
		}
	}
}
