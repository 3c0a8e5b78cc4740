package autoscaler

import (
	"math"
	"time"
)

// PID is a positional controller: its output is the whole correction, not a change of the last one.
// The correction is added to a feed-forward count, and is never negative. The state is an argument
// and a result of [PID.Step].
//
// The error is (measured − target)/target. The rest follows Åström and Murray, Feedback Systems
// (2008), ch. 10. The derivative acts on the filtered measurement only, so a new target causes no
// jump. The integral grows only under conditions: see [PID.Step].
//
// QUART's Eq. 2–3 add the three terms to the count in each period, which integrates twice. Its Alg.
// 1 uses target − measured as the error, so positive gains remove replicas under overload.
type PID struct {
	Kp float64 // per error of 1
	// per second and error of 1; larger errors count as 1, because none is below −1
	Ki     float64
	Kd     float64       // seconds; factor of the measurement's slope in targets per second
	Filter time.Duration // time constant of the measurement's low pass
	Unwind float64       // how much faster the integral falls than it rises
	Band   float64       // smaller errors count as 0
	Limit  float64       // larger errors count as this
	Up     float64       // the largest rise of the output per second
	Down   float64       // the largest fall of the output per second
	Most   float64       // the largest output
	Leak   time.Duration // time constant with which the integral fades while nothing is measured
}

// defaultPID is for waits that are means over a window of about 15 s. Its integral takes longer
// than 15 s to correct an error of 1; the other terms act at once. Its output is in units of the
// square root of the feed-forward count.
var defaultPID = PID{
	Kp: 0.4, Ki: 0.04, Kd: 1, Unwind: 2, Filter: 3 * time.Second, Band: 0.1, Limit: 3, Up: 0.5, Down: 0.2, Most: 20, Leak: time.Minute,
}

// longestStep is the longest time between two steps that counts, because clocks jump.
const longestStep = 5 * time.Second

// PIDState is what a PID remembers.
type PIDState struct {
	At       time.Time `json:",omitzero"` // time of the last step
	Sum      float64   `json:",omitzero"` // integral term of the output
	Measured float64   `json:",omitzero"` // filtered measurement; 0: none
	Out      float64   `json:",omitzero"` // the last output
}

// Step returns the state after a measurement. measured and target are positive and have the same
// unit. If held is set, the last output is not in effect yet, or cannot take effect. The integral
// does not grow while held is set, or while the measurement falls.
func (c PID) Step(s PIDState, at time.Time, measured, target float64, held bool) PIDState {
	dt := s.elapsed(at)
	// larger values say no more
	next := PIDState{At: at, Sum: s.Sum, Measured: min(measured, (1+c.Limit)*target)}
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

// Blind returns the state after a step without a measurement: the learned correction fades.
func (c PID) Blind(s PIDState, at time.Time) PIDState {
	dt := s.elapsed(at)
	sum := s.Sum * math.Exp(-dt/max(c.Leak.Seconds(), 1e-9))
	return PIDState{At: at, Sum: sum, Out: c.slew(s.Out, sum, dt)}
}

// slew moves an output from one value towards another, within the bounds of its slope.
func (c PID) slew(from, to, dt float64) float64 {
	return clamp(clamp(to, from-c.Down*dt, from+c.Up*dt), 0, c.Most)
}

// elapsed returns the time since the last step in seconds, between 0 and longestStep. It returns 0
// for the first step.
func (s PIDState) elapsed(at time.Time) float64 {
	if s.At.IsZero() {
		return 0
	}
	return clamp(at.Sub(s.At).Seconds(), 0, longestStep.Seconds())
}

// beyond returns how far v is outside ±band. It is continuous at the band's edges.
func beyond(v, band float64) float64 {
	switch {
	case v > band:
		return v - band
	case v < -band:
		return v + band
	}
	return 0
}

// clamp returns v within low and high, or low if v is not a number.
func clamp(v, low, high float64) float64 {
	if !(v >= low) {
		return low
	}
	return min(v, high)
}
