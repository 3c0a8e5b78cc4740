package autoscaler

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// The defaults of Config.
const (
	DrainWithin = 2 * time.Second
	Hold        = 10 * time.Second
	Panic       = time.Minute // Knative's stable window
	Attainment  = 0.99
)

const (
	// growEvery is how often a function with an unknown service time may double.
	growEvery = time.Second
	// panicAt is the size of a burst: arrivals are a burst if they need at least this many times the
	// ready replicas, as in Knative.
	panicAt = 2
	// mostPart bounds the part of the time to wait that mean waits may take. It matters if few
	// requests have to be in time.
	mostPart = 100
)

// Config holds the operator's settings. A zero field means its default.
type Config struct {
	DrainWithin time.Duration // a waiting line should be gone after this time
	Hold        time.Duration // a count is lowered only after it was too high for this long
	Panic       time.Duration // a count is not lowered for this long after a sudden burst
	Attainment  float64       // the share of requests that should be in time, below 1

	// Price is what one second of one request's latency is worth, in replica-seconds. The Sizer
	// adds a replica if that saves at least 1/Price request-seconds of waiting per second. 0:
	// latency below the objectives is worth nothing. Values outside 0 to MostPrice count as 0.
	Price float64

	// NoBurst and NoFollow switch parts off, to measure what each part is worth. With NoBurst, each
	// stage waits for the bursts that it measures, and these waits add up along a path. With
	// NoFollow, a stage starts replicas for the arrivals that it measures, and not for those that
	// the stages before it are about to send.
	NoBurst, NoFollow bool
}

// Sizer is a plan.Allocator. It gives a domain the fewest replicas that serve the measured load,
// drain what already waits, and keep the mean waits of its pipelines short enough for their
// objectives. With a price of latency, it adds the replicas that are worth more than they cost.
// Build it with [NewSizer].
type Sizer struct{ cfg Config }

// NewSizer returns a Sizer.
func NewSizer(cfg Config) Sizer {
	cfg.DrainWithin = cmp.Or(cfg.DrainWithin, DrainWithin)
	cfg.Hold = cmp.Or(cfg.Hold, Hold)
	cfg.Panic = cmp.Or(cfg.Panic, Panic)
	if !(cfg.Attainment > 0 && cfg.Attainment < 1) {
		cfg.Attainment = Attainment
	}
	if !(cfg.Price > 0 && cfg.Price <= MostPrice) {
		cfg.Price = 0
	}
	return Sizer{cfg}
}

// meanPart returns the part of the time to wait that mean waits may take. With this part, at most a
// share 1 − Attainment of the tasks waits longer than the whole time. The reason is that an
// exponential wait with mean W exceeds a time t with probability exp(−t/W).
func (c Config) meanPart() float64 { return min(-1/math.Log1p(-c.Attainment), mostPart) }

// Memory is what the Sizer remembers, by function. A Past is never changed.
type Memory map[string]*Past

// Past is what the Sizer remembers of one function.
type Past struct {
	Seen    time.Time // when the function was first seen; if it was never used, it is idle since then
	Checked time.Time // when Line was measured, to decide on growth without a known service time
	Line    int       // tasks that waited at Checked
	// counts that may still hold, sorted: later ones are newer and lower; the first one holds
	Peaks   []Peak
	Learned Learned `json:",omitzero"`
	// when a burst was last seen, and the largest count since it began
	Burst Peak `json:",omitzero"`
	// Expected is the last time when requests were on their way to the function. That time counts
	// as use of the function: see floor.
	Expected time.Time `json:",omitzero"`
}

// Peak is a count that the load asked for, and when.
type Peak struct {
	At    time.Time
	Count int
}

