package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/profile"
	"github.com/stagecoach-serving/stagecoach/bench/chart"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/internal/score"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// profileFlags are the flags of `stagecoach profile`.
type profileFlags struct {
	api         *apiFlags
	name        string
	show, json  bool
	chart       string
	cpu, batch  []int // empty: as the function and its node suggest
	inputs      console.Repeated
	contentType string
	rule        profile.Rule
	accuracy    accuracyFlags
}

// settle is how long a replica has a new quota before it is measured. The kernel refills a quota
// once per period, so the first short calls after a pause are not throttled. Therefore a
// measurement takes many periods.
const (
	period     = 100 * time.Millisecond
	settle     = 3 * period
	longEnough = 20 * period // the least time of a measurement
)

func parseProfile(args []string) (*profileFlags, error) {
	fs := flag.NewFlagSet("profile", flag.ContinueOnError)
	f := &profileFlags{api: newAPIFlags(fs), rule: profile.Rule{For: longEnough}}
	fs.BoolVar(&f.show, "show", false, "show what is stored, and measure nothing")
	fs.BoolVar(&f.json, "json", false, "print JSON instead of a table: what the API answers")
	fs.StringVar(&f.chart, "chart", "", "file for a chart, as SVG")
	fs.Func("cpu", "quotas, by commas, such as 250m,500m,1", func(s string) (err error) { f.cpu, err = numbers(s, cores); return err })
	fs.Func("batch", "batch sizes, by commas, such as 1,8", func(s string) (err error) { f.batch, err = numbers(s, strconv.Atoi); return err })
	fs.Var(&f.inputs, "input", "FILE with an input, or LENGTH=FILE with one of this length; may be repeated")
	fs.StringVar(&f.contentType, "content-type", "", "of the inputs (default: guessed)")
	fs.Float64Var(&f.rule.Relative, "relative", 0.05, "half width of the mean's 95 % confidence interval that is good enough, of the mean")
	fs.IntVar(&f.rule.Most, "most", 2000, "batches that a point may take")
	fs.StringVar(&f.accuracy.folder, "accuracy", "", "measure how accurate answers are instead: FOLDER with inputs and the expected answers")
	fs.StringVar(&f.accuracy.scorer, "scorer", "exact", "compares answers: "+score.Names)
	fs.IntVar(&f.accuracy.least, "min", 20, "inputs that the folder needs at least")
	var err error
	if f.name, err = console.OneName(fs, args); err != nil {
		return nil, err
	}
	if err := f.either(fs); err != nil {
		return nil, err
	}
	if !(f.rule.Relative > 0 && f.rule.Relative < 1) {
		return nil, fmt.Errorf("profile: --relative %g, want above 0 and below 1", f.rule.Relative)
	}
	if f.rule.Most < profile.Least {
		return nil, fmt.Errorf("profile: --most %d, want at least %d", f.rule.Most, profile.Least)
	}
	return f, nil
}

// either refuses flags that have no effect beside the others.
func (f *profileFlags) either(fs *flag.FlagSet) (err error) {
	fs.Visit(func(given *flag.Flag) {
		switch given.Name {
		case "show", "chart", "cpu", "batch", "input", "relative", "most":
			if f.accuracy.folder != "" {
				err = fmt.Errorf("profile: --%s and --accuracy, want one of them", given.Name)
			}
		case "scorer", "min":
			if f.accuracy.folder == "" {
				err = fmt.Errorf("profile: --%s without --accuracy FOLDER", given.Name)
			}
		}
	})
	if err == nil && f.accuracy.least < 1 {
		err = fmt.Errorf("profile: --min %d, want at least 1", f.accuracy.least)
	}
	return err
}

// numbers reads a list of numbers above 0, with commas between them.
func numbers(list string, read func(string) (int, error)) ([]int, error) {
	var out []int
	for s := range strings.SplitSeq(list, ",") {
		n, err := read(strings.TrimSpace(s))
		if err != nil || n <= 0 {
			return nil, fmt.Errorf("%q, want numbers above 0", s)
		}
		out = append(out, n)
	}
	return out, nil
}

// cores reads 250m, 0.5 or 2 as thousandths of a core.
func cores(s string) (int, error) {
	if milli, ok := strings.CutSuffix(s, "m"); ok {
		return strconv.Atoi(milli)
	}
	v, err := strconv.ParseFloat(s, 64)
	if err != nil || !(v*1000 >= 1 && v <= 1<<20) {
		return 0, errors.New("want cores")
	}
	return int(v*1000 + 0.5), nil
}

// Profile measures how long a function takes by CPU, batch size and length of its input. It
// stores the result with the function.
func Profile(ctx context.Context, args []string, out io.Writer) error {
	f, err := parseProfile(args)
	if err != nil {
		return err
	}
	c, err := f.api.open("")
	if err != nil {
		return err
	}
	if f.accuracy.folder != "" {
		return f.measureAccuracy(ctx, c, out)
	}
	path := "/system/function/" + url.PathEscape(f.name)
	if !f.show {
		bodies, err := f.bodies(ctx, c, path)
		if err != nil {
			return err
		}
		p, err := f.measure(ctx, c, path, bodies)
		if err != nil {
			return err
		}
		if err := c.Send(ctx, "profile "+f.name, http.MethodPut, path+"/profile"+f.api.query(), p); err != nil {
			return err
		}
	}
	var p profile.Profile
	if err := c.Get(ctx, path+"/profile"+f.api.query(), &p); err != nil {
		return err
	}
	if f.chart != "" {
		if err := writeProfileChart(f.chart, p); err != nil {
			return err
		}
	}
	if f.json {
		return json.NewEncoder(out).Encode(p)
	}
	return printProfile(p, out)
}

