package autoscaler

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/plan"
)

// The defaults of Config.
const (
	DrainWithin = 2 * time.Second
	Hold        = 10 * time.Second
)

// growEvery is how often a function with an unknown service time may double.
const growEvery = time.Second

// Config is what an operator may set. A zero field means its default.
type Config struct {
	DrainWithin time.Duration // a standing line should be gone after this long
	Hold        time.Duration // a count is not lowered before it was too high for this long
}

// Sizer is a plan.Allocator that gives each function the least number of replicas that keeps its wait within its target
// at the measured load, and drains what already waits. Build it with [NewSizer].
type Sizer struct{ cfg Config }

// NewSizer returns a Sizer.
func NewSizer(cfg Config) Sizer {
	cfg.DrainWithin = cmp.Or(cfg.DrainWithin, DrainWithin)
	cfg.Hold = cmp.Or(cfg.Hold, Hold)
	return Sizer{cfg}
}

// Memory is what the Sizer remembers, by function.
type Memory map[string]Past

// Past is what the Sizer remembers of one function.
type Past struct {
	Seen    time.Time // first seen: a function that was never asked is idle since then
	Checked time.Time // when Line was looked at to decide on growth without a known service time
	Line    int       // tasks that waited then
	Peaks   []Peak    // the counts that may still hold: newer and lower to the end; the first one holds
}

// Peak is a count that the load asked for, and when.
type Peak struct {
	At    time.Time
	Count int
}

// Merge joins the memories of two domains that have become one.
func (Sizer) Merge(a, b Memory) Memory {
	m := make(Memory, len(a)+len(b))
	for _, from := range []Memory{a, b} {
		for name, past := range from {
			m[name] = past
		}
	}
	return m
}

// Allocate implements plan.Allocator.
func (z Sizer) Allocate(s plan.Snapshot, d plan.Domain, m Memory) (plan.Alloc, Memory, error) {
	waits := waitTargets(&s, d)
	alloc, next := make(plan.Alloc, 0, len(d.Functions)), make(Memory, len(d.Functions))
	for i, name := range d.Functions {
		f, ok := s.Function(name)
		if !ok {
			return nil, m, fmt.Errorf("function %q of the domain: not in snapshot %d, want domains of the same snapshot", name, s.Rev)
		}
		past, ok := m[name]
		if !ok {
			past.Seen = s.At
		}
		line, past := z.size(f, s.At, waits[i], past)
		alloc, next[name] = append(alloc, line), past
	}
	return alloc, next, nil
}

// size decides on one function; wait is its target, 0: none.
func (z Sizer) size(f *plan.Function, now time.Time, wait time.Duration, past Past) (plan.Line, Past) {
	ready, starting := f.Current()
	_, most := f.Bounds()
	least, idle := floor(f, now, past.Seen)
	var count int
	var why strings.Builder
	switch {
	case idle:
		past.Peaks, past.Line, past.Checked = nil, 0, time.Time{}
		fmt.Fprintf(&why, "nothing asked for %v: none", f.ZeroAge)
	case f.Service.Known && f.Service.Mean > 0:
		count = z.byLoad(f, wait, most, &why)
	default:
		count, past = grow(f, now, past, ready, starting, &why)
	}
	if count < least {
		fmt.Fprintf(&why, "; at least %d", least)
		count = least
	}
	count = min(count, most)
	if !idle {
		past.Peaks = z.hold(past.Peaks, Peak{now, count})
		if top := past.Peaks[0]; min(top.Count, most) > count {
			count = min(top.Count, most)
			fmt.Fprintf(&why, "; held at %d, as asked for %v ago", count, now.Sub(top.At).Round(100*time.Millisecond))
		}
	}
	fmt.Fprintf(&why, "; was %d; max %d", ready+starting, most)
	return plan.Line{Function: f.Name, Count: count, Batch: f.Batch, Why: why.String()}, past
}

// floor returns the fewest replicas that f's owner and its past allow, and whether f sleeps. A function that may sleep does
// so ZeroAge after its last request, or, never asked, after it was first seen; until then one stays that is awake.
func floor(f *plan.Function, now, seen time.Time) (least int, idle bool) {
	least, _ = f.Bounds()
	if !f.Zero {
		return least, false
	}
	busy := f.Waiting > 0 || f.Running > 0
	since := seen
	if f.Demand.Last.After(since) {
		since = f.Demand.Last
	}
	switch {
	case !busy && now.Sub(since) >= f.ZeroAge:
		return 0, true
	case !busy && f.Demand.Last.IsZero():
		return min(f.Min, f.Max), false
	}
	return min(max(f.Min, 1), max(f.Max, 1)), false
}

