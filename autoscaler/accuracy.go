package autoscaler

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/accuracy"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// Accuracy is a plan.Mixer. It serves as many requests as the budget allows in time, as accurately
// as possible, on as few replicas as possible. Package accuracy finds such a plan exactly. Build it
// with [NewAccuracy].
//
// A plan is made for more than the expected demand: see planFor. It holds for 10 seconds, while the
// demand is in its band. After that, a new plan takes its place only if it is clearly better: see
// exactMix.keeps. Between plans, routing tables follow the present demand and the replicas that
// are ready.
//
// Domains that package accuracy cannot plan for are mixed by [GreedyMix], and each line says why.
type Accuracy struct {
	greedy GreedyMix
	waits  bool
	work   work // of all searches of a decision
}

// NewAccuracy returns an Accuracy. It leaves half of the objective for waits, without hops, and
// uses replicas fully.
func NewAccuracy(cfg Config) Accuracy {
	return Accuracy{NewGreedyMix(cfg), false, planWork}
}

// NewAccuracyWithWaits returns an Accuracy that uses replicas only as far as the predicted waits
// leave enough time, as [GreedyMix] does. It needs more replicas than NewAccuracy, and is late less
// often if requests come at random.
func NewAccuracyWithWaits(cfg Config) Accuracy {
	z := NewAccuracy(cfg)
	z.waits = true
	return z
}

const (
	planEvery   = 10 * time.Second
	planFor     = 1.1  // a plan is made for this many times the expected demand
	planDown    = 0.7  // a plan is replaced at once if demand falls below this part of what it was
	smoothing   = 10.0 // seconds, of the mean of the demand
	planHop     = 0.001
	planWork    = 4e8         // of all searches of a decision: about 0.4 s
	textWork    = 1e7         // a sentence in the text is not worth the decision's last work
	mostOpen    = 0.1         // a plan that may serve this part less than the best one is none
	worthPart   = 0.005       // a new plan is worth a change if it serves this part more,
	worthBetter = 0.002       // or is more accurate by this
	worthLess   = time.Minute // or has needed fewer replicas for so long
)

// AccuracyMemory is what Accuracy remembers. Its parts are never changed.
type AccuracyMemory struct {
	Greedy   Memory                    `json:",omitempty"`
	Demand   map[string]SmoothedDemand `json:",omitempty"` // by pipeline
	Plan     *AccuracyPlan             `json:",omitempty"` // in force; nil: none
	Cheaper  time.Time                 `json:",omitzero"`  // since when fewer replicas would do
	Switches int                       `json:",omitzero"`  // changes of the plan's replicas
	Failed   *AccuracyFailure          `json:",omitempty"` // since the last plan; nil: none
}

// SmoothedDemand is the mean rate of a pipeline's requests; newer ones count more.
type SmoothedDemand struct {
	At    time.Time
	Rate  float64
	Since time.Time // when the rate has changed, as measured
}

// AccuracyPlan is a plan in force.
type AccuracyPlan struct {
	At     time.Time
	For    string             // what it was made for, but the demand
	Demand map[string]float64 // by pipeline
	Lanes  []AccuracyLane     // by function
	Text   string             // for the operator
}

// AccuracyLane is the decision for one function.
type AccuracyLane struct {
	Function string
	Replicas int
	Batch    int // size
	Text     string
}

// Merge joins the memories of two domains that have become one.
func (z Accuracy) Merge(a, b AccuracyMemory) AccuracyMemory {
	out := AccuracyMemory{Greedy: z.greedy.Merge(a.Greedy, b.Greedy), Demand: maps.Clone(a.Demand), Switches: a.Switches + b.Switches}
	if out.Demand == nil {
		out.Demand = map[string]SmoothedDemand{}
	}
	maps.Copy(out.Demand, b.Demand)
	return out
}

// Mix implements plan.Mixer.
func (z Accuracy) Mix(s plan.Snapshot, d plan.Domain, b plan.Budget, m AccuracyMemory) (plan.Mix, AccuracyMemory, error) {
	mx, err := newMixing(&s, d, z.greedy.sizer.cfg.meanPart())
	if err != nil {
		return plan.Mix{}, m, err
	}
	e := &exactMix{mixing: mx, s: &s, d: d, b: &b, was: m, left: z.work, next: AccuracyMemory{Greedy: make(Memory, len(mx.lanes)), Switches: m.Switches}}
	why := e.build()
	if why == "" {
		if mix, err := z.decide(e); err == nil {
			return mix, e.next, nil
		} else {
			why = err.Error()
		}
	}
	mix, greedy, err := z.greedy.Mix(s, d, b, m.Greedy)
	for i := range mix.Alloc {
		mix.Alloc[i].Why += "; greedy: " + why
	}
	next := e.next
	next.Greedy = greedy
	return mix, next, err
}

