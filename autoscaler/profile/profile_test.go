package profile

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

func TestCellsHaveNoDuplicates(t *testing.T) {
	got := fmt.Sprint(Cells([]int{250, 1000, 250}, []int{4, 1}, []int{0}))
	if want := "[{1000 1 0} {1000 4 0} {250 1 0} {250 4 0}]"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if n := len(Cells([]int{1}, nil, []int{1})); n != 0 {
		t.Errorf("%d cells of no batch", n)
	}
}

func TestQuotasFitTheNode(t *testing.T) {
	for _, tc := range []struct {
		limit, node int
		want        []int
	}{
		{0, 2000, []int{250, 500, 1000, 2000}},
		{0, 1000, []int{250, 500, 1000}},
		{600, 64000, []int{150, 300, 600, 1200}},
		{0, 0, []int{250, 500, 1000, 2000}},
		{30, 2000, []int{15, 30, 60}},
		{8000, 1500, []int{1500}},
		{8000, 5, []int{10}},
	} {
		if got := Quotas(tc.limit, tc.node); !slices.Equal(got, tc.want) {
			t.Errorf("of a limit of %dm and a node with %dm: %v, want %v", tc.limit, tc.node, got, tc.want)
		}
	}
}

// TestIntervalsHoldTheMean measures series whose mean is known, and stops as a measurement does. It
// counts how often the interval contains the mean.
func TestIntervalsHoldTheMean(t *testing.T) {
	rule := Rule{Relative: 0.1, For: 2 * time.Second, Most: 3000}
	// time of a batch with its waits, so that correlates covers a tenth of a second
	const each = 20 * time.Millisecond
	for name, next := range map[string]func(r *rand.Rand, last float64) float64{
		"even":         func(r *rand.Rand, _ float64) float64 { return 0.9 + 0.2*r.Float64() },
		"exponential":  func(r *rand.Rand, _ float64) float64 { return r.ExpFloat64() },
		"correlated":   func(r *rand.Rand, last float64) float64 { return 1 + 0.8*(last-1) + 0.1*r.NormFloat64() },
		"stopped each": func(r *rand.Rand, _ float64) float64 { return [...]float64{0.25, 0.25, 0.25, 3.25}[r.IntN(4)] },
	} {
		t.Run(name, func(t *testing.T) {
			const runs = 400
			held, batches := 0, 0
			for seed := range uint64(runs) {
				r := rand.New(rand.NewPCG(seed, 1))
				var s Series
				for last := 1.0; s.Len() < rule.Most; {
					last = next(r, last)
					s.Add(time.Duration(last * float64(time.Second)))
					if s.Enough(rule, time.Duration(s.Len())*each) {
						break
					}
				}
				e := s.Estimate()
				batches += e.N
				if math.Abs(e.Mean-1) <= e.Err {
					held++
				}
			}
			share := float64(held) / runs
			t.Logf("%.3f of the intervals hold the mean, after %d batches", share, batches/runs)
			least := 0.94
			if name == "correlated" {
				least = 0.89
			}
			if share < least {
				t.Errorf("%.3f of the intervals hold the mean, want %.2f at least of the 0.95 that they are made for", share, least)
			}
		})
	}
}

func TestSeriesNeedsEnoughBatches(t *testing.T) {
	var s Series
	rule := Rule{Relative: 0.05, For: time.Second, Most: 100}
	if e := s.Estimate(); e.N != 0 || !math.IsInf(e.Err, 1) || s.Enough(rule, time.Hour) {
		t.Errorf("of nothing: %+v", e)
	}
	s.Add(time.Second)
	if e := s.Estimate(); e.Mean != 1 || !math.IsInf(e.Err, 1) {
		t.Errorf("of one: %+v, want nothing to be known of its error", e)
	}
	for range Least - 1 {
		if s.Enough(rule, time.Hour) {
			t.Fatalf("%d batches are enough", s.Len())
		}
		s.Add(time.Second)
	}
	if s.Enough(rule, time.Second-1) {
		t.Error("it is enough too soon")
	}
	if e := s.Estimate(); !s.Enough(rule, time.Second) || e.Mean != 1 || e.Err != 0 || e.CV != 0 {
		t.Errorf("of %d that are the same: %+v, want it to be enough", Least, e)
	}
	var two Series
	two.Add(time.Second)
	two.Add(3 * time.Second)
	if e := two.Estimate(); e.Mean != 2 || math.Abs(e.Err-12.706) > 0.001 || math.Abs(e.CV-math.Sqrt2/2) > 1e-9 {
		t.Errorf("of 1 s and 3 s: %+v, want 2 ± 12.706 (Student's t with one degree of freedom)", e)
	}
}

