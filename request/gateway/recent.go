package gateway

import (
	"math"
	"net/http"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// The window over a function's latest requests: one slot per second, each with a histogram of
// latencies. Each bound is a fifth above the previous one, so a quantile is off by less than that.
const (
	recentSeconds = 15
	latencyBounds = 76 // 1 ms * 1.2^75 = 15 minutes
	latencyGrowth = 1.2
)

// recent counts the requests of the last seconds. The zero value is ready.
type recent struct {
	mu    sync.Mutex
	slots [recentSeconds]recentSlot
}

// recentSlot is one second.
type recentSlot struct {
	second int64 // Unix time; if it is older than the window, the slot is stale
	ended  uint32
	failed uint32                // 5xx, 429, and clients that left before the answer
	good   [latencyBounds]uint32 // all other requests, by latency
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

// boundOf returns the index of the first bound that is at least d.
func boundOf(d time.Duration) int {
	if d <= time.Millisecond {
		return 0
	}
	return min(int(math.Ceil(math.Log(float64(d)/float64(time.Millisecond))/math.Log(latencyGrowth))), latencyBounds-1)
}

// bound returns the i-th bound in seconds. Below the first it is 0.
func bound(i int) float64 {
	if i < 0 {
		return 0
	}
	return 1e-3 * math.Pow(latencyGrowth, float64(i))
}

// Recent summarizes the last seconds of a function or pipeline.
type Recent struct {
	InFlight int     // current number of requests
	Rate     float64 // ended requests per second
	// Share of requests that ended with 5xx or 429, or lost their client; 0 if there were none.
	Failed   float64
	P50, P99 time.Duration
	// Share of requests that succeeded within the objective; 1 if there were none.
	Within float64
}

// Recent summarizes the last 15 seconds of the function or pipeline with this key. objective is its
// SLO; 0: none.
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

// quantile returns the latency that rank of the counted requests do not exceed.
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
