package sim

import (
	"cmp"
	"math"
	"slices"
	"time"

	hdr "github.com/HdrHistogram/hdrhistogram-go"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/request/flow"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// recorder records what happens in a run. It counts the requests that arrive after the warm-up, and
// their calls. It measures amounts over time from the end of the warm-up to the end of the
// arrivals.
type recorder struct {
	from, to  int64 // ns
	every     int64 // between samples
	pipelines []*pipeRecorder
	stages    []*stageRecorder
	series    Series
	calls     []stageCalls // reused by accuracy
}

// samplesWanted is the approximate number of samples in the series over time.
const samplesWanted = 300

func newRecorder(w *world) *recorder {
	rec := &recorder{from: int64(w.m.scenario.Warmup), to: w.end}
	rec.every = max((w.end/samplesWanted+int64(time.Second)-1)/int64(time.Second), 1) * int64(time.Second)
	for i := range w.m.pipelines {
		rec.pipelines = append(rec.pipelines, &pipeRecorder{slo: w.m.pipelines[i].spec.SLO, latency: newHistogram(3), failed: map[int]int{}, dropped: map[task.DropReason]int{}})
	}
	for _, l := range w.lines {
		rec.stages = append(rec.stages, &stageRecorder{line: l, wait: newHistogram(2), last: -1, starts: map[startKind]*moments{}})
	}
	rec.series.Replicas = make([][]int, len(w.lines))
	return rec
}

// newHistogram returns a histogram of times in µs.
func newHistogram(digits int) *hdr.Histogram { return hdr.New(1, maxService.Microseconds(), digits) }

func record(h *hdr.Histogram, d time.Duration) {
	_ = h.RecordValue(min(max(d, 0), maxService).Microseconds()) // always in range
}

// counts reports whether an instant is within the time that counts.
func (r *recorder) counts(at int64) bool { return at >= r.from && at < r.to }

// moments holds the number of values, their sum and the sum of their squares.
type moments struct{ n, sum, squares float64 }

func (m *moments) add(v float64) { m.n, m.sum, m.squares = m.n+1, m.sum+v, m.squares+v*v }

func (m *moments) mean() float64 { return ratio(m.sum, m.n) }

// cv returns the coefficient of variation, or 0 for fewer than two values.
func (m *moments) cv() float64 {
	if m.n < 2 || m.sum <= 0 {
		return 0
	}
	mean := m.sum / m.n
	return math.Sqrt(max(m.squares/m.n-mean*mean, 0)) / mean
}

// ratio returns a/b, or 0 if b is 0.
func ratio(a, b float64) float64 {
	if b == 0 {
		return 0
	}
	return a / b
}

// pipeRecorder records one pipeline.
type pipeRecorder struct {
	slo               time.Duration
	offered, good     int64
	failed            map[int]int             // by HTTP status
	dropped           map[task.DropReason]int // requests that a policy dropped
	accuracy          moments                 // of answers, if some function declares one
	latency           *hdr.Histogram
	sum               moments
	arrived, answered int64   // since the last sample
	waited            float64 // total latency in seconds of those answered since
}

func (p *pipeRecorder) offer(w *world) {
	p.arrived++
	if w.rec.counts(w.now) {
		p.offered++
	}
}

// finish counts a request's end.
func (r *recorder) finish(w *world, pipeline int, f *flow.Finish) {
	p := r.pipelines[pipeline]
	var stages []task.Timing
	if f.Error != nil {
		stages = f.Error.Stages
	} else {
		stages = f.Response.Stages
	}
	begun := w.now // it was refused at once
	if len(stages) > 0 {
		begun = int64(stages[0].Start.Sub(epoch))
	}
	latency := time.Duration(w.now - begun)
	if f.Error == nil {
		p.answered++
		p.waited += latency.Seconds()
	}
	if !r.counts(begun) {
		return
	}
	for i := range stages {
		if t := &stages[i]; t.Code == task.OK {
			r.stages[w.byKey[cmp.Or(t.Variant, t.Function)].i].served(t)
		}
	}
	if f.Error != nil {
		p.failed[f.Error.Status]++
		if f.Error.Dropped != "" {
			p.dropped[f.Error.Dropped]++
		}
		return
	}
	if w.m.inaccurate {
		p.accuracy.add(r.accuracy(w, stages))
	}
	if p.slo == 0 || latency <= p.slo {
		p.good++
	}
	record(p.latency, latency)
	p.sum.add(latency.Seconds())
}

// accuracy returns the accuracy of a request's answer: the product over its stages. If several
// calls of a stage were answered, their mean counts.
func (r *recorder) accuracy(w *world, stages []task.Timing) float64 {
	r.calls = r.calls[:0]
	for i := range stages {
		t := &stages[i]
		if t.Code != task.OK {
			continue
		}
		l := w.byKey[cmp.Or(t.Variant, t.Function)]
		k := slices.IndexFunc(r.calls, func(c stageCalls) bool { return c.stage == l.own })
		if k < 0 {
			k = len(r.calls)
			r.calls = append(r.calls, stageCalls{stage: l.own})
		}
		r.calls[k].accuracy.add(l.spec.Accuracy)
	}
	out := 1.0
	for i := range r.calls {
		out *= r.calls[i].accuracy.mean()
	}
	return out
}

// stageCalls has the calls of a request in one stage.
type stageCalls struct {
	stage    int
	accuracy moments
}

// stageRecorder records one function: a stage's own, or a variant. Arrivals are those at the stage,
// whatever the lane, and belong to its own function.
type stageRecorder struct {
	line     *line
	gaps     moments // seconds between arrivals
	last     int64   // time of the last arrival; below 0: none
	arrivals int64
	wait     *hdr.Histogram
	waits    moments // seconds
	service  moments
	worked   int64 // ns that slots were busy

	since              int64 // start of the counts below
	replicas, ready    int
	milli              float64 // CPU of all replicas, in thousandths of a core
	replicaNs, readyNs float64
	milliNs            float64
	most               int
	waiting            int
	waitingSince       int64
	waitingNs          float64
	starts             map[startKind]*moments // seconds
	deaths, evictions  int64
	shorts             int64  // plans in which a replica had no place
	why                string // reason in the first such plan
}

// startKind identifies starts that are counted together.
type startKind struct {
	path string
	key  bool
}

// arrived counts a task at the line.
func (s *stageRecorder) arrived(w *world) {
	if !w.rec.counts(w.now) {
		return
	}
	if s.arrivals++; s.last >= 0 {
		s.gaps.add(float64(w.now-s.last) / 1e9)
	}
	s.last = w.now
}

func (s *stageRecorder) calls() float64 { return float64(s.arrivals) }

func (s *stageRecorder) served(t *task.Timing) {
	record(s.wait, t.Wait)
	s.waits.add(t.Wait.Seconds())
	s.service.add(t.Service.Seconds())
}

// busy counts the work of a slot until now.
func (s *stageRecorder) busy(w *world, took int64) {
	s.worked += max(min(w.now, w.rec.to)-max(w.now-took, w.rec.from), 0)
}

// count records that replicas were added, removed or changed.
func (s *stageRecorder) count(w *world) {
	s.integrate(w)
	s.replicas, s.ready = len(s.line.replicas), 0
	for _, r := range s.line.replicas {
		if r.state != plan.Starting {
			s.ready++
		}
	}
	s.milli = float64(s.replicas) * cmp.Or(float64(s.line.cpu), s.line.service.usual)
	if w.now < w.rec.to {
		s.most = max(s.most, s.replicas)
	}
}

// passed returns how many ns between since and now count.
func (r *recorder) passed(since, now int64) float64 {
	return float64(max(min(now, r.to)-max(since, r.from), 0))
}

// integrate adds the replicas times the time that has passed.
func (s *stageRecorder) integrate(w *world) {
	passed := w.rec.passed(s.since, w.now)
	s.replicaNs += float64(s.replicas) * passed
	s.readyNs += float64(s.ready) * passed
	s.milliNs += s.milli * passed
	s.since = w.now
}

// queue records the number of waiting calls.
func (s *stageRecorder) queue(w *world, waiting int) {
	if waiting == s.waiting {
		return
	}
	s.waitingNs += float64(s.waiting) * w.rec.passed(s.waitingSince, w.now)
	s.waiting, s.waitingSince = waiting, w.now
}

func (s *stageRecorder) utilisation() float64 {
	return ratio(float64(s.worked), s.readyNs*float64(s.line.spec.Slots))
}

func (s *stageRecorder) start(w *world, r *replica, took time.Duration) {
	if !w.rec.counts(w.now) {
		return
	}
	k := startKind{r.path, r.key}
	if s.starts[k] == nil {
		s.starts[k] = &moments{}
	}
	s.starts[k].add(took.Seconds())
}

func (s *stageRecorder) short(w *world, why string) {
	if w.rec.counts(w.now) {
		s.shorts++
		s.why = cmp.Or(s.why, why)
	}
}

func (s *stageRecorder) died(w *world) {
	if w.rec.counts(w.now) {
		s.deaths++
	}
}

func (s *stageRecorder) evicted(w *world) {
	if w.rec.counts(w.now) {
		s.evictions++
	}
}

// Series are quantities over time, with one sample every few seconds. All but Replicas are sums
// over the pipelines.
type Series struct {
	T        []float64 `json:"t_s"`
	Offered  []float64 `json:"offered_per_s"`
	Latency  []float64 `json:"latency_mean_s"` // of requests answered since the last sample; 0: none
	Waiting  []int     `json:"waiting"`
	Replicas [][]int   `json:"replicas"` // by stage, in the order of Result.Stages
}

// sample adds one sample to the series.
func (r *recorder) sample(w *world) {
	if w.now > r.to {
		return
	}
	var arrived, answered int64
	var waited float64
	for _, p := range r.pipelines {
		arrived, answered, waited = arrived+p.arrived, answered+p.answered, waited+p.waited
		p.arrived, p.answered, p.waited = 0, 0, 0
	}
	waiting := 0
	for i, l := range w.lines {
		waiting += l.lane.Waiting()
		r.series.Replicas[i] = append(r.series.Replicas[i], len(l.replicas))
	}
	seconds := float64(r.every) / 1e9
	r.series.T = append(r.series.T, float64(w.now)/1e9)
	r.series.Offered = append(r.series.Offered, Round(float64(arrived)/seconds))
	r.series.Latency = append(r.series.Latency, Round(ratio(waited, float64(answered))))
	r.series.Waiting = append(r.series.Waiting, waiting)
}

// close counts what is still open at the end.
func (r *recorder) close(w *world) {
	for _, s := range r.stages {
		s.integrate(w)
		s.queue(w, -1)
	}
}