// exactMix is a decision under way.
type exactMix struct {
	*mixing
	s         *plan.Snapshot
	d         plan.Domain
	b         *plan.Budget
	was, next AccuracyMemory
	problem   accuracy.Problem // its stages are those of mixing, its variants their lanes
	pipelines []*plan.Pipeline
	functions []*plan.Function // of the lanes
	pasts     []Past
	demand    []float64 // expected, by pipeline
	left      work      // that the decision may still use
}

// decide plans, if that is due, and makes the mix of the plan in force.
func (z Accuracy) decide(e *exactMix) (plan.Mix, error) {
	p, failure := e.was.Plan, ""
	if why := e.due(p); why != "" {
		next, err := z.try(e, p, why)
		switch {
		case err == nil:
			p = next
		case z.follows(e, p):
			failure = "; no new plan: " + err.Error()
		default:
			return plan.Mix{}, err
		}
	} else {
		e.next.Cheaper = e.was.Cheaper
	}
	e.next.Plan = p
	counts := e.rollout(e.targets(p))
	var out plan.Mix
	out.Tables, out.Excluded = e.route(p, counts)
	for _, at := range e.order {
		l, f := p.Lanes[at], e.lanes[at].f
		why := l.Text
		if counts[at] != l.Replicas {
			why += fmt.Sprintf("; %d while others start", counts[at])
		}
		out.Alloc = append(out.Alloc, plan.Line{Function: f.Name, Count: counts[at], Batch: l.Batch, Why: why + "; " + p.Text + failure})
		e.next.Greedy[f.Name] = &e.pasts[at]
	}
	return out, nil
}

// due returns why a new plan is needed; empty: p holds.
func (e *exactMix) due(p *AccuracyPlan) string {
	if p == nil || p.For != e.signature() {
		return "new"
	}
	if e.b.Exceeded(e.functions, e.targets(p)) != "" {
		return "budget"
	}
	for i, pipe := range e.pipelines {
		if was := p.Demand[pipe.Name]; e.demand[i] > was || e.demand[i]*planFor < planDown*was {
			return "demand"
		}
	}
	if age := e.s.At.Sub(p.At); age < 0 || age >= planEvery {
		return "time"
	}
	return ""
}

// signature returns all that a plan depends on, but demand, budgets and service times.
func (e *exactMix) signature() string {
	var b strings.Builder
	for i := range e.lanes {
		l := &e.lanes[i]
		fmt.Fprintf(&b, "%s %d %g %d-%d ", l.f.Name, l.f.Revision, l.f.Accurate(), l.least, l.most)
	}
	for _, p := range e.pipelines {
		fmt.Fprintf(&b, "%s %v %v %v %v ", p.Name, p.SLO, p.MinAccuracy, p.Edges, p.Accuracies)
	}
	return b.String()
}

// targets returns the replicas of a plan, by lane.
func (e *exactMix) targets(p *AccuracyPlan) []int {
	out := make([]int, len(e.lanes))
	for i := range out {
		out[i] = min(max(p.Lanes[i].Replicas, e.lanes[i].least), max(e.lanes[i].most, e.lanes[i].least))
	}
	return out
}

// plan returns the plan to follow: a new one, or had.
func (z Accuracy) plan(e *exactMix, had *AccuracyPlan, why string) (*AccuracyPlan, error) {
	same := had != nil && had.For == e.signature()
	p := e.problem
	p.Pipelines = slices.Clone(p.Pipelines)
	for i := range p.Pipelines {
		p.Pipelines[i].Demand = e.demand[i] * planFor
	}
	if same {
		p.CountChanges = true
		for i, l := range had.Lanes {
			at, k := e.place(i)
			p.Stages[at].Variants[k].Running = l.Replicas
		}
	}
	s, err := z.solve(e, &p)
	if err != nil {
		return nil, err
	}
	if s.Gaps[0] > mostOpen {
		return nil, fmt.Errorf("no good plan was found in time")
	}
	out := e.read(&p, s)
	if same && e.b.Exceeded(e.functions, e.targets(had)) == "" {
		if is := e.result(&p, had); e.keeps(s, is) {
			kept := *had
			kept.At, kept.Text = e.s.At, e.text(&p, is)
			if why == "demand" { // the band moves, because had does as well
				kept.Demand = out.Demand
			}
			return &kept, nil
		}
	}
	if e.b.Exceeded(e.functions, e.targets(out)) != "" && e.b.Exceeded(e.functions, e.leasts()) == "" {
		return nil, fmt.Errorf("no room for the plan on the devices")
	}
	out.Text = e.text(&p, s)
	if !same || !slices.EqualFunc(out.Lanes, had.Lanes, func(a, b AccuracyLane) bool { return a.Replicas == b.Replicas }) {
		e.next.Switches++
	}
	return out, nil
}