// within reports whether p is at most d older than now. A peak in the future means that the clock
// was set back; it does not hold.
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
	if z.cfg.NoBurst {
		mod.payAtEach()
	}
	if mod.connect(); !z.cfg.NoFollow {
		mod.follow(m)
	}
	n := len(mod.stages)
	needs, pasts, held := make([]need, n), make([]Past, n), n
	least, most := make([]int, n), make([]int, n)
	const usual = 192 // bytes of text
	texts := make(text, usual*n)
	for i := range mod.stages {
		if past := m[d.Functions[i]]; past != nil {
			pasts[i] = *past
			held += len(past.Peaks)
		}
		needs[i].why, needs[i].past = texts[usual*i:usual*i:usual*(i+1)], &pasts[i]
		z.alone(&needs[i], &mod.stages[i], s.At)
		least[i], most[i] = needs[i].count, needs[i].most
	}
	peaks := make([]Peak, held)
	counts, by, wait := mod.allocate(least, most)
	ahead := make([]int, n)
	if !z.cfg.NoFollow {
		ahead = mod.ahead(needs, z.cfg.DrainWithin.Seconds())
	}
	worth := mod.pays(z.cfg.Price, most)
	for i := range needs {
		if by[i] >= 0 {
			needs[i].why.add(", ").num(counts[i]).add(" for ").add(mod.pipes[by[i]].objective())
		}
		count := max(counts[i], ahead[i])
		if count > counts[i] {
			needs[i].why.add(", ").num(count).add(" for what is held up before it")
		}
		if extra := worth[i] - count; extra > 0 {
			count = worth[i]
			needs[i].why.add(", ").num(count).add(" with ").num(extra).add(" for the price")
		}
		room := len(pasts[i].Peaks) + 1
		count = z.keep(&needs[i], s.At, count, peaks[:0:room])
		if peaks = peaks[room:]; count != counts[i] {
			counts[i], wait[i] = count, 0
			if count > 0 {
				wait[i] = mod.stages[i].wait(count)
			}
		}
	}
	for i, missed := range mod.unmet(counts, wait) {
		needs[i].why.add(missed).add("; was ").num(needs[i].was).add("; max ").num(needs[i].max)
	}
	alloc, next, why := make(plan.Alloc, n), make(Memory, n), joined(needs)
	for i := range needs {
		f := mod.stages[i].f
		length := len(needs[i].why)
		alloc[i] = plan.Line{Function: f.Name, Count: counts[i], Worth: worth[i], Batch: max(f.Batch, 1), Why: why[:length]}
		why = why[length:]
		pasts[i].Learned = pasts[i].Learned.update(mod, i, s.At)
		next[f.Name] = &pasts[i]
	}
	return alloc, next, nil
}

// need is what one function needs apart from its pipelines.
type need struct {
	count, most, max int // most: the largest count that pipelines may give it; max: its bound
	was              int // replicas that are ready or starting
	idle             bool
	burst            bool // arrivals need panicAt times the ready replicas
	why              text
	past             *Past // the previous one, later the one to remember
}

// alone sets what a function needs by itself: for its load, for its line, and by its owner's
// settings.
func (z Sizer) alone(n *need, g *stage, now time.Time) {
	f, past := g.f, n.past
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
		*past = Past{Seen: past.Seen, Learned: past.Learned}
		return
	}
	if n.most = n.max; g.known {
		n.count = z.byLoad(g, ready, &n.why)
		n.burst = g.replicas(g.lambda/g.mu) >= panicAt*max(ready, 1)
	} else {
		n.count = grow(f, now, past, ready, starting, &n.why)
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
	n.count = min(n.count, n.max)
}

// keep returns count, or a larger count that the past still holds, and records count in the past.
// room is memory for one more peak than the past has.
func (z Sizer) keep(n *need, now time.Time, count int, room []Peak) int {
	if n.idle {
		return count
	}
	out := count
	n.past.Peaks = z.hold(n.past.Peaks, Peak{now, count}, room)
	if top := n.past.Peaks[0]; min(top.Count, n.max) > out {
		out = min(top.Count, n.max)
		n.why.add("; held at ").num(out).add(", as asked for ").add(now.Sub(top.At).Round(100 * time.Millisecond).String()).add(" ago")
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
		n.why.add("; not below ").num(out).add(" for a burst ").add(now.Sub(burst.At).Round(100 * time.Millisecond).String()).add(" ago")
	}
	return out
}

