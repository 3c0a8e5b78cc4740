package autoscaler

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// QuartConfig switches parts of [Quart] off, to measure what each part is worth. The zero value has
// all parts on.
type QuartConfig struct {
	NoPID, NoSmooth, NoCPU bool
	Attainment             float64 // as the allocator's: see Config
}

// Quart is a plan.Corrector after QUART (ICDCS'24), §5 and Alg. 1. It has four parts:
//
//   - The corrector, a [PID], adjusts an allocator's counts to the measured waits.
//   - The smoother takes back replicas that are not needed.
//   - The compensator replaces those replicas with CPU.
//   - The list of key stages records which functions had to be scaled up.
//
// Between the smoother and the compensator, replicas on devices get idle CPU. That is not in the
// paper: see exchange. Build a Quart with [NewQuart].
//
// Quart differs from the paper where the paper's text is wrong; the comment of each part has the
// details. The parts run once, one after another, while the paper's Smooth and Correct call each
// other. More load on a function never reduces its replicas, because its target does not depend on
// its own rate and line. The target depends on what other functions measure, and on the past.
type Quart struct{ cfg QuartConfig }

// NewQuart returns a Quart.
func NewQuart(cfg QuartConfig) Quart { return Quart{cfg} }

// steered is the part of the time to wait that mean waits may take before Quart adds replicas.
// Measured waits include the tail that the Sizer leaves room for. If Quart used the Sizer's smaller
// part, it would add replicas whenever waits are longer by chance.
const steered = 0.5

// steered returns the part of the time to wait that mean waits may take before Quart adds replicas.
// It is larger than the constant if Attainment allows that, so that Quart does not undo the Sizer's
// counts.
func (c QuartConfig) steered() float64 {
	return max(steered, NewSizer(Config{Attainment: c.Attainment}).cfg.meanPart())
}

// QuartMemory is what Quart remembers, by function. A Course is never changed.
type QuartMemory map[string]*Course

// Course is what Quart remembers of one function.
type Course struct {
	At    time.Time `json:",omitzero"` // time of the last decision
	Asked int       `json:",omitzero"` // the last count
	Key   Key       `json:",omitzero"`

	PID   PIDState `json:",omitzero"`
	Extra int      `json:",omitzero"` // replicas that the PID adds

	// of arrivals, as measured at the last decision; 0: unknown
	CA2   float64 `json:",omitzero"`
	Taken int     `json:",omitzero"` // replicas that the smoother has taken
	// since when the smoother could take another; zero: it cannot
	Surplus time.Time     `json:",omitzero"`
	Hold    time.Duration `json:",omitzero"` // how long Surplus must last; 0: smoothHold

	// CPU limit that a replica gets, in thousandths of a core; 0: as declared
	CPU   int       `json:",omitzero"`
	CPUAt time.Time `json:",omitzero"` // when CPU was changed, or last needed
	// when the compensator last raised CPU; zero: CPU is as declared
	CPURaised time.Time `json:",omitzero"`
	// Inverse is the mean of 1/CPU behind the measured service times, with CPU in thousandths of a
	// core; 0: unknown.
	Inverse float64 `json:",omitzero"`
}

// Merge joins the memories of two domains that have become one.
func (Quart) Merge(a, b QuartMemory) QuartMemory {
	m := make(QuartMemory, len(a)+len(b))
	maps.Copy(m, a)
	maps.Copy(m, b)
	return m
}

// correction is the state of one function while its domain is corrected.
type correction struct {
	*stage
	line       *plan.Line
	past, next *Course
	fresh      bool // the function has no past
	most       int
	target     float64 // seconds that a task may stay at the function; 0: unknown
	measured   float64 // seconds that tasks stay; 0: unknown
	why        string
	fit        *cpuFit // nil: unknown
	// CPU in thousandths of a core, of service and of the measurements; set with fit
	base, seen int
	neighbours []int // the stages right before and right behind
}

// noCourse is the past of a new function.
var noCourse Course

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
	out, all, courses := slices.Clone(a), make([]correction, len(a)), make([]Course, len(a))
	for i := range all {
		if a[i].Function != d.Functions[i] {
			return nil, m, fmt.Errorf("line of function %q, want %q: lines as the domain's functions", a[i].Function, d.Functions[i])
		}
		all[i].begin(&model.stages[i], &out[i], m[a[i].Function], &courses[i], s.At)
		all[i].fits(fits[a[i].Function], s.At)
	}
	targets(model, all)
	for i := range all {
		if !q.cfg.NoPID {
			all[i].steer(s.At)
		}
	}
	if !q.cfg.NoSmooth {
		neighbours(&s, d, all)
		smooth(all, s.At)
	}
	if !q.cfg.NoCPU {
		exchange(&s, all)
		compensate(&s, all)
	}
	next := make(QuartMemory, len(a))
	for i := range all {
		all[i].reclaim()
		all[i].end(s.At)
		next[out[i].Function] = all[i].next
	}
	return out, next, nil
}

func (c *correction) begin(g *stage, l *plan.Line, past, next *Course, at time.Time) {
	c.stage, c.line, c.past, c.next, c.fresh = g, l, past, next, past == nil
	if c.fresh {
		c.past = &noCourse
	}
	*next = *c.past
	next.At, next.Taken, next.CPU = at, 0, 0
	_, c.most = g.f.Bounds()
	c.why = l.Why
	if w := &g.f.Wait; g.known && (w.Known && w.Mean >= 0 || w.Oldest > 0) {
		wait := w.Oldest
		if w.Known {
			wait = max(wait, w.Mean)
		}
		c.measured = g.latency + max(wait, 0).Seconds()
	}
}

// targets sets how long tasks may stay at each function: its batch's time, and the larger of two
// waits. For functions in several pipelines, the smallest result counts. The waits are:
//
//   - the function's share of its pipeline's time to wait, in proportion to its service time
//   - the part of that time that the other functions on its longest path leave, as measured
//
// So slack goes where it is needed, and no stage is corrected while its pipelines are in time.
// QUART takes T_target from "the SLO setting for each stage", and gives no details.
func targets(m *model, all []correction) {
	for k := range m.pipes {
		p := &m.pipes[k]
		path := m.through(p, func(st *visit) float64 {
			if st.at < 0 || all[st.at].measured == 0 {
				return st.service + p.budget*st.service/p.service // an unknown function counts as on target
			}
			return all[st.at].measured
		})
		for j, length := range path {
			at := p.steps[j].at
			if at < 0 || !all[at].known {
				continue
			}
			c := &all[at]
			own := c.latency
			if c.measured > 0 {
				own = c.measured
			} else {
				own += p.budget * c.latency / p.service
			}
			t := c.latency + max(p.budget*c.latency/p.service, p.limit-(length-own)-c.latency)
			if c.target == 0 || t < c.target {
				c.target = t
			}
		}
	}
}

// steer adds the PID's output. A function without a count sleeps, and is left asleep.
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
	// Square-root staffing (Halfin and Whitt, Operations Research 29(3), 1981): the servers that a
	// queue needs beyond its load grow with the square root of the load.
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

// stay rounds v to a whole number. It returns n if v differs from n by less than three quarters.
func stay(n int, v float64) int {
	switch {
	case v >= float64(n)+0.75:
		return int(v + 0.25)
	case v <= float64(n)-0.75:
		return int(math.Ceil(v - 0.25))
	}
	return n
}

// threatened reports whether tasks take longer than they may, as measured now.
func (c *correction) threatened() bool {
	return c.measured > 0 && c.target > 0 && c.measured > c.target
}

// end completes the line, and records a raise.
func (c *correction) end(at time.Time) {
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
}
