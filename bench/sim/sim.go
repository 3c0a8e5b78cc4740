// Package sim compares the simulator with a running product: the same arrivals and stages.
package sim

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench"
	"github.com/stagecoach-serving/stagecoach/bench/running"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/provider/client"
	"github.com/stagecoach-serving/stagecoach/sim"
)

// The simulator's goals: by how much its figures may differ from those of a running `up`.
const (
	simMean = 0.05
	simP99  = 0.10
	// of the mean and of the median of the cases variants and batches
	simVariants = 0.10
)

// Costs are the times that a running `up` adds to a case.
type Costs struct {
	// from a task's arrival to its line, and from a reply back; both include the gateway's part
	hop time.Duration
	// slot is how long a call keeps its slot beyond its service time.
	slot  time.Duration
	start time.Duration // from the order of a replica until it is ready
}

// simCases returns the cases to compare, with loads of this length. In cases with bursts, service
// times vary little. The product and the simulator draw different service times, and long queues
// would multiply that difference.
func simCases(length time.Duration) []running.Case {
	chain := func(cv float64) []running.Stage {
		var out []running.Stage
		for i := range 3 {
			out = append(out, running.Stage{Name: fmt.Sprintf("chain-%d", i+1), Mean: 40 * time.Millisecond, CV: cv, Replicas: 1})
		}
		return running.Link(out)
	}
	constant := func(rate float64) string { return fmt.Sprintf("%.4g:%v", rate, length) }
	const busy = 0.7
	fan := []running.Stage{ // four calls per request, on three replicas
		{Name: "fan-1", Next: "fan-2", Each: true, Mean: 30 * time.Millisecond, CV: 0.3, Replicas: 3},
		{Name: "fan-2", Next: "fan-3", Each: true, Mean: 30 * time.Millisecond, CV: 0.3, Replicas: 3},
		{Name: "fan-3", Mean: 40 * time.Millisecond, CV: 0.3, Replicas: 1},
	}
	// Each of three functions can serve a third of what the stage can serve. They are equally
	// accurate, so the default route gives each a third of the tasks.
	lanes := running.Link([]running.Stage{
		{Name: "lanes-1", Mean: 20 * time.Millisecond, CV: 0.3, Replicas: 1},
		{Name: "lanes-2", Mean: 240 * time.Millisecond, CV: 0.3, Replicas: 3, Variants: []running.Stage{
			{Name: "lanes-2-middle", Mean: 160 * time.Millisecond, CV: 0.3, Replicas: 2},
			{Name: "lanes-2-quick", Mean: 80 * time.Millisecond, CV: 0.3, Replicas: 1},
		}},
	})
	// A page has three lines on average. Two replicas can read them only in batches: one by one, they
	// would be busy for 95 % of the time.
	batches := running.Link([]running.Stage{
		{Name: "batches-1", Mean: 20 * time.Millisecond, CV: 0.3, Replicas: 2, Outputs: []int{0, 2, 4, 6}},
		{Name: "batches-2", Mean: 30 * time.Millisecond, CV: 0.3, Replicas: 2, Each: true, Batch: 8, BatchCost: 0.2},
	})
	exec := running.ExecTimes["opt-66b"]
	one := running.Stages / exec.Seconds()
	return []running.Case{
		{Name: "chain_poisson", Stages: chain(0.3), Rate: constant(busy / 0.04), CV: 1},
		{Name: "chain_cv4", Stages: chain(running.StageCV), Rate: constant(busy / 0.04), CV: 4},
		{Name: "fan_out", Stages: fan, Rate: constant(busy / 0.04), CV: 1, Items: 4},
		{Name: "variants", Stages: lanes, Rate: constant(0.6 * 3 / 0.08), CV: 1},
		{Name: "batches", Stages: batches, Rate: constant(0.95 * 2 / 3 / 0.03), CV: 1},
		{Name: "step_cv4", Stages: running.SplitEvenly(exec, 1), Rate: running.StepRate(0.2*one, 1.5*one, length/3), CV: 4, Budget: running.Budget, SLO: 3 * exec},
	}
}

