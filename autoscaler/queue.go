package autoscaler

import (
	"math"
	"sort"
	"time"
)

const (
	// saturated is the utilisation above which a queue's steady state predicts nothing. A queue
	// would reach that state only after hours, and a rate that is measured over seconds has an
	// error of more than two percent.
	saturated = 0.98
	// horizon is how long a line is assumed to grow. By then there is another decision.
	horizon = 10 * time.Second
	// longest is the longest prediction.
	longest = 24 * time.Hour
	// mostServers bounds the work. For more servers, C is taken from mostServers at the same
	// utilisation. That is slightly larger.
	mostServers = 1 << 14
)

// meanWait returns the predicted mean time in seconds that a task waits for one of c servers of
// rate mu each, while lambda tasks arrive per second. ca2 and cs2 are as for [Sojourn]. mu must be
// positive. The result is finite and continuous, falls in c and rises in lambda.
//
// Up to the utilisation saturated, the wait is k·C(c)/(cμ−λ), plus burstExtra. The first term is
// Erlang's C for M/M/c (Kleinrock 1975, §3.5), times the correction of Allen and Cunneen for other
// services and for arrivals that are more regular than by chance (Allen, Probability, Statistics
// and Queueing Theory, 1990, §5.4). At higher utilisations, the line grows. The wait is then the
// wait at the utilisation saturated, plus the time to serve the tasks that join the line within the
// constant horizon.
//
// QUART's Eq. 1 has P0, the probability of an empty system, instead of C(c), and another
// denominator: see the package comment.
func meanWait(lambda, mu float64, c int, ca2, cs2 float64) float64 {
	if c <= 0 && lambda > 0 {
		return longest.Seconds()
	}
	return bounded(stableWait(lambda, mu, c, ca2, cs2) + growth(lambda, mu, c))
}

// stableWait is meanWait without the growth of the line. c must be positive if lambda is.
func stableWait(lambda, mu float64, c int, ca2, cs2 float64) float64 {
	if !(lambda > 0) {
		return 0
	}
	lambda = min(lambda, saturated*float64(c)*mu)
	servers, rho := min(c, mostServers), lambda/mu/float64(c)
	wait := variability(ca2, cs2) * erlangC(servers, rho*float64(servers)) / (float64(c) * mu * (1 - rho))
	return wait + burstExtra(lambda, mu, c, ca2)
}

// growth returns the time in seconds to serve the tasks that join the line within the constant
// horizon, because they exceed the utilisation saturated.
func growth(lambda, mu float64, c int) float64 {
	capacity := float64(c) * mu
	return max(lambda-saturated*capacity, 0) / capacity * horizon.Seconds()
}

// bounded returns a wait that is at most the longest prediction, in seconds.
func bounded(wait float64) float64 {
	if !(wait < longest.Seconds()) {
		return longest.Seconds()
	}
	return wait
}

// Sojourn predicts the mean time from a task's arrival to its end. There are c servers that serve
// mu tasks per second each, and lambda tasks arrive per second. waiting is the number of tasks in
// line. ca2 and cs2 are the squared coefficients of variation of the times between arrivals and of
// service times; 1 if unknown. The prediction is at most a day.
//
// The wait is that of M/M/c by Erlang's C, times (min(ca2,1)+cs2)/2 (Allen-Cunneen), plus the wait
// that bursts add if gaps are gamma distributed. It is at least the time until the tasks in line
// have been taken. Past saturation, the line's growth within ten seconds is added. The prediction
// falls if c rises. It rises if lambda or waiting rises.
func Sojourn(lambda, mu float64, c int, ca2, cs2 float64, waiting int) time.Duration {
	if !(mu > 0) || c <= 0 || math.IsNaN(lambda) {
		return longest
	}
	ca2, cs2 = factors(ca2, cs2)
	// The wait for the line replaces a shorter steady wait. The growth of the line adds to either.
	wait := bounded(stableWait(lambda, mu, c, ca2, cs2))
	if waiting > 0 {
		wait = max(wait, float64(waiting)/(float64(c)*mu))
	}
	if lambda > 0 {
		wait += growth(lambda, mu, c)
	}
	return toDuration(wait + 1/mu)
}

// Servers returns the smallest c whose predicted mean wait without a line is at most wait (see
// [Sojourn]). It returns limit if no c up to limit is enough, and 0 if nothing arrives.
func Servers(lambda, mu, ca2, cs2 float64, wait time.Duration, limit int) int {
	if lambda <= 0 {
		return 0
	}
	if !(mu > 0) || math.IsNaN(lambda) {
		return limit
	}
	if limit < 1 {
		return limit
	}
	ca2, cs2 = factors(ca2, cs2)
	return 1 + sort.Search(limit-1, func(i int) bool {
		return lambda <= saturated*float64(i+1)*mu && meanWait(lambda, mu, i+1, ca2, cs2) <= wait.Seconds()
	})
}

// leastCV2 and mostCV2 bound a measured squared coefficient of variation. A window of a thousand
// gaps shows a CV above 10 only if one or two gaps are most of its time. Such a value says more
// about the window than about the load.
const leastCV2, mostCV2 = 0.1, 100

// squared returns the square of a measured coefficient of variation, within bounds. If nothing was
// measured, it returns 1, the value of a Poisson process.
func squared(cv float64) float64 {
	if !(cv > 0) {
		return 1
	}
	return min(max(cv*cv, leastCV2), mostCV2)
}

// factors returns squared coefficients of variation as the model can use them. NaN and negative
// values count as 1, and values are at most a million.
func factors(ca2, cs2 float64) (a, s float64) {
	for _, v := range []*float64{&ca2, &cs2} {
		if !(*v >= 0) {
			*v = 1
		}
		*v = min(*v, 1e6)
	}
	return ca2, cs2
}

// variability returns the factor of Allen and Cunneen without bursts, (min(ca2,1)+cs2)/2.
func variability(ca2, cs2 float64) float64 { return (min(ca2, 1) + cs2) / 2 }

func toDuration(seconds float64) time.Duration {
	if !(seconds < longest.Seconds()) {
		return longest
	}
	return time.Duration(seconds * float64(time.Second))
}
