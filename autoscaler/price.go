package autoscaler

import "math"

// MostPrice is the highest price of latency: see Config.Price.
const MostPrice = 1e6

// passing is the requests of one pipeline that pass through a stage.
type passing struct {
	rate float64 // requests per second
	// slack is by how many seconds a parallel branch of the pipeline takes longer. A wait within the
	// slack delays no request.
	slack float64
}

// pays returns, per stage, the largest count of replicas that the price justifies, limited by most.
// One more replica would save less than 1/price request-seconds of waiting per second. The count is
// 0 for a stage without a known service time or without requests, and for all stages if price is 0.
// A higher price never lowers a count.
//
// Each stage is judged alone, by the wait of its own measured arrivals. Fox's method, which
// allocate has, would give the same counts, because no stage's wait changes another stage's gain.
func (m *model) pays(price float64, most []int) []int {
	counts := make([]int, len(m.stages))
	if !(price > 0) {
		return counts
	}
	for i := range m.stages {
		g := &m.stages[i]
		if ways := m.passing(g); len(ways) > 0 && most[i] > 0 {
			counts[i] = g.pays(price, ways, most[i])
		}
	}
	return counts
}

// pays returns the smallest stable count whose next replica is not worth the price. It returns
// limit if there is none up to limit.
func (g *stage) pays(price float64, ways []passing, limit int) int {
	low := min(max(g.stable(), 1), limit)
	// The margin that square-root staffing (Halfin and Whitt 1981) adds to the load.
	guess := low + g.replicas(math.Sqrt(g.lambda*g.service))
	return searchFrom(low, min(guess, limit), limit, func(n int) bool {
		return price*(g.lateness(ways, n)-g.lateness(ways, n+1)) <= 1
	})
}

// passing returns the requests that pass through g, by pipeline. A stage that gets several calls
// per request counts the request once. A stage that gets only a part of a pipeline's requests, such
// as one of several lanes, counts this part. It returns nothing if g's service time is unknown.
func (m *model) passing(g *stage) []passing {
	if !g.known || !(g.lambda > 0) {
		return nil
	}
	out, sum := make([]passing, 0, len(g.in)), 0.0
	for _, at := range g.in {
		p := &m.pipes[at.pipe]
		way := passing{rate: m.enters(p)}
		if service := m.through(p, func(st *visit) float64 { return st.service }); len(p.edges) > 0 {
			way.slack = max(p.service-service[at.step], 0)
		}
		out, sum = append(out, way), sum+way.rate
	}
	for i := range out {
		out[i].rate *= min(g.lambda/sum, 1)
	}
	return out
}

// enters returns the requests per second that enter p.
func (m *model) enters(p *pipe) float64 {
	rate := 0.0
	for _, st := range p.steps {
		if st.at >= 0 && !st.inner {
			rate = max(rate, m.stages[st.at].lambda)
		}
	}
	return rate
}

// lateness returns the delay that waits at g cause with a number of replicas, in request-seconds
// per second. It is finite, and falls in replicas.
//
// A wait W delays a request by what exceeds its slack s. The wait of a task that waits is
// exponential with some rate r, so the mean of max(W−s, 0) is E[W]·exp(−r·s): see [WaitLaw]. r is
// that of GI/M/c, divided by the factor by which service times that are not exponential lengthen
// waits.
func (g *stage) lateness(ways []passing, replicas int) float64 {
	h := *g
	h.each = true // the wait of its own arrivals, bursts included
	mean := h.wait(replicas)
	if !(mean > 0) {
		return 0
	}
	rate, out := 0.0, 0.0
	for _, way := range ways {
		late := way.rate * mean
		if way.slack > 0 {
			if rate == 0 && replicas > 0 {
				c := g.servers(replicas)
				law := gammaWait(min(g.lambda, saturated*float64(c)*g.mu), g.mu, c, max(g.ca2, 1))
				rate = law.Rate / variability(1, g.cs2)
			}
			late *= math.Exp(-way.slack * rate)
		}
		out += late
	}
	return out
}
