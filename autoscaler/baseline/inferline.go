package baseline

import (
	"cmp"
	"fmt"
	"math"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// The defaults of InferLineConfig, from the paper.
const (
	InferLineStable  = 15 * time.Second
	InferLineLook    = 30 * time.Second
	inferLineWindow  = 5 * time.Second // window of the rates within Look
	inferLineLongest = time.Minute     // longest stretch of the envelope
	inferLineWindows = 60              // largest number of windows within Look
)

// InferLineConfig has the settings of InferLine's tuner. A zero field means its default. The last
// two rows are arguments of [PlanInferLine].
//
//	knob       default   searched        what it is
//	Stable     15 s      2 s to 60 s     time after a change without scaling down
//	Look       30 s      5 s to 60 s     scaling down uses the largest rate within this time
//	Shortest   1         1 to 64         shortest window of the envelope, in service times
//	(planner)  1         0.5 to 8        the planner's objective, as a multiple of the pipeline's
//	(planner)  0.99      0.9 to 0.99     quantile of latencies that the planner keeps to
type InferLineConfig struct {
	Plan         InferLinePlan
	Stable, Look time.Duration
	Shortest     float64
}

// InferLine is a plan.Allocator after the tuner of InferLine (Crankshaw et al., InferLine:
// Latency-Aware Provisioning and Scaling for Prediction Serving Pipelines, SoCC'20, arXiv
// 1812.01776). Before the run, a planner provisions the pipeline for a sample of its load: see
// [PlanInferLine]. During the run, the tuner adapts this provision to the measured load. For each
// stage m, s_m is the number of visits per request, and μ_m is the throughput of a replica. ρ_m is
// the share of the planned throughput that the sample uses.
//
// Up: a traffic envelope holds the largest number of requests in any window of a given length. The
// lengths double from the pipeline's service time to 60 s. If some rates of the envelope exceed
// those of the sample, r_max is the largest of them. Each stage then gets k_m =
// ⌈r_max·s_m/(μ_m·ρ_m)⌉ replicas. So each stage keeps the slack that the planner found necessary.
//
// Down: 15 s after the latest change, each stage gets k_m = ⌈λ·s_m/(μ_m·ρ_p)⌉ replicas. λ is the
// largest rate in any window of 5 s over the last 30 s. ρ_p is the smallest ρ of the pipeline.
//
// Up again: the paper does not say how counts rise again after scaling down. By its text, a load
// within the sample's envelope never raises them. Here, the rule for scaling down also raises a
// stage with fewer replicas than planned, at once and up to the planned count. The planned count is
// enough for loads within the sample's envelope.
//
// The envelope is Demand.Envelope of a pipeline's first stage. It covers the last minute, so a
// burst stays in it for a minute. The rate of a window of 5 s is the largest Demand.Rate in it,
// which fades over 5 s. Each request visits each stage once (s_m = 1). Functions that are not in
// the plan keep their counts. Build it with [NewInferLine].
type InferLine struct{ cfg InferLineConfig }

// NewInferLine returns an InferLine.
func NewInferLine(cfg InferLineConfig) InferLine {
	cfg.Stable, cfg.Look = max(cmp.Or(cfg.Stable, InferLineStable), 0), max(cmp.Or(cfg.Look, InferLineLook), inferLineWindow)
	cfg.Shortest = min(max(cfg.Shortest, 1), 64)
	cfg.Look = min(cfg.Look, inferLineWindows*inferLineWindow)
	return InferLine{cfg}
}

// InferLineMemory is what InferLine remembers, by function.
type InferLineMemory map[string]InferLinePast

// InferLinePast is what InferLine remembers of one function.
type InferLinePast struct {
	At      time.Time
	Count   int
	Changed time.Time       // when Count changed
	Rates   []InferLineRate // rates of windows, the oldest first
}

// InferLineRate is the largest rate in a window.
type InferLineRate struct {
	Window int64 // number of the window of 5 s, since 1970
	Rate   float64
}

// Merge joins the memories of two domains that have become one.
func (InferLine) Merge(a, b InferLineMemory) InferLineMemory { return merged(a, b) }

// Allocate implements plan.Allocator.
func (p InferLine) Allocate(s plan.Snapshot, d plan.Domain, m InferLineMemory) (plan.Alloc, InferLineMemory, error) {
	all, err := functions(&s, d)
	if err != nil {
		return nil, m, err
	}
	out, next := make(plan.Alloc, len(all)), make(InferLineMemory, len(all))
	// replicas that all pipelines together need
	up, down := make([]float64, len(all)), make([]float64, len(all))
	whys := make([]string, len(all))
	for _, e := range entries(&s, d) {
		p.tune(&s, all, e, m, up, down, whys)
	}
	for i, f := range all {
		past := m[f.Name]
		if past.At.After(s.At) { // a clock that was set back starts over
			past = InferLinePast{}
		}
		past.Rates = p.look(past.Rates, f, s.At)
		out[i], next[f.Name] = p.decide(&s, f, past, ceil(up[i]), ceil(down[i]), whys[i])
	}
	return out, next, nil
}

// tune adds what a pipeline needs of each of its stages.
func (p InferLine) tune(s *plan.Snapshot, all []*plan.Function, e entry, m InferLineMemory, up, down []float64, whys []string) {
	first := all[e.of]
	var most float64 // largest rate that exceeds the plan's
	var within time.Duration
	for i, n := range first.Demand.Envelope {
		length := first.Demand.Envelope.Stretch(i)
		if length.Seconds() < p.cfg.Shortest*p.cfg.Plan.Service.Seconds() && i+1 < len(first.Demand.Envelope) || length >= 2*inferLineLongest || i >= len(p.cfg.Plan.Envelope) {
			continue
		}
		if r := float64(n) / length.Seconds(); r > p.cfg.Plan.Envelope[i] && r > most {
			most, within = r, length
		}
	}
	var lambda float64
	for _, r := range p.look(m[first.Name].Rates, first, s.At) {
		lambda = max(lambda, r.Rate)
	}
	least := math.Inf(1)
	for _, i := range e.stages {
		if q, ok := p.cfg.Plan.Stages[all[i].Name]; ok && q.Ratio > 0 {
			least = min(least, q.Ratio)
		}
	}
	for _, i := range e.stages {
		q, ok := p.cfg.Plan.Stages[all[i].Name]
		if !ok || !(q.Throughput > 0 && q.Ratio > 0) {
			continue
		}
		up[i] += most / (q.Throughput * q.Ratio)
		down[i] += lambda / (q.Throughput * least)
		if most > 0 {
			whys[i] += fmt.Sprintf("%.4g/s within %v, planned were fewer; ", most, within)
		}
		whys[i] += fmt.Sprintf("λ=%.4g/s over %v; ", lambda, p.cfg.Look)
	}
}

func (p InferLine) decide(s *plan.Snapshot, f *plan.Function, past InferLinePast, up, down int, why string) (plan.Line, InferLinePast) {
	ready, starting := f.Current()
	_, most := f.Bounds()
	line := plan.Line{Function: f.Name, Batch: max(f.Batch, 1)}
	q, planned := p.cfg.Plan.Stages[f.Name]
	if !planned {
		past.At, line.Count = s.At, bounded(s, f, max(ready+starting, 1))
		line.Why = fmt.Sprintf("%d, as there are: it is not planned for", line.Count)
		return line, past
	}
	line.Batch = min(max(q.Batch, 1), line.Batch)
	if past.At.IsZero() {
		past.Count, past.Changed = q.Count, s.At
		why += fmt.Sprintf("%d are planned; ", q.Count)
	}
	count, target := past.Count, max(up, down)
	switch {
	case up > count:
		count = up
	case down > count && count < q.Count: // was scaled down, and rises within the plan
		count = min(down, q.Count)
	case target < count && s.At.Sub(past.Changed) >= p.cfg.Stable:
		count = target
	}
	count = bounded(s, f, min(count, most))
	if count != past.Count {
		past.Count, past.Changed = count, s.At
	}
	past.At, line.Count = s.At, count
	line.Why = fmt.Sprintf("%sup to %d, down to %d, last change %v ago: %d; was %d", why, up, down, s.At.Sub(past.Changed).Round(time.Second), count, ready+starting)
	return line, past
}

// look adds f's rate to the windows within Look.
func (p InferLine) look(rates []InferLineRate, f *plan.Function, now time.Time) []InferLineRate {
	window, rate := now.UnixNano()/int64(inferLineWindow), arriving(f)
	out := make([]InferLineRate, 0, len(rates)+1)
	for _, r := range rates {
		switch {
		case r.Window == window:
			rate = max(rate, r.Rate)
		case r.Window < window && r.Window > window-int64(p.cfg.Look/inferLineWindow):
			out = append(out, r)
		}
	}
	return append(out, InferLineRate{window, rate})
}