func TestFitNeedsThreeQuotas(t *testing.T) {
	points := func(a, b float64, quotas ...int) (out []plan.Point) {
		for _, q := range quotas {
			out = append(out, plan.Point{CPUMilli: q, Batch: 1, Mean: time.Duration((a + 1000*b/float64(q)) * float64(time.Second)), N: 50})
		}
		return out
	}
	l, ok := Fit(points(0.002, 0.01, 250, 500, 1000, 2000))
	if !ok || math.Abs(l.A-0.002) > 1e-6 || math.Abs(l.B-0.01) > 1e-6 || math.Abs(l.R2-1) > 1e-6 {
		t.Errorf("%+v, %v, want 2 ms and 10 ms", l, ok)
	}
	if l, ok = Fit(points(0.02, 0, 250, 500, 1000)); !ok || l.B != 0 || l.R2 != 1 {
		t.Errorf("of what no CPU makes shorter: %+v", l)
	}
	for _, few := range [][]plan.Point{nil, points(1, 1, 250, 500), points(1, 1, 250, 250, 500, 500), append(points(1, 1, 250, 500), plan.Point{N: 3})} {
		if l, ok := Fit(few); ok {
			t.Errorf("%d points of two quotas: %+v, want no line", len(few), l)
		}
	}
	for name, tc := range map[string]struct {
		ms   [3]int // with 2, 1 and half a core
		want Line
	}{
		// the best line through 0
		"as if it began below 0": {[3]int{9, 20, 41}, Line{A: 0, B: (9*0.5 + 20*1 + 41*2) / 5.25 / 1000}},
		"slower with more CPU":   {[3]int{30, 20, 10}, Line{A: 0.020, B: 0}},
	} {
		var pts []plan.Point
		for i, quota := range []int{2000, 1000, 500} {
			pts = append(pts, plan.Point{CPUMilli: quota, Batch: 1, Mean: time.Duration(tc.ms[i]) * time.Millisecond, N: 10})
		}
		if l, ok := Fit(pts); !ok || math.Abs(l.A-tc.want.A) > 1e-9 || math.Abs(l.B-tc.want.B) > 1e-9 {
			t.Errorf("%s: %+v, %v, want %+v", name, l, ok, tc.want)
		}
	}
	noisy := points(0.002, 0.01, 250, 500, 1000)
	noisy[0].Mean, noisy[0].N = time.Hour, 1
	for i := range noisy[1:] {
		noisy[i+1].N = 1 << 29
	}
	if l, ok = Fit(noisy); !ok || math.IsNaN(l.A) || math.IsInf(l.B, 0) {
		t.Errorf("%+v, %v, want numbers", l, ok)
	}
}

func point(cpu, batch, length int) Point {
	return Point{Cell: Cell{cpu, batch, length}, Mean: 0.01, Err: 0.0004, CV: 0.2, N: 40}
}

func TestRowsAreSortedAndFormatted(t *testing.T) {
	p := Profile{Version: Version, Relative: 0.05, Points: []Point{point(500, 1, 64), point(250, 1, 0), point(1000, 1, 0), point(500, 1, 0)}}
	p.Points[1].Loose, p.Points[1].Mean, p.Points[1].Err = true, 0.0412345, 0.0021
	p.Points[2].Mean = 0.01
	p.Points[3].Mean = 0.0207
	var got []string
	for _, row := range p.Rows() {
		if len(row) != len(Head()) {
			t.Fatalf("row %q, want a cell a head: %q", row, Head())
		}
		got = append(got, strings.Join(row, " "))
	}
	want := []string{"250m 1 - 41.2ms 2.1ms 0.20 40 wider than 5 %", "500m 1 - 20.7ms 400µs 0.20 40 ", "1000m 1 - 10ms 400µs 0.20 40 ", "500m 1 64 10ms 400µs 0.20 40 "}
	if !slices.Equal(got, want) {
		t.Errorf("rows\n%q, want\n%q", got, want)
	}
	groups := p.Groups()
	if len(groups) != 2 || groups[0].Say() != "batch 1: 0 ms + 10.3 ms / cores (R² 1.000)" || groups[1].Say() != "" {
		t.Errorf("%q and %q of %d groups", groups[0].Say(), groups[len(groups)-1].Say(), len(groups))
	}
}

