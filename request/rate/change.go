package rate

import (
	"math"
	"time"
)

// Evidence for a change is a logarithm of a likelihood ratio.
const (
	// Certain is the evidence from which a change is certain. Steady arrivals exceed it less than
	// once per hour (docs/rates.md).
	Certain = 11
	// Suspected is the evidence at which a rate since a change weighs as much as the rate of a longer
	// time. It is the logarithm of the odds that there was no change at that time.
	Suspected = 6
)

// split is a time at which the rate may have changed, and what was counted since.
type split struct {
	age time.Duration
	counts
}

// history has the splits since the latest known change, the latest first. The last split has all
// that was counted.
type history struct {
	splits   []split
	past     gaps          // gaps of before
	evidence [most]float64 // by split
}

// likelihood returns the logarithm of the likelihood of n Poisson arrivals in t seconds at their
// best rate, without the terms that do not depend on the rate.
func likelihood(n, t float64) float64 {
	if n <= 0 {
		return 0
	}
	return n * math.Log(n/t)
}

// weigh computes the evidence for a change at each split. It returns the split with the most
// evidence, and that evidence.
func (h *history) weigh() (best int, most float64) {
	all := h.splits[len(h.splits)-1]
	n, t := all.n, all.age.Seconds()
	none := likelihood(n, t)
	for k, s := range h.splits[:len(h.splits)-1] {
		h.evidence[k] = 0
		u := s.age.Seconds()
		if t <= u {
			continue
		}
		v := (likelihood(s.n, u) + likelihood(n-s.n, t-u) - none) / max(h.cv2(k), 1)
		if h.evidence[k] = v; v > most {
			best, most = k, v
		}
	}
	return best, most
}

// before returns what was counted before split k, without the gap across the split.
func (h *history) before(k int) counts {
	all, s := h.splits[len(h.splits)-1], h.splits[k]
	c := counts{n: all.n - s.n, gaps: all.gaps - s.gaps, time: all.time - s.time, squares: all.squares - s.squares}
	if c.n > 0 {
		c.first = all.first
	}
	return c.inner()
}

// rate returns the mean of the rates since all splits, weighted by the evidence that weigh
// computed. The rate without a change is that of the last Window, or of Ca² times that.
func (h *history) rate(cv2 float64) float64 {
	window := time.Duration(max(cv2, 1) * float64(Window))
	k := len(h.splits) - 1
	for k > 0 && h.splits[k].age > window {
		k--
	}
	steady := h.splits[k].rate()
	sum, weights := steady, 1.0
	for i, s := range h.splits[:len(h.splits)-1] {
		w := math.Exp(h.evidence[i] - Suspected)
		weights += w
		if i < k {
			sum += w * s.rate()
		} else {
			sum += w * steady
		}
	}
	return sum / weights
}

func (s split) rate() float64 { return s.n / max(s.age, shortest).Seconds() }
