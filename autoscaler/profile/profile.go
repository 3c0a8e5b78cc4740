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

// Version is the version of the stored and sent form of a [Profile].
const Version = 1

// Profile holds the measurements of a function. Image and Digest identify what was measured.
type Profile struct {
	Version  int       `json:"version"`
	Function string    `json:"function,omitempty"` // pipeline.Key
	Image    string    `json:"image,omitempty"`
	Digest   string    `json:"digest,omitempty"` // digest of the image; empty: Image identifies it
	Node     string    `json:"node,omitempty"`   // where it was measured
	At       time.Time `json:"at"`               // the measurement's end
	// requested half width of the mean's 95 % confidence interval, per mean
	Relative float64 `json:"relative"`
	// the function has another image now, so policies do not use it; in answers, not stored
	Stale  bool    `json:"stale,omitempty"`
	Points []Point `json:"points"` // sorted by CPU, batch, length
}

// Point is the result of a cell. Times are per batch, in seconds.
type Point struct {
	Cell
	Mean float64 `json:"meanSeconds"`
	Err  float64 `json:"errSeconds"` // half the width of the mean's 95 % confidence interval
	CV   float64 `json:"cv"`
	N    int     `json:"n"` // number of batches
	// the interval is wider than requested, because the bound of batches was reached
	Loose bool `json:"loose,omitempty"`
}

// Cell is the setting of a point.
type Cell struct {
	CPUMilli int `json:"cpuMilli"` // CPU quota in thousandths of a core
	Batch    int `json:"batch"`    // calls per batch
	Length   int `json:"length"`   // of the input, in what the profile's author counts; 0: as it comes
}

func (c Cell) compare(d Cell) int {
	return cmp.Or(cmp.Compare(c.CPUMilli, d.CPUMilli), cmp.Compare(c.Batch, d.Batch), cmp.Compare(c.Length, d.Length))
}

// Cells returns the sampling plan: each quota with each batch and each length, without duplicates.
// The largest quota comes first, so that cells that cannot be measured at all are known soonest.
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

// Quotas returns the default quotas to measure: a quarter, half, once and twice the limit, except
// those that are larger than the node's CPU. All are in thousandths of a core. If limit is 0, one
// core takes its place. If node is 0, the node's CPU is unknown. [Fit] needs at least three quotas.
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

// Bounds of a profile's values.
const (
	MinCPU    = 10      // thousandths of a core, the least that a kernel enforces
	maxCPU    = 1 << 20 // thousandths of a core
	maxBatch  = 4096
	maxLength = 1 << 30
	maxPoints = 1024
	longest   = 3600.0 // seconds per batch
	maxCV     = 100
	maxN      = 1 << 30
)

// Validate reports all faults of p, each as a [pipeline.FieldError] with its path.
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

// Sort sorts the points by CPU, batch and length.
func (p *Profile) Sort() {
	slices.SortFunc(p.Points, func(a, b Point) int { return a.compare(b.Cell) })
}

// Plan returns the points as plan.Points, in the same order.
func (p Profile) Plan() []plan.Point {
	out := make([]plan.Point, 0, len(p.Points))
	for _, pt := range p.Points {
		out = append(out, plan.Point{
			CPUMilli: pt.CPUMilli, Batch: pt.Batch, Length: pt.Length, Mean: duration(pt.Mean), Err: duration(pt.Err), CV: pt.CV, N: pt.N,
		})
	}
	return out
}

// duration converts seconds. It rounds up, so that no measured time becomes 0.
func duration(seconds float64) time.Duration {
	return time.Duration(math.Ceil(seconds * float64(time.Second)))
}

// Of reports whether p was measured with a function's image: by digest, or by name if there is no
// digest.
func (p Profile) Of(image, digest string) bool {
	return p.Digest == digest && (digest != "" || p.Image == image)
}

// Decode reads a stored profile. It returns an error if the version is unknown or a point is
// invalid.
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
