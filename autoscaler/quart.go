package autoscaler

import (
	"fmt"
	"maps"
	"math"
	"time"

	"github.com/stagecoach-serving/stagecoach/plan"
)

// QuartConfig leaves parts of [Quart] out, to see what each is worth. The zero value has all.
type QuartConfig struct {
	NoPID, NoSmooth, NoCPU bool
	Predictor              Predictor // of burstiness; nil: Persistence, which is off least
	Attainment             float64   // as the allocator's: see Config
}

// Quart is a plan.Corrector as QUART (ICDCS'24) has it, §5 and Alg. 1: it steers the counts of an allocator by what is measured (the
// corrector, [PID]), takes back what the flattening of bursts on their way leaves over (the smoother, [Predictor]), makes up for that with CPU
// (the compensator), and keeps the list of key stages. Build it with [NewQuart].
//
// Before that replicas on devices get CPU that is idle, which is not in the paper: see exchange.
//
// It differs from the paper's text where that is wrong; each part says where. They run in a row, once: the paper's Smooth and Correct
// call each other. With more load a function never gets fewer replicas: what it is steered to depends on what others measure and on what
// was before, not on its own rate and line.
type Quart struct{ cfg QuartConfig }

// NewQuart returns a Quart.
func NewQuart(cfg QuartConfig) Quart {
	if cfg.Predictor == nil {
		cfg.Predictor = Persistence{}
	}
	return Quart{cfg}
}

// steered is the part of the time to wait that Quart steers mean waits to. It goes by what is measured, in which there is what the Sizer's
// tail is for: with as little as that leaves, it would add replicas whenever chance has it.
const steered = 0.5

// steered is that part: more where fewer requests have to be in time than it would keep there, as the Sizer's counts are not to be undone.
func (c QuartConfig) steered() float64 {
	return max(steered, NewSizer(Config{Attainment: c.Attainment}).cfg.meanPart())
}

// QuartMemory is what Quart remembers, by function.
type QuartMemory map[string]Course

// Course is what Quart remembers of one function.
type Course struct {
	At    time.Time `json:",omitzero"` // of the last decision
	Asked int       `json:",omitzero"` // the last count
	Key   Key       `json:",omitzero"`

	PID   PIDState `json:",omitzero"`
	Extra int      `json:",omitzero"` // replicas that the PID adds

	CA2     float64       `json:",omitzero"` // of arrivals, as predicted; 0: not yet
	Factor  float64       `json:",omitzero"` // measured over predicted CA2, so far; 0: not known
	Taken   int           `json:",omitzero"` // replicas that the smoother has taken
	Surplus time.Time     `json:",omitzero"` // since when it could take another; zero: it cannot
	Hold    time.Duration `json:",omitzero"` // how long that has to last; 0: the least

	CPU   int       `json:",omitzero"` // thousandths of a core that a replica is given; 0: as declared
	CPUAt time.Time `json:",omitzero"` // when that was changed, or last needed
	// Inverse is one over the thousandths of a core that the measured service times are of, on average; 0: not known.
	Inverse float64 `json:",omitzero"`
}

// Merge joins the memories of two domains that have become one.
func (Quart) Merge(a, b QuartMemory) QuartMemory {
	m := make(QuartMemory, len(a)+len(b))
	maps.Copy(m, a)
	maps.Copy(m, b)
	return m
}

// correction is a function while its domain is corrected.
type correction struct {
	*stage
	line         plan.Line
	past, next   Course
	fresh        bool // there is no past
	most         int
	target       float64 // seconds that tasks may be with it; 0: not known
	measured     float64 // seconds that they are; 0: not known
	why          string
	predicted    stage   // with arrivals as bursty as predicted
	fit          *cpuFit // nil: nothing is known
	base, seen   int     // thousandths of a core that service, and what was measured of it, are of, where fit is known
	predecessors []int
	neighbours   []int // both ways
}

// Correct implements plan.Corrector.
func (q Quart) Correct(s plan.Snapshot, d plan.Domain, a plan.Alloc, m QuartMemory) (plan.Alloc, QuartMemory, error) {
	fits := asDeclared(&s, d)
	model, err := newModel(&s, d, q.cfg.steered())
	if err != nil {
		return nil, m, err
	}
	if len(a) != len(d.Functions) {
		return nil, m, fmt.Errorf("%d lines for a domain of %d functions, want one each", len(a), len(d.Functions))
	}
	all := make([]correction, len(a))
	for i := range all {
		if a[i].Function != d.Functions[i] {
			return nil, m, fmt.Errorf("line of function %q, want %q: lines as the domain's functions", a[i].Function, d.Functions[i])
		}
		all[i].begin(&model.stages[i], a[i], m, s.At)
		all[i].fits(fits[a[i].Function], s.At)
	}
	targets(model, all)
	for i := range all {
		if !q.cfg.NoPID {
			all[i].steer(s.At)
		}
	}
	if !q.cfg.NoSmooth {
		connect(&s, d, all)
		smooth(all, s.At)
	}
	if !q.cfg.NoCPU {
		exchange(&s, all)
		compensate(&s, all)
	}
	for i := range all {
		all[i].reclaim()
	}
	if !q.cfg.NoSmooth {
		q.predict(all, s.At)
	}
	out, next := make(plan.Alloc, len(a)), make(QuartMemory, len(a))
	for i := range all {
		out[i] = all[i].end(s.At)
		next[out[i].Function] = all[i].next
	}
	return out, next, nil
}

