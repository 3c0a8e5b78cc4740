package autoscaler

import (
	"fmt"
	"math"
	"sort"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// GreedyMix is a plan.Mixer. It answers as accurately as the budget allows: it gives replicas to
// accurate variants, and uses cheaper ones for what those cannot serve. Build it with
// [NewGreedyMix].
//
// It makes a series of mixes, which does not depend on the budget. The first one has the fewest
// replicas that functions may have. Each next one adds replicas to one variant:
//
//  1. As long as some requests are not served in time, the variant is the one with which one more
//     replica serves the most of them.
//  2. Then it is the one with which one more replica makes answers most accurate.
//
// After each step, replicas that have become useless are taken back. The last mix that fits the
// budget is the decision, so a larger budget never makes answers less accurate. A second series
// uses no variants on devices, if there are others, for domains that have no devices.
//
// How much a variant can serve in time is predicted as for the [Sizer], with Erlang's C. Chains of
// variants that are too slow together are excluded: see [mixing.exclude].
//
// The method knows lengths, joins and waits. [Accuracy] finds better mixes where it applies.
type GreedyMix struct{ sizer Sizer }

// NewGreedyMix returns a GreedyMix.
func NewGreedyMix(cfg Config) GreedyMix { return GreedyMix{NewSizer(cfg)} }

// Merge joins the memories of two domains that have become one.
func (z GreedyMix) Merge(a, b Memory) Memory { return z.sizer.Merge(a, b) }

// mostMixes bounds the length of a series.
const mostMixes = 400

// Mix implements plan.Mixer.
func (z GreedyMix) Mix(s plan.Snapshot, d plan.Domain, b plan.Budget, m Memory) (plan.Mix, Memory, error) {
	mx, err := newMixing(&s, d, z.sizer.cfg.meanPart())
	if err != nil {
		return plan.Mix{}, m, err
	}
	pasts := make([]Past, len(mx.lanes))
	for i := range mx.lanes {
		l := &mx.lanes[i]
		if past := m[l.f.Name]; past != nil {
			pasts[i] = *past
		}
		l.bound(&pasts[i], &b, s)
	}
	counts, e := mx.best(&b)
	out, next := plan.Mix{}, make(Memory, len(mx.lanes))
	out.Tables, out.Excluded = mx.tables(&s, d, counts, e)
	held := mx.hold(z.sizer, counts, pasts, &b, s)
	for _, at := range mx.order {
		l := &mx.lanes[at]
		why := fmt.Sprintf("%.4g/s of %.4g/s, each %v, with accuracy %.4g: %d", e.flow[at], mx.stages[l.of].rate, short(toDuration(l.service)), l.f.Accurate(), counts[at])
		if held[at] > counts[at] {
			why += fmt.Sprintf("; held at %d", held[at])
		}
		out.Alloc = append(out.Alloc, plan.Line{Function: l.f.Name, Count: held[at], Batch: max(l.f.Batch, 1), Why: why})
		next[l.f.Name] = &pasts[at]
	}
	return out, next, nil
}

// bound sets the fewest and the most replicas that a lane may get.
func (l *mixLane) bound(past *Past, b *plan.Budget, s plan.Snapshot) {
	if past.Seen.IsZero() || past.Seen.After(s.At) {
		past.Seen = s.At
	}
	if l.f.Expected > 0 || past.Expected.After(s.At) {
		past.Expected = s.At
	}
	l.most = b.AtMost(l.f)
	l.least, _ = floor(l.f, s.At, past)
	l.least = min(l.least, l.most)
}

// best returns the replicas of each lane, and what they serve.
func (m *mixing) best(b *plan.Budget) ([]int, effect) {
	functions := make([]*plan.Function, len(m.lanes))
	devices, without := 0, 0
	for i := range m.lanes {
		functions[i] = m.lanes[i].f
		if functions[i].GPU > 0 {
			devices++
		} else {
			without++
		}
	}
	counts := m.last(functions, b, func(*mixLane) bool { return true })
	e := m.effect(counts)
	if devices == 0 || without == 0 {
		return counts, e
	}
	other := m.last(functions, b, func(l *mixLane) bool { return l.f.GPU == 0 })
	if oe := m.effect(other); oe.above(e) {
		return other, oe
	}
	return counts, e
}

// last returns the last mix of a series that fits the budget, or the first mix if none does. The
// series adds replicas to the lanes that may grow.
func (m *mixing) last(functions []*plan.Function, b *plan.Budget, grows func(*mixLane) bool) []int {
	counts := make([]int, len(m.lanes))
	for i := range m.lanes {
		counts[i] = m.lanes[i].least
	}
	best := append([]int(nil), counts...)
	e := m.effect(counts)
	for range mostMixes {
		lane, by := m.step(counts, e, grows)
		if lane < 0 {
			break
		}
		counts[lane] += by
		e = m.effect(counts)
		m.trim(counts, e, lane)
		if b.Exceeded(functions, counts) == "" {
			copy(best, counts)
		}
	}
	return best
}

// step returns the lane that gets the next replicas, and how many. It returns -1 if no lane
// improves the mix. Lanes with many replicas get several at once, so that series are short.
func (m *mixing) step(counts []int, is effect, grows func(*mixLane) bool) (lane, by int) {
	lane = -1
	most := 0.0
	serving := false // a lane serves more requests; then accuracy alone does not count
	for i := range m.lanes {
		l := &m.lanes[i]
		n := min(1+counts[i]/8, l.most-counts[i])
		if n <= 0 || !grows(l) || m.stages[l.of].rate <= 0 {
			continue
		}
		counts[i] += n
		with := m.effect(counts)
		counts[i] -= n
		served, value := (with.served-is.served)/float64(n), (with.value-is.value)/float64(n)
		switch {
		case served > negligibleGain && (!serving || served > most):
			lane, by, most, serving = i, n, served, true
		case !serving && served > -negligibleGain && value > max(most, negligibleGain):
			lane, by, most = i, n, value
		}
	}
	return lane, by
}

// negligibleGain is a part of requests, or of their accuracy, that is worth no replica.
const negligibleGain = 1e-9

// trim takes back replicas without which the mix is as good. The lane that has just grown keeps its
// replicas, so that a series ends.
func (m *mixing) trim(counts []int, is effect, grown int) {
	for i := range m.lanes {
		n := counts[i] - m.lanes[i].least
		if n <= 0 || i == grown {
			continue
		}
		had := counts[i]
		useless := sort.Search(n, func(k int) bool { // the fewest that cannot be taken, minus one
			counts[i] = had - k - 1
			return is.above(m.effect(counts))
		})
		counts[i] = had - useless
	}
}

// hold returns the counts, or larger ones that the past still holds and the budget allows. It
// records the counts in the past.
func (m *mixing) hold(z Sizer, counts []int, pasts []Past, b *plan.Budget, s plan.Snapshot) []int {
	functions, out := make([]*plan.Function, len(m.lanes)), append([]int(nil), counts...)
	for i := range m.lanes {
		functions[i] = m.lanes[i].f
	}
	for i := range m.lanes {
		pasts[i].Peaks = z.hold(pasts[i].Peaks, Peak{s.At, counts[i]}, nil)
		if top := min(pasts[i].Peaks[0].Count, m.lanes[i].most); top > out[i] {
			had := out[i]
			out[i] = top
			if b.Exceeded(functions, out) != "" {
				out[i] = had
			}
		}
	}
	return out
}

// effect is what a mix does.
type effect struct {
	served float64 // sum over stages of the part of requests that is served in time
	value  float64 // sum over stages of the accuracy; requests that are not served in time count 0
	flow   []float64
	rows   [][]float64 // by stage: of each source and class, the flow to each lane
}

// above reports whether e is clearly better than other.
func (e effect) above(other effect) bool {
	if math.Abs(e.served-other.served) > negligibleGain {
		return e.served > other.served
	}
	return e.value > other.value+negligibleGain
}
