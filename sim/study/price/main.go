// Command price shows what a price of latency does: for each price, it simulates three stages with
// bursty arrivals. It prints the table of docs/autoscaler.md, and draws the curve.
//
//	go run ./sim/study/price --svg docs/img/price.svg    # make bench-price
package main

import (
	"context"
	_ "embed"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
	"github.com/stagecoach-serving/stagecoach/sim"
)

//go:embed price.yml
var scenario string

// prices are the prices that are simulated.
var prices = []float64{0, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100}

func main() {
	if err := run(context.Background(), os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "price:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("price", flag.ContinueOnError)
	file := fs.String("svg", "", "file to draw the curve to")
	seeds := fs.Int("seeds", 10, "seeds per price, at least 2")
	duration := fs.Duration("duration", 0, "length of the arrivals; 0: the scenario's")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if *seeds < 2 {
		return fmt.Errorf("--seeds: %d, want at least 2 for intervals", *seeds)
	}
	rows, err := study(ctx, prices, *seeds, *duration)
	if err != nil {
		return err
	}
	if *file != "" {
		f, err := os.Create(*file)
		if err != nil {
			return err
		}
		defer f.Close()
		if err := figure(rows, *seeds).WriteSVG(f); err != nil {
			return err
		}
		if err := f.Close(); err != nil {
			return err
		}
	}
	return table(out, rows)
}

// row is the result of one price.
type row struct {
	price    float64
	latency  sim.Estimate // mean, in seconds
	p99      sim.Estimate // seconds
	replicas sim.Estimate // on average over time: replica-seconds per second
	// What the replicas beyond those of the previous price cost, in replica-seconds per second of
	// latency that they saved. Known means that the saving differs from 0 by more than its
	// interval.
	paid  float64
	known bool
}

// study simulates prices on the same seeds. The first price is the base of the others. duration
// replaces the scenario's, unless it is 0.
func study(ctx context.Context, prices []float64, seeds int, duration time.Duration) ([]row, error) {
	s, err := sim.Parse(strings.NewReader(scenario))
	if err != nil {
		return nil, err
	}
	s.Seeds = seeds
	if duration > 0 {
		s.Duration, s.Warmup = duration, duration/10
	}
	for _, p := range prices {
		s.Policies = append(s.Policies, sim.Policy{Name: fmt.Sprintf("price %g", p), Names: policy.Names{Price: p}})
	}
	m, err := s.Model(nil)
	if err != nil {
		return nil, err
	}
	runs, err := m.Runs(ctx, nil)
	if err != nil {
		return nil, err
	}
	rows := make([]row, len(prices))
	for i, price := range prices {
		rows[i] = row{
			price:    price,
			latency:  estimate(runs[i], func(f *sim.Figures) float64 { return f.Pipelines[0].Mean }),
			p99:      estimate(runs[i], func(f *sim.Figures) float64 { return f.Pipelines[0].P99 }),
			replicas: estimate(runs[i], func(f *sim.Figures) float64 { return f.ReplicaSeconds / f.Seconds }),
		}
		if i > 0 {
			rows[i].paid, rows[i].known = paid(runs[i-1], runs[i])
		}
	}
	return rows, nil
}

// estimate returns the mean of a figure over seeds.
func estimate(runs []sim.Figures, figure func(*sim.Figures) float64) sim.Estimate {
	values := make([]float64, len(runs))
	for i := range runs {
		values[i] = figure(&runs[i])
	}
	return sim.NewEstimate(values)
}

// paid returns how many more replica-seconds the runs in after have per second of latency that they
// save, against the runs in before with the same seeds. known is false if the saving may be chance.
func paid(before, after []sim.Figures) (price float64, known bool) {
	saved, spent := make([]float64, len(after)), 0.0
	for i := range after {
		b, a := &before[i], &after[i]
		saved[i] = (b.Pipelines[0].Mean - a.Pipelines[0].Mean) * a.Pipelines[0].Offered / a.Seconds
		spent += (a.ReplicaSeconds/a.Seconds - b.ReplicaSeconds/b.Seconds) / float64(len(after))
	}
	mean := sim.NewEstimate(saved)
	if mean.Mean <= mean.CI {
		return 0, false
	}
	return spent / mean.Mean, true
}
