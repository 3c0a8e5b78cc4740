// Package accuracy holds how accurate the answers of functions are, and those of chains of
// functions through a pipeline, as `stagecoach profile --accuracy` measures them. It does no I/O.
package accuracy

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/score"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// Version is the version of the stored and sent forms.
const Version = 1

// MostChains is the largest number of chains of a pipeline that are measured or listed.
const MostChains = 256

// Where an accuracy comes from.
const (
	FromAnnotation = "annotation" // the function's owner states it
	FromMeasured   = "measured"
	FromProduct    = "product" // of a chain: see [Chains]
	FromDefault    = "default" // nobody knows it, so it counts as 1
)

// Measured is a measured accuracy.
type Measured struct {
	Scorer string `json:"scorer"`
	score.Estimate
	At time.Time `json:"at"` // the measurement's end
}

// String says in a few words what was measured.
func (m *Measured) String() string {
	return fmt.Sprintf("%.4g, measured by %s on %d inputs, 95 %% interval %.4g to %.4g", m.Mean, m.Scorer, m.N, m.Low, m.High)
}

// Image identifies what a measured function ran.
type Image struct {
	Image  string `json:"image"`
	Digest string `json:"digest,omitempty"` // empty: Image identifies it
}

// Same reports whether two images are equal: by digest, or by name if neither has one.
func (i Image) Same(o Image) bool {
	return i.Digest == o.Digest && (i.Digest != "" || i.Image == o.Image)
}

// Result is the accuracy of one function, or of one chain.
type Result struct {
	// Functions are names without the namespace. A chain has one per stage, in the order of the
	// pipeline's stages.
	Functions []string `json:"functions"`
	Measured
}

// Results is what a measurement sends, and what is stored of a pipeline's chains.
type Results struct {
	Version int `json:"version"`
	// Images are those of all functions that the results name.
	Images    map[string]Image `json:"images"`
	Functions []Result         `json:"functions,omitempty"` // with one function each
	Chains    []Result         `json:"chains,omitempty"`
}

// Sheet is what is known about the functions of a stage, or those of all stages of a pipeline and
// its chains.
type Sheet struct {
	Name string `json:"name"` // key of the pipeline or of the stage
	// Stages are the names of the pipeline's stages, in the order of the functions of a chain; empty:
	// it is a stage.
	Stages    []string   `json:"stages,omitempty"`
	Ends      int        `json:"ends"`      // stages without a next one
	Functions []Function `json:"functions"` // by stage
	// Chains are in the order of the functions; empty: there are none, or more than MostChains.
	Chains []Chain `json:"chains,omitempty"`
}

// Function is the accuracy of one function.
type Function struct {
	Stage    string `json:"stage"`
	Function string `json:"function"`
	Image
	Accuracy float64   `json:"accuracy"` // that policies use
	From     string    `json:"from"`
	Measured *Measured `json:"measured,omitempty"` // also if From is another
	// Stale means that Measured is of an earlier image. It still counts, because the default would
	// make an unknown function the best one.
	Stale bool `json:"stale,omitempty"`
}

// String says in one line how accurate the function is, and where that comes from.
func (f *Function) String() string {
	text := "1, as nobody has stated or measured it"
	switch f.From {
	case FromAnnotation:
		if text = fmt.Sprintf("%.4g, by the annotation %saccuracy", f.Accuracy, pipeline.Prefix); f.Measured != nil {
			text += fmt.Sprintf("; not used: %s", f.Measured)
		}
	case FromMeasured:
		text = f.Measured.String()
	}
	if f.Stale {
		text += ", of an earlier image: measure it again"
	}
	return text
}

// Chain is the accuracy of the answers of a chain.
type Chain struct {
	Functions []string  `json:"functions"`
	Accuracy  float64   `json:"accuracy"`
	From      string    `json:"from"` // measured or product
	Measured  *Measured `json:"measured,omitempty"`
}

// Source says where the accuracy comes from.
func (c *Chain) Source() string {
	if c.Measured == nil {
		return "product"
	}
	return fmt.Sprintf("measured by %s, n %d, %.4g to %.4g", c.Measured.Scorer, c.Measured.N, c.Measured.Low, c.Measured.High)
}

