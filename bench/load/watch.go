package load

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// watcher asks the server once per second for the state of its functions. It reads /metrics, where
// every OpenFaaS gateway has gateway_service_count. It prefers GET /system/timeline/NAME, which
// only Stagecoach has.
type watcher struct {
	client   *http.Client
	gateway  *url.URL
	names    []string
	found    []Function
	sums     []waitSum // of the calls of found[i] so far
	warnings []string
}

type waitSum struct{ seconds, calls float64 }

const (
	watchEvery   = time.Second
	watchTimeout = 5 * time.Second
	maxWatched   = 64
	maxMetrics   = 32 << 20
)

func newWatcher(client *http.Client, cfg Config) *watcher {
	w := &watcher{client: client, gateway: cfg.Gateway}
	for _, t := range cfg.Targets {
		w.names = append(w.names, t.Function)
	}
	return w
}

func (w *watcher) get(ctx context.Context, path string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, watchTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, w.gateway.JoinPath(path).String(), nil)
	if err != nil {
		return nil, err
	}
	req.URL.User = nil
	if u := w.gateway.User; u != nil {
		password, _ := u.Password()
		req.SetBasicAuth(u.Username(), password)
	}
	resp, err := w.client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxMetrics))
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("GET %s: status %d", path, resp.StatusCode)
	}
	return b, err
}

// resolve replaces pipelines by their stages.
func (w *watcher) resolve(ctx context.Context) {
	var all []string
	for _, name := range w.names {
		name, _, _ = strings.Cut(name, "/") // a path after the function's name
		stages := []string{name}
		var p struct {
			Namespace string                  `json:"namespace"`
			Stages    []struct{ Name string } `json:"stages"`
		}
		if b, err := w.get(ctx, "/system/pipelines/"+name); err == nil && json.Unmarshal(b, &p) == nil && len(p.Stages) > 0 {
			stages = nil
			for _, s := range p.Stages {
				stages = append(stages, pipeline.Key{Name: s.Name, Namespace: p.Namespace}.String())
			}
		}
		for _, s := range stages {
			if !slices.Contains(all, s) && len(all) < maxWatched {
				all = append(all, s)
			}
		}
	}
	w.names = all
	w.found = make([]Function, len(all))
	w.sums = make([]waitSum, len(all))
	for i, name := range all {
		w.found[i] = Function{Function: name, Samples: []Sample{}}
	}
}

// run asks until ctx ends. It gives up if nothing answers.
func (w *watcher) run(ctx context.Context, start time.Time) {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	for {
		if err := w.sample(ctx, time.Since(start)); err != nil && ctx.Err() == nil {
			if len(w.functions()) == 0 {
				w.warnings = append(w.warnings, "the server does not show its queues and replicas: "+err.Error())
				return
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// sample asks for each function. It returns the error of /metrics if nothing else answered.
func (w *watcher) sample(ctx context.Context, at time.Duration) error {
	metrics := map[string]float64{}
	text, failed := w.get(ctx, "/metrics")
	if failed == nil {
		metrics = readMetrics(string(text))
	}
	for i, name := range w.names {
		s := Sample{T: math.Round(at.Seconds()*1e3) / 1e3}
		of := func(metric string) (float64, bool) {
			v, ok := metrics[metric+" "+pipeline.Named(name, "").String()]
			return v, ok
		}
		replicas, known := of("gateway_service_count")
		depth, _ := of("stagecoach_dispatch_queue_depth")
		s.Replicas, s.Waiting = int(replicas), int(depth)
		seconds, _ := of("stagecoach_dispatch_wait_seconds_sum")
		if calls, ok := of("stagecoach_dispatch_wait_seconds_count"); ok {
			if n := calls - w.sums[i].calls; n > 0 && len(w.found[i].Samples) > 0 {
				mean := (seconds - w.sums[i].seconds) / n
				s.Wait = &mean
			}
			w.sums[i] = waitSum{seconds, calls}
		}
		var t struct {
			Waiting, Running, Ready int
			Why                     string
		}
		if b, err := w.get(ctx, "/system/timeline/"+name); err == nil && json.Unmarshal(b, &t) == nil {
			s.Replicas, s.Waiting, s.Running, s.Why, known = t.Ready, t.Waiting, t.Running, t.Why, true
		} else if failed == nil && !known {
			failed = fmt.Errorf("GET /system/timeline/%s and /metrics say nothing of it", name)
		}
		if known {
			w.found[i].Samples = append(w.found[i].Samples, s)
		}
	}
	return failed
}

// functions returns the functions with at least one sample.
func (w *watcher) functions() []Function {
	out := []Function{}
	for _, f := range w.found {
		if len(f.Samples) > 0 {
			out = append(out, f)
		}
	}
	return out
}

var metricForm = regexp.MustCompile(`^([a-z_]+)\{function(?:_name)?="([^"]*)"\} (\S+)`)

// readMetrics returns the samples whose only label is the function, by "METRIC FUNCTION".
func readMetrics(text string) map[string]float64 {
	out := map[string]float64{}
	for sc := bufio.NewScanner(strings.NewReader(text)); sc.Scan(); {
		if m := metricForm.FindStringSubmatch(sc.Text()); m != nil {
			if v, err := strconv.ParseFloat(m[3], 64); err == nil {
				out[m[1]+" "+m[2]] = v
			}
		}
	}
	return out
}
