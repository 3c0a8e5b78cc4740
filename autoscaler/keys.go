package autoscaler

import (
	"math"
	"time"
)

// Key records how much a function is a key stage in the sense of QUART (§6.1): a stage that had to
// be scaled up, and may have to be again.
type Key struct {
	Weight float64
	At     time.Time // of Weight
	Raised time.Time // when its count was last raised
}

// Constants of the list of key stages. One raise makes a function a key stage for two half-lives. A
// function that is raised often stays a key stage somewhat longer.
const (
	keyHalfLife  = 3 * time.Minute
	keyThreshold = 0.25
	keyMost      = 4
	// burst is how long after a raise a key stage keeps all its replicas.
	burst = 10 * time.Second
)

// step fades the weight up to now, and counts a raise.
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

// bursts reports whether the function is a key stage that was raised within the time burst, so it
// may soon be raised again. If the clock was set back, that time at most doubles.
func (k Key) bursts(at time.Time) bool {
	ago := at.Sub(k.Raised)
	return k.is() && ago < burst && ago > -burst
}
