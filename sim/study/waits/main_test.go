package main

import (
	"bytes"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestQueueAgainstTheTextbook compares simulated M/M/1 and M/M/2 sojourns with exact quantiles.
func TestQueueAgainstTheTextbook(t *testing.T) {
	for _, c := range simulate("gamma", gammaGaps(1), 1, 0.5, 1, rand.New(rand.NewPCG(1, 2))) {
		for part, p := range map[float64]Predicted{0.5: c.P50, 0.95: c.P95} {
			if c.Servers == 1 && !c.Fixed {
				if want := -2 * math.Log(1-part); math.Abs(p.Simulated-want) > 0.03*want || math.Abs(p.Model-want) > 1e-6 {
					t.Errorf("M/M/1, %g: %+v, want %g", part, p, want)
				}
			}
			if e := off(p.Model, p.Simulated); math.Abs(e) > 0.5 {
				t.Errorf("%d servers, fixed %v, %g: %+v", c.Servers, c.Fixed, part, p)
			}
		}
	}
}

// TestModelMeetsItsGoalUnderBursts simulates some cells of the table with fixed seeds. Predictions
// must be within a quarter of the value, or of a service time.
func TestModelMeetsItsGoalUnderBursts(t *testing.T) {
	for _, cv := range []float64{2, 4, 8} {
		for _, c := range simulate("gamma", gammaGaps(cv*cv), cv, 0.7, 1, rand.New(rand.NewPCG(3, uint64(cv)))) {
			for part, p := range map[float64]Predicted{0.5: c.P50, 0.95: c.P95} {
				if e := off(p.Model, p.Simulated); math.Abs(e) > 1 {
					t.Errorf("CV %g, %d servers, fixed %v, %g: %+v", cv, c.Servers, c.Fixed, part, p)
				}
			}
		}
	}
}

// TestGapsHaveTheirMoments checks the mean and the CV of all kinds of gaps.
func TestGapsHaveTheirMoments(t *testing.T) {
	for name, next := range map[string]gaps{"gamma": gammaGaps(4), "hyperexponential": hyperGaps(4), "modulated": modulatedGaps(4)} {
		rng, n := rand.New(rand.NewPCG(5, 6)), 1_000_000.0
		sum, squares := 0.0, 0.0
		for range int(n) {
			v := next(rng)
			sum, squares = sum+v, squares+v*v
		}
		mean := sum / n
		if cv := math.Sqrt(squares/n-mean*mean) / mean; math.Abs(mean-1) > 0.03 || math.Abs(cv-2) > 0.2 {
			t.Errorf("%s: mean %g, CV %g, want 1 and 2", name, mean, cv)
		}
	}
}

func TestRunPrintsStoredCells(t *testing.T) {
	var first, second bytes.Buffer
	cells := simulate("gamma", gammaGaps(1), 1, 0.5, 1, rand.New(rand.NewPCG(1, 1)))
	if err := write(&first, cells); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "cells.json")
	if err := save(file, cells); err != nil {
		t.Fatal(err)
	}
	if err := run([]string{"--from", file}, &second); err != nil || first.String() != second.String() || !strings.Contains(first.String(), "| 1 | 0.5 |") {
		t.Errorf("%v: %s, want %s", err, second.String(), first.String())
	}
	if err := os.WriteFile(file, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	for what, args := range map[string][]string{"a file that --json wrote": {"--from", file}, "--length": {"--length", "0"}} {
		if err := run(args, &second); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("%v: %v", args, err)
		}
	}
}
