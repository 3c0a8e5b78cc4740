package bench

import (
	"strings"
	"testing"
	"time"
)

func TestQuantileIsLeftOutWhenTheSampleIsTooSmall(t *testing.T) {
	sample := make([]time.Duration, 99)
	for i := range sample {
		sample[i] = time.Duration(99 - i)
	}
	if v, ok := Quantile(sample, 0.99); ok {
		t.Errorf("p99 of 99 observations = %v, want none", v)
	}
	sample = append(sample, 100)
	if v, ok := Quantile(sample, 0.99); !ok || v != 99 {
		t.Errorf("p99 of 1..100 = %v, %v, want 99", v, ok)
	}
	if v, ok := Quantile(sample, 0.5); !ok || v != 50 {
		t.Errorf("median of 1..100 = %v, %v, want 50", v, ok)
	}
	if _, ok := Quantile(sample[:1], 0.5); ok {
		t.Error("a median of one observation")
	}
}

func TestTableHasOneLinePerCase(t *testing.T) {
	r := &Report{Bench: "x"}
	r.Add("a", "m1", 1, 3)
	r.Add("b", "m2", 2.5, 4)
	r.With("torch", "1.13")
	r.Goals = []Goal{{"at least 2", 2.5, true}, {"at least 3", 2.5, false}}
	var b strings.Builder
	if err := r.WriteTable(&b); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(b.String()), "\n")
	if len(lines) != 6 || !strings.Contains(lines[3], "2.5 (n=4)") || !strings.HasSuffix(lines[0], ", torch 1.13") ||
		lines[4] != "goal: at least 2: 2.5, met" || lines[5] != "goal: at least 3: 2.5, missed" {
		t.Errorf("table:\n%s", b.String())
	}
}
