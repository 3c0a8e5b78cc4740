package load

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/stagecoach-serving/stagecoach/bench/load/arrivals"
)

// DefaultData is the folder of recorded traces beside a clone of the repository. Programs look
// there for a trace if the environment names no other folder in STAGECOACH_DATA.
const DefaultData = "../shared/data"

// Scenario is a load as users write it.
type Scenario struct {
	Gateway string `yaml:"gateway"` // http://[user:password@]host:port
	// Of the arrivals; default: the longest of the targets' profiles and traces, else 30s.
	Duration time.Duration `yaml:"duration"`
	// The same seed gives the same instants and bodies.
	Seed uint64 `yaml:"seed"`
	// rate shared by weight among all targets without their own arrivals.
	Rate        string        `yaml:"rate"`
	CV          *float64      `yaml:"cv"`          // default for the targets
	SLO         time.Duration `yaml:"slo"`         // default for the targets
	Timeout     time.Duration `yaml:"timeout"`     // default for the targets; 30s
	MaxInFlight int           `yaml:"maxInFlight"` // default 1000
	Callbacks   string        `yaml:"callbacks"`   // host:port of the receiver; default 127.0.0.1:0
	Targets     []TargetSpec  `yaml:"targets"`
}

// TargetSpec is a target as users write it. It has one of Rate, MMPP and Trace, or it gets a share
// of the scenario's rate.
type TargetSpec struct {
	Function string            `yaml:"function"`
	Name     string            `yaml:"name"`   // default: the function's
	Weight   float64           `yaml:"weight"` // default 1
	Rate     string            `yaml:"rate"`   // see arrivals.ParseProfile
	CV       *float64          `yaml:"cv"`     // of gaps at a constant rate; default 1, Poisson
	MMPP     string            `yaml:"mmpp"`   // see arrivals.ParseStates
	Trace    TraceSpec         `yaml:"trace"`
	Body     Body              `yaml:"body"`
	Headers  map[string]string `yaml:"headers"`
	SLO      time.Duration     `yaml:"slo"`
	Timeout  time.Duration     `yaml:"timeout"`
	Async    bool              `yaml:"async"`
}

// TraceSpec selects a part of a trace and says how to play it.
type TraceSpec struct {
	File   string          `yaml:"file"`
	Format arrivals.Format `yaml:"format"` // default auto
	Column string          `yaml:"column"`
	From   time.Duration   `yaml:"from"`
	To     time.Duration   `yaml:"to"`
	Speed  float64         `yaml:"speed"`
	Scale  float64         `yaml:"scale"`
	Spread arrivals.Spread `yaml:"spread"`
	Loop   bool            `yaml:"loop"`
}

const (
	defaultDuration    = 30 * time.Second
	defaultTimeout     = 30 * time.Second
	defaultMaxInFlight = 1000
	maxTargets         = 1000
)

// ReadScenario reads YAML and refuses unknown fields.
func ReadScenario(r io.Reader) (Scenario, error) {
	var s Scenario
	d := yaml.NewDecoder(r)
	d.KnownFields(true)
	if err := d.Decode(&s); err != nil && !errors.Is(err, io.EOF) {
		return s, err
	}
	return s, nil
}

// Config reads the files that s names and returns the configuration for [Run]. It looks for a trace
// at its path, then in the folder data. Errors have the field's path.
func (s Scenario) Config(data string) (Config, error) {
	c := Config{
		Duration: s.Duration, Seed: s.Seed, MaxInFlight: cmp.Or(s.MaxInFlight, defaultMaxInFlight), Callbacks: cmp.Or(s.Callbacks, "127.0.0.1:0"),
	}
	var err error
	if c.Gateway, err = url.Parse(s.Gateway); err != nil {
		return c, fmt.Errorf("gateway: %w", err)
	}
	if len(s.Targets) > maxTargets {
		return c, fmt.Errorf("targets: got %d, want at most %d", len(s.Targets), maxTargets)
	}
	var errs []error
	weights := 0.0
	for i := range s.Targets {
		t := &s.Targets[i]
		t.Weight = cmp.Or(t.Weight, 1)
		if !(t.Weight > 0 && t.Weight < 1e9) {
			errs = append(errs, fmt.Errorf("targets[%d].weight: got %g, want more than 0", i, t.Weight))
		}
		if t.own() == 0 {
			weights += t.Weight
		}
	}
	longest := time.Duration(0)
	names := map[string]bool{}
	for i, t := range s.Targets {
		target, length, err := s.target(t, weights, s.Seed+uint64(i)<<32, data)
		if err != nil {
			errs = append(errs, fmt.Errorf("targets[%d].%w", i, err))
			continue
		}
		if names[target.Name] {
			errs = append(errs, fmt.Errorf("targets[%d].name: %q twice, want a name of its own", i, target.Name))
		}
		names[target.Name] = true
		longest = max(longest, length)
		c.Targets = append(c.Targets, target)
	}
	if c.Duration == 0 {
		c.Duration = cmp.Or(longest, defaultDuration)
	}
	if len(errs) > 0 {
		return c, errors.Join(errs...)
	}
	return c, c.validate()
}

