package gateway

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// codes are the values of the label code. Any other status counts as the first code of its class.
var codes = [...]int{200, 202, 400, 404, 405, 408, 413, 429, 431, 499, 500, 502, 503, 504}

// metrics holds OpenFaaS's metrics. A request finds its children without a lock.
type metrics struct {
	started *prometheus.CounterVec
	total   *prometheus.CounterVec
	seconds *prometheus.HistogramVec

	mu        sync.Mutex
	functions atomic.Pointer[map[pipeline.Key]*functionMetrics] // by key; copy on write
	// stages counts calls as a stage of pipelines, by the function's key as text; copy on write.
	stages atomic.Pointer[map[string]*atomic.Uint64]
}

// functionMetrics holds the metrics of one function.
type functionMetrics struct {
	key     pipeline.Key
	name    string // key as text
	of      *metrics
	started prometheus.Counter
	codes   [len(codes)]atomic.Pointer[outcome]
	count   atomic.Uint64 // requests that ended
	begun   atomic.Uint64
	recent  recent
	gone    bool // guarded by of.mu; no new series after it is set
}

// outcome counts the requests that ended with one status.
type outcome struct {
	total   prometheus.Counter
	seconds prometheus.Observer
}

func newMetrics(r prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		started: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "gateway_function_invocation_started", Help: "Requests for a function or pipeline that began.",
		}, []string{"function_name"}),
		total: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "gateway_function_invocation_total", Help: "Requests for a function or pipeline that ended, by status; 499: the client hung up.",
		}, []string{"function_name", "code"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "gateway_functions_seconds", Help: "Time from a request's headers to its answer.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60},
		}, []string{"function_name", "code"}),
	}
	m.functions.Store(&map[pipeline.Key]*functionMetrics{})
	m.stages.Store(&map[string]*atomic.Uint64{})
	for _, c := range []prometheus.Collector{m.started, m.total, m.seconds} {
		if err := r.Register(c); err != nil {
			return nil, fmt.Errorf("gateway: %w", err)
		}
	}
	return m, nil
}

// function returns the metrics of a function that exists.
func (m *metrics) function(key pipeline.Key) *functionMetrics {
	if f := (*m.functions.Load())[key]; f != nil {
		return f
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	old := *m.functions.Load()
	if f := old[key]; f != nil {
		return f
	}
	name := key.String()
	f := &functionMetrics{key: key, name: name, of: m, started: m.started.WithLabelValues(name)}
	all := maps.Clone(old)
	all[key] = f
	m.functions.Store(&all)
	return f
}

// tidy drops the metrics of keys for which exists returns false.
func (m *metrics) tidy(exists func(key pipeline.Key) bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := maps.Clone(*m.functions.Load())
	maps.DeleteFunc(all, func(key pipeline.Key, f *functionMetrics) bool {
		if exists(key) {
			return false
		}
		f.gone = true
		of := prometheus.Labels{"function_name": key.String()}
		m.started.DeletePartialMatch(of)
		m.total.DeletePartialMatch(of)
		m.seconds.DeletePartialMatch(of)
		return true
	})
	m.functions.Store(&all)
	stages := maps.Clone(*m.stages.Load())
	maps.DeleteFunc(stages, func(name string, _ *atomic.Uint64) bool { return !exists(pipeline.ParseKey(name)) })
	m.stages.Store(&stages)
}

// invocations returns the number of requests for key that have ended, plus the number of calls of
// key as a stage of pipelines.
func (m *metrics) invocations(key pipeline.Key) float64 {
	var n uint64
	if f := (*m.functions.Load())[key]; f != nil {
		n = f.count.Load()
	}
	if calls := (*m.stages.Load())[key.String()]; calls != nil {
		n += calls.Load()
	}
	return float64(n)
}

// called counts the calls to stages of the pipeline named target. It leaves out calls to a function
// of the same name, because the request is already counted for that function. A call counts once,
// however many attempts it took. Canceled calls do not count, because most of them never ran. A
// call that a variant answered counts for the variant too.
func (m *metrics) called(target string, calls []task.Timing) {
	for i := range calls {
		c := &calls[i]
		if c.Attempt <= 1 && c.Code != task.Canceled && c.Function != target {
			m.stage(c.Function).Add(1)
		}
		if c.Code == task.OK && c.Variant != "" && c.Variant != c.Function {
			m.stage(c.Variant).Add(1)
		}
	}
}

// stage returns the counter of a function's calls as a stage of pipelines.
func (m *metrics) stage(function string) *atomic.Uint64 {
	if n := (*m.stages.Load())[function]; n != nil {
		return n
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	old := *m.stages.Load()
	if n := old[function]; n != nil {
		return n
	}
	n := &atomic.Uint64{}
	all := maps.Clone(old)
	all[function] = n
	m.stages.Store(&all)
	return n
}

// begin counts a request that began.
func (f *functionMetrics) begin() {
	f.started.Inc()
	f.begun.Add(1)
}

// end counts a request that ended with status after d.
func (f *functionMetrics) end(status int, d time.Duration) {
	i := slices.Index(codes[:], status)
	if i < 0 {
		i = slices.Index(codes[:], status/100*100)
	}
	if i < 0 {
		i = slices.Index(codes[:], 500)
	}
	o := f.codes[i].Load()
	if o == nil {
		o = f.outcome(i)
	}
	if o != nil {
		o.total.Inc()
		o.seconds.Observe(d.Seconds())
	}
	f.recent.add(time.Now(), status, d)
	f.count.Add(1)
}

// outcome creates the i-th outcome. It returns nil if the function is gone.
func (f *functionMetrics) outcome(i int) *outcome {
	f.of.mu.Lock()
	defer f.of.mu.Unlock()
	if f.gone {
		return nil
	}
	code := strconv.Itoa(codes[i])
	key := f.key.String()
	o := &outcome{f.of.total.WithLabelValues(key, code), f.of.seconds.WithLabelValues(key, code)}
	f.codes[i].Store(o)
	return o
}
