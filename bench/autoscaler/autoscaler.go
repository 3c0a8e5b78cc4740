// Package autoscaler compares policies on a running product under a load that steps up and down.
package autoscaler

import (
	"context"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench"
	"github.com/stagecoach-serving/stagecoach/bench/chart"
	openloop "github.com/stagecoach-serving/stagecoach/bench/load"
	"github.com/stagecoach-serving/stagecoach/bench/running"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// contender is a policy that decides the number of replicas.
type contender struct {
	name  string
	flags []string // of `stagecoach up`
}

// contenders are compared on the same arrivals with the same budget of replicas.
func contenders() []contender {
	others := []string{"--corrector", "none", "--sharer", "none"}
	return []contender{
		{"fixed", append([]string{"--allocator", "fixed"}, others...)},
		{"uniform", append([]string{"--allocator", "uniform"}, others...)},
		{"quart", nil}, // the defaults
	}
}

// autoscalerBench is a pipeline under a load, sized by one contender after the other.
type autoscalerBench struct {
	images, ort string
	model       string
	stages      []client.Deployment
	pipeline    string
	budget      int
	rounds      int
	step        time.Duration // of each of the load's three parts
	low, high   float64       // requests per second
	cv          float64
	slo         time.Duration
	body        string
	// seventh is how many times as long the seventh waiting stage takes as the others.
	seventh float64
}

// turn is what one contender did in one round.
type turn struct {
	result      openloop.Result
	replicaTime float64 // replica-seconds, from orders to ends
	peak        int     // replicas at the same time
	// first is the time from the step to the first answer of a replica ordered after it; 0: none.
	first time.Duration
}

// Run compares policies on a running `up`. Arrivals have gamma gaps. Their rate is first a fifth of
// what one replica of the slowest stage can serve, then one and a half times that, then a fifth
// again.
func Run(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("bench autoscaler", flag.ContinueOnError)
	asJSON, images := bench.Flags(fs)
	b := autoscalerBench{}
	fs.StringVar(&b.model, "model", "opt-66b", "of QUART's Table 1, split evenly into eight stages that wait; or minilm, which computes")
	fs.StringVar(&b.ort, "ort", "build/ort/libonnxruntime.so.1", "ONNX Runtime's library")
	fs.IntVar(&b.budget, "budget", running.Budget, "replicas that all stages together may have")
	fs.IntVar(&b.rounds, "rounds", 3, "of each contender, interleaved")
	fs.DurationVar(&b.step, "step", 20*time.Second, "length of each of the load's three parts: low, high, low")
	fs.Float64Var(&b.cv, "cv", 4, "coefficient of variation of the gaps between arrivals")
	fs.Float64Var(&b.seventh, "seventh", 1, "how many times as long the seventh stage takes as the others, which wait: above 1 it holds them up")
	svg := fs.String("svg", "", "FILE for a chart of the last round")
	only := fs.String("only", "", "one contender alone")
	if err := console.ParseFlags(fs, args); err != nil {
		return err
	}
	all := contenders()
	if *only != "" {
		if all = slices.DeleteFunc(all, func(c contender) bool { return c.name != *only }); len(all) == 0 {
			return fmt.Errorf("--only %q, want one of fixed, uniform, quart", *only)
		}
	}
	if !(b.seventh > 0 && b.seventh <= 100) {
		return fmt.Errorf("--seventh %g, want more than 0, at most 100", b.seventh)
	}
	if b.rounds < 1 || b.step < time.Second {
		return fmt.Errorf("--rounds %d, --step %v, want at least 1 and 1s", b.rounds, b.step)
	}
	b.images = *images
	if err := b.prepare(ctx); err != nil {
		return err
	}
	report := bench.NewReport("autoscaler", os.Stderr)
	turns := map[string][]turn{}
	for round := range b.rounds {
		for i := range all {
			c := all[(i+round)%len(all)]
			t, err := b.turn(ctx, c, uint64(round))
			if err != nil {
				return fmt.Errorf("%s, round %d: %w", c.name, round+1, err)
			}
			turns[c.name] = append(turns[c.name], t)
			l := t.result.Total.Latency
			console.Progress("bench autoscaler: round %d of %d: %s: mean %.0f ms, p99 %.0f ms, %.1f %% within %v, %.0f replica-seconds",
				round+1, b.rounds, c.name, l.Mean*1e3, bench.OrNaN(l.P99)*1e3, 100*t.result.Total.Attainment, b.slo, t.replicaTime)
		}
	}
	for _, c := range all {
		b.report(report, c.name, turns[c.name])
	}
	if *svg != "" {
		if err := b.draw(*svg, all, turns); err != nil {
			return err
		}
	}
	return bench.Print(report, *asJSON, out)
}

// prepare sets the stages and the load.
func (b *autoscalerBench) prepare(ctx context.Context) error {
	if b.model == "minilm" {
		return b.prepareMiniLM(ctx)
	}
	exec, ok := running.ExecTimes[b.model]
	if !ok {
		return fmt.Errorf("--model %q, want one of whisper-9b, bert-21b, llama-7b, opt-66b, wideresnet, minilm", b.model)
	}
	c := running.Case{Name: "quart", Stages: running.SplitEvenly(exec, b.seventh), Budget: b.budget, SLO: 3 * exec}
	b.stages, b.pipeline, b.slo = c.Deployments(), c.Pipeline(), c.SLO
	one := running.Stages / exec.Seconds() // requests per second of one replica of a stage
	b.low, b.high, b.body = 0.2*one, 1.5*one, "x"
	return nil
}

// turn runs the load once against an `up` of its own.
func (b *autoscalerBench) turn(ctx context.Context, c contender, seed uint64) (t turn, err error) {
	flags := append([]string{"--images", b.images, "--ort", b.ort, "--budget", fmt.Sprint(b.budget)}, c.flags...)
	return t, running.OnUp(ctx, flags, func(api *client.Client) error {
		if err := b.begin(ctx, api); err != nil {
			return err
		}
		cfg, err := openloop.Scenario{
			Gateway: api.URL(), Seed: seed, Timeout: 2 * time.Minute, MaxInFlight: 4000, SLO: b.slo, CV: &b.cv, Rate: running.StepRate(b.low, b.high, b.step),
			Targets: []openloop.TargetSpec{{Function: b.pipeline, Body: openloop.Body{Text: b.body}, Headers: map[string]string{"Content-Type": jsonType}}},
		}.Config("")
		if err != nil {
			return err
		}
		if t.result, err = openloop.Run(ctx, cfg); err != nil {
			return err
		}
		if t.result.Total.Failed+t.result.Total.NotSent > 0 {
			console.Progress("bench autoscaler: %s: %d failed, %d not sent: %+v", c.name, t.result.Total.Failed, t.result.Total.NotSent, t.result.Total.Errors)
		}
		return b.replicas(ctx, api, &t)
	})
}

// begin deploys the stages. It returns when their service times are known and all ordered replicas
// are ready.
func (b *autoscalerBench) begin(ctx context.Context, api *client.Client) error {
	if err := running.DeployAll(ctx, api, b.stages); err != nil {
		return err
	}
	for range 5 {
		if _, err := api.Invoke(ctx, b.pipeline, jsonType, []byte(b.body)); err != nil {
			return err
		}
	}
	for _, d := range b.stages {
		if err := running.Settled(ctx, api, d.Service); err != nil {
			return err
		}
	}
	return nil
}

// replicas records the use of replicas in a turn. The load has three parts of length b.step, and
// begins at the time that the load generator reports.
func (b *autoscalerBench) replicas(ctx context.Context, api *client.Client, t *turn) error {
	begun := t.result.Started
	step, back := begun.Add(b.step), begun.Add(2*b.step)
	for _, n := range readyBySecond(t.result) {
		t.peak = max(t.peak, n)
	}
	for _, d := range b.stages {
		line, err := api.Timeline(ctx, d.Service)
		if err != nil {
			return err
		}
		t.replicaTime += running.ReplicaSeconds(line.Events, begun, begun.Add(3*b.step))
		if at := running.FirstAnswer(line.Events, step, back); !at.IsZero() && (t.first == 0 || at.Sub(step) < t.first) {
			t.first = at.Sub(step)
		}
	}
	return nil
}

// readyBySecond sums the ready replicas of all functions in each second of the load.
func readyBySecond(r openloop.Result) []int {
	out := make([]int, int(math.Ceil(r.Duration)))
	for _, f := range r.Functions {
		last := 0
		at := 0
		for i := range out {
			for at < len(f.Samples) && f.Samples[at].T <= float64(i)+0.5 {
				last = f.Samples[at].Replicas
				at++
			}
			out[i] += last
		}
	}
	return out
}

// report adds the medians over the rounds.
func (b *autoscalerBench) report(r *bench.Report, name string, turns []turn) {
	figures := []struct {
		metric string
		of     func(turn) float64
	}{
		{"mean_ms", func(t turn) float64 { return 1e3 * t.result.Total.Latency.Mean }},
		{"p50_ms", func(t turn) float64 { return 1e3 * bench.OrNaN(t.result.Total.Latency.P50) }},
		{"p99_ms", func(t turn) float64 { return 1e3 * bench.OrNaN(t.result.Total.Latency.P99) }},
		{"slo_percent", func(t turn) float64 { return 100 * t.result.Total.Attainment }},
		{"replica_seconds", func(t turn) float64 { return t.replicaTime }},
		{"peak_replicas", func(t turn) float64 { return float64(t.peak) }},
		{"first_answer_ms", func(t turn) float64 { return float64(t.first) / 1e6 }},
		{"failed", func(t turn) float64 { return float64(t.result.Total.Failed + t.result.Total.NotSent) }},
	}
	for _, f := range figures {
		var all []float64
		for _, t := range turns {
			if v := f.of(t); !math.IsNaN(v) && (f.metric != "first_answer_ms" || v > 0) {
				all = append(all, v)
			}
		}
		if len(all) == 0 {
			continue
		}
		r.Add(b.model+", "+name, f.metric, bench.Median(all), len(all))
	}
}

// draw writes the last round of each contender: tail latency and replicas by second.
func (b *autoscalerBench) draw(file string, all []contender, turns map[string][]turn) error {
	plots := []chart.Plot{
		{Title: fmt.Sprintf("%s, at most %d replicas: requests/s offered, CV %g", b.model, b.budget, b.cv)},
		{Title: "latency, p99 of each second's requests", LogY: true, Unit: func(s float64) string { return fmt.Sprintf("%g s", s) }, Marks: []chart.Mark{{Name: "objective", At: b.slo.Seconds()}}},
		{Title: "replicas"},
	}
	for i, who := range all {
		r := turns[who.name][len(turns[who.name])-1].result
		ready := readyBySecond(r)
		at, tail, replicas, offered := make([]float64, len(ready)), make([]float64, len(ready)), make([]float64, len(ready)), make([]float64, len(ready))
		for s := range ready {
			at[s], tail[s], replicas[s] = float64(s), math.NaN(), float64(ready[s])
			if s >= len(r.Total.Seconds) {
				continue
			}
			second := r.Total.Seconds[s]
			if offered[s] = float64(second.Offered); second.P99 > 0 {
				tail[s] = second.P99
			}
		}
		if i == 0 {
			plots[0].Lines = []chart.Line{{Color: -1, X: at, Y: offered}}
		}
		plots[1].Lines = append(plots[1].Lines, chart.Line{Name: who.name, Color: i, X: at, Y: tail})
		plots[2].Lines = append(plots[2].Lines, chart.Line{Name: who.name, Color: i, X: at, Y: replicas, Steps: true})
	}
	for i := range plots {
		plots[i].XUnit = func(v float64) string { return fmt.Sprintf("%g s", v) }
	}
	var text strings.Builder
	if err := chart.WriteColumn(&text, plots...); err != nil {
		return err
	}
	err := os.MkdirAll(filepath.Dir(file), 0o755) //nolint:gosec // a chart is for everybody
	if err != nil {
		return err
	}
	return os.WriteFile(file, []byte(text.String()), 0o644) //nolint:gosec // likewise
}
