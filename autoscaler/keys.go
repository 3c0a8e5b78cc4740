package autoscaler

import (
	"math"
	"time"
)

// Key is how much of a key stage a function is, in the sense of QUART (§6.1): a stage that had to
// be scaled up, and may have to be again.
type Key struct {
	Weight float64
	At     time.Time // of Weight
	Raised time.Time // when its count was raised last
}

// The list of key stages. One raise makes a function a key stage for two half-lives. A function
// that is raised again and again stays one for a while longer.
const (
	keyHalfLife  = 3 * time.Minute
	keyThreshold = 0.25
	keyMost      = 4
	// burst is how long after a raise a key stage gives nothing back.
	burst = 10 * time.Second
)

// step lets time pass, and counts a raise.
func (k Key) step(at time.Time, raised bool) Key {
	if dt := at.Sub(k.At); dt > 0 && !k.At.IsZero() {
		k.Weight *= math.Exp2(-dt.Seconds() / keyHalfLife.Seconds())
	}
	k.At = at
	if raised {
		k.Weight, k.Raised = min(k.Weight+1, keyMost), at
	}
	if k.Weight < keyThreshold/16 {
		return Key{}
	}
	return k
}

// is reports whether the function is a key stage now.
func (k Key) is() bool { return k.Weight >= keyThreshold }

// bursts reports whether the function was raised so lately that it may be raised again. A clock
// that was set back does not make that longer.
func (k Key) bursts(at time.Time) bool {
	ago := at.Sub(k.Raised)
	return k.is() && ago < burst && ago > -burst
}
