package gateway

import (
	"math"
	"net/http"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// The window over a function's latest requests: so many seconds, and in each a count by latency. Bounds grow by a fifth, so
// that a quantile is off by less than that.
const (
	recentSeconds = 15
	latencyBounds = 76 // 1 ms * 1.2^75: a quarter of an hour
	latencyGrowth = 1.2
)

// recent counts the requests of the last seconds. The zero value is ready.
type recent struct {
	mu    sync.Mutex
	slots [recentSeconds]recentSlot
}

// recentSlot is one second.
type recentSlot struct {
	second int64 // since 1970; of another one, the slot is stale
	ended  uint32
	failed uint32                // 5xx, 429, and clients that did not wait for the answer
	good   [latencyBounds]uint32 // the others, by latency
}

func (r *recent) add(now time.Time, status int, d time.Duration) {
	second := now.Unix()
	r.mu.Lock()
	defer r.mu.Unlock()
	s := &r.slots[second%recentSeconds]
	if s.second != second {
		*s = recentSlot{second: second}
	}
	s.ended++
	switch {
	case status >= 500 || status == http.StatusTooManyRequests || status == statusClientGone:
		s.failed++
	default:
		s.good[boundOf(d)]++
	}
}

// boundOf is the first bound that d does not exceed.
func boundOf(d time.Duration) int {
	if d <= time.Millisecond {
		return 0
	}
	return min(int(math.Ceil(math.Log(float64(d)/float64(time.Millisecond))/math.Log(latencyGrowth))), latencyBounds-1)
}

// bound is the i-th bound in seconds; below the first is 0.
func bound(i int) float64 {
	if i < 0 {
		return 0
	}
	return 1e-3 * math.Pow(latencyGrowth, float64(i))
}

// Recent is what the last seconds brought to a function or pipeline.
type Recent struct {
	InFlight int     // requests now
	Rate     float64 // ended requests per second
	Failed   float64 // share of them that ended with 5xx or 429, or without their client; 0 of none
	P50, P99 time.Duration
	Within   float64 // share of all that were good within the objective; 1 of none
}

// Recent returns what the last 15 seconds brought to the function or pipeline with that key. objective is its SLO; 0: it has
// none.
func (g *Gateway) Recent(key pipeline.Key, objective time.Duration) Recent {
	f := (*g.metrics.functions.Load())[key]
	if f == nil {
		return Recent{Within: 1}
	}
	out := f.recent.read(time.Now(), objective)
	out.InFlight = int(f.begun.Load() - f.count.Load())
	return out
}

func (r *recent) read(now time.Time, objective time.Duration) Recent {
	var good [latencyBounds]float64
	var ended, failed, all float64
	r.mu.Lock()
	for i := range r.slots {
		s := &r.slots[i]
		if age := now.Unix() - s.second; age < 0 || age >= recentSeconds {
			continue
		}
		ended, failed = ended+float64(s.ended), failed+float64(s.failed)
		for b, n := range s.good {
			good[b] += float64(n)
			all += float64(n)
		}
	}
	r.mu.Unlock()
	out := Recent{Rate: ended / recentSeconds, Within: 1}
	if ended == 0 {
		return out
	}
	out.Failed = failed / ended
	out.P50, out.P99 = quantile(good, 0.5*all), quantile(good, 0.99*all)
	within := all
	if objective > 0 {
		within = 0
		for b, n := range good {
			low, high := bound(b-1), bound(b)
			within += n * min(max((objective.Seconds()-low)/(high-low), 0), 1)
		}
	}
	out.Within = within / ended
	return out
}

// quantile returns the latency that so many of the counted ones do not exceed.
func quantile(counts [latencyBounds]float64, rank float64) time.Duration {
	below := 0.0
	for b, n := range counts {
		if n > 0 && below+n >= rank {
			low, high := bound(b-1), bound(b)
			return time.Duration((low + (high-low)*(rank-below)/n) * float64(time.Second))
		}
		below += n
	}
	return 0
}
