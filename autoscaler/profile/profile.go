package profile

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// Quiet is how long a function must have had no request before it can be measured.
const Quiet = 2 * time.Second

// Version is that of the stored and sent form of a [Profile].
const Version = 1

// Profile is what was measured of a function. Image and Digest say of which one.
type Profile struct {
	Version  int       `json:"version"`
	Function string    `json:"function,omitempty"` // pipeline.Key
	Image    string    `json:"image,omitempty"`
	Digest   string    `json:"digest,omitempty"` // that the image was pinned to; empty: its name says what was run
	Node     string    `json:"node,omitempty"`   // that it was measured on
	At       time.Time `json:"at"`               // the measurement's end
	Relative float64   `json:"relative"`         // half width of the mean's 95 % confidence interval that was asked for, of the mean
	Stale    bool      `json:"stale,omitempty"`  // the function's image is another one now: policies do not use it; of answers, not stored
	Points   []Point   `json:"points"`           // sorted by CPU, batch, length
}

// Point is a cell's result. Times are of a batch, in seconds.
type Point struct {
	Cell
	Mean  float64 `json:"meanSeconds"`
	Err   float64 `json:"errSeconds"` // half the width of the mean's 95 % confidence interval
	CV    float64 `json:"cv"`
	N     int     `json:"n"`               // batches
	Loose bool    `json:"loose,omitempty"` // the interval is wider than asked for: the bound of batches came first
}

// Cell is what a point is measured with.
type Cell struct {
	CPUMilli int `json:"cpuMilli"` // that the replica might use, in thousandths of a core
	Batch    int `json:"batch"`    // calls that ran together
	Length   int `json:"length"`   // of the input, in what the profile's author counts; 0: as it comes
}

func (c Cell) compare(d Cell) int {
	return cmp.Or(cmp.Compare(c.CPUMilli, d.CPUMilli), cmp.Compare(c.Batch, d.Batch), cmp.Compare(c.Length, d.Length))
}

// Cells is the sampling plan: each quota with each batch and each length. The largest quota comes first, so that what cannot be
// measured at all is known soonest. Doubles are left out.
func Cells(cpu, batch, length []int) []Cell {
	var out []Cell
	cpu = slices.Compact(slices.Sorted(slices.Values(cpu)))
	slices.Reverse(cpu)
	for _, c := range cpu {
		for _, l := range slices.Compact(slices.Sorted(slices.Values(length))) {
			for _, b := range slices.Compact(slices.Sorted(slices.Values(batch))) {
				out = append(out, Cell{c, b, l})
			}
		}
	}
	return out
}

// Quotas are those to measure when nobody says which: a quarter, half, once and twice what a replica may use, or a core where it
// has no limit, as far as the node has that; all in thousandths of a core. Three of them are the least that a regression needs.
func Quotas(limit, node int) []int {
	base := cmp.Or(limit, 1000)
	var out []int
	for _, q := range []int{base / 4, base / 2, base, 2 * base} {
		if q >= MinCPU && (node <= 0 || q <= node) {
			out = append(out, q)
		}
	}
	if len(out) == 0 {
		return []int{max(min(base, node), MinCPU)}
	}
	return out
}

// Bounds of what a profile may say.
const (
	MinCPU    = 10      // thousandths of a core, the least that a kernel enforces
	maxCPU    = 1 << 20 // thousandths of a core
	maxBatch  = 4096
	maxLength = 1 << 30
	maxPoints = 1024
	longest   = 3600.0 // seconds of a batch
	maxCV     = 100
	maxN      = 1 << 30
)

// Validate reports everything that is wrong with p, each a [pipeline.FieldError] with its path.
func (p Profile) Validate() error {
	var errs []error
	bad := func(path, got, want string) {
		errs = append(errs, &pipeline.FieldError{Path: path, Got: got, Want: want})
	}
	if p.Version != Version {
		bad("version", strconv.Itoa(p.Version), strconv.Itoa(Version))
	}
	if !(p.Relative > 0 && p.Relative < 1) {
		bad("relative", number(p.Relative), "a number above 0 and below 1")
	}
	if n := len(p.Points); n == 0 || n > maxPoints {
		bad("points", strconv.Itoa(n), fmt.Sprintf("1 to %d", maxPoints))
		return errors.Join(errs...)
	}
	seen := map[Cell]int{}
	for i, pt := range p.Points {
		at := fmt.Sprintf("points[%d].", i)
		for _, f := range []struct {
			name             string
			got, least, most int
		}{{"cpuMilli", pt.CPUMilli, MinCPU, maxCPU}, {"batch", pt.Batch, 1, maxBatch}, {"length", pt.Length, 0, maxLength}, {"n", pt.N, 2, maxN}} {
			if f.got < f.least || f.got > f.most {
				bad(at+f.name, strconv.Itoa(f.got), fmt.Sprintf("%d to %d", f.least, f.most))
			}
		}
		if !(pt.Mean > 0 && pt.Mean <= longest) {
			bad(at+"meanSeconds", number(pt.Mean), fmt.Sprintf("above 0 and at most %g", longest))
		}
		if !(pt.Err >= 0 && pt.Err <= longest) {
			bad(at+"errSeconds", number(pt.Err), fmt.Sprintf("0 to %g", longest))
		}
		if !(pt.CV >= 0 && pt.CV <= maxCV) {
			bad(at+"cv", number(pt.CV), fmt.Sprintf("0 to %d", maxCV))
		}
		if first, twice := seen[pt.Cell]; twice {
			bad(fmt.Sprintf("points[%d]", i), fmt.Sprintf("cpu, batch and length of points[%d]", first), "each combination once")
		} else {
			seen[pt.Cell] = i
		}
	}
	return errors.Join(errs...)
}

func number(v float64) string { return strconv.FormatFloat(v, 'g', -1, 64) }

// Sort brings the points into their order.
func (p *Profile) Sort() {
	slices.SortFunc(p.Points, func(a, b Point) int { return a.compare(b.Cell) })
}

// Plan returns the points in the words of policies; they are in order.
func (p Profile) Plan() []plan.Point {
	out := make([]plan.Point, 0, len(p.Points))
	for _, pt := range p.Points {
		out = append(out, plan.Point{
			CPUMilli: pt.CPUMilli, Batch: pt.Batch, Length: pt.Length, Mean: duration(pt.Mean), Err: duration(pt.Err), CV: pt.CV, N: pt.N,
		})
	}
	return out
}

// duration rounds up, so that no time that was measured is nothing.
func duration(seconds float64) time.Duration {
	return time.Duration(math.Ceil(seconds * float64(time.Second)))
}

// Of tells whether p is of the image that a function has: by digest, or by name where there is none.
func (p Profile) Of(image, digest string) bool {
	return p.Digest == digest && (digest != "" || p.Image == image)
}

// Decode reads a stored profile. One of another version, or with points that cannot be, is an error.
func Decode(b []byte) (Profile, error) {
	var p Profile
	if err := json.Unmarshal(b, &p); err != nil {
		return Profile{}, fmt.Errorf("profile: %w", err)
	}
	if err := p.Validate(); err != nil {
		return Profile{}, fmt.Errorf("profile: %w", err)
	}
	p.Stale = false
	p.Sort()
	return p, nil
}
