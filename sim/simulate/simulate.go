// Package simulate is `stagecoach sim`: it runs a scenario on the simulator.
package simulate

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime/debug"
	"time"

	openloop "github.com/stagecoach-serving/stagecoach/bench/load"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/sim"
)

// GC is the percentage by which the heap may grow between garbage collections. It is high because a
// simulation allocates much, but holds little of it for long.
const GC = 800

// Evaluation runs `stagecoach sim paper`; nil: this build has no evaluation.
type Evaluation func(ctx context.Context, args []string, out io.Writer) error

// Run is `stagecoach sim`. It simulates a scenario, and writes the result as Markdown to out and
// its progress to standard error.
func Run(ctx context.Context, args []string, out io.Writer, evaluate Evaluation) error {
	if len(args) > 0 && args[0] == "paper" {
		if evaluate == nil {
			return errors.New("sim paper: this build has no evaluation, want one without `-tags noevaluation`")
		}
		return evaluate(ctx, args[1:], out)
	}
	fs := flag.NewFlagSet("sim", flag.ContinueOnError)
	jsonFile := fs.String("json", "", "file for the result as JSON; - is standard output, in place of Markdown")
	svgFile := fs.String("svg", "", "file for a chart of the first seed over time")
	seeds := fs.Int("seeds", 0, "how many seeds, in place of the scenario's")
	quiet := fs.Bool("quiet", false, "no line a second on standard error")
	record := recordedFlags{
		record:   fs.String("recorded", "", "record of `up --record` to take as load, in place of a scenario; may be gzipped"),
		pipeline: fs.String("pipeline", "", "with --recorded: only this pipeline, and those that share stages with it"),
		write:    fs.String("write", "", "with --recorded: file for the scenario, with its arrivals beside it"),
	}
	fs.Var(&record.policies, "policy", "with --recorded: recorded, static, quart, an allocator, or LEVEL=NAME,…; may be repeated")
	rest, err := console.ParseMixed(fs, args)
	if err != nil {
		return err
	}
	to := outputs{json: *jsonFile, svg: *svgFile, seeds: *seeds, quiet: *quiet}
	if *record.record != "" {
		if len(rest) > 0 {
			return fmt.Errorf("sim: got %q beside --recorded, want one of both", rest)
		}
		return runRecorded(ctx, &record, to, out)
	}
	if *record.pipeline != "" || *record.write != "" || len(record.policies) > 0 {
		return errors.New("sim: --pipeline, --write or --policy without --recorded, want a record")
	}
	if len(rest) != 1 {
		return fmt.Errorf("sim: got %q, want one scenario: `stagecoach sim SCENARIO.yml`", rest)
	}
	model, err := simModel(rest[0], *seeds)
	if err != nil {
		return fmt.Errorf("sim: %s: %w", rest[0], err)
	}
	defer debug.SetGCPercent(debug.SetGCPercent(GC))
	report := simProgress(*quiet)
	result, err := model.Run(ctx, report)
	if err != nil {
		return fmt.Errorf("sim: %w", err)
	}
	return to.write(out, result, result.WriteMarkdown, result.WriteSVG)
}

// simModel reads a scenario. It looks for a trace first at its path, then in the scenario's folder,
// then in the folder of recorded data.
func simModel(name string, seeds int) (*sim.Model, error) {
	file, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	s, err := sim.Parse(file)
	if err != nil {
		return nil, err
	}
	s.Seeds = cmp.Or(seeds, s.Seeds)
	return s.Model(Opener(filepath.Dir(name)))
}

// Opener returns a function that opens traces. It looks for a trace first at its path, then in
// folder, then in the folder of recorded data.
func Opener(folder string) sim.Opener {
	data := cmp.Or(os.Getenv("STAGECOACH_DATA"), openloop.DefaultData)
	return func(trace string) (io.ReadCloser, error) {
		f, err := os.Open(trace)
		for _, folder := range []string{folder, data} {
			if !errors.Is(err, os.ErrNotExist) || filepath.IsAbs(trace) {
				break
			}
			f, err = os.Open(filepath.Join(folder, trace))
		}
		if err != nil {
			return nil, fmt.Errorf("%w (relative paths are looked for beside the scenario and in $STAGECOACH_DATA, which is %q)", err, data)
		}
		return f, nil
	}
}

// simProgress says once a second, and at the end, how far the runs are and how fast.
func simProgress(quiet bool) func(sim.Progress) {
	begun := time.Now()
	last := begun
	return func(p sim.Progress) {
		if now := time.Now(); !quiet && (now.Sub(last) >= time.Second || p.Done == p.Runs) {
			last = now
			console.Progress("%v, %.2f million a second", p, float64(p.Events)/1e6/now.Sub(begun).Seconds())
		}
	}
}
