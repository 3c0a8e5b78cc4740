package paper

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
	"github.com/stagecoach-serving/stagecoach/sim"
	"github.com/stagecoach-serving/stagecoach/sim/study"
)

// toyStudy has two loads of five seconds, and a contender with a fixed number of replicas.
func toyStudy() study.Study {
	load := func(name, rate string) study.Setting {
		return study.Setting{
			Name: name, Model: "toy", Group: name, Service: 20 * time.Millisecond, Train: true,
			Scenario: func(bool) sim.Scenario {
				return sim.Scenario{
					Duration:  5 * time.Second,
					Nodes:     []sim.Node{{Memory: 1 << 30, CPU: 64000, GPUs: 8, GPUMemory: 1 << 30}},
					Pipelines: []sim.Pipeline{{Name: "p", Timeout: time.Second, Arrivals: sim.Arrivals{Rate: rate}}},
					Stages:    []sim.Stage{{Variant: sim.Variant{Name: "s", GPU: 1, Service: sim.Service{Dist: sim.Deterministic, Mean: 20 * time.Millisecond}}}},
				}
			},
		}
	}
	return study.Study{
		Name: "toy", Title: "A toy", Settings: []study.Setting{load("slow", "5"), load("fast", "40")}, Ours: "fixed", Budget: 2, Candidates: 3,
		Train: study.Seeds{First: 101, N: 1}, Test: study.Seeds{First: 1, N: 2}, Multiples: []float64{2}, Objective: 2,
		LeftOut: []study.LeftOut{{Setting: "trace", Why: "it is not there"}},
		Contenders: []study.Contender{{
			Name: "fixed", Title: "a fixed number", Space: []study.Knob{{Name: "level", Low: 1, High: 3, Whole: true}}, Defaults: []float64{1}, Ours: true,
			Apply: func(s sim.Scenario, k []float64) sim.Scenario {
				s.Stages[0].Min, s.Stages[0].Max = int(k[0]), int(k[0])
				s.Policies = []sim.Policy{{Names: policy.Names{Allocator: "fixed", Corrector: "none"}}}
				return s
			},
		}},
		Draw: func(r *study.Result) ([]study.Figure, error) {
			return []study.Figure{{Name: "toy-latency", SVG: []byte("<svg/>")}}, nil
		},
	}
}

