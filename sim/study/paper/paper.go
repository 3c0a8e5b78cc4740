// Package paper is `stagecoach sim paper`: it evaluates the design of a paper on the simulator.
package paper

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/sim"
	"github.com/stagecoach-serving/stagecoach/sim/simulate"
	"github.com/stagecoach-serving/stagecoach/sim/study"
	"github.com/stagecoach-serving/stagecoach/sim/study/quart"
)

// paper is an evaluation that `stagecoach sim paper` knows.
type paper struct {
	name  string
	usual func(sim.Opener) (study.Study, error)
	full  func(sim.Opener) (study.Study, error) // with --full
	quick func() study.Study
	// tuned returns the configurations that come with the paper. It returns fs.ErrNotExist if there
	// are none; then each evaluation chooses its own.
	tuned func() (study.Tuned, error)
	write func(*study.Result, io.Writer) error // the report
}

func papers() []paper {
	bounds := func(sim.Opener) (study.Study, error) { return quart.Bounds(), nil }
	return []paper{
		{"quart", quart.Headline, quart.Full, quart.Quick, quart.Tuned, (*study.Result).WriteMarkdown},
		{"bounds", bounds, bounds, quart.QuickBounds, func() (study.Tuned, error) { return study.Tuned{}, fs.ErrNotExist }, quart.WriteBounds},
	}
}

// paperFlags are what `stagecoach sim paper` is asked.
type paperFlags struct {
	quick, full, tune      bool
	only, json, out, tuned string
	runs                   string
	seeds                  int
}

// Run evaluates one of the papers.
func Run(ctx context.Context, args []string, out io.Writer) error {
	return evaluateOne(ctx, args, papers(), out)
}

// evaluateOne evaluates a paper's design on the simulator. It writes the report to out, and its
// progress to standard error.
func evaluateOne(ctx context.Context, args []string, all []paper, out io.Writer) error {
	var f paperFlags
	fs := flag.NewFlagSet("sim paper", flag.ContinueOnError)
	fs.BoolVar(&f.quick, "quick", false, "a small part of it, in less than half a minute")
	fs.BoolVar(&f.full, "full", false, "all of it, with every load, contender and sweep, which takes much longer")
	fs.BoolVar(&f.tune, "tune", false, "choose the contenders' configurations anew first, which takes longer than the rest")
	fs.StringVar(&f.only, "only", "", "regular expression of settings, and after a slash of contenders")
	fs.IntVar(&f.seeds, "seeds", 0, "how many seeds, in place of the study's")
	fs.StringVar(&f.json, "json", "", "file for the result as JSON; - is standard output, in place of Markdown")
	fs.StringVar(&f.out, "out", "", "folder for report.md, result.json and the figures")
	fs.StringVar(&f.tuned, "tuned", "", "file with configurations, in place of those that come with it; --tune writes it")
	fs.StringVar(&f.runs, "runs", "", "file that keeps finished runs, so that a stopped program goes on there; by default runs.jsonl in the folder of --out, with --full or --tune")
	rest, err := console.ParseMixed(fs, args)
	if err != nil {
		return err
	}
	var names []string
	for _, p := range all {
		if names = append(names, p.name); len(rest) == 1 && rest[0] == p.name {
			if err := p.run(ctx, f, out); err != nil {
				return fmt.Errorf("sim paper %s: %w", p.name, err)
			}
			return nil
		}
	}
	return fmt.Errorf("sim paper: got %q, want one of %q", rest, names)
}

// run makes the evaluation.
func (p *paper) run(ctx context.Context, f paperFlags, out io.Writer) error {
	open := simulate.Opener(".")
	s, err := p.study(f, open)
	if err != nil {
		return err
	}
	for _, l := range s.LeftOut {
		console.Progress("left out: %s: %s", l.Setting, l.Why)
	}
	store, file, err := f.store()
	if err != nil {
		return err
	}
	if s.Store = store; s.More != nil {
		s.More.Store = store
	}
	if file != nil {
		defer file.Close()
	}
	defer debug.SetGCPercent(debug.SetGCPercent(simulate.GC))
	tuned, err := p.configurations(ctx, &s, f, open)
	if err != nil {
		return err
	}
	result, err := s.Evaluate(ctx, tuned, open, studyProgress())
	if err != nil {
		return err
	}
	if store != nil && store.Found() > 0 {
		console.Progress("%d runs were made before, and were not made again", store.Found())
	}
	var errs []error
	if f.json == "-" {
		errs = append(errs, console.WriteJSON(out, result))
	} else {
		errs = append(errs, p.write(result, out))
	}
	if f.json != "" && f.json != "-" {
		errs = append(errs, console.WriteFile(f.json, func(w io.Writer) error { return console.WriteJSON(w, result) }))
	}
	if f.out != "" {
		errs = append(errs, p.fill(f.out, &s, result))
	}
	return errors.Join(errs...)
}

