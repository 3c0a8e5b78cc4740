package rate

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"testing"
	"time"
)

// gamma returns a gamma variate of the shape k with mean 1 (Marsaglia and Tsang).
func gammaGap(r *rand.Rand, cv float64) float64 {
	k := 1 / (cv * cv)
	boost := 1.0
	if k < 1 {
		boost = math.Pow(r.Float64(), 1/k)
		k++
	}
	d := k - 1.0/3
	c := 1 / math.Sqrt(9*d)
	for {
		x := r.NormFloat64()
		v := 1 + c*x
		if v <= 0 {
			continue
		}
		v = v * v * v
		if math.Log(1-r.Float64()) < 0.5*x*x+d-d*v+d*math.Log(v) {
			return d * v * boost * cv * cv
		}
	}
}

// stream plays arrivals of a rate that depends on time: gaps are in operational time.
func stream(r *rand.Rand, cv float64, rate func(t float64) float64, end float64, see func(t float64)) {
	t, left := 0.0, gammaGap(r, cv)
	const dt = 0.01
	for t < end {
		l := rate(t)
		step := math.Min(dt, left/l)
		if step == left/l {
			t += step
			if t < end {
				see(t)
			}
			left = gammaGap(r, cv)
		} else {
			left -= l * step
			t += step
		}
	}
}

func dur(s float64) time.Duration { return time.Duration(s * 1e9) }

func TestProbe(t *testing.T) {
	if os.Getenv("PROBE") == "" {
		t.Skip()
	}
	for _, cv := range []float64{1, 2, 4} {
		for _, base := range []float64{5, 20, 100} {
			// steady: false changes per hour, noise
			var e Estimator
			r := rand.New(rand.NewPCG(1, uint64(cv*100+base)))
			falses, noise, looks, next := 0, 0.0, 0.0, 0.0
			hours := 4.0
			var since time.Duration
			cvs := 0.0
			stream(r, cv, func(float64) float64 { return base }, hours*3600, func(now float64) {
				e.Add(dur(now))
				for next < now {
					next += 1
					if next < 60 {
						continue
					}
					x := e.Read(dur(now))
					if x.Since != since {
						falses++
						since = x.Since
					}
					noise += (x.Rate/base - 1) * (x.Rate/base - 1)
					looks++
					cvs += x.CV2
				}
			})
			fmt.Printf("cv %g rate %3g: %.1f false/h noise %.0f%% cv %.2f |", cv, base, float64(falses)/hours, 100*math.Sqrt(noise/looks), math.Sqrt(cvs/looks))
			for _, f := range []float64{0.25, 0.5, 1.5, 2, 4} {
				for _, ramp := range []float64{0, 20} {
					good := 0
					const seeds = 200
					for seed := range seeds {
						r := rand.New(rand.NewPCG(uint64(seed), 7))
						var e Estimator
						n := 0
						at := 120 + ramp
						next := 60.0
						stream(r, cv, func(t float64) float64 {
							switch {
							case t < 120:
								return base
							case t < at:
								return base * (1 + (f-1)*(t-120)/ramp)
							}
							return base * f
						}, at+10, func(now float64) {
							if now >= at {
								n++
							}
							e.Add(dur(now))
							for next < now {
								next++
								e.Read(dur(now))
							}
						})
						x := e.Read(dur(at + 10))
						tol := max(0.15, 2*cv/math.Sqrt(float64(max(n, 1))))
						if math.Abs(x.Rate/(base*f)-1) <= tol {
							good++
						}
						_ = n
					}
					fmt.Printf(" %3.0f", 100*float64(good)/seeds)
				}
			}
			fmt.Println()
		}
	}
}
