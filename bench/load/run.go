package load

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	hdr "github.com/HdrHistogram/hdrhistogram-go"

	"github.com/stagecoach-serving/stagecoach/bench/load/arrivals"
)

// Config is a complete configuration of a run. [Scenario.Config] makes one.
type Config struct {
	Gateway  *url.URL // user and password are sent with each request
	Targets  []Target
	Duration time.Duration // of the arrivals; the run waits for the last answers after it
	// bounds running requests plus accepted async ones without their callback.
	MaxInFlight int
	Seed        uint64
	// host:port of the receiver for async targets' callbacks; port 0: any.
	Callbacks string
	Progress  func(Progress)    // called once per second; nil: not called
	Transport http.RoundTripper // nil: HTTP/1.1 with kept connections
}

// Target is a function, or anything else behind the gateway, with the requests to send.
type Target struct {
	Name     string
	Function string          // with or without its namespace
	Source   arrivals.Source // used up by the run
	Process  string          // description of the source
	Header   http.Header
	SLO      time.Duration // bound for the latency from a request's instant; 0: none
	Timeout  time.Duration // from a request's instant to its answer or callback
	Async    bool

	payload payload
}

// Progress is the present state of a run.
type Progress struct {
	At                                       time.Duration // since the start
	Offered, NotSent, Answered, Good, Failed int64
	InFlight                                 int
	P50                                      time.Duration // of all answers so far
}

// maxLag is the largest trustworthy 99th percentile of the generator's lag.
const maxLag = 10 * time.Millisecond

// run is a run in progress.
type run struct {
	cfg       Config
	client    *http.Client
	start     time.Time
	slots     chan struct{}
	peak      atomic.Int64
	conns     atomic.Int64
	recorders []*recorder
	callbacks *receiver
	requests  sync.WaitGroup

	mu  sync.Mutex
	lag *hdr.Histogram
}

// Run sends the requests of every target and waits for their answers. When ctx ends, the arrivals
// end, and running requests count as failed. The result then has a warning.
func Run(ctx context.Context, cfg Config) (Result, error) {
	if err := cfg.validate(); err != nil {
		return Result{}, err
	}
	r := &run{cfg: cfg, slots: make(chan struct{}, cfg.MaxInFlight), lag: newHistogram()}
	transport := cfg.Transport
	if transport == nil {
		t := r.newTransport()
		defer t.CloseIdleConnections()
		transport = t
	}
	r.client = &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	for _, t := range cfg.Targets {
		rec := newRecorder(t.Name, t.SLO)
		rec.async = t.Async
		r.recorders = append(r.recorders, rec)
		if t.Async && r.callbacks == nil {
			var err error
			if r.callbacks, err = newReceiver(cfg.Callbacks); err != nil {
				return Result{}, err
			}
			defer r.callbacks.close()
		}
	}
	w := newWatcher(r.client, cfg)
	w.resolve(ctx)
	r.start = time.Now()
	begun := r.start.UTC()
	watch, stopWatching := context.WithCancel(ctx)
	var watching sync.WaitGroup
	watching.Go(func() { w.run(watch, r.start) })
	watching.Go(func() { r.progress(watch) })
	err := r.offerAll(ctx)
	ended := time.Since(r.start)
	r.requests.Wait()
	stopWatching()
	watching.Wait()
	out := r.result(min(ended, cfg.Duration), begun)
	out.Functions = w.functions()
	out.Warnings = append(out.Warnings, w.warnings...)
	if ctx.Err() != nil {
		out.Warnings = append(out.Warnings, fmt.Sprintf("interrupted after %.1f s of %v", ended.Seconds(), cfg.Duration))
	}
	return out, err
}

func (c Config) validate() error {
	var errs []error
	if c.Gateway == nil || c.Gateway.Host == "" || c.Gateway.Scheme != "http" && c.Gateway.Scheme != "https" {
		errs = append(errs, fmt.Errorf("gateway: got %v, want http://host:port", c.Gateway))
	}
	if len(c.Targets) == 0 {
		errs = append(errs, errors.New("targets: got none, want one or more"))
	}
	if c.Duration <= 0 {
		errs = append(errs, fmt.Errorf("duration: got %v, want more than 0", c.Duration))
	}
	if c.MaxInFlight <= 0 {
		errs = append(errs, fmt.Errorf("maxInFlight: got %d, want 1 or more", c.MaxInFlight))
	}
	for i, t := range c.Targets {
		if t.Timeout <= 0 {
			errs = append(errs, fmt.Errorf("targets[%d].timeout: got %v, want more than 0", i, t.Timeout))
		}
	}
	return errors.Join(errs...)
}

