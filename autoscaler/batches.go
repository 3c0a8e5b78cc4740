package autoscaler

import (
	"sort"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// This file tells a batch's time from a task's share of it. A task in a batch of 8 that takes 80 ms
// uses 10 ms of a slot, and stays for 80 ms. So capacity is counted in shares (stage.service), and
// latency in whole batches (stage.latency).

// batchTime returns how long a task of f stays in its batch, in seconds, on average over tasks. It
// is f.Service.Mean if no batch had more than one task, and never less.
//
// The sizes of batches follow the load, and f.Service.Mean follows them soon. The times per size do
// not fade. So the time is interpolated, by the share of a task: what share each size has, against
// the present mean. If shares do not fall with the size, they do not show the present sizes. The
// time is then the mean over all tasks of measured batches. A function without measured batches has
// the times of its profile.
func batchTime(f *plan.Function) float64 {
	mean := f.Service.Mean.Seconds()
	times := f.Service.Batches
	if len(times) == 0 && f.Batch > 1 {
		times = profiledBatches(f)
	}
	largest := 1
	for _, b := range times {
		if b.Mean > 0 && b.N > 0 {
			largest = max(largest, b.Size)
		}
	}
	if largest == 1 {
		return mean
	}
	return clamp(fromShares(times, mean), mean, mean*float64(largest))
}

// profiledBatches returns the profiled times of f's batch sizes with the CPU that its replicas
// have, up to the size that f may use; see fitCPU for the points that count.
func profiledBatches(f *plan.Function) (out []plan.Batched) {
	for _, b := range f.ProfiledBatches() {
		if b.Size <= f.Batch {
			out = append(out, b)
		}
	}
	return out
}

// fromShares returns the time of the batches whose tasks have this mean share, in seconds.
func fromShares(times []plan.Batched, mean float64) float64 {
	var tasks, busy, lastShare, lastTime float64 // of the size before
	falls := true
	found := 0.0
	for _, b := range times {
		if b.Size < 1 || b.Mean <= 0 || b.N <= 0 {
			continue
		}
		size, took := float64(b.Size), b.Mean.Seconds()
		tasks += size * float64(b.N)
		busy += size * float64(b.N) * took
		share := took / size
		switch {
		case lastShare == 0 || found > 0:
		case share > 0.95*lastShare:
			falls = false // the sizes cannot be told apart
		case mean >= lastShare:
			found = lastTime
		case mean >= share:
			found = lastTime + (took-lastTime)*(lastShare-mean)/(lastShare-share)
		}
		lastShare, lastTime = share, took
	}
	switch {
	case found > 0 && falls:
		return found
	case falls:
		return lastTime // the share is smaller than that of the largest size
	}
	return busy / tasks
}

// batchWait returns by how much a task waits longer, in seconds, as servers take batches: the time
// until the first of c busy servers ends is that of a batch, not of a share. mu is the rate of one
// server in tasks per second. It is 0 if tasks run alone.
func (g *stage) batchWait(mu float64, c int) float64 {
	if !(g.latency > g.service) || c <= 0 || !(g.lambda > 0) {
		return 0
	}
	n := min(c, mostServers)
	rho := min(g.lambda/(float64(c)*mu), saturated)
	return erlangC(n, rho*float64(n)) * (g.latency/g.service - 1) / mu / float64(c)
}

// fillWait returns how long a task of f waits for its batch to fill, in seconds. It is the mean
// over all tasks of a batch, if a replica is free. lambda is the number of arrivals per second.
func fillWait(f *plan.Function, lambda float64) float64 {
	if f.Batch <= 1 || f.BatchWait <= 0 {
		return 0
	}
	most, wait := float64(f.Batch-1), f.BatchWait.Seconds()
	if lambda*wait >= most { // the batch is full before its wait ends
		return most / lambda / 2
	}
	later := lambda * wait // number of tasks that join the first one, evenly over its wait
	return wait * (1 + later/2) / (1 + later)
}

// leastBatched is least for a stage with batches.
func (g *stage) leastBatched(target time.Duration, limit int) int {
	h := *g
	h.waiting = 0
	stable := min(h.stable(), limit)
	return stable + sort.Search(max(limit-stable, 0), func(k int) bool { return stable+k > 0 && h.sojourn(stable+k) <= target })
}