// Run compares the simulator with a running `up`, with the same arrivals, distributions of service
// times and policies. The simulator gets the costs of a hop, a slot and a start as measured on
// other stages.
func Run(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("bench sim", flag.ContinueOnError)
	asJSON, images := bench.Flags(fs)
	rounds := fs.Int("rounds", 5, "of each case, interleaved; each has its own arrivals")
	length := fs.Duration("length", time.Minute, "of a load")
	only := fs.String("only", "", "one case alone")
	if err := console.ParseFlags(fs, args); err != nil {
		return err
	}
	cases := simCases(*length)
	if *only != "" {
		if cases = slices.DeleteFunc(cases, func(c running.Case) bool { return c.Name != *only }); len(cases) == 0 {
			return fmt.Errorf("--only %q, want one of chain_poisson, chain_cv4, fan_out, variants, batches, step_cv4", *only)
		}
	}
	if *rounds < 1 || *length < 3*time.Second {
		return fmt.Errorf("--rounds %d, --length %v, want at least 1 and 3s", *rounds, *length)
	}
	report := bench.NewReport("sim", os.Stderr)
	pairs := make([][][2]running.Outcome, len(cases)) // by case, then round: real, simulated
	var all []Costs
	for round := range *rounds {
		for i := range cases {
			at := (i + round) % len(cases)
			c := &cases[at]
			// Costs depend on the load of the machine, so they are measured near in time.
			cost, err := freshCosts(ctx, *images)
			if err != nil {
				return fmt.Errorf("costs, round %d: %w", round+1, err)
			}
			all = append(all, cost)
			pair, err := compare(ctx, c, *images, cost, uint64(round+1))
			if err != nil {
				return fmt.Errorf("%s, round %d: %w", c.Name, round+1, err)
			}
			pairs[at] = append(pairs[at], pair)
			console.Progress("bench sim: round %d of %d: %s: %.0f requests, mean %.1f ms and simulated %.1f ms, p99 %.0f ms and %.0f ms; hop %v, slot %v, start %v",
				round+1, *rounds, c.Name, pair[0].Requests, pair[0].Mean*1e3, pair[1].Mean*1e3, pair[0].P99*1e3, pair[1].P99*1e3, cost.hop, cost.slot, cost.start)
		}
	}
	for i := range cases {
		reportPairs(report, cases[i].Name, pairs[i])
	}
	reportCosts(report, all)
	return bench.Print(report, *asJSON, out)
}

// compare runs a case on an `up` of its own, and simulates it.
func compare(ctx context.Context, c *running.Case, images string, cost Costs, seed uint64) (pair [2]running.Outcome, err error) {
	flags := []string{"--images", images}
	if c.Budget > 0 {
		flags = append(flags, "--budget", fmt.Sprint(c.Budget))
	}
	err = running.OnUp(ctx, flags, func(api *client.Client) (err error) {
		pair[0], err = c.Real(ctx, api, seed)
		return err
	})
	if err != nil {
		return pair, err
	}
	if pair[1], err = Simulate(ctx, c, cost, seed); err != nil {
		return pair, err
	}
	if pair[0].Requests != pair[1].Requests {
		return pair, fmt.Errorf("%.0f requests were sent and %.0f simulated, want the same", pair[0].Requests, pair[1].Requests)
	}
	return pair, nil
}

// Simulate runs the case in virtual time.
func Simulate(ctx context.Context, c *running.Case, cost Costs, seed uint64) (running.Outcome, error) {
	s, err := sim.Parse(strings.NewReader(scenario(c, cost, seed)))
	if err != nil {
		return running.Outcome{}, err
	}
	model, err := s.Model(nil)
	if err != nil {
		return running.Outcome{}, err
	}
	r, err := model.Run(ctx, nil)
	if err != nil {
		return running.Outcome{}, err
	}
	of, p := r.Policies[0], r.Policies[0].Pipelines[0]
	return running.Outcome{
		Requests: p.Offered.Mean, Failed: math.Round(p.Failed.Mean * p.Offered.Mean), Mean: p.Mean.Mean, P50: p.P50.Mean, P99: p.P99.Mean,
		ReplicaSeconds: of.ReplicaSeconds.Mean,
	}, nil
}

