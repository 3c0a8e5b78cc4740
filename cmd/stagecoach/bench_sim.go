package main

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
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/provider/client"
	"github.com/stagecoach-serving/stagecoach/sim"
)

// The simulator's goals: by how much its figures may differ from those of a running `up`.
const (
	simMean = 0.05
	simP99  = 0.10
)

// costs are what a running `up` adds to what a case says.
type costs struct {
	hop   time.Duration // of a task to its line, and of a reply back; the gateway's part is shared out among them
	slot  time.Duration // that a call keeps its slot beyond its service time: the stage protocol, and timers that come late
	start time.Duration // from the order of a replica until it is ready
}

// simCases are those that are compared, of so long a load. Under bursts service times vary little: a queue would multiply their chance, which
// is not the same in both.
func simCases(length time.Duration) []simCase {
	chain := func(cv float64) []simStage {
		var out []simStage
		for i := range 3 {
			out = append(out, simStage{name: fmt.Sprintf("chain-%d", i+1), mean: 40 * time.Millisecond, cv: cv, replicas: 1})
		}
		return link(out)
	}
	constant := func(rate float64) string { return fmt.Sprintf("%.4g:%v", rate, length) }
	const busy = 0.7
	fan := []simStage{ // four calls a request, on three replicas
		{name: "fan-1", next: "fan-2", each: true, mean: 30 * time.Millisecond, cv: 0.3, replicas: 3},
		{name: "fan-2", next: "fan-3", each: true, mean: 30 * time.Millisecond, cv: 0.3, replicas: 3},
		{name: "fan-3", mean: 40 * time.Millisecond, cv: 0.3, replicas: 1},
	}
	exec := execTimes["opt-66b"]
	one := benchStages / exec.Seconds()
	return []simCase{
		{name: "chain_poisson", stages: chain(0.3), rate: constant(busy / 0.04), cv: 1},
		{name: "chain_cv4", stages: chain(benchStageCV), rate: constant(busy / 0.04), cv: 4},
		{name: "fan_out", stages: fan, rate: constant(busy / 0.04), cv: 1, items: 4},
		{name: "step_cv4", stages: splitEvenly(exec, 1), rate: stepRate(0.2*one, 1.5*one, length/3), cv: 4, budget: benchBudget, slo: 3 * exec},
	}
}

// benchSim holds the simulator against a running `up`: the same arrivals, distributions of service times and policies. What a hop, a slot
// and a start cost is measured beside it, on other stages.
func benchSim(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("bench sim", flag.ContinueOnError)
	asJSON, images := reportFlags(fs)
	rounds := fs.Int("rounds", 5, "of each case, interleaved; each has its own arrivals")
	length := fs.Duration("length", time.Minute, "of a load")
	only := fs.String("only", "", "one case alone")
	if err := console.ParseFlags(fs, args); err != nil {
		return err
	}
	cases := simCases(*length)
	if *only != "" {
		if cases = slices.DeleteFunc(cases, func(c simCase) bool { return c.name != *only }); len(cases) == 0 {
			return fmt.Errorf("--only %q, want one of chain_poisson, chain_cv4, fan_out, step_cv4", *only)
		}
	}
	if *rounds < 1 || *length < 3*time.Second {
		return fmt.Errorf("--rounds %d, --length %v, want at least 1 and 3s", *rounds, *length)
	}
	report := bench.NewReport("sim", os.Stderr)
	pairs := make([][][2]outcome, len(cases)) // by case, then round: real, simulated
	var all []costs
	for round := range *rounds {
		for i := range cases {
			at := (i + round) % len(cases)
			c := &cases[at]
			cost, err := freshCosts(ctx, *images) // near in time: what they are depends on what else the machine does
			if err != nil {
				return fmt.Errorf("costs, round %d: %w", round+1, err)
			}
			all = append(all, cost)
			pair, err := compare(ctx, c, *images, cost, uint64(round+1))
			if err != nil {
				return fmt.Errorf("%s, round %d: %w", c.name, round+1, err)
			}
			pairs[at] = append(pairs[at], pair)
			console.Progress("bench sim: round %d of %d: %s: %.0f requests, mean %.1f ms and simulated %.1f ms, p99 %.0f ms and %.0f ms; hop %v, slot %v, start %v",
				round+1, *rounds, c.name, pair[0].requests, pair[0].mean*1e3, pair[1].mean*1e3, pair[0].p99*1e3, pair[1].p99*1e3, cost.hop, cost.slot, cost.start)
		}
	}
	for i := range cases {
		reportPairs(report, cases[i].name, pairs[i])
	}
	reportCosts(report, all)
	return printReport(report, *asJSON, out)
}

