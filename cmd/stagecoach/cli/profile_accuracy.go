package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/internal/score"
	"github.com/stagecoach-serving/stagecoach/provider/accuracy"
	"github.com/stagecoach-serving/stagecoach/provider/client"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// accuracyFlags are the flags of `stagecoach profile --accuracy`.
type accuracyFlags struct {
	folder string
	scorer string
	least  int
}

const (
	atATime     = 4        // calls of a measurement
	mostAnswer  = 64 << 20 // bytes
	scorerLimit = 30 * time.Second
	sayEvery    = 5 * time.Second
)

// measureAccuracy runs each function of a stage, or each chain of a pipeline, on all examples. It
// stores the scores, and prints what is known then.
func (f *profileFlags) measureAccuracy(ctx context.Context, c *client.Client, out io.Writer) error {
	scorer, file, err := f.accuracy.parse()
	if err != nil {
		return err
	}
	examples, err := readExamples(f.accuracy.folder, f.accuracy.least)
	if err != nil {
		return err
	}
	path := "/system/accuracy/" + url.PathEscape(f.name) + f.api.query()
	var sheet accuracy.Sheet
	if err := c.Get(ctx, path, &sheet); err != nil {
		return err
	}
	m := accuracyRun{c: c, f: f, scorer: scorer, file: file, examples: examples}
	results, err := m.all(ctx, sheet)
	if err != nil {
		return fmt.Errorf("profile %s: %w", f.name, err)
	}
	if err := c.Send(ctx, "accuracy of "+f.name, http.MethodPut, path, results); err != nil {
		return err
	}
	if err := c.Get(ctx, path, &sheet); err != nil {
		return err
	}
	if f.json {
		return json.NewEncoder(out).Encode(sheet)
	}
	return printAccuracy(sheet, out)
}

// parse returns the scorer. file is true if it is a command that reads files.
func (a *accuracyFlags) parse() (scorer score.Scorer, file func(ctx context.Context, want, got string) (float64, error), err error) {
	if program, ok := strings.CutPrefix(a.scorer, "command="); ok {
		path, err := exec.LookPath(program)
		if err != nil {
			return scorer, nil, fmt.Errorf("profile: --scorer: %w", err)
		}
		return score.Scorer{Name: a.scorer}, func(ctx context.Context, want, got string) (float64, error) {
			return runScorer(ctx, path, want, got)
		}, nil
	}
	if scorer, err = score.Parse(a.scorer); err != nil {
		err = fmt.Errorf("profile: --scorer: %w", err)
	}
	return scorer, nil, err
}

// runScorer runs the user's program with the files of both answers. It prints the score.
func runScorer(ctx context.Context, program, want, got string) (float64, error) {
	ctx, stop := context.WithTimeoutCause(ctx, scorerLimit, fmt.Errorf("it took more than %v", scorerLimit))
	defer stop()
	var out, trouble bytes.Buffer
	cmd := exec.CommandContext(ctx, program, want, got)
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = &out, &trouble, time.Second
	if err := cmd.Run(); err != nil {
		return 0, fmt.Errorf("%s: %w: %.300s", program, cmpErr(context.Cause(ctx), err), console.Harmless(strings.TrimSpace(trouble.String())))
	}
	v, err := strconv.ParseFloat(strings.TrimSpace(out.String()), 64)
	if err != nil || !(v >= 0 && v <= 1) {
		return 0, fmt.Errorf("%s printed %.100q, want a number from 0 to 1", program, out.String())
	}
	return v, nil
}

// accuracyRun is one measurement.
type accuracyRun struct {
	c      *client.Client
	f      *profileFlags
	scorer score.Scorer
	// file scores files, in place of scorer.Score; nil: it does not.
	file     func(ctx context.Context, want, got string) (float64, error)
	examples []example
}

// all measures what a sheet lists.
func (m *accuracyRun) all(ctx context.Context, sheet accuracy.Sheet) (r accuracy.Results, err error) {
	r = accuracy.Results{Version: accuracy.Version, Images: map[string]accuracy.Image{}}
	for _, f := range sheet.Functions {
		r.Images[f.Function] = f.Image
	}
	pipeline, items := len(sheet.Stages) > 0, ""
	var chains [][]string
	for _, c := range sheet.Chains {
		chains = append(chains, c.Functions)
	}
	if !pipeline {
		for _, f := range sheet.Functions {
			chains = append(chains, []string{f.Function})
		}
		if items, err = ProfileItems(ctx, m.c, "/system/function/"+url.PathEscape(m.f.name)+m.f.api.query()); err != nil {
			return r, err
		}
	}
	switch {
	case sheet.Ends > 1:
		return r, fmt.Errorf("the pipeline has %d last stages, want one whose answers are scored; measure its stages one by one: %s", sheet.Ends, strings.Join(sheet.Stages, ", "))
	case len(chains) == 0:
		return r, fmt.Errorf("it has no chain to measure: it has a fault, or more than %d chains; `stagecoach pipeline describe` shows faults, and its stages can be measured one by one", accuracy.MostChains)
	}
	for i, functions := range chains {
		target := m.f.name
		if !pipeline {
			target = functions[0]
		}
		title := strings.Join(functions, " → ")
		begin := time.Now()
		scores, err := m.one(ctx, target, items, functions, func(done int) {
			console.Progress("profile: %d of %d: %s: %d of %d inputs", i+1, len(chains), title, done, len(m.examples))
		})
		if err != nil {
			return r, fmt.Errorf("%s: %w", title, err)
		}
		e := accuracy.Result{Functions: functions, Measured: accuracy.Measured{Scorer: m.scorer.Name, Estimate: score.Of(scores, m.scorer.Hits), At: time.Now().UTC()}}
		console.Progress("profile: %d of %d: %s: %.4g, %.4g to %.4g, on %d inputs in %v", i+1, len(chains), title, e.Mean, e.Low, e.High, e.N, time.Since(begin).Round(100*time.Millisecond))
		if e.Mean <= 0 {
			return r, fmt.Errorf("%s: no answer to %d inputs is right at all (such as %s); is %q the right scorer, and are the answers in %s those of these inputs?",
				title, e.N, m.examples[0].input, m.scorer.Name, m.f.accuracy.folder)
		}
		if pipeline {
			r.Chains = append(r.Chains, e)
		}
		if len(functions) == 1 {
			r.Functions = append(r.Functions, e)
		}
	}
	return r, nil
}