// newTransport returns a transport that keeps as many connections as requests may be in flight, and
// counts new ones.
func (r *run) newTransport() *http.Transport {
	dial := net.Dialer{Timeout: 10 * time.Second}
	return &http.Transport{
		MaxIdleConns: r.cfg.MaxInFlight, MaxIdleConnsPerHost: r.cfg.MaxInFlight, IdleConnTimeout: 90 * time.Second,
		DisableCompression: true, TLSHandshakeTimeout: 10 * time.Second,
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			conn, err := dial.DialContext(ctx, network, addr)
			if err == nil {
				r.conns.Add(1)
			}
			return conn, err
		},
	}
}

// offerAll returns when all targets' arrivals have ended. Requests may still be in flight.
func (r *run) offerAll(ctx context.Context) error {
	errs := make([]error, len(r.cfg.Targets))
	var offering sync.WaitGroup
	for i := range r.cfg.Targets {
		offering.Go(func() { errs[i] = r.offer(ctx, &r.cfg.Targets[i], r.recorders[i]) })
	}
	offering.Wait()
	return errors.Join(errs...)
}

// offer sends a target's requests, each at its instant.
func (r *run) offer(ctx context.Context, t *Target, rec *recorder) error {
	source := arrivals.Until(t.Source, r.cfg.Duration)
	wait := time.NewTimer(0)
	defer wait.Stop()
	for {
		at, ok := source.Next()
		if !ok {
			at = r.cfg.Duration // waits for the end, because rates are relative to it
		}
		var body []byte
		var contentType string
		if ok {
			var err error
			if body, contentType, err = t.payload(); err != nil {
				return fmt.Errorf("target %s: body: %w", t.Name, err)
			}
		}
		if left := time.Until(r.start.Add(at)); left > 0 {
			wait.Reset(left)
			select {
			case <-wait.C:
			case <-ctx.Done():
				return nil
			}
		}
		if !ok || ctx.Err() != nil {
			return nil
		}
		select {
		case r.slots <- struct{}{}:
		default:
			rec.offered(at, false)
			continue
		}
		if n := int64(len(r.slots)); n > r.peak.Load() {
			r.peak.Store(n) // the maximum, apart from a race of two targets
		}
		rec.offered(at, true)
		r.requests.Go(func() {
			defer func() { <-r.slots }()
			rec.ended(r.send(ctx, t, at, body, contentType))
		})
	}
}

// progress reports once per second until ctx ends.
func (r *run) progress(ctx context.Context) {
	if r.cfg.Progress == nil {
		return
	}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		p := Progress{At: time.Since(r.start), InFlight: len(r.slots)}
		all := newHistogram()
		for _, rec := range r.recorders {
			rec.mu.Lock()
			p.Offered, p.NotSent, p.Answered = p.Offered+rec.f.Offered, p.NotSent+rec.f.NotSent, p.Answered+rec.f.Answered
			p.Good, p.Failed = p.Good+rec.f.Good, p.Failed+rec.f.Failed
			all.Merge(rec.latency)
			rec.mu.Unlock()
		}
		p.P50 = time.Duration(all.ValueAtQuantile(50)) * time.Microsecond
		r.cfg.Progress(p)
	}
}

// result summarizes the run.
func (r *run) result(d time.Duration, begun time.Time) Result {
	gateway := *r.cfg.Gateway
	gateway.User = nil
	out := Result{
		Schema: Schema, Started: begun, Duration: d.Seconds(), Gateway: gateway.String(), Seed: r.cfg.Seed,
		Warnings: []string{}, Functions: []Function{},
		Generator: Generator{latencyOf(r.lag), r.cfg.MaxInFlight, int(r.peak.Load()), r.conns.Load()},
	}
	if p99 := cmp.Or(out.Generator.Lag.P99, &out.Generator.Lag.Max); *p99 > maxLag.Seconds() {
		out.Warnings = append(out.Warnings, fmt.Sprintf("the generator lagged: 1 %% of the requests were sent %.1f ms late or more, want at most %v; "+
			"latencies count from when they were due, but bursts came flatter than asked for: use a machine with less to do, or a lower rate", *p99*1e3, maxLag))
	}
	total := newRecorder("total", 0)
	for i, rec := range r.recorders {
		t := r.cfg.Targets[i]
		if r.callbacks != nil {
			rec.callbacks.Duplicates = r.callbacks.duplicatesOf(t.Name)
		}
		f := rec.figures(d)
		f.Function, f.Process = t.Function, t.Process
		out.Targets = append(out.Targets, f)
		total.merge(rec)
	}
	out.Total = total.figures(d)
	if out.Total.NotSent > 0 {
		out.Warnings = append(out.Warnings, fmt.Sprintf("%d of %d requests were not sent because %d were in flight: the server got less than was offered",
			out.Total.NotSent, out.Total.Offered, r.cfg.MaxInFlight))
	}
	return out
}
