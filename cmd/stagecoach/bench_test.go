package main

import (
	"bytes"
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/bench"
	"github.com/stagecoach-serving/stagecoach/bench/coldstart"
	"github.com/stagecoach-serving/stagecoach/bench/starts"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// figures are the names of a report's figures, as CASE METRIC.
func figures(r *bench.Report) []string {
	var out []string
	for _, f := range r.Results {
		// The figure is negative if processes of other tests, which share pages with replicas, end
		// meanwhile.
		if f.Value > 0 || strings.HasPrefix(f.Metric, "extra_per_replica") {
			out = append(out, f.Case+" "+f.Metric)
		}
	}
	return out
}

// TestBenchColdstartTorch measures a small stage with real PyTorch. Each case gives the same answer
// and has its figures.
func TestBenchColdstartTorch(t *testing.T) {
	t.Parallel()
	py, err := starts.FindTorch(t.Context(), proctest.Torch(t), false)
	if err != nil {
		t.Fatal(err)
	}
	cases := coldstart.TorchCases()
	for i := range cases {
		cases[i].Slow = false // each as often
	}
	kind := &coldstart.Kind{Name: "torch", Stage: func(ctx context.Context, m starts.Machine, bytes int64) (*starts.Stage, error) {
		return starts.NewTorchStage(ctx, m, py, bytes, starts.OnCPU)
	}, Cases: cases}
	var warnings bytes.Buffer
	report := bench.NewReport("coldstart", &warnings)
	if err := (coldstart.Size{Kind: kind, Machine: benchMachine(defaultRuntime()), Size: "2MB", Bytes: 2e6, Often: 2, Alive: []int{2}}).Measure(t.Context(), report); err != nil {
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

// TestBenchRefuses checks that each bench says in one line why it cannot measure.
func TestBenchRefuses(t *testing.T) {
	for _, tc := range []struct{ args, want string }{
		{"coldstart --match quick", `--match "quick": no stage`},
		{"coldstart --match torch --python /no/such/python", "apt-get install python3-torch"},
		{"gpu --size 5X", `"5X", want bytes`},
		{"gpu --sizes 0.7G,2.7G", "got --sizes, which is --size now, such as --size 1GB,5.4GB"},
		{"gpu -sizes=0.7G", "got -sizes=0.7G, which is --size now"},
		{"gpu --paths fork,warm", `--paths: got "warm", want some of plain,fork,parked,resident,heap,cold`},
		{"gpu --device cpu --json-lines /no/such/folder/lines", "--json-lines: open /no/such/folder/lines"},
		{"gpu --rounds 1", "want at least 2"},
		{"gpu --device what", "--device: "},
		{"gpu --device cpu --python /no/such/python", "apt-get install python3-torch"},
		{"autoscaler --only none", `--only "none", want one of fixed`},
		{"autoscaler --rounds 0", "want at least 1"},
		{"autoscaler --model gpt", `--model "gpt", want one of`},
		{"scale --nodes 0", `--nodes "0", --runs 20: want numbers above 0`},
		{"nodes-scale --nodes 10,x", `--nodes: "10,x", want numbers above 0`},
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
