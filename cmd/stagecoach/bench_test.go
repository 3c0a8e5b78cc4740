package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
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
		if f.Value > 0 {
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
	} {
		var out bytes.Buffer
		err := run(t.Context(), append([]string{"bench"}, strings.Fields(tc.args)...), &out)
		if err == nil || !strings.Contains(err.Error(), tc.want) || out.Len() > 0 {
			t.Errorf("bench %s: error %v, want %q in it; printed %q", tc.args, err, tc.want, out.String())
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
