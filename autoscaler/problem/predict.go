package problem

import (
	"cmp"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// Predicted is the value of a decision for one pipeline. Waits and sojourns are means over its
// requests.
type Predicted struct {
	Pipeline string  `json:"pipeline"`
	SLO      float64 `json:"sloSeconds"` // 0: no objective
	Rate     float64 `json:"rate"`       // requests per second
	// Service, Wait and Sojourn, their sum, are of the path with the longest sojourn.
	Service float64 `json:"serviceSeconds"`
	Wait    float64 `json:"waitSeconds"`
	Sojourn float64 `json:"sojournSeconds"`
	// The sojourn is within the objective. nil: there is none, or a service time is unknown.
	Met *bool `json:"met,omitempty"`
	// product over its stages of the mean accuracy, weighted by shares
	Accuracy float64 `json:"accuracy"`
	// stages whose service time is unknown: the path has nothing for them
	Unknown []string `json:"unknown"`
}

// model predicts what a decision does: calls go where its tables send them, and each function is a
// queue with as many servers as its replicas have slots. See [autoscaler.Sojourn].
type model struct {
	p     *Problem
	s     *plan.Snapshot
	wants []plan.Want
	made  *plan.Plan
	lanes map[string]*lane
	// by pipeline and stage: the part of the calls that each function gets
	parts map[string]map[string]map[string]float64
}

// lane is a function as a queue.
type lane struct {
	f             *plan.Function
	count         int
	rate          float64 // calls per second
	stage         float64 // calls per second of its stage
	wait, sojourn time.Duration
}

// newModel returns the model of a valid plan for s.
func newModel(p *Problem, s *plan.Snapshot, made *plan.Plan) *model {
	m := &model{p: p, s: s, wants: made.Wants, made: made, lanes: map[string]*lane{}, parts: map[string]map[string]map[string]float64{}}
	for i := range made.Wants {
		f, _ := s.Function(made.Wants[i].Function)
		m.lanes[f.Name] = &lane{f: f, count: len(made.Wants[i].Slots)}
	}
	flow := map[string]float64{} // per stage, as it follows from the pipelines
	for i := range s.Pipelines {
		x := &s.Pipelines[i]
		m.parts[x.Name] = m.route(x)
		for _, stage := range x.Stages {
			rate := p.rates[x.Name][stage]
			flow[stage] += rate
			for name, part := range m.parts[x.Name][stage] {
				m.lanes[name].rate += rate * part
			}
		}
	}
	for i := range p.Stages {
		st := &p.Stages[i]
		key := st.Name
		rate := p.demandOf(st).Rate
		for _, name := range p.stages[key] {
			l := m.lanes[name]
			if l.stage = rate; flow[key] > 0 { // a stage's own demand keeps the shares
				l.rate *= rate / flow[key]
			}
		}
		m.alone(key, flow[key], rate)
		for _, name := range p.stages[key] {
			m.lanes[name].predict()
		}
	}
	return m
}

// alone sets the rates of a stage whose pipelines have no requests, but which has a demand of its
// own. It has the shares of the requests that enter there.
func (m *model) alone(stage string, flow, rate float64) {
	if flow > 0 || rate == 0 {
		return
	}
	for name, part := range m.enter(stage, plan.FromClient, 0) {
		m.lanes[name].rate = rate * part
	}
}

// predict sets the wait and the sojourn of a lane.
func (l *lane) predict() {
	f := l.f
	if !f.Service.Known || l.rate == 0 && f.Waiting == 0 {
		return
	}
	ca, cs := cmp.Or(f.Demand.CV, f.Stage.CV, 1), cmp.Or(f.Service.CV, 1)
	l.sojourn = autoscaler.Sojourn(l.rate, 1/f.Service.Mean.Seconds(), l.count*f.Slots, ca*ca, cs*cs, f.Waiting)
	l.wait = max(l.sojourn-f.Service.Mean, 0)
}

// route returns for each stage of a pipeline the part of its calls that each function gets. It
// follows the requests from the entry, as each source may have other shares.
func (m *model) route(x *plan.Pipeline) map[string]map[string]float64 {
	before := make([][]int, len(x.Stages))
	for _, e := range x.Edges {
		before[e.To] = append(before[e.To], e.From)
	}
	length, out := m.p.lengths[x.Name], map[string]map[string]float64{}
	for k, stage := range x.Stages {
		switch len(before[k]) {
		case 0:
			out[stage] = m.enter(stage, plan.FromClient, length)
		case 1:
			out[stage] = map[string]float64{}
			from := out[x.Stages[before[k][0]]]
			for _, name := range m.p.stages[x.Stages[before[k][0]]] { // in their order, for equal sums
				for to, part := range m.enter(stage, name, length) {
					out[stage][to] += from[name] * part
				}
			}
		default:
			out[stage] = m.enter(stage, plan.FromJoin, length)
		}
	}
	return out
}

// enter returns the parts of the calls from one source that the functions of a stage get.
func (m *model) enter(stage, from string, length int) map[string]float64 {
	k, ok := slices.BinarySearchFunc(m.made.Tables, stage, func(t plan.Table, stage string) int { return cmp.Compare(t.Stage, stage) })
	if !ok {
		return map[string]float64{stage: 1}
	}
	out := map[string]float64{}
	if l, ok := m.made.Tables[k].Row(from).Level(length); ok {
		for _, s := range l.Shares {
			out[s.Lane] = s.Part
		}
	}
	return out
}

// line describes a want.
func (m *model) line(w *plan.Want) Line {
	l := m.lanes[w.Function]
	f := l.f
	out := Line{
		Function: f.Name, Stage: f.Serves(), Count: l.count, Nodes: []string{}, CPUMilli: cmp.Or(w.CPUMilli, f.CPULimit), Batch: w.Batch,
		Key: w.Key, Rank: cmp.Or(w.Rank, "fifo"), Why: w.Why, Short: w.Short, Accuracy: f.Accurate(), Rate: l.rate,
		Wait: l.wait.Seconds(), Sojourn: l.sojourn.Seconds(),
	}
	for _, slot := range w.Slots {
		at := slot.Node
		if slot.Device != "" {
			at += "/" + slot.Device
		}
		out.Nodes = append(out.Nodes, at)
	}
	if l.stage > 0 {
		out.Share = l.rate / l.stage
	}
	if servers := l.count * f.Slots; f.Service.Known && servers > 0 {
		out.Busy = l.rate * f.Service.Mean.Seconds() / float64(servers)
	}
	return out
}

// predict returns the values of all pipelines, sorted by name.
func (m *model) predict() []Predicted {
	out := []Predicted{}
	for i := range m.s.Pipelines {
		x := &m.s.Pipelines[i]
		v := Predicted{Pipeline: x.Name, SLO: x.SLO.Seconds(), Rate: m.p.rates[x.Name][x.Stages[0]], Accuracy: 1, Unknown: []string{}}
		service, sojourn := make([]float64, len(x.Stages)), make([]float64, len(x.Stages))
		for k, stage := range x.Stages {
			accuracy, all, known := 0.0, 0.0, true
			for _, name := range m.p.stages[stage] { // in their order, for equal sums
				l, part := m.lanes[name], m.parts[x.Name][stage][name]
				accuracy, all, known = accuracy+part*l.f.Accurate(), all+part, known && (part == 0 || l.f.Service.Known)
				mean := 0.0
				if l.f.Service.Known {
					mean = l.f.Service.Mean.Seconds()
				}
				service[k] += part * mean
				sojourn[k] += part * max(l.sojourn.Seconds(), mean)
			}
			if all > 0 {
				v.Accuracy *= accuracy / all
			}
			if !known {
				v.Unknown = append(v.Unknown, stage)
			}
		}
		v.Service, v.Sojourn = longest(x, service, sojourn)
		v.Wait = v.Sojourn - v.Service
		if met := v.Sojourn <= v.SLO; v.SLO > 0 && len(v.Unknown) == 0 {
			v.Met = &met
		}
		out = append(out, v)
	}
	return out
}

// longest returns the service and the sojourn of the path with the longest sojourn. Both arguments
// have one number per stage, in seconds.
func longest(x *plan.Pipeline, service, sojourn []float64) (float64, float64) {
	// of the longest path that ends at each stage
	total, served := slices.Clone(sojourn), slices.Clone(service)
	for _, e := range x.Edges { // sorted by From: the path to From is complete
		if t := total[e.From] + sojourn[e.To]; t > total[e.To] {
			total[e.To], served[e.To] = t, served[e.From]+service[e.To]
		}
	}
	best := 0
	for k := range total {
		if total[k] > total[best] {
			best = k
		}
	}
	return served[best], total[best]
}
