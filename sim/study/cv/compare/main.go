// Command cv compares predictors of burstiness. It measures the error of each predictor on
// held-back runs. It also measures how well scenarios are served if the autoscaler's smoother uses
// that predictor.
//
// With --train, it makes new weights for the attention. It then measures only errors, and includes
// an attention without neighbours and one with Eq. 4 as QUART prints it.
//
//	go run ./sim/study/cv/compare                                    # make bench-cv
//	go run ./sim/study/cv/compare --train sim/study/cv/weights.go    # make train-cv
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"

	"github.com/stagecoach-serving/stagecoach/autoscaler"
	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
	"github.com/stagecoach-serving/stagecoach/sim"
	"github.com/stagecoach-serving/stagecoach/sim/qna"
	"github.com/stagecoach-serving/stagecoach/sim/study/cv"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "cv:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("cv", flag.ContinueOnError)
	train := fs.String("train", "", "file to write weights to, as Go")
	scenarios := fs.String("scenarios", "bench/scenarios", "folder of the scenarios that predictors size")
	if err := fs.Parse(args); err != nil {
		return err
	}
	contenders := cv.Contenders()
	if *train != "" {
		var err error
		if contenders, err = learn(ctx, *train); err != nil {
			return err
		}
	}
	runs := cv.HeldBackRuns(180)
	records, err := cv.Record(ctx, runs, progress("held back"))
	if err != nil {
		return err
	}
	if err := cv.WriteMarkdown(out, contenders, cv.Compare(runs, records, contenders)); err != nil || *train != "" {
		return err
	}
	return effects(ctx, *scenarios, out)
}

// learn makes weights, and returns the contenders with them.
func learn(ctx context.Context, file string) ([]cv.Contender, error) {
	training, err := cv.Record(ctx, cv.TrainingRuns(), progress("training"))
	if err != nil {
		return nil, err
	}
	validation, err := cv.Record(ctx, cv.ValidationRuns(), progress("validation"))
	if err != nil {
		return nil, err
	}
	fit := func(view cv.View) cv.AttentionWeights {
		return cv.Train(cv.Samples(training, view), cv.Samples(validation, view), func(f cv.Fit) {
			fmt.Fprintf(os.Stderr, "epoch %d of %d: loss %.5f, of validation %.5f\n", f.Epoch, f.Epochs, f.Training, f.Validation)
		})
	}
	w := fit(cv.Whole)
	source, err := cv.Go(w)
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(file, source, 0o644); err != nil { //nolint:gosec // it is source
		return nil, err
	}
	contenders := cv.Contenders()
	contenders[len(contenders)-1] = cv.Learned("attention", w, cv.Whole)
	return append(contenders, cv.Learned("without neighbours", fit(cv.Alone), cv.Alone), cv.Learned("Eq. 4 as printed", fit(cv.AsPrinted), cv.AsPrinted)), nil
}

func progress(of string) func(done, all int) {
	return func(done, all int) {
		if done%20 == 0 || done == all {
			fmt.Fprintf(os.Stderr, "%s: %d of %d runs\n", of, done, all)
		}
	}
}

// effects sizes scenarios with the whole policy and each predictor.
func effects(ctx context.Context, folder string, out io.Writer) error {
	fmt.Fprint(out, "\n| scenario | sizes | predictor | in time | mean | p99 | replica-seconds | to QNA: mean | replica-seconds |\n|---|---|---|---|---|---|---|---|---|\n")
	for _, name := range []string{"cv4", "step", "unbalanced", "diamond"} {
		for _, allocator := range []string{"sizer", "uniform"} {
			if err := effect(ctx, folder, name, allocator, out); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		}
	}
	return nil
}

// effect simulates a scenario on five seeds, with twice its budget.
func effect(ctx context.Context, folder, name, allocator string, out io.Writer) error {
	file, err := os.Open(filepath.Join(folder, name+".yml"))
	if err != nil {
		return err
	}
	s, err := sim.Parse(file)
	if err := errors.Join(err, file.Close()); err != nil {
		return err
	}
	s.Budget, s.Seed, s.Seeds, s.Policies = 2*s.Budget, 201, 5, nil // room to take something back
	for _, p := range []struct {
		name    string
		predict cv.Predictor
	}{{"qna", qna.Predict}, {"persistence", cv.Persistence}, {"attention", cv.NewAttention().Predict}} {
		s.Policies = append(s.Policies, sim.Policy{Name: p.name, Make: func(sim.Run) (policy.Set, error) {
			set, err := policy.Names{Allocator: allocator}.Choose()
			return policy.WithCorrector(set, "quart-"+p.name, cv.NewCorrector(autoscaler.QuartConfig{}, p.predict)), err
		}})
	}
	m, err := s.Model(func(name string) (io.ReadCloser, error) {
		return nil, fmt.Errorf("%s: want scenarios without files", name)
	})
	if err != nil {
		return err
	}
	r, err := m.Run(ctx, nil)
	if err != nil {
		return err
	}
	for _, p := range r.Policies {
		is, v := p.Pipelines[0], sim.Versus{}
		if len(p.Versus) > 0 {
			v = p.Versus[0]
		}
		fmt.Fprintf(out, "| %s | %s | %s | %s %% | %s ms | %s ms | %s | %s %% | %s %% |\n", name, allocator, p.Name, plusMinus(is.Attainment, 100, 2), plusMinus(is.Mean, 1e3, 1),
			plusMinus(is.P99, 1e3, 0), plusMinus(p.ReplicaSeconds, 1, 0), plusMinus(v.Mean, 100, 2), plusMinus(v.ReplicaSeconds, 100, 2))
	}
	return nil
}

func plusMinus(e sim.Estimate, scale float64, digits int) string {
	return fmt.Sprintf("%.*f ± %.*f", digits, scale*e.Mean, digits, scale*e.CI)
}
