package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/bench"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager"
)

// figures are the names of a report's figures, as CASE METRIC.
func figures(r *bench.Report) []string {
	var out []string
	for _, f := range r.Results {
		// What replicas add falls below zero if processes of other tests, which share pages with them, end meanwhile.
		if f.Value > 0 || strings.HasPrefix(f.Metric, "extra_per_replica") {
			out = append(out, f.Case+" "+f.Metric)
		}
	}
	return out
}

// TestBenchColdstartTorch measures a small stage with real PyTorch: each case answers the same and has its figures.
func TestBenchColdstartTorch(t *testing.T) {
	t.Parallel()
	py, err := findTorch(t.Context(), proctest.Torch(t), false)
	if err != nil {
		t.Fatal(err)
	}
	cases := torchCases()
	for i := range cases {
		cases[i].slow = false // each as often
	}
	kind := &startKind{"torch", func(ctx context.Context, bytes int64) (*benchStage, error) {
		return newTorchStage(ctx, py, bytes, onCPU)
	}, cases}
	var warnings bytes.Buffer
	report := bench.NewReport("coldstart", &warnings)
	if err := (startSize{kind, "2MB", 2e6, 2, []int{2}}).measure(t.Context(), report); err != nil {
		t.Fatal(err)
	}
	got := figures(report)
	for _, want := range []string{
		"fork first_output_p50_ms", "fork hello_p50_ms", "fork inference_p50_ms", "fork extra_per_replica_at_2_mb", "fork forks_per_second", "fork speedup_over_cold",
		"cold first_output_p50_ms", "cold hello_p50_ms", "plain first_output_p50_ms", "plain inference_p50_ms", "plain speedup_over_cold",
	} {
		if !slices.Contains(got, "torch_2MB_"+want) {
			t.Errorf("no figure %q in %q", want, got)
		}
	}
	if slices.Contains(got, "torch_2MB_plain hello_p50_ms") {
		t.Error("a process that speaks no stage protocol says hello")
	}
}

// TestBenchRefuses: what cannot be measured is said in a line.
func TestBenchRefuses(t *testing.T) {
	for _, tc := range []struct{ args, want string }{
		{"coldstart --match quick", `--match "quick": no stage`},
		{"coldstart --match torch --python /no/such/python", "apt-get install python3-torch"},
		{"gpu --sizes 5X", `"5X", want bytes`},
		{"gpu --rounds 1", "want at least 2"},
		{"gpu --device what", "--device: "},
		{"gpu --device cpu --python /no/such/python", "apt-get install python3-torch"},
		{"autoscaler --only none", `--only "none", want one of fixed`},
		{"autoscaler --rounds 0", "want at least 1"},
		{"autoscaler --model gpt", `--model "gpt", want one of`},
		{"sim --only none", `--only "none", want one of chain_poisson`},
		{"sim --length 1s", "want at least 1 and 3s"},
	} {
		var out bytes.Buffer
		err := run(t.Context(), append([]string{"bench"}, strings.Fields(tc.args)...), &out)
		if err == nil || !strings.Contains(err.Error(), tc.want) || out.Len() > 0 {
			t.Errorf("bench %s: error %v, want %q in it; printed %q", tc.args, err, tc.want, out.String())
		}
	}
}

// TestBenchGPUOnCPU takes the whole way without a GPU: each path has its figures.
func TestBenchGPUOnCPU(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	args := []string{"bench", "gpu", "--device", "cpu", "--python", proctest.Torch(t), "--sizes", "0.002G", "--rounds", "2", "--json"}
	if err := run(t.Context(), args, &out); err != nil {
		t.Fatal(err)
	}
	var report bench.Report
	if err := json.Unmarshal(out.Bytes(), &report); err != nil {
		t.Fatalf("%v: %s", err, out.String())
	}
	got := figures(&report)
	for _, want := range []string{
		"device context_p50_ms", "device pinned_1_streams_gb_per_s",
		"0.002G_fork first_output_p50_ms", "0.002G_fork place_p50_ms", "0.002G_fork speedup_over_plain",
		"0.002G_parked first_output_p50_ms", "0.002G_parked speedup_over_plain",
		"0.002G_resident first_output_p50_ms", "0.002G_resident speedup_over_plain",
		"0.002G_cold load_p50_ms", "0.002G_plain first_output_p50_ms", "0.002G_plain load_p50_ms",
	} {
		if !slices.Contains(got, want) {
			t.Errorf("no figure %q in %q", want, got)
		}
	}
	if report.Versions["torch"] == "" || len(report.Goals) > 0 {
		t.Errorf("versions %v, goals %v; want PyTorch's, and goals of GPUs alone", report.Versions, report.Goals)
	}
	for _, f := range report.Results {
		if f.Metric == "other_answers" {
			t.Errorf("%+v", f)
		}
	}
}

