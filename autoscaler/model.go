package autoscaler

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// model describes a domain as queues: the load and the speed of each function, and how long tasks
// may wait on each pipeline. [newModel] makes it once per decision. stages has the order of the
// domain's functions.
type model struct {
	stages []stage
	order  []int     // stages, each after the stages before it; see connect
	pipes  []pipe    // pipelines with an objective and a known service time, and each function in none
	buf    []float64 // scratch memory of through
}

// stage is a function as a queue with replicas·slots servers of rate mu each.
type stage struct {
	f          *plan.Function
	known      bool    // the service time is known; else mu is 0 and there is no prediction
	lambda, mu float64 // per second
	measured   float64 // lambda as measured; lambda may be larger: see follow
	slots      int     // servers per replica
	ca2, cs2   float64 // squared coefficients of variation, within bounds; 1 where nothing is measured
	laned      bool    // one of several lanes of its stage
	bursts     float64 // burst part of the arrivals at the pipelines' entries, or here: see payOnce
	patience   float64 // seconds that a burst may wait, by the pipeline patient
	patient    int     // index of that pipeline; -1: none
	waiting    int
	service    float64 // seconds per task: its share of its batch's time
	latency    float64 // seconds that a task's batch takes; service if tasks run alone: see batchTime
	in         []place // where the stage is in pipes
	before     []int   // stages whose answers arrive here; see connect
}

// place is a step of a pipeline.
type place struct{ pipe, step int }

// pipe is a pipeline as a graph of waits.
type pipe struct {
	name     string // empty for a function that is in no pipeline with an objective
	slo      time.Duration
	steps    []visit // in topological order
	edges    []plan.Edge
	service  float64 // seconds of whole batches on the critical path
	limit    float64 // seconds that service and mean waits on each path may take together
	budget   float64 // of limit for waits
	bursts   float64 // burst part of the arrivals that enter
	patience float64 // the part of budget for bursts, which wait once; the rest is for waits by chance
	reached  bool    // the objective leaves time to wait; else budget is best effort
	text     string  // as objective returns it
}

// visit is a stage's place in a pipeline.
type visit struct {
	at      int     // index in stages; -1: not deployed
	inner   bool    // a stage of the pipeline is before it
	service float64 // seconds of whole batches; if unknown, the mean of the known ones
	share   float64 // seconds of the budget, by service on the longest path through the visit
	wait    float64 // seconds; share if no prediction is possible
}

// leastBudget is the smallest budget for waits, as a part of the pipeline's service time. It
// applies even if the objective leaves less.
const leastBudget = 0.1

// newModel makes the model of a domain of s. Objectives leave tasks some time to wait; part is the
// part of this time that mean waits may take.
func newModel(s *plan.Snapshot, d plan.Domain, part float64) (*model, error) {
	m := &model{stages: make([]stage, len(d.Functions)), pipes: make([]pipe, 0, max(len(d.Pipelines), 1))}
	places := make([]place, len(m.stages)) // memory for in: most stages are in one pipeline
	finder, variants := s.Finder(), false
	for i, name := range d.Functions {
		f, ok := finder.Function(name)
		if !ok {
			return nil, fmt.Errorf("function %q of the domain: not in snapshot %d, want domains of the same snapshot", name, s.Rev)
		}
		m.stages[i] = newStage(f)
		variants = variants || f.VariantOf != ""
		m.stages[i].in = places[i : i : i+1]
	}
	var lanes []plan.Lanes
	if variants {
		lanes = s.LanesIn(d)
	}
	for _, name := range d.Pipelines {
		switch p, ok := s.Pipeline(name); {
		case !ok || p.SLO <= 0:
		case len(lanes) == 0:
			m.addPipe(p, p.Stages, d.Functions, part)
		default:
			m.addLanes(p, lanes, d.Functions, part)
		}
	}
	for i := range m.stages {
		if g := &m.stages[i]; g.known && len(g.in) == 0 { // it may wait for as long as it serves
			g.in = append(g.in, place{len(m.pipes), 0})
			m.pipes = append(m.pipes, pipe{
				steps: []visit{{at: i, service: g.latency, share: g.latency}}, service: g.latency, limit: 2 * g.latency, budget: g.latency, reached: true,
			})
		}
	}
	m.payOnce()
	return m, nil
}

