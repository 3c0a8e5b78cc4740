package autoscaler

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/plan"
)

// cpuFit is a service time as a function of the CPU that a replica may use: a + b/q, of which a is what more CPU does not make
// shorter (Amdahl).
type cpuFit struct {
	a, b float64 // seconds, and seconds times thousandths of a core
	most int     // the largest quota that was measured: nothing is said of larger ones
}

// fewestQuotas are what it takes to fit two parameters and see that they do.
const fewestQuotas = 3

// fitCPU is the regression of f's service time on 1/quota, by least squares weighted with the points' batches; ok is false while fewer
// than three quotas were measured, or more CPU is of no use. Of several batches and lengths it takes those that were measured with the
// most quotas, the batch next to f's own first.
//
// QUART measures its response times offline as well and adds "a specific number of CPUs" (§5.3); what it adds them by is not printed.
func fitCPU(f *plan.Function) (fit cpuFit, ok bool) {
	points := likePoints(f)
	var n, sx, sy, sxx, sxy float64
	for _, p := range points {
		w, x, y := float64(max(p.N, 1)), 1/float64(p.CPUMilli), p.Mean.Seconds()
		n, sx, sy, sxx, sxy = n+w, sx+w*x, sy+w*y, sxx+w*x*x, sxy+w*x*y
		fit.most = max(fit.most, p.CPUMilli)
	}
	det := n*sxx - sx*sx
	if len(points) == 0 || !(det > 0) {
		return cpuFit{}, false
	}
	fit.b = (n*sxy - sx*sy) / det
	fit.a = max((sy-fit.b*sx)/n, 0)
	return fit, fit.b > 0 && !math.IsInf(fit.b, 0)
}

// likePoints are the measured points of one batch and length, of at least three quotas.
func likePoints(f *plan.Function) []plan.Point {
	type kind struct{ batch, length int }
	groups := map[kind][]plan.Point{}
	var kinds []kind
	for _, p := range f.Profile {
		if p.CPUMilli <= 0 || p.Mean <= 0 {
			continue
		}
		k := kind{p.Batch, p.Length}
		if groups[k] == nil {
			kinds = append(kinds, k)
		}
		groups[k] = append(groups[k], p)
	}
	quotas := func(k kind) int {
		seen := map[int]bool{}
		for _, p := range groups[k] {
			seen[p.CPUMilli] = true
		}
		return len(seen)
	}
	slices.SortFunc(kinds, func(x, y kind) int {
		return cmp.Or(cmp.Compare(quotas(y), quotas(x)), cmp.Compare(abs(x.batch-f.Batch), abs(y.batch-f.Batch)),
			cmp.Compare(x.batch, y.batch), cmp.Compare(x.length, y.length))
	})
	if len(kinds) == 0 || quotas(kinds[0]) < fewestQuotas {
		return nil
	}
	return groups[kinds[0]]
}

func abs(v int) int { return max(v, -v) }

// at returns the service time with a quota, in seconds.
func (c cpuFit) at(quota int) float64 { return c.a + c.b/float64(max(quota, 1)) }

// scaled returns what a service time that was measured with one quota will be with another.
func (c cpuFit) scaled(mean time.Duration, from, to int) time.Duration {
	return time.Duration(float64(mean) * c.at(to) / c.at(from))
}