func (c *correction) begin(g *stage, l plan.Line, m QuartMemory, at time.Time) {
	past, ok := m[l.Function]
	c.stage, c.line, c.past, c.next, c.fresh = g, l, past, past, !ok
	c.next.At, c.next.Taken, c.next.CPU = at, 0, 0
	_, c.most = g.f.Bounds()
	c.why = l.Why
	if w := g.f.Wait; g.known && (w.Known && w.Mean >= 0 || w.Oldest > 0) {
		wait := w.Oldest
		if w.Known {
			wait = max(wait, w.Mean)
		}
		c.measured = g.service + max(wait, 0).Seconds()
	}
}

// targets says how long tasks may be with each function. It has its pipeline's time to wait by its share of the service time, or all
// that the others on its longest path leave of it as measured, if that is more: slack goes where it is needed, and no stage is corrected
// while its pipelines are in time. QUART takes T_target from "the SLO setting for each stage" and says no more.
func targets(m *model, all []correction) {
	for k := range m.pipes {
		p := &m.pipes[k]
		path := p.through(func(st *visit) float64 {
			if st.at < 0 || all[st.at].measured == 0 {
				return st.service + p.budget*st.service/p.service // what is not known is taken as on target
			}
			return all[st.at].measured
		})
		for j, length := range path {
			at := p.steps[j].at
			if at < 0 || !all[at].known {
				continue
			}
			c := &all[at]
			own := c.service
			if c.measured > 0 {
				own = c.measured
			} else {
				own += p.budget * c.service / p.service
			}
			t := c.service + max(p.budget*c.service/p.service, p.limit-(length-own)-c.service)
			if c.target == 0 || t < c.target {
				c.target = t
			}
		}
	}
}

// steer adds what the PID says. One without a count sleeps, and is left to do so.
func (c *correction) steer(at time.Time) {
	if c.line.Count <= 0 {
		c.next.PID, c.next.Extra = PIDState{}, 0
		return
	}
	switch {
	case c.measured > 0 && c.target > 0:
		ready, _ := c.f.Current()
		held := ready < c.past.Asked || c.past.Asked >= c.most
		c.next.PID = defaultPID.Step(c.past.PID, at, c.measured, c.target, held)
	default:
		c.next.PID = defaultPID.Blind(c.past.PID, at)
	}
	// Square-root staffing (Halfin and Whitt, Operations Research 29(3), 1981): what a queue needs beyond its load grows with the root of it.
	replicas := c.next.PID.Out * math.Sqrt(float64(c.line.Count))
	c.next.Extra = stay(c.past.Extra, replicas)
	before := c.line.Count
	c.line.Count = min(before+c.next.Extra, max(c.most, before))
	if c.next.Extra == 0 {
		return
	}
	c.why += fmt.Sprintf("; pid %+d", c.next.Extra)
	if c.measured > 0 {
		c.why += fmt.Sprintf(" (takes %v, target %v)", c.secs(c.measured), c.secs(c.target))
	}
	if c.line.Count < before+c.next.Extra {
		c.why += fmt.Sprintf(", %d at most", c.most)
	}
}

func (c *correction) secs(v float64) time.Duration { return short(toDuration(v)) }

// stay rounds v to a whole number, and stays with the one there was while it is not off by three quarters.
func stay(n int, v float64) int {
	switch {
	case v >= float64(n)+0.75:
		return int(v + 0.25)
	case v <= float64(n)-0.75:
		return int(math.Ceil(v - 0.25))
	}
	return n
}

// threatened reports whether tasks take longer than they may, by what is measured now.
func (c *correction) threatened() bool {
	return c.measured > 0 && c.target > 0 && c.measured > c.target
}

// end makes the line and counts a raise.
func (c *correction) end(at time.Time) plan.Line {
	before := c.past.Asked
	if c.fresh {
		ready, starting := c.f.Current()
		before = ready + starting
	}
	c.next.Asked = c.line.Count
	c.next.Key = c.past.Key.step(at, c.line.Count > before && c.line.Count > max(c.f.Min, 1))
	if c.next.Key.is() {
		c.line.Key = true
		c.why += "; key stage"
	}
	c.line.Why = c.why
	return c.line
}