// newStage returns f as a queue.
func newStage(f *plan.Function) stage {
	g := stage{
		f: f, slots: min(max(f.Slots, 1), mostServers), ca2: squared(f.Demand.CV), cs2: squared(f.Service.CV), waiting: max(f.Waiting, 0),
	}
	if f.Service.Known && f.Service.Mean > 0 {
		g.known, g.service = true, f.Service.Mean.Seconds()
		g.mu = 1 / g.service
		g.latency = batchTime(f)
	}
	if f.Demand.Known && f.Demand.Rate > 0 { // not NaN
		g.measured = min(max(f.Demand.Rate, f.Demand.Ahead), math.MaxInt32)
		g.lambda = g.measured
	}
	return g
}

// addPipe adds a pipeline, unless all of its service times are unknown. stages are the functions
// that serve its stages.
func (m *model) addPipe(p *plan.Pipeline, stages, functions []string, part float64) {
	out := pipe{name: p.Name, slo: p.SLO, steps: make([]visit, len(p.Stages))}
	known, sum := 0, 0.0
	for k, name := range stages {
		st := &out.steps[k]
		st.at = -1
		if i, ok := slices.BinarySearch(functions, name); ok {
			st.at = i
			if g := &m.stages[i]; g.known {
				st.service = g.latency
				known, sum = known+1, sum+g.latency
			}
		}
	}
	if known == 0 {
		return
	}
	for k := range out.steps {
		if st := &out.steps[k]; st.service == 0 {
			st.service = sum / float64(known)
		}
	}
	out.edges = forward(p)
	for _, e := range out.edges {
		out.steps[e.To].inner = true
	}
	service := m.through(&out, func(st *visit) float64 { return st.service })
	out.service = slices.Max(service)
	slack := p.SLO.Seconds() - out.service
	out.budget = max(part*slack, leastBudget*out.service)
	out.reached = slack > 0
	out.limit = out.service + out.budget
	for k := range out.steps {
		st := &out.steps[k]
		st.share = out.budget * st.service / service[k]
		if st.at >= 0 && m.stages[st.at].known {
			m.stages[st.at].in = append(m.stages[st.at].in, place{len(m.pipes), k})
		} else {
			st.wait = st.share
		}
	}
	m.pipes = append(m.pipes, out)
}

// forward returns the edges of p that lead to later stages, sorted by From. If there are none, it
// connects the stages in a row. The caller must not change the result, which may be p's own slice.
func forward(p *plan.Pipeline) []plan.Edge {
	sorted := func(a, b plan.Edge) int { return cmp.Or(a.From-b.From, a.To-b.To) }
	onwards := func(e plan.Edge) bool { return 0 <= e.From && e.From < e.To && e.To < len(p.Stages) }
	if len(p.Edges) > 0 && slices.IsSortedFunc(p.Edges, sorted) && !slices.ContainsFunc(p.Edges, func(e plan.Edge) bool { return !onwards(e) }) {
		return p.Edges
	}
	out := make([]plan.Edge, 0, len(p.Stages))
	for _, e := range p.Edges {
		if onwards(e) {
			out = append(out, e)
		}
	}
	if len(out) == 0 {
		for k := 1; k < len(p.Stages); k++ {
			out = append(out, plan.Edge{From: k - 1, To: k})
		}
	}
	slices.SortFunc(out, sorted)
	return out
}

// through returns for each step of p the length of the longest path through the step, for the given
// lengths of steps. The next call overwrites the result.
func (m *model) through(p *pipe, length func(*visit) float64) []float64 {
	n := 3 * len(p.steps)
	m.buf = slices.Grow(m.buf[:0], n)[:n]
	return p.throughIn(m.buf, length)
}

// throughIn works like through. buf must have room for three numbers per step.
func (p *pipe) throughIn(buf []float64, length func(*visit) float64) []float64 {
	n := len(p.steps)
	clear(buf)
	// length of the step, of the longest way to it, and from it
	own, head, tail := buf[:n], buf[n:2*n], buf[2*n:]
	for k := range p.steps {
		own[k] = length(&p.steps[k])
	}
	for _, e := range p.edges { // sorted by From, so the way to the step is complete
		head[e.To] = max(head[e.To], head[e.From]+own[e.From])
	}
	for _, e := range slices.Backward(p.edges) {
		tail[e.From] = max(tail[e.From], own[e.To]+tail[e.To])
	}
	for k := range own {
		own[k] += head[k] + tail[k]
	}
	return own
}