// probe is an input to measure with.
type probe struct {
	length      int
	contentType string
	body        []byte
}

// bodies reads the inputs' files, or takes the function's example.
func (f *profileFlags) bodies(ctx context.Context, c *client.Client, path string) ([]probe, error) {
	var out []probe
	seen := map[int]string{}
	for _, in := range f.inputs {
		s, file := probe{}, in
		if n, rest, ok := strings.Cut(in, "="); ok {
			if length, err := strconv.Atoi(n); err == nil {
				if s.length, file = length, rest; length <= 0 {
					return nil, fmt.Errorf("profile: --input %q, want LENGTH=FILE with a length above 0, or FILE", in)
				}
			}
		}
		if other, twice := seen[s.length]; twice {
			return nil, fmt.Errorf("profile: --input %q and %q have one length, want one file per length, as LENGTH=FILE", other, in)
		}
		seen[s.length] = in
		var err error
		if s.body, err = os.ReadFile(file); err != nil {
			return nil, fmt.Errorf("profile: input: %w", err)
		}
		s.contentType = f.contentType
		if s.contentType == "" {
			s.contentType = guessType(s.body, file)
		}
		out = append(out, s)
	}
	if len(out) > 0 {
		return out, nil
	}
	var d client.Deployment
	if err := c.Get(ctx, path+f.api.query(), &d); err != nil {
		return nil, err
	}
	example, ok := d.Annotations[pipeline.Prefix+"example"]
	if !ok {
		return nil, fmt.Errorf("profile: no input: want --input FILE, or an annotation %sexample on %s", pipeline.Prefix, f.name)
	}
	s := probe{contentType: f.contentType, body: []byte(example)}
	if s.contentType == "" {
		s.contentType = guessType(s.body, "")
	}
	return []probe{s}, nil
}

// ProfileItems returns the X-Items header for the calls that measure a function; empty: none. path
// is the API's path of the function, with the query. For a stage of a pipeline, the header makes a
// JSON array a list of items, as in the pipeline. If the stage has an annotation named "items",
// that annotation decides and the header is empty.
func ProfileItems(ctx context.Context, c *client.Client, path string) (string, error) {
	var d client.Deployment
	if err := c.Get(ctx, path, &d); err != nil {
		return "", err
	}
	if d.Annotations[pipeline.Prefix+"pipeline"] == "" || d.Annotations[pipeline.Prefix+"items"] != "" {
		return "", nil
	}
	return pipeline.ItemsMany, nil
}

// guessType returns the content type of an input, by its file's name or by its content.
func guessType(body []byte, file string) string {
	start := bytes.TrimSpace(body)
	if strings.EqualFold(filepath.Ext(file), ".json") || len(start) > 0 && strings.ContainsRune("[{", rune(start[0])) && json.Valid(body) {
		return "application/json"
	}
	return http.DetectContentType(body)
}

// printProfile prints a profile, and the fits of its groups.
func printProfile(p profile.Profile, out io.Writer) error {
	fmt.Fprintf(out, "%s, image %s, on node %s, %s\n", console.Harmless(p.Function), console.Harmless(p.Image), console.Harmless(p.Node), p.At.UTC().Format("2006-01-02 15:04 MST"))
	if p.Stale {
		fmt.Fprintln(out, "stale: the function has another image now, and the autoscaler does not use this")
	}
	fmt.Fprintln(out)
	t := console.NewTable(out)
	fmt.Fprintln(t, strings.Join(profile.Head(), "\t"))
	for _, row := range p.Rows() {
		fmt.Fprintln(t, strings.TrimRight(strings.Join(row, "\t"), "\t"))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, g := range p.Groups() {
		if line := g.Say(); line != "" {
			fmt.Fprintf(out, "\n%s", line)
		}
	}
	_, err := fmt.Fprintln(out)
	return err
}

// writeProfileChart draws the service time by quota, with one line per batch size and length.
func writeProfileChart(file string, p profile.Profile) error {
	c := chart.Plot{
		Title: "Service time of a batch by CPU: " + p.Function, LogX: true, LogY: true,
		Unit:  func(ms float64) string { return strconv.FormatFloat(ms, 'g', 4, 64) + " ms" },
		XUnit: func(cores float64) string { return strconv.FormatFloat(cores, 'g', 3, 64) },
	}
	for i, g := range p.Groups() {
		l := chart.Line{Name: g.Name(), Color: i}
		for _, pt := range g.Points {
			l.X, l.Y = append(l.X, float64(pt.CPUMilli)/1000), append(l.Y, 1000*pt.Mean)
		}
		c.Lines = append(c.Lines, l)
	}
	f, err := os.Create(file)
	if err != nil {
		return fmt.Errorf("profile: chart: %w", err)
	}
	return errors.Join(c.WriteFile(f), f.Close())
}