// TestSimPaper checks that the report goes to standard output, and that report, result and figures
// go to a folder. It also checks that chosen configurations are stored in a file and then used from
// there.
func TestSimPaper(t *testing.T) {
	t.Parallel()
	toy := paper{
		"toy", func(sim.Opener) (study.Study, error) { return toyStudy(), nil },
		func(sim.Opener) (study.Study, error) { s := toyStudy(); s.Test.N = 5; return s, nil },
		func() study.Study { s := toyStudy(); s.Settings = s.Settings[:1]; return s },
		func() (study.Tuned, error) { return study.Tuned{Schema: study.TunedSchema, Study: "toy"}, nil },
		(*study.Result).WriteMarkdown,
	}
	folder := t.TempDir()
	tuned := filepath.Join(folder, "tuned.json")
	run := func(args ...string) (string, error) {
		var out bytes.Buffer
		err := evaluateOne(t.Context(), args, []paper{toy}, &out)
		return out.String(), err
	}
	result := func(args ...string) (r study.Result) {
		t.Helper()
		out, err := run(append(args, "--json", "-")...)
		if err == nil {
			err = json.Unmarshal([]byte(out), &r)
		}
		if err != nil {
			t.Fatalf("%v: %v", args, err)
		}
		return r
	}
	if r := result("toy"); len(r.Outcomes) != 2 || !r.Outcomes[0].Untuned || r.Seeds.N != 2 || len(r.LeftOut) != 1 {
		t.Errorf("without configurations: %+v", r)
	}
	if r := result("toy", "--quick", "--seeds", "1"); len(r.Outcomes) != 1 || r.Seeds.N != 1 {
		t.Errorf("--quick --seeds 1: %+v", r)
	}
	if r := result("toy", "--full", "--only", "fast"); r.Seeds.N != 5 {
		t.Errorf("--full: seeds %+v, want the full study's 5", r.Seeds)
	}
	if _, err := run("toy", "--full", "--quick"); err == nil || !strings.Contains(err.Error(), "want one of them") {
		t.Errorf("--full --quick: %v, want one of them", err)
	}
	if r := result("toy", "--tune", "--only", "fast"); len(r.Tuned.Choices) != 1 || r.Outcomes[0].Untuned {
		t.Errorf("--tune --only: %+v", r)
	}
	out, err := run("toy", "--tune", "--tuned", tuned, "--out", filepath.Join(folder, "made", "here"))
	if err != nil || !strings.HasPrefix(out, "# A toy\n") || !strings.Contains(out, "Left out: trace: it is not there") || !strings.Contains(out, "level 2") {
		t.Errorf("%v: %s", err, out)
	}
	for name, want := range map[string]string{"report.md": out, "result.json": `"schema": "stagecoach-study/1"`, "toy-latency.svg": "<svg/>"} {
		if b, err := os.ReadFile(filepath.Join(folder, "made", "here", name)); err != nil || !strings.Contains(string(b), want) {
			t.Errorf("%s: %v: %s", name, err, b)
		}
	}
	if b, _ := os.ReadFile(filepath.Join(folder, "made", "here", "report.md")); !strings.Contains(string(b), "- [toy-latency](toy-latency.svg)") {
		t.Errorf("the report does not link its figure: %s", b)
	}
	runs := filepath.Join(folder, "made", "here", "runs.jsonl")
	kept, err := os.ReadFile(runs)
	const made = 3*2 + 2*2 // candidates and loads, then loads and seeds
	if n := bytes.Count(kept, []byte("\n")); err != nil || n != made {
		t.Errorf("--tune kept %d runs (%v), want 10", n, err)
	}
	if out, err := run("toy", "--full", "--seeds", "2", "--tuned", tuned, "--runs", runs); err != nil || !strings.HasPrefix(out, "# A toy\n") {
		t.Errorf("--full with the runs of --tune: %v: %s", err, out)
	}
	if again, _ := os.ReadFile(runs); !bytes.Equal(again, kept) {
		t.Error("runs that were kept were made again")
	}
	r := result("toy", "--tuned", tuned, "--only", "fast")
	if len(r.Tuned.Choices) != 1 || len(r.Outcomes) != 1 || r.Outcomes[0].Untuned || r.Outcomes[0].GPUs.Mean != 2 {
		t.Errorf("with configurations: %+v", r)
	}
	before, _ := os.ReadFile(tuned)
	if _, err := run("toy", "--tuned", tuned, "--only", "fast", "--tune"); err != nil {
		t.Error(err)
	}
	small := toy
	small.quick = func() study.Study { s := toyStudy(); s.Candidates = 1; return s }
	if err := evaluateOne(t.Context(), []string{"toy", "--quick", "--tune", "--tuned", tuned}, []paper{small}, io.Discard); err == nil || !strings.Contains(err.Error(), "want as before") {
		t.Errorf("a quick look at what was tuned otherwise: %v, want that the file stays", err)
	}
	if after, _ := os.ReadFile(tuned); !bytes.Equal(before, after) {
		t.Errorf("a part that was tuned again changed\n%s\nto\n%s", before, after)
	}
}

// TestSimPaperErrors: what is wrong is named, and what there is.
func TestSimPaperErrors(t *testing.T) {
	t.Parallel()
	missing := filepath.Join(t.TempDir(), "none.json")
	for want, args := range map[string][]string{
		`sim paper: got [], want one of ["quart" "bounds"]`:         {},
		`sim paper: got ["fermat"], want one of ["quart" "bounds"]`: {"fermat"},
		"sim paper quart: open " + missing + ": no such file":       {"quart", "--quick", "--tuned", missing},
		`sim paper quart: "planet" matches none, want some of`:      {"quart", "--quick", "--only", "planet"},
		"sim paper quart: seeds for the test: -3 from 3001 on":      {"quart", "--quick", "--seeds", "-3"},
	} {
		if err := Run(t.Context(), args, nil); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%q: got %v, want %s", args, err, want)
		}
	}
	ctx, stop := context.WithCancel(t.Context())
	stop()
	if err := Run(ctx, []string{"quart", "--quick"}, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

// TestFiguresOfMore checks that a study's figures are followed by those of its further settings.
func TestFiguresOfMore(t *testing.T) {
	s, more := toyStudy(), toyStudy()
	more.Draw = func(r *study.Result) ([]study.Figure, error) { return []study.Figure{{Name: "of-" + r.Title}}, nil }
	s.More = &more
	r := &study.Result{More: &study.Result{Title: "more"}}
	if got, err := figures(&s, r); err != nil || len(got) != 2 || got[0].Name != "toy-latency" || got[1].Name != "of-more" {
		t.Errorf("%+v, %v, want one figure of each", got, err)
	}
	s.Draw = nil
	if got, err := figures(&s, r); err != nil || len(got) != 1 {
		t.Errorf("%+v, %v, want the figure of more", got, err)
	}
	if got, err := figures(&s, &study.Result{}); err != nil || len(got) != 0 {
		t.Errorf("%+v, %v, want none without a result of more", got, err)
	}
}