func TestDecodeSortsAndValidates(t *testing.T) {
	p := Profile{Version: Version, Relative: 0.05, Stale: true, Points: []Point{point(500, 1, 0), point(250, 2, 0), point(250, 1, 0)}}
	b, err := json.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	got, err := Decode(b)
	if err != nil || got.Stale || fmt.Sprint(got.Points[0].Cell, got.Points[1].Cell, got.Points[2].Cell) != "{250 1 0} {250 2 0} {500 1 0}" {
		t.Errorf("%+v, %v, want it sorted", got, err)
	}
	if pts := got.Plan(); pts[0].Mean != 10*time.Millisecond || pts[0].CPUMilli != 250 || pts[2].CPUMilli != 500 || pts[0].Err != 400*time.Microsecond {
		t.Errorf("in the words of policies %+v", pts)
	}
	p.Points[0].Mean, p.Points[1].CV, p.Points[2].Err = math.NaN(), math.Inf(1), math.NaN()
	p.Points = append(p.Points, p.Points[2])
	p.Version, p.Relative = 0, math.NaN()
	var field *pipeline.FieldError
	err = p.Validate()
	for _, path := range []string{"version", "relative", "points[0].meanSeconds", "points[1].cv", "points[2].errSeconds", "points[3]: got cpu, batch and length of points[2]"} {
		if !errors.As(err, &field) || !strings.Contains(err.Error(), path) {
			t.Errorf("%v, want %s among it", err, path)
		}
	}
	for digest, want := range map[string]bool{"": true, "sha256:1": false} {
		if got := (Profile{Image: "a"}).Of("a", digest); got != want {
			t.Errorf("a profile of image a is one of a at %q: %v, want %v", digest, got, want)
		}
	}
	if p := (Profile{Image: "a", Digest: "sha256:1"}); !p.Of("b", "sha256:1") || p.Of("a", "sha256:2") || p.Of("a", "") {
		t.Error("with a digest, the digest says which image it is")
	}
}

// FuzzDecode checks that policies get positive points in order, or none, from any stored bytes.
func FuzzDecode(f *testing.F) {
	f.Add([]byte(`{"version":1,"relative":0.05,"points":[{"cpuMilli":250,"batch":1,"length":0,"meanSeconds":0.04,"errSeconds":0.001,"cv":0.3,"n":60}]}`))
	f.Add([]byte(`{"version":1,"relative":0.5,"points":[{"cpuMilli":10,"batch":4096,"meanSeconds":5e-324,"n":2},{"cpuMilli":1000,"batch":1,"meanSeconds":3600,"errSeconds":3600,"cv":100,"n":2}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := Decode(b)
		if err != nil {
			return
		}
		points := p.Plan()
		for i, pt := range points {
			if pt.CPUMilli < MinCPU || pt.Batch < 1 || pt.Length < 0 || pt.Mean <= 0 || pt.Err < 0 || !(pt.CV >= 0) || math.IsInf(pt.CV, 0) || pt.N < 2 {
				t.Fatalf("point %+v", pt)
			}
			if i > 0 && p.Points[i-1].compare(p.Points[i].Cell) >= 0 {
				t.Fatalf("%+v before %+v", p.Points[i-1], p.Points[i])
			}
		}
		for _, g := range p.Groups() {
			if l, ok := g.Line(); ok && (math.IsNaN(l.A) || math.IsNaN(l.B) || math.IsInf(l.B, 0)) {
				t.Fatalf("line %+v of %+v", l, g)
			}
		}
		p.Rows()
	})
}