// study is what the flags ask for.
func (p *paper) study(f paperFlags, open sim.Opener) (study.Study, error) {
	var s study.Study
	var err error
	switch {
	case f.quick && f.full:
		return s, errors.New("--quick and --full, want one of them")
	case f.quick:
		s = p.quick()
	case f.full:
		s, err = p.full(open)
	default:
		s, err = p.usual(open)
	}
	if err != nil {
		return s, err
	}
	s.Test.N = cmp.Or(f.seeds, s.Test.N)
	if s.More != nil {
		s.More.Test.N = cmp.Or(f.seeds, s.More.Test.N)
	}
	if err := s.Check(); err != nil {
		return s, err
	}
	return s, s.Only(f.only)
}

// configurations returns the contenders' configurations for an evaluation. They are read from the
// file that --tuned names; without --tuned, they are those that come with the study. With --tune,
// or if there is no --tuned and the study comes with none, the contenders are tuned instead. The
// new configurations are then written to the file that --tuned names, if it names one.
func (p *paper) configurations(ctx context.Context, s *study.Study, f paperFlags, open sim.Opener) (study.Tuned, error) {
	tuned, err := p.stored(f.tuned)
	missing := errors.Is(err, fs.ErrNotExist)
	tune := f.tune || missing && f.tuned == ""
	if !tune || err != nil && !missing {
		return tuned, err
	}
	merge := f.tuned != "" && !missing && (f.only != "" || f.quick) // the rest of the file stays
	if merge {
		if _, err := tuned.Merge(s.Nothing()); err != nil {
			return tuned, err // before it takes long
		}
	}
	newer, err := s.Tune(ctx, open, studyProgress())
	if err != nil || f.tuned == "" {
		return newer, err
	}
	if merge {
		if newer, err = tuned.Merge(newer); err != nil {
			return newer, err
		}
	}
	return newer, console.WriteFile(f.tuned, func(w io.Writer) error { return console.WriteJSON(w, newer) })
}

// stored are the configurations of a file, or those that come with the study.
func (p *paper) stored(file string) (study.Tuned, error) {
	if file == "" {
		return p.tuned()
	}
	f, err := os.Open(file)
	if err != nil {
		return study.Tuned{}, err
	}
	defer f.Close()
	return study.ReadTuned(f, p.name)
}

// fill fills a folder with the report, the result and its figures.
func (p *paper) fill(folder string, s *study.Study, r *study.Result) error {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	figures, err := figures(s, r)
	errs := []error{
		err,
		console.WriteFile(filepath.Join(folder, "result.json"), func(w io.Writer) error { return console.WriteJSON(w, r) }),
		console.WriteFile(filepath.Join(folder, "report.md"), func(w io.Writer) error { return errors.Join(p.write(r, w), linkFigures(w, figures)) }),
	}
	for _, f := range figures {
		errs = append(errs, console.WriteFile(filepath.Join(folder, f.Name+".svg"), func(w io.Writer) error {
			_, err := io.Copy(w, bytes.NewReader(f.SVG))
			return err
		}))
	}
	return errors.Join(errs...)
}

// figures draws the figures of a result, and of the study's further settings.
func figures(s *study.Study, r *study.Result) (out []study.Figure, err error) {
	for ; s != nil && r != nil && err == nil; s, r = s.More, r.More {
		if s.Draw == nil {
			continue
		}
		var more []study.Figure
		more, err = s.Draw(r)
		out = append(out, more...)
	}
	return out, err
}

// linkFigures writes what figures lie beside a report.
func linkFigures(w io.Writer, figures []study.Figure) error {
	var b strings.Builder
	for i, f := range figures {
		if i == 0 {
			b.WriteString("\n## Figures\n\n")
		}
		fmt.Fprintf(&b, "- [%s](%s.svg)\n", cmp.Or(f.Title, f.Name), f.Name)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// studyProgress returns a function that prints the progress of the runs and the estimated time
// left, at most once per second and at the end.
func studyProgress() func(study.Progress) {
	begun := time.Now()
	last := begun
	return func(p study.Progress) {
		now := time.Now()
		if now.Sub(last) < time.Second && p.Done < p.Runs {
			return
		}
		last = now
		took := now.Sub(begun)
		left := time.Duration(float64(took) / float64(p.Done) * float64(p.Runs-p.Done))
		console.Progress("%s: %d of %d runs, %d %%, %.1f a second, %v left", p.Step, p.Done, p.Runs, 100*p.Done/p.Runs, float64(p.Done)/took.Seconds(), left.Round(time.Second))
	}
}
