package cv

import (
	"cmp"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/sim/qna"
)

const (
	// learning is the time constant with which measured burstiness corrects the predicted one.
	learning = 30 * time.Second
	// longestStep is the longest time between two decisions that counts, because clocks jump.
	longestStep = 5 * time.Second
	// mostFactor bounds the correction: it is between 1/mostFactor and mostFactor.
	mostFactor = 4
)

// Corrector is a plan.Corrector: [autoscaler.Quart] with a predictor. It uses the burstiness that
// was predicted at the last decision. [autoscaler.Quart] uses the burstiness that was measured
// then. Build it with [NewCorrector].
type Corrector struct {
	quart   autoscaler.Quart
	predict Predictor
	saw     func(at time.Time, n qna.Network) // gets each network that is predicted; may be nil
}

// NewCorrector returns a Corrector with a predictor.
func NewCorrector(cfg autoscaler.QuartConfig, predict Predictor) Corrector {
	return Corrector{quart: autoscaler.NewQuart(cfg), predict: predict}
}

// Memory is what a Corrector remembers. Factors has, by function, the ratio of measured to
// predicted Ca² so far.
type Memory struct {
	Quart   autoscaler.QuartMemory `json:"quart,omitempty"`
	Factors map[string]float64     `json:"factors,omitempty"`
}

// Merge joins the memories of two domains that have become one.
func (c Corrector) Merge(a, b Memory) Memory {
	m := Memory{Quart: c.quart.Merge(a.Quart, b.Quart), Factors: maps.Clone(a.Factors)}
	if m.Factors == nil {
		m.Factors = map[string]float64{}
	}
	maps.Copy(m.Factors, b.Factors)
	return m
}

// Correct implements plan.Corrector.
func (c Corrector) Correct(s plan.Snapshot, d plan.Domain, a plan.Alloc, m Memory) (plan.Alloc, Memory, error) {
	out, quart, err := c.quart.Correct(s, d, a, m.Quart)
	if err != nil {
		return nil, m, err
	}
	n := network(&s, d, out)
	for i, name := range d.Functions {
		n.Stations[i].Factor = m.Factors[name]
	}
	if c.saw != nil {
		c.saw(s.At, n)
	}
	factors := make(map[string]float64, len(d.Functions))
	for i, ca2 := range c.predict(n) {
		name := d.Functions[i]
		quart[name].CA2 = bound(ca2) // quart is new, so no other holder sees the change
		factor := m.Factors[name]
		if slices.ContainsFunc(n.Links, func(l qna.Link) bool { return l.To == i }) {
			dt := 0.0
			if past := m.Quart[name]; past != nil && !past.At.IsZero() {
				dt = s.At.Sub(past.At).Seconds()
			}
			factor = learn(factor, bound(ca2), n.Stations[i].CA2, dt)
		}
		if factor > 0 {
			factors[name] = factor
		}
	}
	return out, Memory{quart, factors}, nil
}

// learn returns the factor after dt more seconds. ca2 is the predicted squared CV, and measured the
// measured one, or 0 if there is none.
func learn(factor, ca2, measured, dt float64) float64 {
	if !(measured > 0) {
		return factor
	}
	// The prediction already includes the factor. The remaining error changes the factor gradually, in
	// logarithms because the factor is a ratio.
	step := 1 - math.Exp(-clamp(dt, 0, longestStep.Seconds())/learning.Seconds())
	return clamp(cmp.Or(factor, 1)*math.Exp(step*math.Log(measured/ca2)), 1.0/mostFactor, mostFactor)
}

// network returns a domain as a queueing network with the decided replicas.
func network(s *plan.Snapshot, d plan.Domain, a plan.Alloc) qna.Network {
	n := qna.Network{Stations: make([]qna.Station, len(d.Functions))}
	for i, name := range d.Functions {
		f, ok := s.Function(name)
		if !ok {
			continue
		}
		st := qna.Station{CS2: squared(f.Service.CV), Servers: max(min(max(a[i].Count, 0), math.MaxInt32/max(f.Slots, 1))*max(f.Slots, 1), 1)}
		if f.Demand.Known && f.Demand.Rate > 0 {
			st.Rate = min(f.Demand.Rate, math.MaxInt32)
		}
		if f.Service.Known && f.Service.Mean > 0 {
			st.Rho = clamp(st.Rate*f.Service.Mean.Seconds()/float64(st.Servers), 0, 1)
		}
		if f.Demand.Known && f.Demand.CV > 0 {
			st.CA2 = squared(f.Demand.CV)
		}
		n.Stations[i] = st
	}
	for _, name := range d.Pipelines {
		p, ok := s.Pipeline(name)
		if !ok {
			continue
		}
		for _, e := range p.Edges {
			if e.From < 0 || e.From >= e.To || e.To >= len(p.Stages) {
				continue
			}
			from, ok := slices.BinarySearch(d.Functions, p.Stages[e.From])
			to, ok2 := slices.BinarySearch(d.Functions, p.Stages[e.To])
			if l := (qna.Link{From: from, To: to}); ok && ok2 && from != to && !slices.Contains(n.Links, l) {
				n.Links = append(n.Links, l)
			}
		}
	}
	slices.SortFunc(n.Links, func(a, b qna.Link) int { return cmp.Or(a.From-b.From, a.To-b.To) })
	return n
}

// squared returns the square of a measured coefficient of variation, within bounds. Without a
// measurement, it returns 1.
func squared(v float64) float64 {
	if !(v > 0) {
		return 1
	}
	return bound(v * v)
}
