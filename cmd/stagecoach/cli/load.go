package cli

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	openloop "github.com/stagecoach-serving/stagecoach/bench/load"
	arrive "github.com/stagecoach-serving/stagecoach/bench/load/arrivals"
	"github.com/stagecoach-serving/stagecoach/bench/load/report"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

const loadUsage = `stagecoach load FUNCTION --rate 20 [flags]     one function or pipeline
stagecoach load --scenario FILE.yml [flags]    several; see docs/load.md
stagecoach load compare A.json B.json …        results side by side

`

// loadFlags are the flags that are no part of a scenario.
type loadFlags struct {
	scenario, jsonFile, htmlFile string
	quiet, allowErrors           bool
}

// Load sends requests at given instants, and reports what came of them.
func Load(ctx context.Context, args []string, out io.Writer) error {
	if len(args) > 0 && args[0] == "compare" {
		return compareLoads(args[1:], out)
	}
	s, f, err := loadScenario(args)
	if err != nil {
		return err
	}
	api, err := client.Dial(s.Gateway)
	if err != nil {
		return err
	}
	s.Gateway = api.URL()
	cfg, err := s.Config(cmp.Or(os.Getenv("STAGECOACH_DATA"), openloop.DefaultData))
	if err != nil {
		return fmt.Errorf("load: %w", err)
	}
	if !f.quiet {
		cfg.Progress = func(p openloop.Progress) { console.Progress("%s", p) }
	}
	result, err := openloop.Run(ctx, cfg)
	if err != nil {
		return fmt.Errorf("load: %w", err)
	}
	err = writeLoad(f, result, out)
	if !f.allowErrors {
		err = errors.Join(err, loadFaults(result))
	}
	return err
}

// loadFaults returns an error if requests failed for any reason other than a refusal (429).
func loadFaults(result openloop.Result) error {
	kinds, requests := result.Total.Faults()
	if requests == 0 {
		return nil
	}
	first := kinds[0] // the most frequent
	return fmt.Errorf("load: %d of %d requests failed, %d of them with %q (%s); want no failures except refusals (429), or --allow-errors",
		requests, result.Total.Sent, first.Count, first.Kind, strings.TrimSpace(first.Example))
}

// writeLoad prints the result, or writes its JSON to standard output when its file is "-".
func writeLoad(f loadFlags, result openloop.Result, out io.Writer) error {
	var errs []error
	if f.jsonFile == "-" {
		errs = append(errs, console.WriteJSON(out, result))
	} else {
		errs = append(errs, result.WriteTable(out))
	}
	if f.jsonFile != "" && f.jsonFile != "-" {
		errs = append(errs, console.WriteFile(f.jsonFile, func(w io.Writer) error { return console.WriteJSON(w, result) }))
	}
	if f.htmlFile != "" {
		errs = append(errs, console.WriteFile(f.htmlFile, func(w io.Writer) error { return report.Write(w, result) }))
	}
	return errors.Join(errs...)
}

// loadScenario reads the flags and the scenario's file, if there is one. Flags of the whole run
// override the file.
func loadScenario(args []string) (openloop.Scenario, loadFlags, error) {
	fs := flag.NewFlagSet("load", flag.ContinueOnError)
	fs.Usage = func() {
		fmt.Fprint(fs.Output(), loadUsage)
		fs.PrintDefaults()
	}
	var f loadFlags
	gateway := gatewayFlag(fs)
	var s openloop.Scenario
	fs.StringVar(&f.scenario, "scenario", "", "YAML file with several targets")
	fs.StringVar(&f.jsonFile, "json", "", "file for the result as JSON; - is standard output")
	fs.StringVar(&f.htmlFile, "html", "", "file for the result as a page with charts")
	fs.BoolVar(&f.quiet, "quiet", false, "no line a second on standard error")
	fs.BoolVar(&f.allowErrors, "allow-errors", false, "exit with status 0 even if requests failed; refusals (429) are no failures")
	fs.DurationVar(&s.Duration, "duration", 0, "of the arrivals; default: the rate's segments, the trace's length, or 30s")
	fs.Uint64Var(&s.Seed, "seed", 1, "the same seed, the same instants and bodies")
	fs.IntVar(&s.MaxInFlight, "max-in-flight", 0, "requests at a time; what is above it is counted as not sent (default 1000)")
	fs.StringVar(&s.Callbacks, "callbacks", "", "host:port where callbacks are received (default 127.0.0.1:0)")
	t, body, headers, cv := targetFlags(fs)
	rest, err := console.ParseMixed(fs, args)
	if err != nil {
		return s, f, err
	}
	if len(rest) > 1 {
		return s, f, fmt.Errorf("load: got %q, want one function", rest)
	}
	function := strings.Join(rest, "")
	given := map[string]bool{}
	fs.Visit(func(x *flag.Flag) { given[x.Name] = true })
	s.Gateway = *gateway
	if f.scenario == "" {
		if function == "" {
			return s, f, errors.New("load: got no function; want `stagecoach load FUNCTION --rate 20`, or --scenario FILE.yml")
		}
		t.Function, t.Headers = function, *headers
		if given["cv"] {
			t.CV = cv
		}
		t.Body, err = body()
		s.Targets = []openloop.TargetSpec{*t}
		return s, f, err
	}
	if function != "" {
		return s, f, fmt.Errorf("load: a scenario has targets of its own; want no function beside --scenario, got %q", function)
	}
	whole := []string{"scenario", "json", "html", "quiet", "allow-errors", "gateway", "duration", "seed", "max-in-flight", "callbacks"}
	for _, name := range slices.Sorted(maps.Keys(given)) {
		if !slices.Contains(whole, name) {
			return s, f, fmt.Errorf("load: a scenario has targets of its own; want no --%s beside --scenario", name)
		}
	}
	fromFile, err := readLoadScenario(f.scenario)
	if err != nil {
		return s, f, err
	}
	if given["gateway"] || fromFile.Gateway == "" {
		fromFile.Gateway = s.Gateway
	}
	for name, set := range map[string]func(){
		"duration": func() { fromFile.Duration = s.Duration }, "seed": func() { fromFile.Seed = s.Seed },
		"max-in-flight": func() { fromFile.MaxInFlight = s.MaxInFlight }, "callbacks": func() { fromFile.Callbacks = s.Callbacks },
	} {
		if given[name] {
			set()
		}
	}
	return fromFile, f, nil
}

