// Command waits compares the autoscaler's predictions of waits with simulated queues. It prints the
// tables of docs/model.md. All times are in service times.
//
//	go run ./sim/study/waits --json docs/model.json    # make bench-waits
package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"

	"github.com/stagecoach-serving/stagecoach/autoscaler"
)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "waits:", err)
		os.Exit(1)
	}
}

// Cell is one queue: what was simulated, and what the model predicts. Times are in service times.
type Cell struct {
	Gaps    string    `json:"gaps"` // gamma, hyperexponential or modulated
	Fixed   bool      `json:"fixed"`
	CV      float64   `json:"cv"`
	Load    float64   `json:"load"`
	Servers int       `json:"servers"`
	Tasks   int       `json:"tasks"`
	P50     Predicted `json:"p50"`
	P95     Predicted `json:"p95"`
}

// Predicted is a quantile of sojourns, simulated and predicted.
type Predicted struct {
	Simulated float64 `json:"simulated"`
	Half      float64 `json:"half"` // half of the 95 % interval of Simulated, by batch means
	Model     float64 `json:"model"`
	// Before is by Allen and Cunneen's factor with Ca² up to 36, and AllenCunneen by the factor
	// with any Ca².
	Before       float64 `json:"-"`
	AllenCunneen float64 `json:"-"`
}

var (
	cvs     = []float64{1, 2, 4, 8}
	loads   = []float64{0.5, 0.7, 0.8, 0.9, 0.95}
	servers = []int{1, 2, 4, 8, 16, 32}
)

func run(args []string, out io.Writer) error {
	fs := flag.NewFlagSet("waits", flag.ContinueOnError)
	file := fs.String("json", "", "file to write all cells to")
	from := fs.String("from", "", "file of cells to print, in place of simulating")
	length := fs.Float64("length", 500, "length of runs, in times that a queue takes to forget")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if !(*length >= 1) || *length > 1e6 {
		return fmt.Errorf("--length %g, want 1 to 1000000", *length)
	}
	var cells []Cell
	if *from != "" {
		text, err := os.ReadFile(*from)
		if err != nil {
			return err
		}
		if err := json.Unmarshal(text, &cells); err != nil {
			return fmt.Errorf("%s: %w, want a file that --json wrote", *from, err)
		}
		for i := range cells {
			cells[i].predict()
		}
	} else {
		cells = study(*length)
	}
	if *file != "" {
		if err := save(*file, cells); err != nil {
			return err
		}
	}
	return write(out, cells)
}

// save writes cells to a file as JSON, one per line.
func save(file string, cells []Cell) error {
	var b bytes.Buffer
	for i, c := range cells {
		for _, p := range []*Predicted{&c.P50, &c.P95} {
			p.Model = rounded(p.Model)
		}
		text, err := json.Marshal(c)
		if err != nil {
			return err
		}
		b.WriteString([]string{"[\n", ",\n"}[min(i, 1)])
		b.Write(text)
	}
	b.WriteString("\n]\n")
	return os.WriteFile(file, b.Bytes(), 0o644)
}

// rounded returns v with four digits.
func rounded(v float64) float64 {
	unit := math.Pow(10, 3-math.Floor(math.Log10(max(math.Abs(v), 1e-9))))
	return math.Round(v*unit) / unit
}

// study simulates and predicts all cells.
func study(length float64) (out []Cell) {
	kinds := []struct {
		name string
		of   func(float64) gaps
	}{{"gamma", gammaGaps}, {"hyperexponential", hyperGaps}, {"modulated", modulatedGaps}}
	for _, kind := range kinds {
		for i, cv := range cvs {
			if kind.name != "gamma" && cv == 1 {
				continue // Poisson arrivals as well
			}
			for j, load := range loads {
				fmt.Fprintf(os.Stderr, "%s, CV %g, load %g\n", kind.name, cv, load)
				rng := rand.New(rand.NewPCG(uint64(i), uint64(j)))
				out = append(out, simulate(kind.name, kind.of(cv*cv), cv, load, length, rng)...)
			}
		}
	}
	return out
}

// simulate runs all queues of a load on one stream of gaps, so that they differ by servers only.
func simulate(name string, next gaps, cv, load, length float64, rng *rand.Rand) (out []Cell) {
	n := max(int(length*(cv*cv+1)/((1-load)*(1-load))), 400_000)
	queues := make([]*queue, 0, 2*len(servers))
	for _, fixed := range []bool{false, true} {
		for _, c := range servers {
			queues = append(queues, &queue{free: make([]float64, c), fixed: fixed})
		}
	}
	at := 0.0 // in gaps; all queues have the same
	for k := range n + n/10 {
		at += next(rng)
		batch := -1
		if k >= n/10 {
			batch = (k - n/10) * batches / n
		}
		for _, q := range queues {
			q.arrive(at/(load*float64(len(q.free))), rng, batch)
		}
	}
	for _, q := range queues {
		c := Cell{Gaps: name, Fixed: q.fixed, CV: cv, Load: load, Servers: len(q.free), Tasks: n}
		for part, p := range map[float64]*Predicted{0.5: &c.P50, 0.95: &c.P95} {
			value, half := q.quantile(part)
			p.Simulated, p.Half = rounded(value), rounded(half)
		}
		c.predict()
		out = append(out, c)
	}
	return out
}

// predict sets what the laws predict.
func (c *Cell) predict() {
	cs2 := 1.0
	if c.Fixed {
		cs2 = 0
	}
	lambda := c.Load * float64(c.Servers)
	law := autoscaler.Waits(lambda, 1, c.Servers, c.CV*c.CV, cs2)
	chance := autoscaler.Waits(lambda, 1, c.Servers, 1, 1)
	factor := func(ca2 float64) autoscaler.WaitLaw {
		return autoscaler.WaitLaw{Busy: chance.Busy, Rate: chance.Rate / ((ca2 + cs2) / 2)}
	}
	before, allenCunneen := factor(min(c.CV*c.CV, 36)), factor(c.CV*c.CV)
	for part, p := range map[float64]*Predicted{0.5: &c.P50, 0.95: &c.P95} {
		p.Model = sojourn(law, c.Fixed, part)
		p.Before, p.AllenCunneen = sojourn(before, c.Fixed, part), sojourn(allenCunneen, c.Fixed, part)
	}
}

// sojourn returns a quantile of the wait plus a service that takes 1: always, or on average and
// exponential.
func sojourn(w autoscaler.WaitLaw, fixed bool, part float64) float64 {
	low, high := 0.0, 1.0
	for exceeds(w, fixed, high) > 1-part {
		high *= 2
	}
	for range 60 {
		if mid := (low + high) / 2; exceeds(w, fixed, mid) > 1-part {
			low = mid
		} else {
			high = mid
		}
	}
	return high
}

// exceeds returns the probability that wait and service take longer than t.
func exceeds(w autoscaler.WaitLaw, fixed bool, t float64) float64 {
	if fixed {
		if t < 1 {
			return 1
		}
		return w.Busy * math.Exp(-w.Rate*(t-1))
	}
	d := 1 - w.Rate
	if math.Abs(d) < 1e-9 {
		return math.Exp(-t) * (1 + w.Busy*t)
	}
	// P(S > t) and P(S <= t, W > t−S), for S exponential with rate 1
	return math.Exp(-t) + w.Busy*(math.Exp(-w.Rate*t)-math.Exp(-t))/d
}
