package demo

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench"
	"github.com/stagecoach-serving/stagecoach/bench/chart"
	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/provider/client"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// phase is a stretch of Poisson arrivals.
type phase struct {
	rate   float64 // per second
	length time.Duration
}

// arrivals draws the instants of Poisson arrivals through the phases, from a seed.
func arrivals(seed uint64, phases []phase) []time.Duration {
	r := rand.New(rand.NewPCG(seed, 0))
	var at []time.Duration
	begin := time.Duration(0)
	for _, p := range phases {
		for t := begin; ; {
			t += time.Duration(r.ExpFloat64() / p.rate * float64(time.Second))
			if t >= begin+p.length {
				break
			}
			at = append(at, t)
		}
		begin += p.length
	}
	return at
}

// sample is the state of a function at an instant of a burst.
type sample struct {
	at      time.Duration
	waiting int
	ready   int
}

// call is one request of a burst.
type call struct {
	at     time.Duration // sent
	took   time.Duration
	status int
}

// burst is the record of a burst on a function.
type burst struct {
	function string
	length   time.Duration
	calls    []call
	samples  []sample
	events   []schema.Event
}

// runBurst sends the arrivals to a function in an open loop, and watches it.
func runBurst(ctx context.Context, api *client.Client, function string, phases []phase) (burst, error) {
	b := burst{function: function}
	for _, p := range phases {
		b.length += p.length
	}
	start := time.Now()
	watch, stopWatch := context.WithCancel(ctx)
	defer stopWatch()
	var wg, watcher sync.WaitGroup
	watcher.Go(func() { b.samples = watchFunction(watch, api, function, start) })
	due := arrivals(1, phases)
	b.calls = make([]call, len(due))
	for i, at := range due {
		select {
		case <-ctx.Done():
		case <-time.After(time.Until(start.Add(at))):
		}
		wg.Go(func() {
			a, err := api.Do(ctx, http.MethodPost, "/function/"+function, "text/plain", []byte("burst"))
			b.calls[i] = call{at, a.Took, a.Status}
			if err != nil {
				b.calls[i].status = 0
			}
		})
	}
	wg.Wait()
	stopWatch()
	watcher.Wait()
	tl, err := api.Timeline(ctx, function)
	if err != nil {
		return b, err
	}
	for _, e := range tl.Events {
		if !e.At.Before(start) {
			b.events = append(b.events, e)
		}
	}
	return b, ctx.Err()
}

func watchFunction(ctx context.Context, api *client.Client, function string, start time.Time) []sample {
	var out []sample
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		if tl, err := api.Timeline(ctx, function); err == nil {
			out = append(out, sample{time.Since(start), tl.Waiting, tl.Ready})
		}
		select {
		case <-ctx.Done():
			return out
		case <-tick.C:
		}
	}
}

// failed counts the calls that were not answered with 200.
func (b burst) failed() int {
	n := 0
	for _, c := range b.calls {
		if c.status != http.StatusOK {
			n++
		}
	}
	return n
}

// forked returns the starts of replicas that were forked from a loaded zygote and have answered.
func (b burst) forked() []client.ReplicaStart {
	return slices.DeleteFunc(client.ReplicaStarts(b.events), func(r client.ReplicaStart) bool { return r.Path != keysmanager.PathFork || r.Loaded || r.Answered == 0 })
}

// second is a row of the burst's table.
type second struct {
	arrivals, waiting, ready int
	took                     []time.Duration
}

func (b burst) seconds() []second {
	out := make([]second, int((b.length+time.Second-1)/time.Second))
	for _, c := range b.calls {
		if i := int(c.at / time.Second); i < len(out) {
			out[i].arrivals++
			out[i].took = append(out[i].took, c.took)
		}
	}
	for _, s := range b.samples {
		if i := int(s.at / time.Second); i < len(out) {
			out[i].waiting = max(out[i].waiting, s.waiting)
			out[i].ready = max(out[i].ready, s.ready)
		}
	}
	return out
}

func (b burst) writeTable(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(t, "second\tarrivals\tqueue\treplicas\tmedian latency\t\n")
	for i, s := range b.seconds() {
		median := "-"
		if v, ok := bench.Quantile(s.took, 0.5); ok {
			median = fmt.Sprintf("%d ms", v.Milliseconds())
		}
		fmt.Fprintf(t, "%d\t%d\t%d\t%d\t%s\t\n", i, s.arrivals, s.waiting, s.ready, median)
	}
	return t.Flush()
}

// writeChart draws arrivals, queue and replicas over time.
func (b burst) writeChart(w io.Writer) error {
	c := chart.Chart{Title: "A burst on " + b.function + " (its replicas hold a slot instead of a device)", Steps: true}
	rows := []chart.Series{{Name: "arrivals/s"}, {Name: "queue"}, {Name: "replicas"}}
	for i, s := range b.seconds() {
		c.X = append(c.X, float64(i))
		for k, v := range []int{s.arrivals, s.waiting, s.ready} {
			rows[k].Values = append(rows[k].Values, float64(v))
		}
	}
	c.Rows = rows
	return c.WriteSVG(w)
}