func readLoadScenario(name string) (openloop.Scenario, error) {
	file, err := os.Open(name)
	if err != nil {
		return openloop.Scenario{}, fmt.Errorf("load: scenario: %w", err)
	}
	defer file.Close()
	s, err := openloop.ReadScenario(file)
	if err != nil {
		return s, fmt.Errorf("load: %s: %w", name, err)
	}
	return s, nil
}

// targetFlags adds the flags of a single target. Once the flags are parsed, body returns the body
// of the target's requests.
func targetFlags(fs *flag.FlagSet) (t *openloop.TargetSpec, body func() (openloop.Body, error), headers *map[string]string, cv *float64) {
	t = &openloop.TargetSpec{}
	fs.StringVar(&t.Rate, "rate", "", "requests per second: 20, or steps and ramps: 2:10s,2..20:30s,20:1m")
	cv = fs.Float64("cv", 1, "coefficient of variation of the gaps: 0 even, 1 Poisson, others gamma")
	fs.StringVar(&t.MMPP, "mmpp", "", "states of a Markov-modulated Poisson process, RATE:MEANTIME: 5:10s,50:2s")
	fs.DurationVar(&t.SLO, "slo", 0, "objective of the latency; answers in time are good ones")
	fs.DurationVar(&t.Timeout, "timeout", 0, "from a request's instant to its answer or callback (default 30s)")
	fs.BoolVar(&t.Async, "async", false, "invoke asynchronously and wait for callbacks")
	fs.StringVar(&t.Trace.File, "trace", "", "file with a trace, also in $STAGECOACH_DATA, or else in "+openloop.DefaultData)
	fs.Func("trace-format", fmt.Sprint("one of ", arrive.Formats(), " (default auto)"), func(v string) error { t.Trace.Format = arrive.Format(v); return nil })
	fs.StringVar(&t.Trace.Column, "trace-column", "", "of counts, or start of a function's name in the trace")
	fs.DurationVar(&t.Trace.From, "trace-from", 0, "where in the trace to begin")
	fs.DurationVar(&t.Trace.To, "trace-to", 0, "where in the trace to end")
	fs.Float64Var(&t.Trace.Speed, "trace-speed", 1, "10: ten times as fast")
	fs.Float64Var(&t.Trace.Scale, "trace-scale", 1, "0.1: a tenth of the arrivals, by chance")
	fs.Func("trace-spread", "how a count's arrivals lie in their second: uniform, even or poisson (default uniform)", func(v string) error {
		t.Trace.Spread = arrive.Spread(v)
		return nil
	})
	fs.BoolVar(&t.Trace.Loop, "trace-loop", false, "begin again at the trace's end, until --duration")
	text := fs.String("body", "", "text, @FILE, or @FOLDER/ for its files in turn")
	var b openloop.Body
	fs.StringVar(&b.Order, "body-order", "", "of a folder's files: turn or random")
	fs.IntVar(&b.Random, "body-random", 0, "so many random bytes a request")
	fs.StringVar(&b.Template, "body-template", "", "text with {{counter}}, {{words 5}}, {{int 1 10}}; @FILE")
	fs.StringVar(&b.ContentType, "content-type", "", "of bodies (default: guessed)")
	headers = &map[string]string{}
	fs.Func("header", "NAME: VALUE of each request; may be repeated", func(v string) error {
		name, value, ok := strings.Cut(v, ":")
		if !ok {
			return errors.New("want NAME: VALUE")
		}
		(*headers)[strings.TrimSpace(name)] = strings.TrimSpace(value)
		return nil
	})
	return t, func() (openloop.Body, error) { return bodyOf(b, *text) }, headers, cv
}

// bodyOf sets b's text, file or folder from the value of --body: a value @PATH names a file or a
// folder. If b's template is @FILE, bodyOf reads that file.
func bodyOf(b openloop.Body, text string) (openloop.Body, error) {
	file, isFile := strings.CutPrefix(text, "@")
	switch info, err := os.Stat(file); {
	case !isFile:
		b.Text = text
	case err != nil:
		return b, fmt.Errorf("load: --body: %w", err)
	case info.IsDir():
		b.Folder = file
	default:
		b.File = file
	}
	if file, ok := strings.CutPrefix(b.Template, "@"); ok {
		text, err := os.ReadFile(file)
		if err != nil {
			return b, fmt.Errorf("load: --body-template: %w", err)
		}
		b.Template = string(text)
	}
	return b, nil
}

func compareLoads(names []string, out io.Writer) error {
	if len(names) < 2 {
		return fmt.Errorf("load compare: got %q, want two or more files that load --json has written", names)
	}
	var runs []openloop.Result
	for _, name := range names {
		f, err := os.Open(name)
		if err != nil {
			return fmt.Errorf("load compare: %w", err)
		}
		r, err := openloop.ReadResult(f)
		_ = f.Close() // was only read
		if err != nil {
			return fmt.Errorf("load compare: %s: %w", name, err)
		}
		runs = append(runs, r)
	}
	return openloop.WriteComparison(out, names, runs)
}
