package autoscaler

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"strconv"
	"time"

	"github.com/stagecoach-serving/stagecoach/plan"
)

// The defaults of Config.
const (
	DrainWithin = 2 * time.Second
	Hold        = 10 * time.Second
	Panic       = time.Minute // as Knative's stable window
	Attainment  = 0.99
)

const (
	// growEvery is how often a function with an unknown service time may double.
	growEvery = time.Second
	// panicAt times what is ready, asked for by what arrives, is a burst, as in Knative.
	panicAt = 2
	// mostPart bounds what mean waits may take of the time to wait, where few requests have to be in time.
	mostPart = 100
)

// Config is what an operator may set. A zero field means its default.
type Config struct {
	DrainWithin time.Duration // a standing line should be gone after this long
	Hold        time.Duration // a count is not lowered before it was too high for this long
	Panic       time.Duration // nor for this long after a sudden burst
	Attainment  float64       // the part of requests that should be in time, below 1
}

// Sizer is a plan.Allocator that gives a domain the least number of replicas that keeps the mean waits of its pipelines within what
// their objectives leave at the measured load, and drains what already waits. Build it with [NewSizer].
type Sizer struct{ cfg Config }

// NewSizer returns a Sizer.
func NewSizer(cfg Config) Sizer {
	cfg.DrainWithin = cmp.Or(cfg.DrainWithin, DrainWithin)
	cfg.Hold = cmp.Or(cfg.Hold, Hold)
	cfg.Panic = cmp.Or(cfg.Panic, Panic)
	if !(cfg.Attainment > 0 && cfg.Attainment < 1) {
		cfg.Attainment = Attainment
	}
	return Sizer{cfg}
}

// meanPart is the part of the time to wait that mean waits may take, if that is not to be passed by more than 1 − Attainment: a wait
// that is exponential with mean W passes it with probability exp(−slack/W).
func (c Config) meanPart() float64 { return min(-1/math.Log1p(-c.Attainment), mostPart) }

// Memory is what the Sizer remembers, by function.
type Memory map[string]Past

// Past is what the Sizer remembers of one function.
type Past struct {
	Seen    time.Time // first seen: a function that was never asked is idle since then
	Checked time.Time // when Line was looked at to decide on growth without a known service time
	Line    int       // tasks that waited then
	Peaks   []Peak    // the counts that may still hold: newer and lower to the end; the first one holds
	Learned Learned   `json:",omitzero"`
	Burst   Peak      `json:",omitzero"` // when a burst was last seen, and the largest count since it began
	// Expected is the last time when requests were on their way here. It counts as use, see floor.
	Expected time.Time `json:",omitzero"`
}

// Peak is a count that the load asked for, and when.
type Peak struct {
	At    time.Time
	Count int
}

// within says that p is of the last d before now. What lies in the future is of a clock that was set back: it does not hold.
func (p Peak) within(d time.Duration, now time.Time) bool {
	age := now.Sub(p.At)
	return 0 <= age && age < d
}

// Merge joins the memories of two domains that have become one.
func (Sizer) Merge(a, b Memory) Memory {
	m := make(Memory, len(a)+len(b))
	maps.Copy(m, a)
	maps.Copy(m, b)
	return m
}

// Allocate implements plan.Allocator.
func (z Sizer) Allocate(s plan.Snapshot, d plan.Domain, m Memory) (plan.Alloc, Memory, error) {
	mod, err := newModel(&s, d, z.cfg.meanPart())
	if err != nil {
		return nil, m, err
	}
	mod.connect()
	mod.follow(m)
	n := len(mod.stages)
	needs, least, most := make([]need, n), make([]int, n), make([]int, n)
	const usual = 192 // bytes of text
	texts := make(text, usual*n)
	for i := range mod.stages {
		needs[i].why = texts[usual*i : usual*i : usual*(i+1)]
		z.alone(&needs[i], &mod.stages[i], s.At, m[d.Functions[i]])
		least[i], most[i] = needs[i].count, needs[i].most
	}
	counts, by := mod.allocate(least, most)
	ahead := mod.ahead(needs, z.cfg.DrainWithin.Seconds())
	for i := range needs {
		if by[i] >= 0 {
			needs[i].why.add(", ").num(counts[i]).add(" for ").add(mod.pipes[by[i]].objective())
		}
		if ahead[i] > counts[i] {
			counts[i] = ahead[i]
			needs[i].why.add(", ").num(counts[i]).add(" for what is held up before it")
		}
		counts[i] = z.keep(&needs[i], s.At, counts[i])
	}
	alloc, next := make(plan.Alloc, n), make(Memory, n)
	unmet := mod.unmet(counts)
	for i := range needs {
		f, n := mod.stages[i].f, &needs[i]
		n.why.add(unmet[i]).add("; was ").num(n.was).add("; max ").num(n.max)
		alloc[i] = plan.Line{Function: f.Name, Count: counts[i], Batch: max(f.Batch, 1), Why: string(n.why)}
		n.past.Learned = n.past.Learned.update(mod, i, s.At)
		next[f.Name] = n.past
	}
	return alloc, next, nil
}

