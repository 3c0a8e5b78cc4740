package autoscaler

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// QuartConfig leaves parts of [Quart] out, to see what each is worth. The zero value has all parts.
type QuartConfig struct {
	NoPID, NoSmooth, NoCPU bool
	Attainment             float64 // as the allocator's: see Config
}

// Quart is a plan.Corrector after QUART (ICDCS'24), §5 and Alg. 1. It has four parts:
//
//   - The corrector, a [PID], steers the counts of an allocator by what is measured.
//   - The smoother takes back replicas that are left over.
//   - The compensator makes up for these with CPU.
//   - The list of key stages tells which functions had to be scaled up.
//
// Before that, replicas on devices get CPU that is idle, which is not in the paper: see exchange.
// Build it with [NewQuart].
//
// Quart differs from the paper where the paper's text is wrong; each part says where. The parts run
// in a row, once, while the paper's Smooth and Correct call each other. With more load a function
// never gets fewer replicas: its target depends on what other functions measure and on the past,
// not on its own rate and line.
type Quart struct{ cfg QuartConfig }

// NewQuart returns a Quart.
func NewQuart(cfg QuartConfig) Quart { return Quart{cfg} }

// steered is the part of the time to wait that Quart steers mean waits to. Measured waits include
// the tail that the Sizer leaves room for: with the Sizer's smaller part, Quart would add replicas
// whenever chance makes waits longer.
const steered = 0.5

// steered returns that part. It is larger if fewer requests have to be in time than the constant
// would keep in time, so that the Sizer's counts are not undone.
func (c QuartConfig) steered() float64 {
	return max(steered, NewSizer(Config{Attainment: c.Attainment}).cfg.meanPart())
}

// QuartMemory is what Quart remembers, by function. Courses are never changed.
type QuartMemory map[string]*Course

// Course is what Quart remembers of one function.
type Course struct {
	At    time.Time `json:",omitzero"` // of the last decision
	Asked int       `json:",omitzero"` // the last count
	Key   Key       `json:",omitzero"`

	PID   PIDState `json:",omitzero"`
	Extra int      `json:",omitzero"` // replicas that the PID adds

	CA2     float64       `json:",omitzero"` // of arrivals, as measured at the last decision; 0: not yet
	Taken   int           `json:",omitzero"` // replicas that the smoother has taken
	Surplus time.Time     `json:",omitzero"` // since when it could take another; zero: it cannot
	Hold    time.Duration `json:",omitzero"` // how long that has to last; 0: the least

	CPU   int       `json:",omitzero"` // thousandths of a core that a replica is given; 0: as declared
	CPUAt time.Time `json:",omitzero"` // when CPU was changed, or last needed
	// Inverse is the mean of one over the CPU, in thousandths of a core, that the measured service
	// times are of; 0: unknown.
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
	line       *plan.Line
	past, next *Course
	fresh      bool // there is no past
	most       int
	target     float64 // seconds that tasks may be with the function; 0: unknown
	measured   float64 // seconds that they are; 0: unknown
	why        string
	fit        *cpuFit // nil: unknown
	base, seen int     // CPU, in thousandths of a core, of service and of what was measured; set with fit
	neighbours []int   // both ways
}

// noCourse is the past of a function that is new.
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
		c.measured = g.service + max(wait, 0).Seconds()
	}
}

// targets says how long tasks may be with each function. A function has the larger of two parts of
// its pipeline's time to wait: its share by service time, and what the other functions on its
// longest path leave of that time as measured. So slack goes where it is needed, and no stage is
// corrected while its pipelines are in time. QUART takes T_target from "the SLO setting for each
// stage" and says no more.
func targets(m *model, all []correction) {
	for k := range m.pipes {
		p := &m.pipes[k]
		path := m.through(p, func(st *visit) float64 {
			if st.at < 0 || all[st.at].measured == 0 {
				return st.service + p.budget*st.service/p.service // what is unknown counts as on target
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

// steer adds what the PID says. A function without a count sleeps, and is left asleep.
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
	// Square-root staffing (Halfin and Whitt, Operations Research 29(3), 1981): what a queue needs
	// beyond its load grows with the root of the load.
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

// stay rounds v to a whole number. It returns n while v is within three quarters of n.
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

// end completes the line, and counts a raise.
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
