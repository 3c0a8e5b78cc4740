package load

import (
	"cmp"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	hdr "github.com/HdrHistogram/hdrhistogram-go"
)

// recorder collects the outcomes of a target's requests.
type recorder struct {
	mu        sync.Mutex
	f         Figures // counts and names
	latency   *hdr.Histogram
	service   *hdr.Histogram
	errors    map[string]*Kind
	stages    []*stageRecorder // in order of their first answers
	callbacks Callbacks
	async     bool
	seconds   []second
}

type stageRecorder struct {
	Stage
	wait, service *hdr.Histogram
}

type second struct {
	Second
	latencies []float32 // a sample of at most maxLatencies
	seen      int
}

const (
	maxLatencies = 10_000
	maxKinds     = 100
	maxStages    = 256
	maxExample   = 300
)

func newRecorder(name string, slo time.Duration) *recorder {
	return &recorder{
		f:       Figures{Name: name, SLO: slo.Seconds()},
		latency: newHistogram(), service: newHistogram(), errors: map[string]*Kind{},
	}
}

// second returns the Second of an instant. Callers hold mu.
func (r *recorder) second(at time.Duration) *second {
	i := int(at / time.Second)
	for len(r.seconds) <= i {
		r.seconds = append(r.seconds, second{Second: Second{T: len(r.seconds)}})
	}
	return &r.seconds[i]
}

// offered counts a request in the second of its instant.
func (r *recorder) offered(at time.Duration, sent bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.second(at)
	r.f.Offered++
	s.Offered++
	if sent {
		r.f.Sent++
		return
	}
	r.f.NotSent++
	s.NotSent++
	r.kind(kindNotSent, "as many requests were in flight as may be", 1)
}

// outcome is the outcome of a request that was sent.
type outcome struct {
	at, sent, end time.Duration // since the start: due, sent and answered
	kind, example string        // of the failure; empty: answered
	stages        []StageTime
	accepted      bool // an accepted async request
	lost          bool
}

// ended counts an outcome.
func (r *recorder) ended(o outcome) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if o.accepted {
		r.callbacks.Accepted++
		if o.lost {
			r.callbacks.Lost++
		} else {
			r.callbacks.Called++
		}
	}
	came := r.second(o.end)
	if o.kind != "" {
		r.f.Failed++
		came.Failed++
		r.kind(o.kind, o.example, 1)
		return
	}
	took := o.end - o.at
	r.f.Answered++
	came.Answered++
	if r.f.SLO == 0 || took.Seconds() <= r.f.SLO {
		r.f.Good++
		came.Good++
	}
	record(r.latency, took)
	record(r.service, o.end-o.sent)
	s := r.second(o.at)
	if s.seen++; len(s.latencies) < maxLatencies {
		s.latencies = append(s.latencies, float32(took.Seconds()))
	} else if i := rand.IntN(s.seen); i < maxLatencies {
		s.latencies[i] = float32(took.Seconds())
	}
	for _, t := range o.stages {
		r.stage(t)
	}
}

// kind counts failures of a kind.
func (r *recorder) kind(kind, example string, n int64) {
	k := r.errors[kind]
	if k == nil {
		if len(r.errors) >= maxKinds {
			kind = "other"
		}
		if k = r.errors[kind]; k == nil {
			k = &Kind{Kind: kind, Example: example[:min(len(example), maxExample)]}
			r.errors[kind] = k
		}
	}
	k.Count += n
}

func (r *recorder) stage(t StageTime) {
	i := slices.IndexFunc(r.stages, func(s *stageRecorder) bool { return s.Stage.Stage == t.Stage })
	if i < 0 {
		if len(r.stages) >= maxStages {
			return
		}
		i = len(r.stages)
		r.stages = append(r.stages, &stageRecorder{Stage{Stage: t.Stage}, newHistogram(), newHistogram()})
	}
	s := r.stages[i]
	s.Requests++
	s.Calls += int64(t.Calls)
	record(s.wait, t.Wait)
	record(s.service, t.Service)
}