// own returns how many kinds of arrivals the target has.
func (t TargetSpec) own() int {
	n := 0
	for _, is := range []bool{t.Rate != "", t.MMPP != "", t.Trace.File != ""} {
		if is {
			n++
		}
	}
	return n
}

// target returns a target and the length of its arrivals, or 0 if they have no end.
func (s Scenario) target(t TargetSpec, weights float64, seed uint64, data string) (Target, time.Duration, error) {
	out := Target{
		Name: cmp.Or(t.Name, t.Function), Function: t.Function, Async: t.Async, Header: http.Header{},
		SLO: cmp.Or(t.SLO, s.SLO), Timeout: cmp.Or(t.Timeout, s.Timeout, defaultTimeout),
	}
	if t.Function == "" || strings.ContainsAny(t.Function, " ?#%") {
		return out, 0, fmt.Errorf("function: got %q, want a function's or pipeline's name", t.Function)
	}
	for name, value := range t.Headers {
		out.Header.Set(name, value)
	}
	var err error
	if out.payload, err = t.Body.payload(seed); err != nil {
		return out, 0, fmt.Errorf("body: %w", err)
	}
	switch n := t.own(); {
	case n > 1:
		return out, 0, errors.New("rate: want one of rate, mmpp and trace")
	case t.Trace.File != "" || t.MMPP != "":
		if t.CV != nil {
			return out, 0, errors.New("cv: a trace or MMPP has its own; want none")
		}
		if t.MMPP != "" {
			states, err := arrivals.ParseStates(t.MMPP)
			if err != nil {
				return out, 0, fmt.Errorf("mmpp: %w", err)
			}
			out.Process = fmt.Sprintf("MMPP %s, %.4g/s on average", states, states.Mean())
			out.Source, err = arrivals.MMPP(states, seed)
			return out, 0, err
		}
		length, err := t.Trace.open(&out, seed, data)
		if err != nil {
			return out, 0, fmt.Errorf("trace: %w", err)
		}
		return out, length, nil
	}
	rate := cmp.Or(t.Rate, s.Rate)
	if rate == "" {
		return out, 0, errors.New("rate: got none, want rate, mmpp or trace, or a rate of the whole scenario")
	}
	p, err := arrivals.ParseProfile(rate)
	if err != nil {
		return out, 0, fmt.Errorf("rate: %w", err)
	}
	if t.Rate == "" {
		p = p.Scale(t.Weight / weights)
	}
	one := 1.0
	cv := *cmp.Or(t.CV, s.CV, &one)
	if out.Source, err = arrivals.Renewal(p, cv, seed); err != nil {
		return out, 0, fmt.Errorf("cv: %w", err)
	}
	out.Process = fmt.Sprintf("%s per second, cv %g", p, cv)
	return out, p.Length(), nil
}

// open reads the trace and makes it the source of the target.
func (t TraceSpec) open(out *Target, seed uint64, data string) (time.Duration, error) {
	f, err := os.Open(t.File)
	if errors.Is(err, os.ErrNotExist) && !filepath.IsAbs(t.File) && data != "" {
		f, err = os.Open(filepath.Join(data, t.File))
	}
	if err != nil {
		return 0, fmt.Errorf("%w (relative paths are looked for in $STAGECOACH_DATA too, which is %q)", err, data)
	}
	defer f.Close()
	tr, err := arrivals.ReadTrace(f, t.Format, t.Column)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", t.File, err)
	}
	if tr, err = tr.Cut(t.From, t.To); err != nil {
		return 0, fmt.Errorf("%s: %w", t.File, err)
	}
	speed := cmp.Or(t.Speed, 1)
	if out.Source, err = tr.Replay(arrivals.Replay{Speed: speed, Scale: t.Scale, Spread: t.Spread, Loop: t.Loop}, seed); err != nil {
		return 0, err
	}
	length := time.Duration(float64(tr.Length) / speed)
	out.Process = fmt.Sprintf("trace %s from %v for %v, speed %g, scale %g, %.4g/s on average",
		filepath.Base(t.File), t.From, tr.Length, speed, cmp.Or(t.Scale, 1), tr.Arrivals()*cmp.Or(t.Scale, 1)/length.Seconds())
	return length, nil
}
