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

// InferLineConfig has the settings of InferLine's tuner.
//
//	knob       default   searched        what it is
//	Stable     15 s      2 s to 60 s     time after a change without scaling down
//	Look       30 s      5 s to 60 s     scaling down uses the largest rate of this time
//	Shortest   1         1 to 64         shortest window of the envelope, in service times
//	(planner)  1         1 to 8          the planner's objective, as a part of the pipeline's
//	(planner)  0.99      0.9 to 0.99     quantile of latencies that the planner keeps to
//
// Zero fields mean their defaults. The last two are arguments of [PlanInferLine].
type InferLineConfig struct {
	Plan         InferLinePlan
	Stable, Look time.Duration
	Shortest     float64
}

// InferLine is a plan.Allocator after InferLine (Crankshaw et al., InferLine: Latency-Aware
// Provisioning and Scaling for Prediction Serving Pipelines, SoCC'20, arXiv 1812.01776). It is a
// tuner that keeps a pipeline at the provision that a planner made beforehand for a sample of its
// load: see [PlanInferLine].
//
// Up: a traffic envelope has the largest number of requests in any window of ΔT, for windows from
// the pipeline's service time, doubling, to 60 s. If rates exceed those of the sample, r_max is the
// largest of them. Each stage m then gets k_m = ⌈r_max·s_m/(μ_m·ρ_m)⌉ replicas. ρ_m is the share of
// the stage's throughput that the sample took. So the stage keeps the slack that the planner found
// necessary.
//
// Down: 15 s after the latest change, λ is the largest rate of windows of 5 s over 30 s, and k_m =
// ⌈λ·s_m/(μ_m·ρ_p)⌉. ρ_p is the smallest ρ of the pipeline.
//
// Up again: the tuner compares the load with the sample. The paper does not say what it compares
// with after it has scaled down. By its text, a load within the sample's envelope would never scale
// the provision up again. Here a stage with fewer replicas than planned gets what the rule for
// scaling down asks for, at once, up to the planned count. That count is enough for loads within
// the sample's envelope.
//
// The envelope is plan.Demand's, over the last minute, at a pipeline's first stage. A burst stays
// in it for a minute. Rates of 5 s are the Demand's, faded over 5 s, at their largest since the
// window began. Each request visits each stage once (s_m = 1). Functions that are not in the plan
// keep their counts. Build it with [NewInferLine].
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