func TestGPUGoals(t *testing.T) {
	sizes := []gpuSize{{"0.7G", 7e8}, {"5.4G", 54e8}}
	r := &bench.Report{}
	r.Add("0.7G_ring", "share_of_pinned", 0.79, 5)
	r.Add("5.4G_ring", "share_of_pinned", 0.8, 5)
	r.Add("0.7G_fork", "first_output_p50_ms", 2000, 5) // nothing is wanted of that
	r.Add("5.4G_fork", "first_output_p50_ms", 999, 5)
	r.Add("5.4G_parked", "first_output_p50_ms", 301, 5)
	r.Add("0.7G_fork", "speedup_over_plain", 4.9, 2)
	r.Add("5.4G_resident", "speedup_over_plain", 30, 2)
	var got []string
	for _, g := range gpuGoals(r, sizes) {
		got = append(got, fmt.Sprint(g.Figure, g.Met))
	}
	if want := []string{"0.79 false", "0.8 true", "999 true", "301 false", "4.9 false", "30 true"}; !slices.Equal(got, want) {
		t.Errorf("goals %q, want %q", got, want)
	}
}

// TestBenchGPUWithoutGPU ends with a status of its own, so that a script knows that nothing is wrong.
func TestBenchGPUWithoutGPU(t *testing.T) {
	var out bytes.Buffer
	err := run(t.Context(), []string{"bench", "gpu", "--device", "none"}, &out)
	if err == nil || statusOf(err) != 3 || !strings.Contains(err.Error(), "NVML shows no GPU") || strings.Contains(err.Error(), "\n") || out.Len() > 0 {
		t.Errorf("status %d, %v, printed %q; want 3, a line, and nothing", statusOf(err), err, out.String())
	}
	if got := statusOf(errors.New("any other")); got != 1 {
		t.Errorf("status %d of any other error, want 1", got)
	}
	ill := []keysmanager.Device{{ID: "GPU-1", Unhealthy: "XID 79"}, {ID: "GPU-2"}}
	if d, err := firstWell(ill); err != nil || d.ID != "GPU-2" {
		t.Errorf("%v, %v, want the one that is well", d, err)
	}
	if _, err := firstWell(ill[:1]); err == nil || !strings.Contains(err.Error(), "XID 79") {
		t.Errorf("error %v, want what is wrong with it", err)
	}
}

// TestBenchDevice measures a stand-in for a device.
func TestBenchDevice(t *testing.T) {
	python := proctest.Torch(t)
	folder, err := filepath.Abs("testdata/cuda")
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("PYTHONPATH", folder)
	g := gpuBench{py: torchPython{Program: python}, at: torchDevice{name: "cuda:0"}, sizes: []gpuSize{{"1M", 1e6}, {"2M", 2e6}}, report: &bench.Report{}}
	if err := g.limits(t.Context()); err != nil {
		t.Fatal(err)
	}
	got := figures(g.report)
	for _, want := range []string{"context_p50_ms", "context_mb", "kernels_p50_ms", "kernels_mb", "import_p50_ms", "pinned_1_streams_gb_per_s", "pinned_2_streams_gb_per_s", "pinned_4_streams_gb_per_s"} {
		if !slices.Contains(got, "device "+want) {
			t.Errorf("no figure %q in %q", want, got)
		}
	}
	for _, f := range g.report.Results {
		if strings.HasSuffix(f.Metric, "_mb") && f.Value != 100 {
			t.Errorf("%+v, want 100", f)
		}
		if g.pinned < f.Value && strings.HasPrefix(f.Metric, "pinned_") {
			t.Errorf("pinned at best %v, and %+v", g.pinned, f)
		}
	}
	if env := g.py.process(); env != "/usr/bin/env PYTHONPATH="+folder+" "+python+" ./stage" {
		t.Errorf("processes of stages are %q", env)
	}
}
