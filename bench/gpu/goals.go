package gpu

import (
	"fmt"
	"slices"

	"github.com/stagecoach-serving/stagecoach/bench"
)

// headline is the size that the goals in milliseconds apply to.
const headline = 5_400_000_000

// goals compares the figures of a size with their goals. On the CPU there are no goals.
func (g *gpuBench) goals(s gpuSize) (out []bench.Goal) {
	if !g.at.onGPU() {
		return nil
	}
	goal := func(what, path, metric string, most bool, want float64) {
		name := s.name + "_" + path
		i := slices.IndexFunc(g.report.Results, func(f bench.Result) bool { return f.Case == name && f.Metric == metric })
		if i < 0 {
			return // it was not measured, as its note says
		}
		got, sign := g.report.Results[i].Value, "at least"
		met := got >= want
		if most {
			sign, met = "at most", got <= want
		}
		out = append(out, bench.Goal{Goal: fmt.Sprintf("%s %s: %s: %s %g", s.name, path, what, sign, want), Figure: got, Met: met})
	}
	for _, path := range []string{"ring", "fork", "heap", "parked", "resident"} {
		goal("bandwidth of the copy as a share of the pinned copy's", path, "share_of_pinned", false, 0.8)
	}
	if s.bytes == headline {
		goal("ms from order to first output", "fork", "first_output_p50_ms", true, 1000)
		goal("ms from order to first output", "parked", "first_output_p50_ms", true, 300)
		goal("ms from order to first output", "resident", "first_output_p50_ms", true, 300)
	}
	goal("ms beyond the pinned copy", "resident", "beyond_pinned_p50_ms", true, 50)
	for _, path := range []string{"fork", "parked", "resident"} {
		goal("times as fast as torch.load by hand", path, "speedup_over_plain", false, 5)
	}
	return out
}
