// Package qna predicts how bursty arrivals are at each station of a queueing network. It implements
// Whitt's Queueing Network Analyzer (Bell System Technical Journal 62(9), 1983).
//
// Only simulations and studies use it. The autoscaler uses measured burstiness, because in
// simulations the latest measurement predicts better than these formulas (docs/adr/0045).
package qna

import (
	"math"
	"slices"
)

// Network is a set of stations that feed each other.
type Network struct {
	Stations []Station
	Links    []Link // sorted by From, then To
}

// Station is a function as a queueing network sees it.
type Station struct {
	Rate    float64 // arrivals per second; 0: unknown
	Servers int     // slots of all replicas; at least 1
	Rho     float64 // utilisation of the servers; 0 to 1
	CS2     float64 // squared coefficient of variation of service times
	// measured squared coefficient of variation of the times between arrivals; 0: unknown
	CA2    float64
	Factor float64 // measured over predicted CA2 so far; 0: unknown
}

// Link says that what leaves one station arrives at another.
type Link struct{ From, To int }

// The bounds of squared coefficients of variation. They are needed because a measurement over a few
// arrivals can be any number.
const (
	Least = 0.01
	Most  = 64 // a CV of 8, the largest that QUART looks at
)

// passes bounds the work on networks with cycles. Two pipelines that use the same stages in
// opposite order make a cycle. Other networks need one pass, in topological order.
const passes = 20

// Predict returns, for each station, the squared coefficient of variation of the times between
// arrivals, bounded by [Least] and [Most]. For stations without predecessors, that is the measured
// value. For other stations, Predict computes it from the departures of their predecessors, and
// multiplies it by the station's Factor if that is known.
func Predict(n Network) []float64 {
	out := make([]float64, len(n.Stations))
	into := make([][]int, len(n.Stations))
	for i, s := range n.Stations {
		out[i] = Known(s.CA2)
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

// arriving superposes what comes from the stations before i.
func (n Network) arriving(i int, links []int, c2 []float64) float64 {
	s := n.Stations[i]
	var rate, sum float64
	for _, k := range links {
		from := n.Stations[n.Links[k].From]
		// A stage that is called for each request gets all departures of its predecessor. A stage
		// that is called for some requests gets a part of them.
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
	return bound(out)
}

// order returns the stations in topological order. If the network has cycles, cyclic is true and
// the stations on or behind cycles come last.
func (n Network) order() (order []int, cyclic bool) {
	before := make([]int, len(n.Stations))
	after := make([][]int, len(n.Stations))
	for _, l := range n.Links {
		before[l.To]++
		after[l.From] = append(after[l.From], l.To)
	}
	for i := range n.Stations {
		if before[i] == 0 {
			order = append(order, i)
		}
	}
	for k := 0; k < len(order); k++ {
		for _, to := range after[order[k]] {
			if before[to]--; before[to] == 0 {
				order = append(order, to)
			}
		}
	}
	cyclic = len(order) < len(n.Stations)
	for i := range n.Stations {
		if cyclic && !slices.Contains(order, i) {
			order = append(order, i)
		}
	}
	return order, cyclic
}

// Departure returns the squared coefficient of variation of the times between departures of a queue
// with c servers of utilisation rho: Cd² = 1 + (1−ρ²)(Ca²−1) + ρ²/√c (Cs²−1) (Whitt 1983, Eq. 39).
// Departures of an idle queue vary as its arrivals do, and those of a busy queue as its service
// times do.
func Departure(ca2, cs2, rho float64, c int) float64 {
	r2 := max(rho, 0)
	if rho != rho {
		r2 = 0
	}
	r2 = min(r2, 1)
	r2 *= r2
	return 1 + (1-r2)*(ca2-1) + r2/math.Sqrt(float64(max(c, 1)))*(cs2-1)
}

// Split returns the squared coefficient of variation of a share of a stream that is drawn by
// chance (Whitt 1983, Eq. 36).
func Split(c2, share float64) float64 { return share*c2 + 1 - share }

// Known bounds a measured squared coefficient of variation. If it is unknown, Known returns 1, that
// of exponential times.
func Known(c2 float64) float64 {
	if !(c2 > 0) {
		return 1
	}
	return bound(c2)
}

// bound returns v between Least and Most, and Least if v is not a number.
func bound(v float64) float64 {
	if !(v >= Least) {
		return Least
	}
	return min(v, Most)
}