func (e *exactMix) leasts() []int {
	out := make([]int, len(e.lanes))
	for i := range out {
		out[i] = e.lanes[i].least
	}
	return out
}

// result returns what a plan that was made before does now.
func (e *exactMix) result(p *accuracy.Problem, had *AccuracyPlan) *accuracy.Solution {
	out, value, demand := &accuracy.Solution{}, 0.0, 0.0
	for _, n := range e.targets(had) {
		out.Price += float64(n)
	}
	r := accuracy.MostAccurateFirst(p, e.counts(p, e.targets(had), had))
	for i := range p.Pipelines {
		part, good := r.Result(p, i)
		demand += p.Pipelines[i].Demand
		out.Served += part * p.Pipelines[i].Demand
		value += part * good * p.Pipelines[i].Demand
	}
	if out.Served > 0 {
		out.Accuracy = value / out.Served
		out.Served /= demand
	}
	if demand <= 0 {
		out.Served = 1
	}
	return out
}

// keeps reports whether the plan in force stays. is is what that plan does now, and s is the new
// plan. The old plan stays if the new one serves hardly more, is
// hardly more accurate, and has not been cheaper for long enough.
func (e *exactMix) keeps(s, is *accuracy.Solution) bool {
	if s.Served*(1-worthPart) > is.Served || s.Accuracy > is.Accuracy+worthBetter {
		return false
	}
	if s.Price > is.Price-0.5 {
		return true
	}
	if e.next.Cheaper = e.was.Cheaper; e.next.Cheaper.IsZero() || e.next.Cheaper.After(e.s.At) {
		e.next.Cheaper = e.s.At
	}
	if e.s.At.Sub(e.next.Cheaper) < worthLess {
		return true
	}
	e.next.Cheaper = time.Time{}
	return false
}

// use sets the rates of a problem's batches to what the replicas of a solution serve, so that waits
// are short enough. It reports whether any has clearly changed.
func (e *exactMix) use(p *accuracy.Problem, s *accuracy.Solution) bool {
	changed := false
	p.Stages = slices.Clone(p.Stages)
	for i := range p.Stages {
		p.Stages[i].Variants = slices.Clone(p.Stages[i].Variants)
		for k, lane := range e.stages[i].lanes {
			l, n := &e.lanes[lane], max(s.Counts[i][k].Replicas, 1)
			part := min(l.rate(n)/(float64(n*max(l.slots, 1))*l.mu), 1)
			if l.mu <= 0 || !(part > 0) {
				continue
			}
			v := &p.Stages[i].Variants[k]
			v.Batches = slices.Clone(v.Batches)
			for b := range v.Batches {
				full := e.problem.Stages[i].Variants[k].Batches[b].Rate
				changed = changed || math.Abs(v.Batches[b].Rate-part*full) > 0.02*full
				v.Batches[b].Rate = part * full
			}
		}
	}
	return changed
}

// place returns a lane's stage and its index there.
func (e *exactMix) place(lane int) (stage, variant int) {
	stage = e.lanes[lane].of
	return stage, slices.Index(e.stages[stage].lanes, lane)
}

// counts returns replicas of lanes in the form of package accuracy, with the batches of a plan.
func (e *exactMix) counts(p *accuracy.Problem, replicas []int, of *AccuracyPlan) [][]accuracy.Count {
	out := make([][]accuracy.Count, len(p.Stages))
	for i := range p.Stages {
		out[i] = make([]accuracy.Count, len(p.Stages[i].Variants))
		for k, lane := range e.stages[i].lanes {
			batch := slices.IndexFunc(p.Stages[i].Variants[k].Batches, func(b accuracy.Batch) bool { return b.Size == of.Lanes[lane].Batch })
			out[i][k] = accuracy.Count{Replicas: replicas[lane], Batch: max(batch, 0)}
		}
	}
	return out
}

