package main

import (
	"math"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/rate"
)

// before is the rule that was used before package rate. The rate came from a window whose weights
// fade in 5 s. A window of 2 s replaced it if it had more arrivals than chance explains. Bursty
// arrivals had longer windows, unless a shorter window contradicted them (Lepski 1990). Gaps of any
// rate counted for the CV.
type before struct {
	first   bool
	began   time.Duration
	last    time.Duration
	buckets [30]float64 // arrivals per half second
	newest  int64
	slow    [4]float64 // sums that fade in 10, 20, 40 and 80 s
	slowAt  time.Duration
	gaps    [3]float64 // faded number, sum and sum of squares of the gaps
	gapsAt  time.Duration
}

const (
	halfSecond = 500 * time.Millisecond
	fade       = 5.0 // seconds
	surprise   = 3.0 // standard deviations
)

func (b *before) turn(at time.Duration) {
	k := int64(at / halfSecond)
	for i := max(b.newest+1, k-29); i <= k; i++ {
		b.buckets[i%30] = 0
	}
	b.newest = max(b.newest, k)
	for i := range b.slow {
		b.slow[i] *= math.Exp(-(at - b.slowAt).Seconds() / (fade * float64(int(2)<<i)))
	}
	b.slowAt = at
	for i := range b.gaps {
		b.gaps[i] *= math.Exp(-(at - b.gapsAt).Seconds() / 20)
	}
	b.gapsAt = at
}

func (b *before) Add(at time.Duration) {
	b.turn(at)
	if !b.first {
		b.first, b.began = true, at
	} else if gap := (at - b.last).Seconds(); gap <= 60 {
		b.gaps[0]++
		b.gaps[1] += gap
		b.gaps[2] += gap * gap
	}
	b.last = at
	b.buckets[b.newest%30]++
	for i := range b.slow {
		b.slow[i]++
	}
}

func (b *before) Read(at time.Duration) rate.Estimate {
	b.turn(at)
	var sum, exposure, recent, covered float64
	for k := max(b.newest-29, 0); k <= b.newest; k++ {
		from := time.Duration(k) * halfSecond
		to := min(from+halfSecond, at)
		weight := math.Exp(-(at - (from+to)/2).Seconds() / fade)
		seen := max(from, min(b.began, to))
		sum += weight * b.buckets[k%30]
		exposure += weight * (to - seen).Seconds()
		if k > b.newest-4 {
			recent += b.buckets[k%30]
			covered += (to - seen).Seconds()
		}
	}
	base := sum / max(exposure, 1)
	cv2 := 0.0
	if g := b.gaps; g[0] >= 5 && g[1] >= 1 && g[1]*g[1] >= 1.5*g[2] {
		cv2 = max(g[2]*g[0]/(g[1]*g[1])-1, 0)
	}
	if chance := base * covered; recent > chance+surprise*math.Sqrt(chance*max(cv2, 1)) {
		return rate.Estimate{Rate: max(base, recent/max(covered, 1)), CV2: cv2}
	}
	if cv2 > 1 {
		base = b.slower(base, cv2, at)
	}
	return rate.Estimate{Rate: base, CV2: cv2}
}

// slower returns the rate of the longest window that no shorter one contradicts.
func (b *before) slower(base, cv2 float64, at time.Duration) float64 {
	known := []float64{base}
	for k, sum := range b.slow {
		narrower := fade * float64(int(1)<<k)
		if narrower >= cv2*fade {
			break
		}
		slow := sum / (2 * narrower * -math.Expm1(-(at-b.began).Seconds()/(2*narrower)))
		if (at-b.last).Seconds()*slow > 5*cv2 {
			break
		}
		for j, r := range known {
			if within := 2 * fade * float64(int(1)<<j); math.Abs(r-slow) > surprise*math.Sqrt(cv2*slow/within) {
				return known[k]
			}
		}
		known = append(known, slow)
	}
	return known[len(known)-1]
}