// scenario returns the case as a scenario for the simulator. The cost of a slot is added to each
// service time, and does not change the variance.
func scenario(c *running.Case, cost Costs, seed uint64) string {
	host := bench.NewReport("", io.Discard).Host
	var b strings.Builder
	fmt.Fprintf(&b, "name: %s\nseed: %d\nseeds: 1\nhop: %v\nbudget: %d\nnodes: [{memory: %d, cpu: %d}]\n", c.Name, seed, cost.hop, c.Budget, host.Memory, host.Cores)
	fmt.Fprintf(&b, "pipelines: [{name: p, slo: %v, timeout: %v, items: %d, arrivals: {rate: %q, cv: %g}}]\nstages:\n", c.SLO, running.Timeout, cmp.Or(c.Items, 1), c.Rate, c.CV)
	for i := range c.Stages {
		s := &c.Stages[i]
		fmt.Fprintf(&b, "- {%s, next: [%s], each: %t, variants: [", function(c, s, cost), s.Next, s.Each)
		for k := range s.Variants {
			fmt.Fprintf(&b, "{%s}, ", function(c, &s.Variants[k], cost))
		}
		b.WriteString("]}\n")
	}
	return b.String()
}

// function returns the fields that stages and variants have.
func function(c *running.Case, s *running.Stage, cost Costs) string {
	mean := s.Mean + cost.slot
	share := s.Mean.Seconds() / mean.Seconds()
	low, high := s.Bounds(c.Budget)
	text := fmt.Sprintf("name: %s, service: {dist: lognormal, mean: %v, cv: %g, batchCost: %g}, start: {cold: %v}, memory: 16Mi, min: %d, max: %d, batch: %d",
		s.Name, mean, s.CV*share, s.BatchCost*share, cost.start, low, high, max(s.Batch, 1))
	if len(s.Outputs) > 0 {
		text += fmt.Sprintf(", outputs: {list: %s}", strings.ReplaceAll(fmt.Sprint(s.Outputs), " ", ","))
	}
	return text
}

// reportPairs adds the results of a case: medians over the rounds. In a round, both have the same
// arrivals, so their difference is the median of the rounds' differences.
func reportPairs(r *bench.Report, name string, pairs [][2]running.Outcome) {
	mean, median := simMean, 0.0
	if name == "variants" || name == "batches" {
		mean, median = simVariants, simVariants
	}
	figures := []struct {
		metric string
		scale  float64
		bound  float64 // 0: none
		of     func(o running.Outcome) float64
	}{
		{"mean_ms", 1e3, mean, func(o running.Outcome) float64 { return o.Mean }},
		{"p50_ms", 1e3, median, func(o running.Outcome) float64 { return o.P50 }},
		{"p99_ms", 1e3, simP99, func(o running.Outcome) float64 { return o.P99 }},
		{"replica_seconds", 1, 0, func(o running.Outcome) float64 { return o.ReplicaSeconds }},
		{"requests", 1, 0, func(o running.Outcome) float64 { return o.Requests }},
		{"failed", 1, 0, func(o running.Outcome) float64 { return o.Failed }},
	}
	for _, f := range figures {
		var is, simulated, apart []float64
		for _, p := range pairs {
			a, b := f.of(p[0]), f.of(p[1])
			if math.IsNaN(a) || math.IsNaN(b) {
				continue
			}
			is, simulated = append(is, a*f.scale), append(simulated, b*f.scale)
			if a != 0 {
				apart = append(apart, b/a-1)
			}
		}
		if len(is) == 0 {
			continue
		}
		line := name + " " + f.metric
		r.Add(line, "real", bench.Median(is), len(is))
		r.Add(line, "simulated", bench.Median(simulated), len(simulated))
		if real := bench.Median(is); real != 0 {
			r.Add(line, "ratio", bench.Median(simulated)/real, len(is))
		}
		if len(apart) > 0 {
			r.Add(line, "difference_percent", 100*bench.Median(apart), len(apart))
		}
		if f.bound > 0 && len(apart) > 0 {
			d := bench.Median(apart)
			r.Goals = append(r.Goals, bench.Goal{
				Goal: fmt.Sprintf("%s: percent that simulated differs from real: at most %g", line, 100*f.bound), Figure: 100 * d, Met: math.Abs(d) <= f.bound,
			})
		}
	}
}

// reportCosts adds the costs that were measured for the simulator.
func reportCosts(r *bench.Report, all []Costs) {
	for _, f := range []struct {
		name string
		of   func(c Costs) time.Duration
	}{
		{"hop_ms", func(c Costs) time.Duration { return c.hop }},
		{"slot_ms", func(c Costs) time.Duration { return c.slot }},
		{"start_ms", func(c Costs) time.Duration { return c.start }},
	} {
		var values []float64
		for _, c := range all {
			values = append(values, f.of(c).Seconds()*1e3)
		}
		r.Add("costs "+f.name, "real", bench.Median(values), len(values))
	}
}