// need is what one function needs whatever its pipelines say.
type need struct {
	count, most, max int // most: that pipelines may give it; max: its bound
	was              int // replicas that serve or start
	idle             bool
	burst            bool // what arrives needs panicAt times what is ready
	why              text
	past             Past // to be remembered
}

// alone sets what a function needs by itself: what its load and its line ask for, and its owner.
func (z Sizer) alone(n *need, g *stage, now time.Time, past Past) {
	f := g.f
	if past.Seen.IsZero() || past.Seen.After(now) {
		past.Seen = now
	}
	ready, starting := f.Current()
	_, n.max = f.Bounds()
	n.was = ready + starting
	if f.Expected > 0 || past.Expected.After(now) {
		past.Expected = now
	}
	var least int
	if least, n.idle = floor(f, now, past); n.idle {
		n.why.addf("nothing asked for %v: none", f.ZeroAge)
		n.past = Past{Seen: past.Seen, Learned: past.Learned}
		return
	}
	if n.most = n.max; g.known {
		n.count = z.byLoad(g, ready, &n.why)
		n.burst = g.replicas(g.lambda/g.mu) >= panicAt*max(ready, 1)
	} else {
		n.count, past = grow(f, now, past, ready, starting, &n.why)
	}
	if byTarget := g.byTarget(); byTarget > 0 {
		n.why.addf(", %d for %.4g %s at %.4g a replica", byTarget, f.Target.Load, f.Target.Type, f.Target.Value)
		n.count = max(n.count, byTarget)
	}
	if n.count < least {
		n.why.addf("; at least %d", least)
		if f.Expected > 0 {
			n.why.addf(" for %d requests on their way", f.Expected)
		}
		n.count = least
	}
	n.count, n.past = min(n.count, n.max), past
}

// keep returns the count with what the past asks for, and puts count into the past.
func (z Sizer) keep(n *need, now time.Time, count int) int {
	if n.idle {
		return count
	}
	out := count
	n.past.Peaks = z.hold(n.past.Peaks, Peak{now, count})
	if top := n.past.Peaks[0]; min(top.Count, n.max) > out {
		out = min(top.Count, n.max)
		n.why.addf("; held at %d, as asked for %v ago", out, now.Sub(top.At).Round(100*time.Millisecond))
	}
	burst := n.past.Burst
	if !burst.within(z.cfg.Panic, now) {
		burst = Peak{}
	}
	if n.burst {
		burst = Peak{now, max(count, burst.Count)}
	}
	if n.past.Burst = burst; min(burst.Count, n.max) > out {
		out = min(burst.Count, n.max)
		n.why.addf("; not below %d for a burst %v ago", out, now.Sub(burst.At).Round(100*time.Millisecond))
	}
	return out
}

// floor returns the fewest replicas that f's owner and its past allow, and whether f sleeps. A
// function that may sleep does so ZeroAge after it was last used: after its latest task, or after
// the last time that a request was on its way to it. If it was never used, it sleeps ZeroAge after
// it was first seen. Until it sleeps, a function that was used keeps at least one replica.
func floor(f *plan.Function, now time.Time, past Past) (least int, idle bool) {
	least, _ = f.Bounds()
	if !f.Zero {
		return least, false
	}
	busy := f.Waiting > 0 || f.Running > 0 || f.Expected > 0
	used := f.Demand.Last
	if past.Expected.After(used) {
		used = past.Expected
	}
	since := past.Seen
	if used.After(since) {
		since = used
	}
	switch {
	case !busy && now.Sub(since) >= f.ZeroAge:
		return 0, true
	case !busy && used.IsZero():
		return min(f.Min, f.Max), false
	}
	return min(max(f.Min, 1), max(f.Max, 1)), false
}