// merge adds the records of o. Both must be idle.
func (r *recorder) merge(o *recorder) {
	r.f.Offered += o.f.Offered
	r.f.Sent += o.f.Sent
	r.f.NotSent += o.f.NotSent
	r.f.Answered += o.f.Answered
	r.f.Failed += o.f.Failed
	r.f.Good += o.f.Good
	r.latency.Merge(o.latency)
	r.service.Merge(o.service)
	for _, k := range o.kinds() {
		r.kind(k.Kind, k.Example, k.Count)
	}
	for _, s := range o.stages {
		i := slices.IndexFunc(r.stages, func(x *stageRecorder) bool { return x.Stage.Stage == s.Stage.Stage })
		if i < 0 {
			i = len(r.stages)
			r.stages = append(r.stages, &stageRecorder{Stage{Stage: s.Stage.Stage}, newHistogram(), newHistogram()})
		}
		x := r.stages[i]
		x.Requests, x.Calls = x.Requests+s.Requests, x.Calls+s.Calls
		x.wait.Merge(s.wait)
		x.service.Merge(s.service)
	}
	if o.async {
		r.async = true
		r.callbacks.Accepted += o.callbacks.Accepted
		r.callbacks.Called += o.callbacks.Called
		r.callbacks.Duplicates += o.callbacks.Duplicates
		r.callbacks.Lost += o.callbacks.Lost
	}
	for i, s := range o.seconds {
		x := r.second(time.Duration(i) * time.Second)
		x.Offered, x.NotSent = x.Offered+s.Offered, x.NotSent+s.NotSent
		x.Answered, x.Good, x.Failed = x.Answered+s.Answered, x.Good+s.Good, x.Failed+s.Failed
		x.latencies = append(x.latencies, s.latencies...)
	}
}

// kinds returns the kinds of failure, the most frequent first.
func (r *recorder) kinds() []Kind {
	out := []Kind{}
	for _, k := range r.errors {
		out = append(out, *k)
	}
	slices.SortFunc(out, func(a, b Kind) int { return cmp.Or(cmp.Compare(b.Count, a.Count), cmp.Compare(a.Kind, b.Kind)) })
	return out
}

// figures summarizes the records over the duration of the arrivals.
func (r *recorder) figures(d time.Duration) Figures {
	r.mu.Lock()
	defer r.mu.Unlock()
	f := r.f
	s := d.Seconds()
	if s > 0 {
		f.OfferedRate, f.AnsweredRate, f.Goodput = float64(f.Offered)/s, float64(f.Answered)/s, float64(f.Good)/s
	}
	if f.Offered > 0 {
		f.Attainment = float64(f.Good) / float64(f.Offered)
	}
	f.Latency, f.Service, f.Distribution = latencyOf(r.latency), latencyOf(r.service), distributionOf(r.latency)
	f.Errors, f.Stages, f.Seconds = r.kinds(), []Stage{}, []Second{}
	for _, s := range r.stages {
		st := s.Stage
		st.Wait, st.Service = latencyOf(s.wait), latencyOf(s.service)
		f.Stages = append(f.Stages, st)
	}
	for _, s := range r.seconds {
		slices.Sort(s.latencies)
		s.P50, s.P99 = nearest(s.latencies, 0.5), nearest(s.latencies, 0.99)
		f.Seconds = append(f.Seconds, s.Second)
	}
	if r.async {
		c := r.callbacks
		f.Callbacks = &c
	}
	return f
}

// nearest returns the nearest-rank quantile of a sorted sample in microsecond resolution; 0 for an
// empty one.
func nearest(sorted []float32, q float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	v := float64(sorted[max(0, int(math.Ceil(q*float64(len(sorted))))-1)])
	return math.Round(v*1e6) / 1e6
}
