package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/sim"
)

// TestStudyWritesTheTableAndTheCurve runs the study with short runs.
func TestStudyWritesTheTableAndTheCurve(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "price.svg")
	var out bytes.Buffer
	if err := run(t.Context(), []string{"--svg", file, "--seeds", "2", "--duration", "40s"}, &out); err != nil {
		t.Fatal(err)
	}
	if lines := strings.Count(out.String(), "\n"); lines != len(prices)+2 || !strings.Contains(out.String(), "\n| 100 | ") {
		t.Errorf("%d lines in\n%s", lines, out.String())
	}
	svg, err := os.ReadFile(file)
	if err != nil || !strings.HasPrefix(string(svg), "<svg ") || strings.Count(string(svg), "<polyline") < 2 || strings.Contains(string(svg), "NaN") {
		t.Errorf("%v: %.2000s", err, svg)
	}
	if err := run(t.Context(), []string{"--seeds", "1"}, &out); err == nil || !strings.Contains(err.Error(), "--seeds: 1, want at least 2") {
		t.Errorf("got %v", err)
	}
}

// TestAHigherPriceBuysLatency checks the study's result on a few minutes: each price saves latency,
// costs replicas, and pays about what it says.
func TestAHigherPriceBuysLatency(t *testing.T) {
	t.Parallel()
	rows, err := study(t.Context(), []float64{0, 1, 10, 100}, 4, 8*time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	for i := 1; i < len(rows); i++ {
		before, r := rows[i-1], rows[i]
		if r.latency.Mean >= before.latency.Mean || r.replicas.Mean <= before.replicas.Mean {
			t.Errorf("price %g: %v s with %v replicas; price %g: %v s with %v", r.price, r.latency, r.replicas, before.price, before.latency, before.replicas)
		}
		if !r.known || r.paid > 1.1*r.price || r.paid < before.price/1.1 {
			t.Errorf("price %g: paid %g, want between the price before, %g, and this one", r.price, r.paid, before.price)
		}
	}
}

// TestPaidIsSpentOverSaved computes what was paid by hand: 2 replicas for 0.1 s of 5 requests per
// second. A saving that may be chance has no price.
func TestPaidIsSpentOverSaved(t *testing.T) {
	of := func(mean, replicas float64) sim.Figures {
		return sim.Figures{Seconds: 10, ReplicaSeconds: 10 * replicas, Pipelines: []sim.PipelineFigures{{Offered: 50, Mean: mean}}}
	}
	got, known := paid([]sim.Figures{of(0.5, 3), of(0.7, 4)}, []sim.Figures{of(0.4, 5), of(0.6, 6)})
	if !known || got < 3.999 || got > 4.001 {
		t.Errorf("%g, %t, want 4", got, known)
	}
	if _, known := paid([]sim.Figures{of(0.5, 3), of(0.7, 4)}, []sim.Figures{of(0.2, 5), of(0.8, 6)}); known {
		t.Error("a price of a saving that one seed of two has")
	}
}