// byLoad returns the replicas that serve what arrives, and, if those are more, that drain what waits: c servers take c·μ − λ tasks a
// second off the line. A slot is a server; the service time is a task's share of its batch's, so that a batch that pays shows as
// a faster server. What the line grows by until a replica has started counts as well, and it need not be gone before.
func (z Sizer) byLoad(g *stage, ready int, why *text) int {
	why.add("λ=").float(g.lambda).add("/s μ=").float(g.mu).add("/s")
	if g.f.Demand.CV > 0 {
		why.add(" Ca²=").float(g.ca2)
	}
	count := g.stable()
	why.add(": ").num(count).add(" for stability")
	if g.waiting > 0 {
		start := startTime(g.f.Starts)
		within := max(z.cfg.DrainWithin.Seconds(), start)
		line := float64(g.waiting) + max(g.lambda-float64(g.servers(ready))*g.mu, 0)*start
		// More servers than tasks would not make the line shorter.
		servers := min((g.lambda+line/within)*g.service, line+float64(max(g.f.Running, 0)))
		if drain := g.replicas(servers); drain > count {
			count = drain
			why.addf(", %d to drain %d waiting in %v", count, g.waiting, short(toDuration(within)))
		}
	}
	return count
}

// startTime returns the mean time in seconds that a replica took to start; 0: unknown.
func startTime(starts []plan.Start) float64 {
	var n, sum float64
	for _, s := range starts {
		if s.N > 0 && s.Mean > 0 {
			n, sum = n+float64(s.N), sum+float64(s.N)*s.Mean.Seconds()
		}
	}
	if n == 0 {
		return 0
	}
	return sum / n
}

// byTarget returns the replicas that OpenFaaS's way to scale asks for; 0: none.
func (g *stage) byTarget() int {
	t := g.f.Target
	if t.Type == "" || !t.Known || !(t.Load > 0) || !(t.Value > 0) {
		return 0
	}
	if n := math.Ceil(t.Load / t.Value); n < math.MaxInt32 {
		return int(n)
	}
	return math.MaxInt32
}

// grow sizes a function whose service time is unknown: one replica when anything waits, and twice as many a second later,
// when all that were asked for are ready and the line has grown nevertheless.
func grow(f *plan.Function, now time.Time, past Past, ready, starting int, why *text) (int, Past) {
	if f.Waiting == 0 && f.Running == 0 {
		why.add("service time unknown, nothing waits")
		past.Line, past.Checked = 0, time.Time{}
		return 0, past
	}
	count := max(ready+starting, 1)
	why.addf("service time unknown, %d waiting: %d", f.Waiting, count)
	if starting > 0 || (Peak{At: past.Checked}).within(growEvery, now) {
		return count, past
	}
	if ready > 0 && f.Waiting > past.Line {
		count *= 2
		why.addf(", doubled to %d as the line has grown from %d", count, past.Line)
	}
	past.Line, past.Checked = f.Waiting, now
	return count, past
}

// hold adds p to the peaks and forgets those that hold no longer. The input is left as it was. There are never more peaks
// than different counts.
func (z Sizer) hold(peaks []Peak, p Peak) []Peak {
	out := make([]Peak, 0, len(peaks)+1)
	for _, old := range peaks {
		if old.within(z.cfg.Hold, p.At) && old.Count > p.Count {
			out = append(out, old)
		}
	}
	return append(out, p)
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

// text is a line for the operator as it is written. A decision writes thousands: what each has is put in without package fmt.
type text []byte

func (t *text) add(s string) *text {
	*t = append(*t, s...)
	return t
}

func (t *text) num(n int) *text {
	*t = strconv.AppendInt(*t, int64(n), 10)
	return t
}

func (t *text) float(v float64) *text {
	*t = strconv.AppendFloat(*t, v, 'f', 1, 64)
	return t
}

func (t *text) addf(format string, args ...any) { *t = fmt.Appendf(*t, format, args...) }