// compare runs a case on an `up` of its own, and simulates it.
func compare(ctx context.Context, c *simCase, images string, cost costs, seed uint64) (pair [2]outcome, err error) {
	flags := []string{"--images", images}
	if c.budget > 0 {
		flags = append(flags, "--budget", fmt.Sprint(c.budget))
	}
	err = onUp(ctx, flags, func(api *client.Client) (err error) {
		pair[0], err = c.real(ctx, api, seed)
		return err
	})
	if err != nil {
		return pair, err
	}
	if pair[1], err = simulate(ctx, c, cost, seed); err != nil {
		return pair, err
	}
	if pair[0].requests != pair[1].requests {
		return pair, fmt.Errorf("%.0f requests were sent and %.0f simulated, want the same", pair[0].requests, pair[1].requests)
	}
	return pair, nil
}

// simulate is the case in virtual time.
func simulate(ctx context.Context, c *simCase, cost costs, seed uint64) (outcome, error) {
	s, err := sim.Parse(strings.NewReader(scenario(c, cost, seed)))
	if err != nil {
		return outcome{}, err
	}
	model, err := s.Model(nil)
	if err != nil {
		return outcome{}, err
	}
	r, err := model.Run(ctx, nil)
	if err != nil {
		return outcome{}, err
	}
	of, p := r.Policies[0], r.Policies[0].Pipelines[0]
	return outcome{
		requests: p.Offered.Mean, failed: math.Round(p.Failed.Mean * p.Offered.Mean), mean: p.Mean.Mean, p50: p.P50.Mean, p99: p.P99.Mean,
		replicaSeconds: of.ReplicaSeconds.Mean,
	}, nil
}

// scenario is the case as the simulator takes it. What a slot costs lengthens each call and leaves its spread.
func scenario(c *simCase, cost costs, seed uint64) string {
	host := bench.NewReport("", io.Discard).Host
	var b strings.Builder
	fmt.Fprintf(&b, "name: %s\nseed: %d\nseeds: 1\nhop: %v\nbudget: %d\nnodes: [{memory: %d, cpu: %d}]\n", c.name, seed, cost.hop, c.budget, host.Memory, host.Cores)
	fmt.Fprintf(&b, "pipelines: [{name: p, slo: %v, timeout: %v, items: %d, arrivals: {rate: %q, cv: %g}}]\nstages:\n", c.slo, simTimeout, cmp.Or(c.items, 1), c.rate, c.cv)
	for _, s := range c.stages {
		mean := s.mean + cost.slot
		low, high := s.bounds(c.budget)
		fmt.Fprintf(&b, "- {name: %s, next: [%s], each: %t, service: {dist: lognormal, mean: %v, cv: %g}, start: {cold: %v}, memory: 16Mi, min: %d, max: %d}\n",
			s.name, s.next, s.each, mean, s.cv*s.mean.Seconds()/mean.Seconds(), cost.start, low, high)
	}
	return b.String()
}

// reportPairs adds what a case came to: medians over the rounds. The difference is the median of the rounds' own: in a round both had the
// same arrivals.
func reportPairs(r *bench.Report, name string, pairs [][2]outcome) {
	figures := []struct {
		metric string
		scale  float64
		bound  float64 // 0: none
		of     func(o outcome) float64
	}{
		{"mean_ms", 1e3, simMean, func(o outcome) float64 { return o.mean }},
		{"p50_ms", 1e3, 0, func(o outcome) float64 { return o.p50 }},
		{"p99_ms", 1e3, simP99, func(o outcome) float64 { return o.p99 }},
		{"replica_seconds", 1, 0, func(o outcome) float64 { return o.replicaSeconds }},
		{"requests", 1, 0, func(o outcome) float64 { return o.requests }},
		{"failed", 1, 0, func(o outcome) float64 { return o.failed }},
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
		r.Add(line, "real", median(is), len(is))
		r.Add(line, "simulated", median(simulated), len(simulated))
		if len(apart) > 0 {
			r.Add(line, "difference_percent", 100*median(apart), len(apart))
		}
		if f.bound > 0 && len(apart) > 0 {
			d := median(apart)
			r.Goals = append(r.Goals, bench.Goal{
				Goal: fmt.Sprintf("%s: percent that simulated differs from real: at most %g", line, 100*f.bound), Figure: 100 * d, Met: math.Abs(d) <= f.bound,
			})
		}
	}
}

// reportCosts adds what was measured for the simulator.
func reportCosts(r *bench.Report, all []costs) {
	for _, f := range []struct {
		name string
		of   func(c costs) time.Duration
	}{
		{"hop_ms", func(c costs) time.Duration { return c.hop }},
		{"slot_ms", func(c costs) time.Duration { return c.slot }},
		{"start_ms", func(c costs) time.Duration { return c.start }},
	} {
		var values []float64
		for _, c := range all {
			values = append(values, f.of(c).Seconds()*1e3)
		}
		r.Add("costs "+f.name, "real", median(values), len(values))
	}
}
