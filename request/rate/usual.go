package rate

import (
	"math"
	"time"
)

// Horizon is how far ahead a rate is expected.
const Horizon = 10 * time.Second

// memory is the time in which the weight of an arrival, or of a change, falls to 1/e.
const memory = 2 * time.Minute

// usual has faded sums over the last minutes. If changes come at random with a rate r, the present
// rate lasts for a time t with the probability exp(−r·t). After a change, the mean rate is the best
// guess.
type usual struct {
	from, at          time.Duration // time of the first arrival; time of the sums
	arrivals, changes float64
}

func (u *usual) add(at time.Duration, arrivals, changes float64) {
	f := math.Exp(-(at - u.at).Seconds() / memory.Seconds())
	u.arrivals = u.arrivals*f + arrivals
	u.changes = u.changes*f + changes
	u.at = at
}

// ahead returns the rate to expect after Horizon, if the rate is now the given one.
func (u usual) ahead(at time.Duration, now float64) float64 {
	u.add(at, 0, 0)
	t := memory.Seconds() * -math.Expm1(-(at-u.from).Seconds()/memory.Seconds())
	if t < shortest.Seconds() {
		return now
	}
	mean := u.arrivals / t
	return mean + (now-mean)*math.Exp(-u.changes/t*Horizon.Seconds())
}
