package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/control/events"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// topView is what GET /system/top answers: all that `stagecoach top` shows. Times are in seconds, sizes in bytes.
type topView struct {
	At        time.Time      `json:"at"`
	Pipelines []topPipeline  `json:"pipelines"` // sorted by name; functions that were called by themselves lately are among them
	Functions []topFunction  `json:"functions"` // sorted by name
	Nodes     []topNode      `json:"nodes"`
	Events    []events.Event `json:"events"` // the latest, in order
}

// topPipeline is what the last 15 seconds brought to a pipeline.
type topPipeline struct {
	Name     string  `json:"name"`
	Rate     float64 `json:"rate"` // ended requests per second
	P50      float64 `json:"p50"`
	P99      float64 `json:"p99"`
	SLO      float64 `json:"slo,omitempty"`
	Within   float64 `json:"within"` // share of all requests that were good within the objective
	Failed   float64 `json:"failed"` // share that were not the client's fault
	InFlight int     `json:"inFlight"`
	Fault    string  `json:"fault,omitempty"` // why it cannot be invoked
}

// topFunction is what is known of a function now.
type topFunction struct {
	Name        string  `json:"name"`
	Rate        float64 `json:"rate"` // arriving tasks per second
	CV          float64 `json:"cv"`   // of the times between them
	Waiting     int     `json:"waiting"`
	Running     int     `json:"running"`
	Wait        float64 `json:"wait"`        // of the latest tasks in the line
	Service     float64 `json:"service"`     // of a task
	Utilisation float64 `json:"utilisation"` // rate * service / what can run at a time
	Ready       int     `json:"ready"`       // replicas
	Starting    int     `json:"starting"`
	Draining    int     `json:"draining"`
	Wanted      int     `json:"wanted"`
	Why         string  `json:"why"` // of the last decision, or why replicas do not start
}

// topNode is what a node has.
type topNode struct {
	Name       string `json:"name"`
	Memory     int64  `json:"memory"`
	MemoryUsed int64  `json:"memoryUsed"`
	Zygotes    int    `json:"zygotes"`
	Replicas   int    `json:"replicas"`
}

// topEvents is how many of the latest events top knows.
const topEvents = 50

// serveTop answers GET /system/top.
func (u *up) serveTop(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(u.top(time.Now().UTC())) // the client may be gone
}

func (u *up) top(now time.Time) topView {
	v := topView{At: now, Pipelines: []topPipeline{}, Functions: []topFunction{}, Nodes: []topNode{}, Events: u.events.Latest(topEvents)}
	for _, p := range u.registry.Pipelines() {
		v.Pipelines = append(v.Pipelines, u.topPipeline(p))
	}
	counts := u.local.Counts()
	for _, f := range u.registry.Functions() {
		if g, ok := u.registry.Graph(f.Key); ok && u.registry.Alone(f.Key) {
			if p := u.topPipeline(g); p.Rate > 0 || p.InFlight > 0 {
				v.Pipelines = append(v.Pipelines, p)
			}
		}
		v.Functions = append(v.Functions, u.topFunction(f.Key, counts[f.Key].Ready, counts[f.Key].Starting, counts[f.Key].Draining, now))
	}
	slices.SortFunc(v.Pipelines, func(a, b topPipeline) int { return strings.Compare(a.Name, b.Name) })
	v.Pipelines = slices.CompactFunc(v.Pipelines, func(a, b topPipeline) bool { return a.Name == b.Name }) // of an earlier version, a pipeline and a function of its name
	s, _ := u.loop.Last()
	for _, n := range s.Nodes {
		out := topNode{Name: n.Name, Memory: n.Memory, MemoryUsed: n.MemoryUsed, Zygotes: len(n.Zygotes)}
		for _, f := range s.Functions {
			for _, r := range f.Replicas {
				if r.Node == n.Name && r.State != plan.Starting {
					out.Replicas++
				}
			}
		}
		v.Nodes = append(v.Nodes, out)
	}
	return v
}

func (u *up) topPipeline(p pipeline.Pipeline) topPipeline {
	key := p.Key()
	r := u.gateway.Recent(key, p.SLO)
	out := topPipeline{
		Name: key.String(), Rate: r.Rate, P50: r.P50.Seconds(), P99: r.P99.Seconds(), SLO: p.SLO.Seconds(),
		Within: r.Within, Failed: r.Failed, InFlight: r.InFlight,
	}
	if len(p.Faults) > 0 {
		out.Fault = fmt.Sprint(p.Faults[0])
	}
	return out
}

func (u *up) topFunction(key pipeline.Key, ready, starting, draining int, now time.Time) topFunction {
	is := u.lines.Signals(key, now)
	out := topFunction{
		Name: key.String(), Rate: is.Demand.Rate, CV: is.Demand.CV, Waiting: is.Waiting, Running: is.Running, Service: is.Service.Mean.Seconds(),
		Wait: u.lines.Waited(key).Seconds(), Ready: ready, Starting: starting, Draining: draining,
	}
	if servers := u.lines.Load(key).Servers; servers > 0 {
		out.Utilisation = is.Demand.Rate * is.Service.Mean.Seconds() / float64(servers)
	}
	if w, ok := u.status.want(key); ok {
		out.Wanted, out.Why = len(w.Slots), w.Why
		if w.Short != "" {
			out.Why = w.Short
		}
	}
	if n, _, cause := u.local.Failure(key); n > 0 {
		out.Why = fmt.Sprintf("%d starts failed: %s", n, cause)
	}
	return out
}

// runTop shows a running stagecoach, live in a terminal.
func runTop(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("top", flag.ContinueOnError)
	gateway := gatewayFlag(fs)
	once := fs.Bool("once", false, "print it once and end, as when the output is no terminal")
	asJSON := fs.Bool("json", false, "print what GET /system/top answers, once")
	if err := console.ParseFlags(fs, args); err != nil {
		return err
	}
	api, err := client.Dial(*gateway)
	if err != nil {
		return err
	}
	api.HTTP.Timeout = 5 * time.Second
	var v topView
	if err := api.Get(ctx, "/system/top", &v); err != nil {
		return err
	}
	if *asJSON {
		e := json.NewEncoder(out)
		e.SetIndent("", "  ")
		return e.Encode(v)
	}
	tty := openTerminal(out)
	if *once || tty == nil {
		const width = 120
		_, err := fmt.Fprintln(out, strings.Join(renderTop(v, width, 1000), "\n"))
		return err
	}
	return liveTop(ctx, api, v, tty)
}

// liveTop redraws once a second, and when the terminal changes its size, until ctx ends or somebody types q.
func liveTop(ctx context.Context, api *client.Client, v topView, tty *terminal) error {
	restore, err := tty.raw()
	if err != nil {
		return err
	}
	defer restore()
	ctx, quit := context.WithCancel(ctx)
	keys := make(chan struct{})
	go func() { defer close(keys); tty.keys(ctx, quit) }()
	defer func() { quit(); <-keys }()
	resized := make(chan os.Signal, 1)
	signal.Notify(resized, syscall.SIGWINCH)
	defer signal.Stop(resized)
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	var failed error
	for {
		width, height := tty.size()
		lines := renderTop(v, width, height)
		if failed != nil {
			lines[0] = fit("no answer, what is below is old: "+printable(failed.Error()), width)
		}
		if err := tty.draw(lines); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-resized:
			continue
		case <-tick.C:
		}
		var next topView
		if failed = api.Get(ctx, "/system/top", &next); failed == nil {
			v = next
		}
	}
}