// floor returns the fewest replicas that f's settings and its past allow, and whether f sleeps. A
// function that may sleep does so when it was not used for ZeroAge. Its latest use is its latest
// task, or the last time that a request was on its way to it. A function that was never used sleeps
// ZeroAge after it was first seen. Until it sleeps, a function that was used keeps at least one
// replica.
func floor(f *plan.Function, now time.Time, past *Past) (least int, idle bool) {
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

// byLoad returns the larger of two counts: the replicas that serve all arrivals, and the replicas
// that drain the waiting line in time. c servers take c·μ − λ tasks per second off the line. A slot
// is a server. The service time is a task's share of its batch's time, so larger batches count as
// faster servers.
//
// New replicas help only once they have started. So the line counts with its growth until then, and
// the time that is allowed for draining it is DrainWithin or the start time, whichever is longer.
func (z Sizer) byLoad(g *stage, ready int, why *text) int {
	why.add("λ=").float(g.lambda).add("/s μ=").float(g.mu).add("/s")
	if g.f.Demand.CV > 0 {
		why.add(" Ca²=").float(g.ca2)
	}
	if g.latency > g.service {
		why.add(", a batch takes ").add(short(toDuration(g.latency)).String())
	}
	count := g.stable()
	why.add(": ").num(count).add(" for stability")
	if g.waiting > 0 {
		start := startTime(g.f.Starts)
		within := max(z.cfg.DrainWithin.Seconds(), start)
		line := float64(g.waiting) + max(g.lambda-float64(g.servers(ready))*g.mu, 0)*start
		// More servers than tasks do not make the line shorter.
		servers := min((g.lambda+line/within)*g.service, line+float64(max(g.f.Running, 0)))
		if drain := g.replicas(servers); drain > count {
			count = drain
			why.add(", ").num(count).add(" to drain ").num(g.waiting).add(" waiting in ").add(short(toDuration(within)).String())
		}
	}
	return count
}

// startTime returns the mean start time of replicas in seconds; 0: unknown.
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

// byTarget returns the replicas that OpenFaaS's scale target asks for; 0: there is no target.
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

// grow returns the count of a function whose service time is unknown: 0 if no task waits or runs,
// else at least one. It doubles the count, at most once per second, if all requested replicas are
// ready and the line has grown since the last check.
func grow(f *plan.Function, now time.Time, past *Past, ready, starting int, why *text) int {
	if f.Waiting == 0 && f.Running == 0 {
		why.add("service time unknown, nothing waits")
		past.Line, past.Checked = 0, time.Time{}
		return 0
	}
	count := max(ready+starting, 1)
	why.addf("service time unknown, %d waiting: %d", f.Waiting, count)
	if starting > 0 || (Peak{At: past.Checked}).within(growEvery, now) {
		return count
	}
	if ready > 0 && f.Waiting > past.Line {
		count *= 2
		why.addf(", doubled to %d as the line has grown from %d", count, past.Line)
	}
	past.Line, past.Checked = f.Waiting, now
	return count
}

// hold returns the peaks that still hold, followed by p. It does not change peaks. The result uses
// room if it fits. It never has more peaks than there are different counts.
func (z Sizer) hold(peaks []Peak, p Peak, room []Peak) []Peak {
	for _, old := range peaks {
		if old.within(z.cfg.Hold, p.At) && old.Count > p.Count {
			room = append(room, old)
		}
	}
	return append(room, p)
}

// short rounds a duration to about three digits.
func short(d time.Duration) time.Duration {
	for unit := time.Second; unit > time.Microsecond; unit /= 10 {
		if d >= unit {
			return d.Round(unit / 100)
		}
	}
	return d
}

// text builds a line for the operator. A decision writes thousands of lines, so the parts that
// every line has are written without package fmt.
type text []byte

// joined returns the texts of all needs in one string, one after the other.
func joined(needs []need) string {
	var b strings.Builder
	length := 0
	for i := range needs {
		length += len(needs[i].why)
	}
	b.Grow(length)
	for i := range needs {
		b.Write(needs[i].why)
	}
	return b.String()
}

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
