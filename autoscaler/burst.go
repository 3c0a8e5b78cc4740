package autoscaler

import "math"

// Bursts are waited for once. What one lets through comes no faster than it serves, so that the next stage, if it serves as fast, has no
// line of them: the wait for a burst on a path is that at its slowest stage, and not a sum. Of deterministic tandem queues that is a
// theorem (Friedman, Reduction Methods for Tandem Queuing Systems, Operations Research 13, 1965), and network calculus has it as "pay
// bursts only once" (Le Boudec and Thiran, Network Calculus, 2001, §1.4.3). Waits by chance, of arrivals one by one and of services, add up.
//
// So Allen and Cunneen's factor (Ca²+Cs²)/2 is taken apart: of Ca² up to 1 makes waits by chance at each stage; the rest is bursts, whose
// wait behind λ a second at capacity C is (Ca²−1)/2·λ/(C(C−λ)), Kingman's for heavy traffic: that a burst is served by several servers
// makes it no shorter, so that Erlang's C has no part in it. Ca² is that of what enters the pipeline, as the stages behind see bursts that those
// before have flattened, which they will not when they have more replicas.

// bursty is what of a squared coefficient of variation is bursts, as a part of Allen and Cunneen's factor.
func bursty(ca2 float64) float64 { return max(ca2-1, 0) / 2 }

// payOnce tells each stage what bursts come to it, and how long they may wait. A pipeline's budget is divided as the factor is. A stage
// that has a call for each item sees larger bursts than what enters.
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

// entering is how bursty what enters p is.
func (m *model) entering(p *pipe) float64 {
	inner := make([]bool, len(p.steps))
	for _, e := range p.edges {
		inner[e.To] = true
	}
	out := 0.0
	for k, st := range p.steps {
		if st.at >= 0 && !inner[k] {
			out = max(out, bursty(m.stages[st.at].ca2))
		}
	}
	return out
}

// burstWait is the predicted mean wait for bursts, in seconds, with so many replicas.
func (g *stage) burstWait(replicas int) float64 {
	if !g.known || replicas <= 0 || !(g.lambda > 0) {
		return 0
	}
	capacity := float64(g.servers(replicas)) * g.mu
	rho := min(g.lambda/capacity, saturated)
	return min(g.bursts*rho/(capacity*(1-rho)), longest.Seconds())
}

// forBursts is the least count with which bursts wait no longer than they may.
func (g *stage) forBursts() int {
	if !g.known || g.patient < 0 {
		return 0
	}
	// The root of C² − λC − eλ/w.
	need := (g.lambda + math.Sqrt(g.lambda*g.lambda+4*g.bursts*g.lambda/g.patience)) / 2
	return g.replicas(need / g.mu)
}

// burstWaits is the longest burst wait on p.
func (m *model) burstWaits(p *pipe, counts []int) float64 {
	out := 0.0
	for _, st := range p.steps {
		if st.at >= 0 {
			out = max(out, m.stages[st.at].burstWait(counts[st.at]))
		}
	}
	return out
}
