package autoscaler

import (
	"math"
	"sort"
)

// This file predicts waits for bursts. A path waits for a burst only once, at its slowest stage.
// The reason is that the tasks of a burst leave a stage no faster than the stage serves them. If
// the next stage serves as fast, no line of these tasks forms there. For deterministic tandem
// queues, that is a theorem (Friedman, Reduction Methods for Tandem Queuing Systems, Operations
// Research 13, 1965). Network calculus calls it "pay bursts only once" (Le Boudec and Thiran,
// Network Calculus, 2001, §1.4.3). In contrast, waits by chance come from single arrivals and
// varying service times, and they add up over the stages.
//
// So the model splits waits. The part of Ca² up to 1 causes waits by chance at each stage. The part
// above 1 causes waits for bursts: the wait of GI/M/c with gamma gaps, less that of M/M/c. In heavy
// traffic it is (Ca²−1)/2·λ/(C(C−λ)) with λ arrivals per second and capacity C (Kingman).
//
// Ca² is measured where requests enter the pipeline. Later stages measure smaller bursts, because
// the earlier stages have flattened them. With more replicas, the earlier stages would flatten
// bursts less.

// bursty returns the burst part of Allen and Cunneen's factor for a squared coefficient of
// variation of arrivals.
func bursty(ca2 float64) float64 { return max(ca2-1, 0) / 2 }

// payOnce sets two fields of each stage: bursts, the burst part of Allen and Cunneen's factor, and
// patience, how long tasks may wait for bursts. It splits a pipeline's budget between waits for
// bursts and waits by chance, in proportion to their parts of the factor. A stage's bursts are the
// larger of two values: what the stage measures, and what enters its pipelines. A stage with one
// call per item measures larger bursts than enter.
func (m *model) payOnce() {
	for i := range m.stages {
		g := &m.stages[i]
		g.bursts, g.patient = bursty(g.ca2), -1
	}
	for k := range m.pipes {
		p := &m.pipes[k]
		entering := m.entering(p)
		for _, st := range p.steps {
			if st.at >= 0 {
				g := &m.stages[st.at]
				g.bursts = max(g.bursts, entering)
				p.bursts = max(p.bursts, g.bursts)
			}
		}
	}
	for k := range m.pipes {
		p := &m.pipes[k]
		p.patience = p.budget * p.bursts / (p.bursts + 1)
		for _, st := range p.steps {
			if st.at < 0 || p.patience <= 0 {
				continue
			}
			if g := &m.stages[st.at]; g.patient < 0 || p.patience < g.patience {
				g.patience, g.patient = p.patience, k
			}
		}
	}
}

// payAtEach undoes payOnce: each stage waits for its own bursts, and the waits add up.
func (m *model) payAtEach() {
	for i := range m.stages {
		g := &m.stages[i]
		g.bursts, g.patience, g.patient, g.each = 0, 0, -1, true
	}
	for k := range m.pipes {
		m.pipes[k].bursts, m.pipes[k].patience = 0, 0
	}
}

// entering returns how bursty the arrivals are that enter p.
func (m *model) entering(p *pipe) float64 {
	out := 0.0
	for _, st := range p.steps {
		if st.at >= 0 && !st.inner {
			out = max(out, bursty(m.stages[st.at].ca2))
		}
	}
	return out
}

// burstWait returns the predicted mean wait for bursts, in seconds, with this many replicas. Above
// the utilisation saturated, it is the wait at that utilisation.
func (g *stage) burstWait(replicas int) float64 {
	if !g.known || replicas <= 0 || !(g.lambda > 0) {
		return 0
	}
	c := g.servers(replicas)
	rate := min(g.lambda, saturated*float64(c)*g.mu)
	return min(burstExtra(rate, g.mu, c, 1+2*g.bursts), longest.Seconds())
}

// forBursts returns the smallest count with which waits for bursts are within the stage's patience.
// It returns limit if no count up to limit is enough.
func (g *stage) forBursts(limit int) int {
	if !g.known || g.patient < 0 || !(g.lambda > 0) {
		return 0
	}
	within := func(n int) bool { return g.burstWait(n) <= g.patience }
	// The root of C² − λC − eλ/w: the capacity with which Kingman's wait is w.
	guess := g.replicas((g.lambda + math.Sqrt(g.lambda*g.lambda+4*g.bursts*g.lambda/g.patience)) / 2 / g.mu)
	return searchFrom(min(max(g.stable(), 1), limit), guess, limit, within)
}

// searchFrom returns the smallest n from low to limit for which within is true, or limit if there
// is none. within must stay true for larger n. The search takes few steps if guess is near the
// result.
func searchFrom(low, guess, limit int, within func(int) bool) int {
	high, step := min(max(guess, low), limit), 1
	for high < limit && !within(high) {
		low, high, step = high+1, min(limit-high, step)+high, 2*step
	}
	if step == 1 { // the guess is enough, or the limit
		for ; low < high; step *= 2 {
			next := max(high-step, low)
			if !within(next) {
				low = next + 1
				break
			}
			high = next
		}
	}
	return low + sort.Search(high-low, func(k int) bool { return within(low + k) })
}

// burstWaits returns the longest burst wait on p.
func (m *model) burstWaits(p *pipe, counts []int) float64 {
	out := 0.0
	for _, st := range p.steps {
		if st.at >= 0 {
			out = max(out, m.stages[st.at].burstWait(counts[st.at]))
		}
	}
	return out
}