// waitsIn returns for each step of p the longest path through the step, in seconds of service and
// mean waits. buf must have room for three numbers per step. wait is the mean wait of each stage.
func (p *pipe) waitsIn(buf, wait []float64) []float64 {
	return p.throughIn(buf, func(st *visit) float64 {
		if st.at < 0 || st.wait > 0 {
			return st.service + st.wait
		}
		return st.service + wait[st.at]
	})
}

// wait returns the predicted mean wait by chance, in seconds, with this many replicas and no line.
// It does not include waits for bursts. It returns 0 if the service time is unknown.
func (g *stage) wait(replicas int) float64 {
	if !g.known {
		return 0
	}
	c := g.servers(replicas)
	return meanWait(g.lambda, g.mu, c, min(g.ca2, 1), g.cs2) + g.batchWait(g.mu, c)
}

// sojourn predicts how long tasks stay at this stage with this many replicas: see [Sojourn]. It
// returns 0 if the service time is unknown.
func (g *stage) sojourn(replicas int) time.Duration { return g.sojournAt(g.mu, replicas) }

// sojournAt works like sojourn, with servers of rate mu.
func (g *stage) sojournAt(mu float64, replicas int) time.Duration {
	if !g.known {
		return 0
	}
	c := g.servers(replicas)
	out := Sojourn(g.lambda, mu, c, g.ca2, g.cs2, g.waiting)
	if g.latency > g.service {
		out += toDuration(g.batchWait(mu, c) + (g.latency/g.service-1)/mu)
	}
	return min(out, longest)
}

// servers returns the number of servers of this many replicas.
func (g *stage) servers(replicas int) int {
	return min(max(replicas, 0), math.MaxInt32/g.slots) * g.slots
}

// replicas returns the smallest count of replicas with at least this many servers.
func (g *stage) replicas(servers float64) int {
	if !(servers < math.MaxInt32) {
		return math.MaxInt32
	}
	return int(math.Ceil(math.Ceil(servers) / float64(g.slots)))
}

// stable returns the smallest count of replicas that serves all arrivals with a margin of two
// percent. It returns 0 if nothing arrives or the service time is unknown.
func (g *stage) stable() int {
	if !g.known {
		return 0
	}
	return g.replicas(g.lambda / (saturated * g.mu))
}

// least returns the smallest stable count of replicas for which a new task's predicted sojourn is
// at most target, if no other task waits: see [stage.sojourn]. It returns limit if no count up to
// limit is enough, and 0 if the service time is unknown.
func (g *stage) least(target time.Duration, limit int) int {
	if !g.known {
		return 0
	}
	if g.latency > g.service {
		return g.leastBatched(target, limit)
	}
	servers := Servers(g.lambda, g.mu, g.ca2, g.cs2, target-toDuration(g.service), g.servers(limit))
	return min(g.replicas(float64(servers)), limit)
}

// waits returns the predicted mean wait of each stage with these counts, in seconds. A stage
// without replicas sleeps: no task waits for it, even if its measured demand has not faded.
func (m *model) waits(counts []int) []float64 {
	wait := make([]float64, len(m.stages))
	for i := range m.stages {
		if counts[i] > 0 {
			wait[i] = m.stages[i].wait(counts[i])
		}
	}
	return wait
}

// unmet returns for each stage a text about a pipeline that misses its objective on a path through
// the stage; empty: none. wait is the mean wait of each stage with these counts, in seconds.
func (m *model) unmet(counts []int, wait []float64) []string {
	out := make([]string, len(m.stages))
	for k := range m.pipes {
		p := &m.pipes[k]
		if p.name == "" {
			continue
		}
		bursts := m.burstWaits(p, counts)
		m.buf = slices.Grow(m.buf[:0], 3*len(p.steps))[:3*len(p.steps)]
		for j, path := range p.waitsIn(m.buf, wait) {
			at := p.steps[j].at
			path += bursts
			switch {
			case at < 0 || out[at] != "":
			case !p.reached:
				out[at] = fmt.Sprintf("; %s is out of reach: it serves for %v", p.objective(), short(toDuration(p.service)))
			case path > p.limit:
				out[at] = fmt.Sprintf("; %s is at risk: %v expected on average, at most %v wanted", p.objective(), short(toDuration(path)), short(toDuration(p.limit)))
			}
		}
	}
	return out
}

// objective returns a description of p's objective.
func (p *pipe) objective() string {
	switch {
	case p.text != "":
	case p.name == "":
		p.text = fmt.Sprintf("a wait of %v", short(toDuration(p.budget)))
	default:
		p.text = p.name + "'s " + p.slo.String()
	}
	return p.text
}
