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
)

// codes are the values that the label code can have; other statuses count as the first of their class.
var codes = [...]int{200, 202, 400, 404, 405, 408, 413, 429, 431, 499, 500, 502, 503, 504}

// metrics are OpenFaaS's, with the children that a request needs found without a lock.
type metrics struct {
	started *prometheus.CounterVec
	total   *prometheus.CounterVec
	seconds *prometheus.HistogramVec

	mu        sync.Mutex
	functions atomic.Pointer[map[string]*functionMetrics] // by key; copied to change
}

// functionMetrics are the children of one function.
type functionMetrics struct {
	key     string
	of      *metrics
	started prometheus.Counter
	codes   [len(codes)]atomic.Pointer[outcome]
	count   atomic.Uint64 // requests that ended
	begun   atomic.Uint64
	recent  recent
	gone    bool // with of.mu held: nothing new is exported of it
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
	m.functions.Store(&map[string]*functionMetrics{})
	for _, c := range []prometheus.Collector{m.started, m.total, m.seconds} {
		if err := r.Register(c); err != nil {
			return nil, fmt.Errorf("gateway: %w", err)
		}
	}
	return m, nil
}

// function returns the children of a function that exists.
func (m *metrics) function(key string) *functionMetrics {
	if f := (*m.functions.Load())[key]; f != nil {
		return f
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	old := *m.functions.Load()
	if f := old[key]; f != nil {
		return f
	}
	f := &functionMetrics{key: key, of: m, started: m.started.WithLabelValues(key)}
	all := maps.Clone(old)
	all[key] = f
	m.functions.Store(&all)
	return f
}

// tidy drops those that exist says no of.
func (m *metrics) tidy(exists func(key string) bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := maps.Clone(*m.functions.Load())
	maps.DeleteFunc(all, func(key string, f *functionMetrics) bool {
		if exists(key) {
			return false
		}
		f.gone = true
		of := prometheus.Labels{"function_name": key}
		m.started.DeletePartialMatch(of)
		m.total.DeletePartialMatch(of)
		m.seconds.DeletePartialMatch(of)
		return true
	})
	m.functions.Store(&all)
}

// ended returns how many requests for key have ended.
func (m *metrics) ended(key string) float64 {
	if f := (*m.functions.Load())[key]; f != nil {
		return float64(f.count.Load())
	}
	return 0
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

// outcome makes the i-th; nil: the function has gone.
func (f *functionMetrics) outcome(i int) *outcome {
	f.of.mu.Lock()
	defer f.of.mu.Unlock()
	if f.gone {
		return nil
	}
	code := strconv.Itoa(codes[i])
	o := &outcome{f.of.total.WithLabelValues(f.key, code), f.of.seconds.WithLabelValues(f.key, code)}
	f.codes[i].Store(o)
	return o
}
