package sim

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/bench/load/arrivals"
	"github.com/stagecoach-serving/stagecoach/internal/yamlfile"
)

func (s *Service) check(path string, p *problems) {
	switch s.Dist {
	case Deterministic, Exponential:
		if s.CV != nil {
			p.add(path+".cv", "%g, want none: that of %s is known", *s.CV, s.Dist)
		}
	case Gamma, Lognormal:
		within(p, path+".cv", *s.CV, 0, maxCV)
	default:
		p.add(path+".dist", "%q, want one of %s, %s, %s, %s", s.Dist, Deterministic, Exponential, Gamma, Lognormal)
	}
	within(p, path+".batchCost", *s.BatchCost, 0, 100)
	within(p, path+".cpuShare", s.CPUShare, 0, 1)
	within(p, path+".perLength", s.PerLength, 0, time.Minute)
	if len(s.Profile) == 0 {
		within(p, path+".mean", s.Mean, time.Microsecond, maxService)
		return
	}
	if s.Mean != 0 || s.CPUShare != 0 {
		p.add(path+".mean", "%v with cpuShare %g, want neither beside a profile", s.Mean, s.CPUShare)
	}
	for i, x := range s.Profile {
		at := fmt.Sprintf("%s.profile[%d]", path, i)
		within(p, at+".cpu", int(x.CPU), plan.LeastCPU, yamlfile.MaxMilli)
		within(p, at+".batch", x.Batch, 1, 1024)
		within(p, at+".mean", x.Mean, time.Microsecond, maxService)
		within(p, at+".cv", x.CV, 0, maxCV)
		for k := range i {
			if s.Profile[k].CPU == x.CPU && s.Profile[k].Batch == x.Batch {
				p.add(at, "a second point of cpu %dm and batch %d, want one", x.CPU, x.Batch)
			}
		}
	}
}

// service draws service times.
type service struct {
	dist      Dist
	mean      float64 // ns of a single call with the usual quota
	batchCost float64
	cpuShare  float64
	perLength float64 // ns
	usual     float64 // quota of mean, in thousandths of a core
	shape     float64 // of gamma: 1/CV²; 0: the time is constant
	mu, sigma float64 // of the logarithm of a lognormal time
	profile   []Point // sorted by CPU, then batch
}

func newService(s Variant) *service {
	v := s.Service
	out := &service{
		dist: v.Dist, mean: float64(v.Mean), batchCost: *v.BatchCost, cpuShare: v.CPUShare, perLength: float64(v.PerLength),
		usual: float64(s.CPULimit), profile: slices.Clone(v.Profile),
	}
	slices.SortFunc(out.profile, func(a, b Point) int { return cmp.Or(cmp.Compare(a.CPU, b.CPU), cmp.Compare(a.Batch, b.Batch)) })
	if n := len(out.profile); n > 0 && out.usual == 0 {
		out.usual = float64(out.profile[n-1].CPU)
	}
	out.usual = cmp.Or(out.usual, 1000)
	if v.CV != nil && *v.CV > 0 {
		variance := math.Log(1 + *v.CV**v.CV)
		out.shape, out.mu, out.sigma = 1 / *v.CV / *v.CV, -variance/2, math.Sqrt(variance)
	}
	return out
}

// draw returns a random factor with mean 1.
func (s *service) draw(r *rand.Rand) float64 {
	switch s.dist {
	case Exponential:
		return r.ExpFloat64()
	case Gamma:
		if s.shape > 0 {
			return arrivals.Gamma(r, s.shape) / s.shape
		}
	case Lognormal:
		return math.Exp(s.mu + s.sigma*r.NormFloat64())
	}
	return 1
}

// base returns the mean time of a batch in ns. cpu is the quota in thousandths of a core; 0 means
// the usual quota. length is that of the batch's longest input; 0: unknown.
func (s *service) base(batch, cpu, length int) float64 {
	q := cmp.Or(float64(cpu), s.usual)
	long := s.perLength * float64(length)
	if len(s.profile) > 0 {
		return s.measured(float64(batch), q) + long
	}
	t := s.mean + long
	if batch > 1 {
		t *= 1 + s.batchCost*float64(batch-1)
	}
	if s.cpuShare > 0 {
		t *= 1 - s.cpuShare + s.cpuShare*s.usual/q
	}
	return t
}

// measured returns the profile's time, linear in 1/quota between and beyond its quotas.
func (s *service) measured(batch, q float64) float64 {
	var x, y []float64
	for from := 0; from < len(s.profile); {
		to := from
		for to < len(s.profile) && s.profile[to].CPU == s.profile[from].CPU {
			to++
		}
		// x ascends
		x, y = append(x, -1/float64(s.profile[from].CPU)), append(y, s.batched(s.profile[from:to], batch))
		from = to
	}
	return max(interpolate(x, y, -1/q), float64(time.Microsecond))
}

// batched returns the time of a batch from the points of one quota. It is linear in the batch size,
// between the points and beyond them.
func (s *service) batched(points []Point, batch float64) float64 {
	if len(points) == 1 {
		p := points[0]
		return float64(p.Mean) * (1 + s.batchCost*(batch-1)) / (1 + s.batchCost*(float64(p.Batch)-1))
	}
	var x, y []float64
	for _, p := range points {
		x, y = append(x, float64(p.Batch)), append(y, float64(p.Mean))
	}
	return interpolate(x, y, batch)
}

// interpolate returns a polygon's value at v. x ascends.
func interpolate(x, y []float64, v float64) float64 {
	if len(x) == 1 {
		return y[0]
	}
	i, _ := slices.BinarySearch(x, v)
	i = min(max(i, 1), len(x)-1)
	return y[i-1] + (y[i]-y[i-1])*(v-x[i-1])/(x[i]-x[i-1])
}

// points returns the profile as policies see it.
func (s *service) points() []plan.Point {
	var out []plan.Point
	for _, p := range s.profile {
		out = append(out, plan.Point{CPUMilli: int(p.CPU), Batch: p.Batch, Mean: p.Mean, CV: p.CV, N: 1})
	}
	return out
}