// byLoad returns the replicas that the measured load needs: Erlang C for what arrives, and a fluid bound for what already
// waits: c servers take c·μ − λ tasks a second off the line. A slot is a server; the service time is a task's share of its
// batch's, so that a batch that pays shows as a faster server.
func (z Sizer) byLoad(f *plan.Function, wait time.Duration, most int, why *strings.Builder) int {
	mean := f.Service.Mean.Seconds()
	lambda, mu := 0.0, 1/mean
	if f.Demand.Known {
		lambda = f.Demand.Rate
	}
	if wait <= 0 {
		wait = f.Service.Mean
	}
	slots := max(f.Slots, 1)
	byErlang := Servers(lambda, mu, 1, 1, wait, most*slots)
	fmt.Fprintf(why, "λ=%.1f/s μ=%.1f/s wait≤%v: %d by Erlang C", lambda, mu, short(wait), byErlang)
	// More servers than tasks would not make the line shorter.
	byDrain := int(min(math.Ceil((lambda+float64(f.Waiting)/z.cfg.DrainWithin.Seconds())*mean), float64(f.Waiting+f.Running)))
	if byDrain > byErlang {
		fmt.Fprintf(why, ", +%d to drain %d waiting in %v", byDrain-byErlang, f.Waiting, z.cfg.DrainWithin)
	}
	servers := max(byErlang, byDrain)
	if slots > 1 {
		fmt.Fprintf(why, ", %d a replica", slots)
	}
	return (servers + slots - 1) / slots
}

// grow sizes a function whose service time is unknown: one replica when anything waits, and twice as many a second later,
// when all that were asked for are ready and the line has grown nevertheless.
func grow(f *plan.Function, now time.Time, past Past, ready, starting int, why *strings.Builder) (int, Past) {
	if f.Waiting == 0 && f.Running == 0 {
		why.WriteString("service time unknown, nothing waits")
		past.Line, past.Checked = 0, time.Time{}
		return 0, past
	}
	count := max(ready+starting, 1)
	fmt.Fprintf(why, "service time unknown, %d waiting: %d", f.Waiting, count)
	if starting > 0 || now.Sub(past.Checked) < growEvery {
		return count, past
	}
	if ready > 0 && f.Waiting > past.Line {
		count *= 2
		fmt.Fprintf(why, ", doubled to %d as the line has grown from %d", count, past.Line)
	}
	past.Line, past.Checked = f.Waiting, now
	return count, past
}

// hold adds p to the peaks and forgets those that hold no longer. The input is left as it was. There are never more peaks
// than different counts.
func (z Sizer) hold(peaks []Peak, p Peak) []Peak {
	out := make([]Peak, 0, len(peaks)+1)
	for _, old := range peaks {
		if p.At.Sub(old.At) < z.cfg.Hold && old.Count > p.Count {
			out = append(out, old)
		}
	}
	return append(out, p)
}

// waitTargets returns for each function of d how long its tasks may wait on average; 0: as long as the default says.
//
// A pipeline's objective less the service times of its stages is the time that may be spent waiting. Half of it is kept for
// the tail, because the target is a mean: in an M/M/c queue those who wait do so for longer than twice the mean with
// probability exp(−2) = 0.14. The rest is shared in proportion to service time. Stages with unknown service times count
// like the mean of the known ones; parallel branches count as if in a row, which is on the safe side. A stage of several
// pipelines gets the tightest target; one whose objective is out of reach a tenth of its service time.
func waitTargets(s *plan.Snapshot, d plan.Domain) []time.Duration {
	waits := make([]time.Duration, len(d.Functions))
	for _, name := range d.Pipelines {
		i, ok := slices.BinarySearchFunc(s.Pipelines, name, func(p plan.Pipeline, n string) int { return cmp.Compare(p.Name, n) })
		if !ok || s.Pipelines[i].SLO <= 0 {
			continue
		}
		p := s.Pipelines[i]
		var known, work time.Duration
		for _, stage := range p.Stages {
			if f, ok := s.Function(stage); ok && f.Service.Known {
				known++
				work += f.Service.Mean
			}
		}
		if work <= 0 {
			continue
		}
		ratio := max((p.SLO.Seconds()/(work/known*time.Duration(len(p.Stages))).Seconds()-1)/2, 0.1)
		for _, stage := range p.Stages {
			at, ok := slices.BinarySearch(d.Functions, stage)
			f, there := s.Function(stage)
			if !ok || !there || !f.Service.Known {
				continue
			}
			wait := max(time.Duration(ratio*float64(f.Service.Mean)), 1)
			if waits[at] == 0 || wait < waits[at] {
				waits[at] = wait
			}
		}
	}
	return waits
}

// short rounds a duration to three digits or so.
func short(d time.Duration) time.Duration {
	for unit := time.Second; unit > time.Microsecond; unit /= 10 {
		if d >= unit {
			return d.Round(unit / 100)
		}
	}
	return d
}