// one runs these functions on all examples. It returns the scores in the order of the examples.
func (m *accuracyRun) one(ctx context.Context, target, items string, functions []string, say func(done int)) ([]float64, error) {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	scores := make([]float64, len(m.examples))
	var wg sync.WaitGroup
	next, done := make(chan int), make(chan struct{}, len(scores))
	for range min(atATime, len(scores)) {
		wg.Go(func() {
			for i := range next {
				var err error
				if scores[i], err = m.score(ctx, target, items, functions, m.examples[i]); err != nil {
					stop(err)
				}
				done <- struct{}{}
			}
		})
	}
	tick := time.NewTicker(sayEvery)
	defer tick.Stop()
	for i := 0; i < len(scores) && ctx.Err() == nil; {
		select {
		case <-ctx.Done():
		case next <- i:
			i++
		case <-tick.C:
			say(len(done))
		}
	}
	close(next)
	wg.Wait()
	return scores, context.Cause(ctx)
}

// score calls the target with one example, and scores the answer.
func (m *accuracyRun) score(ctx context.Context, target, items string, functions []string, e example) (float64, error) {
	body, err := os.ReadFile(e.input)
	if err != nil {
		return 0, err
	}
	header := http.Header{"Content-Type": {m.f.contentType}, task.HeaderVariants: {strings.Join(functions, ",")}}
	if m.f.contentType == "" {
		header.Set("Content-Type", typeOf(body, e.input))
	}
	if items != "" {
		header.Set("X-Items", items)
	}
	got, err := m.call(ctx, "/function/"+invocationName(target, m.f.api.namespace), header, body)
	if err != nil {
		return 0, fmt.Errorf("input %s: %w", e.input, err)
	}
	v, err := m.compare(ctx, e, got)
	if err != nil {
		return 0, fmt.Errorf("answer to %s, against %s: %w", e.input, e.answer, err)
	}
	return v, nil
}

func (m *accuracyRun) call(ctx context.Context, path string, header http.Header, body []byte) ([]byte, error) {
	resp, err := m.c.Stream(ctx, http.MethodPost, path, header, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if err := client.Refused(resp, "call"); err != nil {
		return nil, err
	}
	got, err := io.ReadAll(io.LimitReader(resp.Body, mostAnswer+1))
	if err == nil && len(got) > mostAnswer {
		err = fmt.Errorf("the answer has more than %d bytes", mostAnswer)
	}
	return got, err
}

// compare scores an answer.
func (m *accuracyRun) compare(ctx context.Context, e example, got []byte) (float64, error) {
	if m.file == nil {
		want, err := os.ReadFile(e.answer)
		if err != nil {
			return 0, err
		}
		return m.scorer.Score(want, got)
	}
	f, err := os.CreateTemp("", "stagecoach-answer-*")
	if err != nil {
		return 0, err
	}
	defer os.Remove(f.Name())
	if _, err = f.Write(got); errors.Join(err, f.Close()) != nil {
		return 0, fmt.Errorf("file of the answer: %w", err)
	}
	return m.file(ctx, e.answer, f.Name())
}

// printAccuracy prints what is known about functions and chains.
func printAccuracy(sheet accuracy.Sheet, out io.Writer) error {
	t := console.NewTable(out)
	fmt.Fprintln(t, "STAGE\tFUNCTION\tACCURACY")
	for i := range sheet.Functions {
		f := &sheet.Functions[i]
		fmt.Fprintf(t, "%s\t%s\t%s\n", f.Stage, f.Function, f)
	}
	if len(sheet.Chains) > 0 {
		fmt.Fprintln(t, "\nCHAIN\tACCURACY\tFROM")
	}
	for i := range sheet.Chains {
		c := &sheet.Chains[i]
		fmt.Fprintf(t, "%s\t%.4g\t%s\n", strings.Join(c.Functions, " → "), c.Accuracy, c.Source())
	}
	return t.Flush()
}
