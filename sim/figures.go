package sim

import (
	"cmp"
	"slices"
	"sort"
	"time"

	hdr "github.com/HdrHistogram/hdrhistogram-go"

	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// Figures are the results of one run: one policy on one seed. Counts include the requests that
// arrived after the warm-up, and their calls. Amounts over time are measured from the end of the
// warm-up to the end of the arrivals. Times are in seconds. A mean without observations is 0.
type Figures struct {
	Policy    string       // its name in the scenario
	Policies  policy.Names // one per level
	Seed      uint64
	Seconds   float64           // seconds that count
	Pipelines []PipelineFigures // in the scenario's order
	Stages    []StageFigures    // sorted by name

	ReplicaSeconds float64 // of all stages, from order to end; the next two also
	DeviceSeconds  float64 // times the replica's devices
	CoreSeconds    float64 // times the replica's CPU quota, in cores

	Ticks     float64 // control ticks
	Held      float64 // domains that kept their replicas because a policy failed
	Refused   float64 // refused plans
	Complaint string  // why the first plan was refused
	Events    float64
	Decisions string  // a hash of all decisions in their order: see digest
	QNAError  float64 // see PolicyResult
	SameError float64 // see PolicyResult
	Series    Series
}

// PipelineFigures are the results of a pipeline's requests. Latencies are of answered requests.
type PipelineFigures struct {
	Name                      string
	Offered, Answered, Failed float64
	Attainment                float64 // share of Offered that was answered within the objective
	Goodput                   float64 // requests answered within the objective, per second
	Mean, P50, P75, P95, P99  float64
	Failures                  map[int]int             // by HTTP status
	Drops                     map[task.DropReason]int // requests that a policy dropped
	Accuracy                  float64                 // of the answers; 0: no function declares any

	latency []bucket
}

// bucket counts latencies up to that of the next bucket, which is 0.1 % larger.
type bucket struct {
	from  time.Duration
	count int64 // includes all buckets before
}

// Attained returns the share of the offered requests that were answered within d. Latencies that
// differ by less than 0.1 % count as equal. The field Attainment is exact.
func (p *PipelineFigures) Attained(d time.Duration) float64 {
	i := sort.Search(len(p.latency), func(i int) bool { return p.latency[i].from > d })
	if i == 0 {
		return 0
	}
	return ratio(float64(p.latency[i-1].count), p.Offered)
}

// Quantile returns the latency within which a share q of the offered requests was answered, up to
// 0.1 % too small. It returns false if fewer requests were answered.
func (p *PipelineFigures) Quantile(q float64) (time.Duration, bool) {
	i := sort.Search(len(p.latency), func(i int) bool { return float64(p.latency[i].count) >= q*p.Offered })
	if i == len(p.latency) {
		return 0, false
	}
	return p.latency[i].from, true
}

// StageFigures are the results of a function's calls. If a stage has variants, Rate, CV and
// Predicted of its own function are those of all calls at the stage. For a variant, Rate is that of
// the calls that it answered, and the other two are 0.
type StageFigures struct {
	Name string
	LaneFigures
	Rate float64 // of calls, per second
	CV   float64 // of the times between arrivals
	// CV by Whitt's QNA from the entering requests; of an entry stage: as measured
	Predicted      float64
	Queue          float64 // waiting calls, on average over time
	Wait, WaitP99  float64
	Service        float64
	ServiceCV      float64
	Utilisation    float64 // share of time that the slots of ready replicas were taken
	ReplicaSeconds float64 // as in Figures; the next two also
	DeviceSeconds  float64
	CoreSeconds    float64
	Most           int            // largest number of replicas at a time
	Starts         []StartFigures // sorted by path, key stages last
	Deaths         int
	Evictions      int    // of its parameters
	Short          int    // plans in which a replica had no place
	ShortWhy       string // reason in the first such plan
}

// LaneFigures are what a function answered as one of several that serve a stage.
type LaneFigures struct {
	Stage string  // empty: the function alone serves its stage, and the other fields are 0
	Tasks float64 // calls that it answered
	Share float64 // of the answered calls of the stage
}

// StartFigures are the starts on one path, from the order to ready.
type StartFigures struct {
	Path string
	Key  bool // the stage was a key stage in the plan that ordered them
	N    int
	Mean float64
}

// figures returns a run's figures. The recorder must not be used afterwards.
func (w *world) figures(p int) Figures {
	c, r := &w.control, w.rec
	out := Figures{
		Policy: w.m.scenario.Policies[p].Name, Policies: w.set.Names(), Seed: w.seed, Seconds: float64(r.to-r.from) / 1e9,
		Ticks: float64(c.ticks), Held: float64(c.held), Refused: float64(c.refused), Complaint: c.complaint, Events: float64(w.popped), Series: r.series,
		Decisions: c.decisions.String(),
	}
	for i, p := range r.pipelines {
		out.Pipelines = append(out.Pipelines, p.figures(w.m.pipelines[i].spec.Name, out.Seconds))
	}
	for _, s := range r.stages {
		is := s.figures(out.Seconds)
		out.Stages = append(out.Stages, is)
		out.ReplicaSeconds += is.ReplicaSeconds
		out.DeviceSeconds += is.DeviceSeconds
		out.CoreSeconds += is.CoreSeconds
	}
	out.share(w)
	out.predict(w.m, r)
	return out
}

// share sets what only functions of stages with several lanes have.
func (f *Figures) share(w *world) {
	for _, l := range w.lines {
		if len(l.lanes) < 2 {
			continue
		}
		sum := 0.0
		for _, i := range l.lanes {
			s := &f.Stages[i]
			s.Stage, s.Tasks = l.spec.Name, w.rec.stages[i].service.n
			sum += s.Tasks
			if i != l.i {
				s.Rate = s.Tasks / f.Seconds
			}
		}
		for _, i := range l.lanes {
			f.Stages[i].Share = ratio(f.Stages[i].Tasks, sum)
		}
	}
}

func (p *pipeRecorder) figures(name string, seconds float64) PipelineFigures {
	offered := float64(p.offered)
	quantile := func(q float64) float64 { return float64(p.latency.ValueAtQuantile(q)) / 1e6 }
	return PipelineFigures{
		Name: name, Offered: offered, Answered: p.sum.n, Failed: offered - p.sum.n, Failures: p.failed,
		Attainment: ratio(float64(p.good), offered), Goodput: float64(p.good) / seconds, Drops: p.dropped, Accuracy: p.accuracy.mean(),
		Mean: p.sum.mean(), P50: quantile(50), P75: quantile(75), P95: quantile(95), P99: quantile(99), latency: buckets(p.latency),
	}
}

// buckets returns the buckets of h that are not empty.
func buckets(h *hdr.Histogram) []bucket {
	var out []bucket
	sum := int64(0)
	for _, b := range h.Distribution() {
		if b.Count > 0 {
			sum += b.Count
			out = append(out, bucket{time.Duration(b.From) * time.Microsecond, sum})
		}
	}
	return out
}

func (s *stageRecorder) figures(seconds float64) StageFigures {
	spec := &s.line.spec
	out := StageFigures{
		Name: spec.Name, Rate: s.calls() / seconds, CV: s.gaps.cv(), Queue: s.waitingNs / 1e9 / seconds,
		Wait: s.waits.mean(), WaitP99: float64(s.wait.ValueAtQuantile(99)) / 1e6, Service: s.service.mean(), ServiceCV: s.service.cv(),
		Utilisation: s.utilisation(), ReplicaSeconds: s.replicaNs / 1e9, DeviceSeconds: s.replicaNs / 1e9 * float64(spec.GPU), CoreSeconds: s.milliNs / 1e12,
		Most: s.most, Deaths: int(s.deaths), Evictions: int(s.evictions), Short: int(s.shorts), ShortWhy: s.why,
	}
	for k, took := range s.starts {
		out.Starts = append(out.Starts, StartFigures{Path: k.path, Key: k.key, N: int(took.n), Mean: took.mean()})
	}
	slices.SortFunc(out.Starts, func(a, b StartFigures) int { return cmp.Or(cmp.Compare(a.Path, b.Path), compareBool(a.Key, b.Key)) })
	return out
}

func compareBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}
