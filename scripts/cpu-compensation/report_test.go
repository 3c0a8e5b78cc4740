package main

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/record"
)

// TestCompensatedJudgesARun checks that a run counts only if a plan raised the CPU, the replicas
// got it, and the stage was faster afterwards.
func TestCompensatedJudgesARun(t *testing.T) {
	t.Parallel()
	// Each decision comes 20 s after the one before it.
	type decision struct {
		now, planned int // thousandths of a core; 0: as declared
		service      time.Duration
	}
	const ms = time.Millisecond
	for name, tc := range map[string]struct {
		all  []decision
		want string
	}{
		"faster":          {[]decision{{0, 0, 100 * ms}, {0, 700, 100 * ms}, {700, 1000, 90 * ms}, {1000, 1000, 80 * ms}, {1000, 1000, 70 * ms}, {1000, 1000, 60 * ms}, {0, 0, 90 * ms}}, ""},
		"as declared":     {[]decision{{0, 0, 100 * ms}, {0, 500, 100 * ms}, {0, 0, 50 * ms}, {0, 0, 50 * ms}, {0, 0, 50 * ms}}, "no plan raised the CPU"},
		"not in force":    {[]decision{{0, 700, 100 * ms}, {0, 700, 90 * ms}, {0, 700, 90 * ms}, {0, 700, 90 * ms}}, "replicas kept 500m, though a plan gave them 700m"},
		"too short a run": {[]decision{{0, 700, 100 * ms}, {700, 700, 90 * ms}, {700, 700, 80 * ms}}, "the run ended less than 45s"},
		"not faster":      {[]decision{{0, 700, 100 * ms}, {700, 700, 90 * ms}, {700, 700, 90 * ms}, {700, 700, 100 * ms}}, "service took 100ms with 500m and 100ms with 700m"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var lines []line
			for i, d := range tc.all {
				f, w := plan.Function{CPULimit: 500, CPUNow: d.now}, plan.Want{CPUMilli: d.planned, Why: "line"}
				f.Service.Mean = d.service
				at := time.Unix(1e9, 0).Add(time.Duration(i) * 20 * time.Second)
				lines = append(lines, line{record.Line{Snapshot: plan.Snapshot{At: at}}, &f, &w})
			}
			got, err := compensated(lines)
			if tc.want != "" {
				if err == nil || !strings.Contains(err.Error(), tc.want) {
					t.Errorf("%+v, %v, want %q", got, err, tc.want)
				}
				return
			}
			if want := (compensation{500, 1000, 100 * ms, 60 * ms, "line"}); err != nil || got != want {
				t.Errorf("%+v, %v, want %+v", got, err, want)
			}
		})
	}
}

func TestProfiledReadsWhatProfilePrints(t *testing.T) {
	t.Parallel()
	got, err := profiled([]byte(`{"function":"f","points":[{"cpuMilli":500,"batch":1,"meanSeconds":0.1019},{"cpuMilli":1000,"batch":1,"meanSeconds":0.05}]}`))
	if err != nil || len(got) != 2 || got[500] != 102*time.Millisecond || got[1000] != 50*time.Millisecond {
		t.Errorf("%v, %v, want 102 ms and 50 ms", got, err)
	}
	if got, err := profiled([]byte("{")); err == nil {
		t.Errorf("half an answer: %v, want an error", got)
	}
}

// TestTheKeptRecordShowsACompensation reads the record that the command has kept, and prints it.
func TestTheKeptRecordShowsACompensation(t *testing.T) {
	t.Parallel()
	lines, err := read(filepath.Join("..", "..", "autoscaler", "testdata", "cpu-live.jsonl.gz"), function)
	if err != nil {
		t.Fatal(err)
	}
	c, err := compensated(lines)
	if err != nil || c.declared != declared || c.quota < 2*declared*9/10 || !strings.Contains(c.why, "cpu 250m to ") {
		t.Errorf("%+v, %v, want a raise from %dm to nearly twice as much", c, err, declared)
	}
	var out strings.Builder
	if show(&out, lines); !strings.Contains(out.String(), "250m   as declared") || strings.Count(out.String(), "\n") < 15 {
		t.Errorf("%s\nwant a table of the run in steps of 10 s", out.String())
	}
	again := filepath.Join(t.TempDir(), "again.jsonl.gz")
	if err := keep(lines, again); err != nil {
		t.Fatal(err)
	}
	kept, err := read(again, function)
	if err != nil || len(kept) < 100 {
		t.Fatalf("%d decisions, %v, want what was kept", len(kept), err)
	}
	if got, err := compensated(kept); err != nil || got.quota != c.quota || got.before != c.before {
		t.Errorf("%+v, %v, want %+v as before", got, err, c)
	}
}