// Validate returns all faults of r, each as a [pipeline.FieldError].
func (r *Results) Validate() error {
	var errs []error
	bad := func(path, got, want string) {
		errs = append(errs, &pipeline.FieldError{Path: path, Got: got, Want: want})
	}
	if r.Version != Version {
		bad("version", strconv.Itoa(r.Version), strconv.Itoa(Version))
	}
	if len(r.Functions)+len(r.Chains) == 0 {
		bad("functions", "none", "a result of a function, or of a chain")
	}
	if n := len(r.Chains); n > MostChains {
		bad("chains", strconv.Itoa(n), fmt.Sprintf("at most %d", MostChains))
	}
	for _, list := range []struct {
		name string
		all  []Result
	}{{"functions", r.Functions}, {"chains", r.Chains}} {
		seen := map[string]bool{}
		for i := range list.all {
			e, at := &list.all[i], fmt.Sprintf("%s[%d]", list.name, i)
			key := strings.Join(e.Functions, ",")
			if seen[key] {
				bad(at+".functions", strconv.Quote(key), "each once")
			}
			seen[key] = true
			for _, f := range e.Functions {
				if _, ok := r.Images[f]; !ok {
					bad("images", "none of "+strconv.Quote(f), "the image that was measured")
				}
			}
			if list.name == "functions" && len(e.Functions) != 1 {
				bad(at+".functions", strconv.Itoa(len(e.Functions)), "one function")
			}
			errs = append(errs, e.check(at))
		}
	}
	return errors.Join(errs...)
}

// check returns the faults of a measurement.
func (m *Measured) check(at string) error {
	var errs []error
	bad := func(path, got, want string) {
		errs = append(errs, &pipeline.FieldError{Path: at + path, Got: got, Want: want})
	}
	number := func(v float64) string { return strconv.FormatFloat(v, 'g', -1, 64) }
	if m.N < 1 {
		bad(".n", strconv.Itoa(m.N), "at least 1")
	}
	if !(m.Mean > 0 && m.Mean <= 1) {
		bad(".mean", number(m.Mean), "above 0 and at most 1")
	}
	if !(m.Low >= 0 && m.Low <= m.Mean) {
		bad(".low", number(m.Low), "from 0 to the mean")
	}
	if !(m.High >= m.Mean && m.High <= 1) {
		bad(".high", number(m.High), "from the mean to 1")
	}
	if m.Scorer == "" || len(m.Scorer) > 200 {
		bad(".scorer", fmt.Sprintf("%.50q", m.Scorer), "a name of 1 to 200 bytes")
	}
	return errors.Join(errs...)
}

// Chains returns the accuracy of each chain of a pipeline. stages has the functions of each stage.
// measured returns the measured accuracy of a chain; nil: it was not measured. Without functions,
// or with more than MostChains chains, Chains returns nil.
//
// A chain that was not measured gets the product of its functions' accuracies, each divided by that
// of the stage's most accurate function. So the best chain has 1. If some chains were measured, the
// products are scaled to agree with them: with the best chain if that was measured, and else with
// all measured chains on average.
func Chains(stages [][]Function, measured func(functions []string) *Measured) []Chain {
	out, best, sum, some := combine(stages), 0.0, 0.0, 0
	for i := range out {
		c := &out[i]
		if c.Measured = measured(c.Functions); c.Measured == nil {
			continue
		}
		some++
		sum += c.Measured.Mean / c.Accuracy
		if c.Accuracy >= 1 {
			best = max(best, c.Measured.Mean)
		}
	}
	scale := 1.0
	switch {
	case best > 0:
		scale = best
	case some > 0:
		scale = sum / float64(some)
	}
	for i := range out {
		c := &out[i]
		if c.From, c.Accuracy = FromProduct, min(c.Accuracy*scale, 1); c.Measured != nil {
			c.From, c.Accuracy = FromMeasured, c.Measured.Mean
		}
	}
	return out
}

// combine returns all chains, each with the product of its normalised accuracies.
func combine(stages [][]Function) []Chain {
	n := min(len(stages), 1)
	for _, s := range stages {
		if n *= len(s); n == 0 || n > MostChains {
			return nil
		}
	}
	if n == 0 {
		return nil
	}
	out := []Chain{{Accuracy: 1}}
	for _, s := range stages {
		best := 0.0
		for i := range s {
			best = max(best, s[i].Accuracy)
		}
		var next []Chain
		for _, c := range out {
			for i := range s {
				next = append(next, Chain{Functions: append(slices.Clip(c.Functions), s[i].Function), Accuracy: c.Accuracy * s[i].Accuracy / best})
			}
		}
		out = next
	}
	return out
}
