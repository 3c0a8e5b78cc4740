// Command rates compares the measured rate of arrivals with the true one after steps, ramps and
// spikes. It prints the tables of docs/rates.md.
//
//	go run ./sim/study/rates    # make bench-rates
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"os"
	"runtime"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/rate"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "rates:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	fs := flag.NewFlagSet("rates", flag.ContinueOnError)
	seeds := fs.Int("seeds", 200, "number of runs per change")
	hours := fs.Float64("hours", 20, "length of steady runs")
	file := fs.String("json", "", "file to write all cells to")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if *seeds < 1 || !(*hours > 0) {
		return fmt.Errorf("--seeds %d --hours %g, want more than 0", *seeds, *hours)
	}
	t := study(*seeds, *hours)
	if *file != "" {
		text, err := json.MarshalIndent(t, "", " ")
		if err != nil {
			return err
		}
		if err := os.WriteFile(*file, append(text, '\n'), 0o644); err != nil {
			return err
		}
	}
	return write(os.Stdout, t)
}

// tables has all that is measured.
type tables struct {
	Changes []change `json:"changes"`
	Steady  []steady `json:"steady"`
}

// change is a change of the rate, and how well it is followed.
type change struct {
	Kind   string  `json:"kind"` // step, ramp or spike
	Rate   float64 `json:"rate"` // arrivals per second before
	CV     float64 `json:"cv"`
	Factor float64 `json:"factor"` // of the rate by a step or ramp; of a spike: 1
	Before follow  `json:"before"`
	Now    follow  `json:"now"`
}

// follow says how well an estimator follows a change.
type follow struct {
	Within float64 `json:"within"` // share of runs within the goal ten seconds later
	// Seconds is the median time until four fifths of a step are seen; at most longest.
	Seconds float64 `json:"seconds"`
}

// steady is a rate that does not change.
type steady struct {
	Rate    float64 `json:"rate"`
	CV      float64 `json:"cv"`
	Before  float64 `json:"before"` // error as a root mean square, a part of the rate
	Now     float64 `json:"now"`
	FalseHr float64 `json:"false_per_hour"` // changes that were reported per hour
	CVs     float64 `json:"measured_cv"`
}

// estimator is what is compared.
type estimator interface {
	Add(at time.Duration)
	Read(at time.Duration) rate.Estimate
}

var (
	cvs     = []float64{1, 2, 4}
	rates   = []float64{5, 20, 100}
	factors = []float64{0.25, 0.5, 1.5, 2, 4}
)

const (
	settle  = 120.0 // seconds before the change
	ramp    = 20.0  // seconds that a ramp takes
	later   = 10.0  // seconds after the change at which the goal is judged
	longest = 30.0  // seconds after a step at which a run ends
)

// study measures all cells, with one goroutine per processor.
func study(seeds int, hours float64) (t tables) {
	for _, cv := range cvs {
		for _, r := range rates {
			t.Steady = append(t.Steady, steady{Rate: r, CV: cv})
			for _, f := range factors {
				t.Changes = append(t.Changes, change{Kind: "step", Rate: r, CV: cv, Factor: f}, change{Kind: "ramp", Rate: r, CV: cv, Factor: f})
			}
			t.Changes = append(t.Changes, change{Kind: "spike", Rate: r, CV: cv, Factor: 1})
		}
	}
	var work []func()
	for i := range t.Changes {
		work = append(work, func() { t.Changes[i].measure(seeds) })
	}
	for i := range t.Steady {
		work = append(work, func() { t.Steady[i].measure(hours * 3600) })
	}
	jobs := make(chan func())
	var group sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		group.Go(func() {
			for job := range jobs {
				job()
			}
		})
	}
	for i, job := range work {
		fmt.Fprintf(os.Stderr, "rates: %d of %d\n", i+1, len(work))
		jobs <- job
	}
	close(jobs)
	group.Wait()
	return t
}

// end returns the time of the change's end.
func (c *change) end() float64 {
	if c.Kind == "ramp" {
		return settle + ramp
	}
	return settle
}

// at returns the true rate at a time.
func (c *change) at(t float64) float64 {
	switch {
	case t < settle || c.Kind == "spike":
		return c.Rate
	case c.Kind == "ramp" && t < settle+ramp:
		return c.Rate * (1 + (c.Factor-1)*(t-settle)/ramp)
	}
	return c.Rate * c.Factor
}

// measure runs the change with each seed.
func (c *change) measure(seeds int) {
	for _, x := range []struct {
		make func() estimator
		out  *follow
	}{{func() estimator { return &before{} }, &c.Before}, {func() estimator { return &rate.Estimator{} }, &c.Now}} {
		good := 0
		delays := make([]float64, seeds)
		for seed := range seeds {
			ok, delay := c.one(x.make(), uint64(seed))
			if ok {
				good++
			}
			delays[seed] = delay
		}
		x.out.Within = float64(good) / float64(seeds)
		x.out.Seconds = median(delays)
	}
}

// one reports whether the estimate is within the goal later seconds after the change, and after
// how many seconds four fifths of the change are seen.
func (c *change) one(e estimator, seed uint64) (ok bool, delay float64) {
	end := c.end()
	judged, n := end+later, 0
	delay = longest
	look := func(t float64) {
		x := e.Read(duration(t))
		seen := c.Rate + 0.8*(c.Factor-1)*c.Rate
		if t >= end && delay == longest && (c.Factor > 1 && x.Rate >= seen || c.Factor < 1 && x.Rate <= seen) {
			delay = t - end
		}
		if t == judged {
			truth := c.Rate * c.Factor
			goal := max(0.15, 2*c.CV/math.Sqrt(float64(max(n, 1))))
			ok = math.Abs(x.Rate/truth-1) <= goal
		}
	}
	play(seed, c.CV, c.at, end+longest, look, func(t float64) {
		if t >= end && t < judged {
			n++
		}
		e.Add(duration(t))
	}, c.spike())
	return ok, delay
}

// spike returns the number of arrivals that come at once at the time of the change.
func (c *change) spike() int {
	if c.Kind == "spike" {
		return int(5 * c.Rate)
	}
	return 0
}

// measure plays a steady rate for a time in seconds.
func (s *steady) measure(length float64) {
	var now rate.Estimator
	var old before
	var looks, changes, was, is, cv2 float64
	var since time.Duration
	play(1, s.CV, func(float64) float64 { return s.Rate }, length, func(t float64) {
		x, y := now.Read(duration(t)), old.Read(duration(t))
		if t < settle {
			since = x.Since
			return
		}
		if x.Since != since {
			changes, since = changes+1, x.Since
		}
		looks++
		was += (y.Rate/s.Rate - 1) * (y.Rate/s.Rate - 1)
		is += (x.Rate/s.Rate - 1) * (x.Rate/s.Rate - 1)
		cv2 += x.CV2
	}, func(t float64) {
		now.Add(duration(t))
		old.Add(duration(t))
	}, 0)
	s.Before, s.Now, s.FalseHr, s.CVs = math.Sqrt(was/looks), math.Sqrt(is/looks), changes*3600/(length-settle), math.Sqrt(cv2/looks)
}

func duration(seconds float64) time.Duration { return time.Duration(seconds * float64(time.Second)) }
