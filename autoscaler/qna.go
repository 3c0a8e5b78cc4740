package autoscaler

import "math"

// Predictor says how bursty arrivals at each station of a network will be: [Persistence], which is the default, [QNA] or [Attention]. On
// simulations that were held back the first and the last are as good, and QNA is worse (docs/adr/0045).
type Predictor interface {
	// Predict returns the squared coefficient of variation of the times between arrivals, a station each: positive and finite.
	Predict(n Network) []float64
}

// Network is a set of stations that feed each other.
type Network struct {
	Stations []Station
	Links    []Link // sorted by From, then To
}

// Station is a function as a queueing network sees it.
type Station struct {
	Rate    float64 // of arrivals, a second; 0: not known
	Servers int     // slots of all replicas; at least 1
	Rho     float64 // their utilisation; 0 to 1
	CS2     float64 // squared coefficient of variation of service times
	CA2     float64 // the same of times between arrivals as measured; 0: not known
	Factor  float64 // measured over predicted CA2, so far; 0: not known
}

// Link says that what leaves one station arrives at another.
type Link struct{ From, To int }

// The bounds of squared coefficients of variation: those of a few arrivals can be anything.
const (
	leastC2   = 0.01
	mostC2    = 64 // a CV of 8, the largest that QUART looks at
	unknownC2 = 1  // as of exponential times
)

// QNA predicts by Whitt's Queueing Network Analyzer (Bell System Technical Journal 62(9), 1983): what enters a network is measured,
// and what happens to its burstiness on the way is computed, station by station. A station's factor, which is learned from its own
// measurements, makes up for what the formulas leave out.
//
// QUART learns this from features of neighbours: see [Attention].
type QNA struct{}

// passes bounds the work on networks with cycles, which pipelines in opposite directions make. Others need one, in topological order.
const passes = 20

// Predict implements Predictor.
func (QNA) Predict(n Network) []float64 {
	out := make([]float64, len(n.Stations))
	into := make([][]int, len(n.Stations))
	for i, s := range n.Stations {
		out[i] = knownC2(s.CA2)
	}
	for k, l := range n.Links {
		into[l.To] = append(into[l.To], k)
	}
	order, cyclic := n.order()
	for range passes {
		moved := 0.0
		for _, i := range order {
			if len(into[i]) == 0 {
				continue
			}
			c2 := n.arriving(i, into[i], out)
			moved = max(moved, math.Abs(c2-out[i]))
			out[i] = c2
		}
		if !cyclic || moved < 1e-6 {
			break
		}
	}
	return out
}

// arriving superposes what comes from the stations before i and what enters the network there.
func (n Network) arriving(i int, links []int, c2 []float64) float64 {
	s := n.Stations[i]
	var rate, sum float64
	for _, k := range links {
		from := n.Stations[n.Links[k].From]
		// A stage that is called for each request gets all of what its predecessor lets go; one that is not, a part.
		share := 1.0
		if s.Rate > 0 && from.Rate > s.Rate {
			share = s.Rate / from.Rate
		}
		flow := max(from.Rate*share, 1e-9)
		rate += flow
		sum += flow * Split(Departure(c2[n.Links[k].From], from.CS2, from.Rho, from.Servers), share)
	}
	out := sum / rate
	if s.Factor > 0 {
		out *= s.Factor
	}
	return clamp(out, leastC2, mostC2)
}

// order returns the stations so that what feeds one comes before it, and whether that was not to be had for all: then those of cycles
// come last.
func (n Network) order() (order []int, cyclic bool) {
	before := make([]int, len(n.Stations))
	after := make([][]int, len(n.Stations))
	for _, l := range n.Links {
		before[l.To]++
		after[l.From] = append(after[l.From], l.To)
	}
	done := make([]bool, len(n.Stations))
	for i := range n.Stations {
		if before[i] == 0 {
			order = append(order, i)
		}
	}
	for k := 0; k < len(order); k++ {
		done[order[k]] = true
		for _, to := range after[order[k]] {
			if before[to]--; before[to] == 0 {
				order = append(order, to)
			}
		}
	}
	if len(order) == len(n.Stations) {
		return order, false
	}
	for i := range n.Stations {
		if !done[i] {
			order = append(order, i)
		}
	}
	return order, true
}

// Departure is the squared coefficient of variation of the times between departures of a queue with c servers of utilisation rho:
// Cd² = 1 + (1−ρ²)(Ca²−1) + ρ²/√c (Cs²−1) (Whitt 1983, Eq. 39). An idle queue passes on what arrives, a busy one how it serves.
func Departure(ca2, cs2, rho float64, c int) float64 {
	r2 := clamp(rho, 0, 1)
	r2 *= r2
	return 1 + (1-r2)*(ca2-1) + r2/math.Sqrt(float64(max(c, 1)))*(cs2-1)
}

// Split is the squared coefficient of variation of a share of a stream that is drawn by chance (Whitt 1983, Eq. 36).
func Split(c2, share float64) float64 { return share*c2 + 1 - share }

// knownC2 bounds a measured squared coefficient of variation; not known, it is that of exponential times.
func knownC2(c2 float64) float64 {
	if !(c2 > 0) {
		return unknownC2
	}
	return clamp(c2, leastC2, mostC2)
}