// read returns a solution as a plan, with its reasons.
func (e *exactMix) read(p *accuracy.Problem, s *accuracy.Solution) *AccuracyPlan {
	out := &AccuracyPlan{At: e.s.At, For: e.signature(), Demand: map[string]float64{}, Lanes: make([]AccuracyLane, len(e.lanes))}
	for i, pipe := range e.pipelines {
		out.Demand[pipe.Name] = p.Pipelines[i].Demand
	}
	for i := range e.lanes {
		at, k := e.place(i)
		c, v := s.Counts[at][k], &p.Stages[at].Variants[k]
		batch := v.Batches[c.Batch]
		l := AccuracyLane{Function: v.Name, Replicas: c.Replicas, Batch: batch.Size}
		l.Text = fmt.Sprintf("%d with accuracy %.4g, in batches of %d, at most %v per task", c.Replicas, v.Accuracy, batch.Size, short(toDuration(batch.Time/(1-accuracy.HalfForQueueing))))
		for _, x := range s.Dominated {
			if x.Stage == at && x.Variant == k {
				l.Text = fmt.Sprintf("%d: never used, because %s is as accurate and as fast", c.Replicas, p.Stages[at].Variants[x.By].Name)
			}
		}
		out.Lanes[i] = l
	}
	return out
}

// text says what a solution does, why answers are less accurate than they could be, and what would
// change that.
func (e *exactMix) text(p *accuracy.Problem, s *accuracy.Solution) string {
	demand := 0.0
	for i := range p.Pipelines {
		demand += p.Pipelines[i].Demand
	}
	text := fmt.Sprintf("plan for %.4g/s: serves %.4g%% with accuracy %.4g on %d replicas", demand, 100*s.Served, s.Accuracy, int(s.Price+0.5))
	if !s.Proved() {
		text += fmt.Sprintf(" (perhaps %.2g%% more, and accuracy %.2g higher)", 100*s.Gaps[0], s.Gaps[1])
	}
	if e.left < textWork {
		return text
	}
	wide := *p
	wide.Replicas, wide.Budgets, wide.CountChanges = 100*(1+p.Replicas), nil, false
	wide.Stages = slices.Clone(p.Stages)
	for i := range wide.Stages {
		wide.Stages[i].Variants = slices.Clone(p.Stages[i].Variants)
		for k := range wide.Stages[i].Variants {
			wide.Stages[i].Variants[k].Uses, wide.Stages[i].Variants[k].Most = nil, 0
		}
	}
	full, err := e.left.spend(&wide, 1)
	if err != nil || full.Served < 1-1e-6 {
		return text
	}
	if lost := full.Accuracy - s.Accuracy; lost > 1e-6 || s.Served < 1-1e-6 {
		text += fmt.Sprintf("; %d replicas would serve all with accuracy %.4g", int(full.Price+0.5), full.Accuracy)
	}
	return text
}

// expected returns the demand of a pipeline whose entry has this rate now.
func (e *exactMix) expected(name string, now float64, since time.Time) float64 {
	was, ok := e.was.Demand[name]
	next := SmoothedDemand{At: e.s.At, Rate: now, Since: since}
	if age := e.s.At.Sub(was.At).Seconds(); ok && age >= 0 && age < 6*smoothing && was.Since.Equal(since) {
		weight := age / (smoothing + age)
		next.Rate = was.Rate + weight*(now-was.Rate)
	}
	if e.next.Demand == nil {
		e.next.Demand = map[string]SmoothedDemand{}
	}
	e.next.Demand[name] = next
	return next.Rate
}

// sources returns where tasks of a stage come from, and their index in the routes of package
// accuracy: the stage and the variant before, or -1.
func (e *exactMix) source(from string) (stage, variant int) {
	if lane := e.lane(from); lane >= 0 {
		return e.place(lane)
	}
	return -1, -1
}

// byAccuracy sorts lanes: the most accurate ones first.
func (e *exactMix) byAccuracy(lanes []int) {
	slices.SortStableFunc(lanes, func(a, b int) int {
		return cmp.Or(better(e.lanes[a].f, e.lanes[b].f), cmp.Compare(e.lanes[a].f.Name, e.lanes[b].f.Name))
	})
}
