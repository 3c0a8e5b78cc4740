package autoscaler

import (
	"math"
	"time"
)

// PID is a positional controller whose memory goes in and comes out. Its output is how much to add
// to a feed-forward count, never negative.
//
// QUART's Eq. 2–3 add the three terms to the count in each period, which integrates twice. Its Alg.
// 1 takes the error as target less measured, so positive gains remove replicas under overload. Here
// the error is (measured − target)/target, and the output is the whole correction and not a step of
// it (Åström and Murray, Feedback Systems (2008), ch. 10: set-point and measurement apart,
// derivative filtered, conditional integration).
type PID struct {
	Kp     float64       // per error of 1
	Ki     float64       // per error of 1 and second; larger ones count as 1, as there are none below −1
	Kd     float64       // seconds, of the measurement's slope in targets a second
	Filter time.Duration // time constant of the measurement's low pass
	Unwind float64       // how much faster the integral falls than it rises
	Band   float64       // errors up to this count as none
	Limit  float64       // errors beyond this count as this
	Up     float64       // the most that the output rises in a second
	Down   float64       // the most that it falls in a second
	Most   float64       // the largest output
	Leak   time.Duration // time constant with which the integral fades where nothing is measured
}

// defaultPID is for waits that are means over a window of about 15 s. The integral takes longer
// than that to make up for an error of 1; the rest acts at once. The output is in square roots of
// the feed-forward count.
var defaultPID = PID{
	Kp: 0.4, Ki: 0.04, Kd: 1, Unwind: 2, Filter: 3 * time.Second, Band: 0.1, Limit: 3, Up: 0.5, Down: 0.2, Most: 20, Leak: time.Minute,
}

// longestStep is the most time that is believed to have passed between two steps, because clocks
// jump.
const longestStep = 5 * time.Second

// PIDState is what a PID remembers.
type PIDState struct {
	At       time.Time `json:",omitzero"` // of the last step
	Sum      float64   `json:",omitzero"` // the integral's part of the output
	Measured float64   `json:",omitzero"` // the measurement, filtered; 0: none
	Out      float64   `json:",omitzero"` // the last output
}

// Step takes a measurement and its target in the same unit; both are positive. held says that the
// last output is not in effect yet, or cannot be. Then the integral does not grow. Nor does it grow
// while the measurement falls.
func (c PID) Step(s PIDState, at time.Time, measured, target float64, held bool) PIDState {
	dt := s.elapsed(at)
	next := PIDState{At: at, Sum: s.Sum, Measured: min(measured, (1+c.Limit)*target)} // what is farther off says no more
	slope := 0.0
	if s.Measured > 0 {
		keep := math.Exp(-dt / max(c.Filter.Seconds(), 1e-9))
		next.Measured = keep*s.Measured + (1-keep)*next.Measured
		if dt > 0 {
			slope = (next.Measured - s.Measured) / dt
		}
	}
	e := beyond(min(next.Measured/target-1, c.Limit), c.Band)
	switch {
	case e < 0:
		next.Sum = clamp(s.Sum+c.Unwind*c.Ki*e*dt, 0, c.Most)
	case !held && slope >= 0:
		next.Sum = clamp(s.Sum+c.Ki*min(e, 1)*dt, 0, c.Most)
	}
	next.Out = c.slew(s.Out, c.Kp*e+next.Sum+clamp(c.Kd*slope/target, -c.Limit, c.Limit), dt)
	return next
}

// Blind takes a step without a measurement: what was learned fades.
func (c PID) Blind(s PIDState, at time.Time) PIDState {
	dt := s.elapsed(at)
	sum := s.Sum * math.Exp(-dt/max(c.Leak.Seconds(), 1e-9))
	return PIDState{At: at, Sum: sum, Out: c.slew(s.Out, sum, dt)}
}

// slew moves an output towards where it should be, as fast as it may.
func (c PID) slew(from, to, dt float64) float64 {
	return clamp(clamp(to, from-c.Down*dt, from+c.Up*dt), 0, c.Most)
}

// elapsed returns the time since the last step in seconds, between 0 and longestStep; 0 at the
// first.
func (s PIDState) elapsed(at time.Time) float64 {
	if s.At.IsZero() {
		return 0
	}
	return clamp(at.Sub(s.At).Seconds(), 0, longestStep.Seconds())
}

// beyond returns how far v is outside of ±band. It is continuous, unlike a step at the band's edge.
func beyond(v, band float64) float64 {
	switch {
	case v > band:
		return v - band
	case v < -band:
		return v + band
	}
	return 0
}

// clamp returns v within low and high, and low where v is not a number.
func clamp(v, low, high float64) float64 {
	if !(v >= low) {
		return low
	}
	return min(v, high)
}
