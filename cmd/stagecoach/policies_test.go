package main

import (
	"bytes"
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/control"
	"github.com/stagecoach-serving/stagecoach/provider/client"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// TestAPipelineChoosesItsPolicies runs a pipeline that asks for an allocator of mixes, beside a
// function with the policies of the flags. It reads the table with explain, sends requests, and
// replays the recorded decisions.
func TestAPipelineChoosesItsPolicies(t *testing.T) {
	record := filepath.Join(t.TempDir(), "record.jsonl")
	r := start(t, "--record", record, "--budget", "8", "--rank", "least-slack")
	wait := func(name, mean string, annotations map[string]string) fn {
		return fn{name, "wait", map[string]string{"max": "6"}, annotations, map[string]string{"wait_mean": mean, "wait_cv": "0"}}
	}
	r.deployAll(
		wait("cut", "1ms", map[string]string{"pipeline": "film", "next": "grade", "slo": "1s", "allocator": "accuracy", "rank": "fair"}),
		wait("grade", "50ms", map[string]string{"pipeline": "film"}),
		wait("tint", "5ms", map[string]string{"variant-of": "grade", "accuracy": "0.8"}),
		wait("alone", "1ms", nil),
	)
	why := func(name string) (x schema.Explanation) {
		if err := json.Unmarshal(r.must(http.StatusOK, http.MethodGet, "/system/pipelines/"+name+"/explain", "").Body, &x); err != nil {
			t.Fatal(err)
		}
		return x
	}
	r.until(late, "a table and replicas", func() bool {
		x := why("film")
		return len(x.Stages) == 2 && x.Stages[1].Table != nil && x.Stages[0].Ready > 0 && x.Stages[1].Ready > 0
	})
	x := why("film")
	if p := x.Policies; p.Allocator != "accuracy" || p.Corrector != "none" || p.Rank != "fair" || x.Stages[1].Rank != "fair" {
		t.Errorf("policies %+v, rank %q, want the pipeline's own", p, x.Stages[1].Rank)
	}
	if got := x.Stages[1].Table.Rows[0].Levels[0].Shares; len(got) != 1 || got[0].Lane != "grade" {
		t.Errorf("shares %+v, want all for the accurate variant while there is nothing to do", got)
	}
	if p := why("alone").Policies; p.Allocator != "sizer" || p.Corrector != "quart" || p.Rank != "least-slack" {
		t.Errorf("policies %+v of another function, want those of the flags", p)
	}
	for range 5 {
		r.must(http.StatusOK, http.MethodPost, "/function/film", "x")
	}
	err := r.Deploy(t.Context(), client.Deployment{Service: "odd", Image: "stagecoach/noop:0.1.0", Annotations: map[string]string{"stagecoach.dev/route": "worst"}})
	if err == nil || !strings.Contains(err.Error(), "want one of best, even") {
		t.Errorf("an unknown route: %v, want the known ones", err)
	}
	r.until(late, "the next decisions to be recorded", func() bool {
		b, err := os.ReadFile(record)
		return err == nil && bytes.Count(b, []byte("\n")) > 5
	})
	r.stop()
	b, err := os.ReadFile(record)
	if err != nil {
		t.Fatal(err)
	}
	again, err := control.ReplayRecord(bytes.NewReader(b))
	if err != nil || !again.Same() || !bytes.Contains(b, []byte(`"Tables"`)) {
		t.Errorf("replay: %+v, %v, want the same decisions, with tables", again, err)
	}
}
