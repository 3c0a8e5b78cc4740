package baseline

import (
	"fmt"
	"math"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// The defaults of INFlessConfig.
const (
	INFlessAlpha = 0.8 // PodLoadRate in the authors' code, gpu/aside/dispatcher.go
	INFlessGamma = 0.5 // equal weights
	// from the hybrid histogram (Shahrad et al., Serverless in the Wild, USENIX ATC'20)
	INFlessTail      = 0.99
	INFlessKeepAlive = time.Minute // a bin of that histogram
	INFlessLoad      = 1
)

const (
	inflessHead   = 0.05           // from the hybrid histogram
	inflessRange  = 4 * time.Hour  // also from there: a longer idle time is out of bounds
	inflessShort  = time.Hour      // range of LSTH's short-term histogram
	inflessLong   = 24 * time.Hour // range of LSTH's long-term histogram
	inflessMost   = 1024           // largest batch, in calls
	inflessFewest = 5              // smallest number of idle times for which a histogram is used
	// end of the first bin; each bin ends at twice the end of the one before
	inflessFirst = float64(time.Second)
)

// INFlessConfig has the settings that INFless leaves open. A zero field means its default.
// [INFless] explains the symbols.
//
//	knob       default  searched       what it is
//	Alpha      0.8      0.2 to 1       instances lose their load below R_min + Alpha·(R_max − R_min)
//	Load       1        0.25 to 1      part of r_up that an instance gets; in the paper: all
//	Tail       0.99     0.5 to 0.99    quantile of idle times that keep-alive covers
//	KeepAlive  1 min    5 s to 5 min   keep-alive while fewer than five idle times are known
//
// Gamma is the weight of the long-term histogram. It changes nothing in scenarios of minutes,
// because both histograms then hold the same times.
type INFlessConfig struct {
	Alpha, Gamma, Tail, Load float64
	KeepAlive                time.Duration
}

// INFless is a plan.Allocator after INFless (Yang et al., INFless: A Native Serverless System for
// Low-Latency, High-Throughput Inference, ASPLOS'22; github.com/TankLabTJU/INFless). It scales each
// function by itself. In the paper, a function is a whole model.
//
// Batches: t_slo is the function's objective, and t_exec is the time of a batch of b requests. The
// wait and the batch must fit: t_wait + t_exec ≤ t_slo. A batch fills while the previous one runs,
// so t_exec ≤ t_slo/2. A batch of one does not wait to fill, and needs only t_exec ≤ t_slo. An
// instance serves up to r_up = b/t_exec requests per second. At a rate below r_low = b/(t_slo −
// t_exec), the first request of a batch would wait too long for the last one.
//
// Instances: R is the rate of arrivals. R_max and R_min are the sums of r_up and r_low over the
// instances that get load.
//
//   - If R is above R_max, enough instances for R − R_max are added.
//   - If R is below R_min + α(R_max − R_min), as in the authors' code, only as many instances as R
//     needs get load. The others are idle.
//
// R does not include waiting tasks. So if Load is 1, only the capacity that rounding up adds can
// drain a line.
//
// Idle instances (the paper's LSTH): an idle instance ends, starts again after a pre-warm window,
// and stays until a keep-alive window ends. The pre-warm window is the 5th percentile of the
// function's idle times, and the keep-alive window is their Tail quantile. Each window is a
// weighted mean of two histograms: the long-term one has weight γ, and the short-term one has
// weight 1 − γ.
//
// Differences:
//
//   - The paper chooses among ⟨batch, CPU, GPU⟩ per instance. Here all replicas of a function have
//     the same batch, with the declared CPU and GPU. It is the batch with the most throughput.
//   - No batch waits to fill. So r_low excludes no batch, and is 0 for a batch of one.
//   - Histograms have counts that fade, and bins that double from one second. The paper has bins of
//     a minute, which show nothing in a load of minutes. Both changes end idle instances sooner.
//   - Times come from the profile, or from measurements if there is none.
//
// Build it with [NewINFless].
type INFless struct{ cfg INFlessConfig }

// NewINFless returns an INFless.
func NewINFless(cfg INFlessConfig) INFless {
	part := func(v *float64, fallback float64) {
		if !(*v > 0 && *v <= 1) {
			*v = fallback
		}
	}
	part(&cfg.Alpha, INFlessAlpha)
	part(&cfg.Gamma, INFlessGamma)
	part(&cfg.Tail, INFlessTail)
	part(&cfg.Load, INFlessLoad)
	if cfg.KeepAlive <= 0 {
		cfg.KeepAlive = INFlessKeepAlive
	}
	return INFless{cfg}
}

// INFlessMemory is what INFless remembers, by function.
type INFlessMemory map[string]INFlessPast

// INFlessPast is what INFless remembers of one function.
type INFlessPast struct {
	At    time.Time
	Count int         // instances that get load
	Idle  []time.Time // since when the other instances are idle, in their order; let go or not
	Short IdleTimes   // recent idle times of instances
	Long  IdleTimes   // idle times over a day
}

// IdleTimes is a histogram of faded counts. Bin i counts times up to 2^i seconds.
type IdleTimes [16]float64

// Merge joins the memories of two domains that have become one.
func (INFless) Merge(a, b INFlessMemory) INFlessMemory { return merged(a, b) }

// Allocate implements plan.Allocator.
func (p INFless) Allocate(s plan.Snapshot, d plan.Domain, m INFlessMemory) (plan.Alloc, INFlessMemory, error) {
	all, err := functions(&s, d)
	if err != nil {
		return nil, m, err
	}
	out, next := make(plan.Alloc, len(all)), make(INFlessMemory, len(all))
	slos := objectives(&s, d, all)
	for i, f := range all {
		out[i], next[f.Name] = p.decide(&s, f, slos[i], m[f.Name])
	}
	return out, next, nil
}

func (p INFless) decide(s *plan.Snapshot, f *plan.Function, slo float64, past INFlessPast) (plan.Line, INFlessPast) {
	ready, starting := f.Current()
	line := plan.Line{Function: f.Name, Batch: max(f.Batch, 1)}
	if past.At.IsZero() || past.At.After(s.At) { // a clock that was set back starts over
		past = INFlessPast{At: s.At, Count: max(ready+starting, 1)}
	}
	batch, up, low := p.instance(f, slo)
	if up == 0 {
		line.Count = bounded(s, f, max(ready+starting, 1))
		line.Why = fmt.Sprintf("service time unknown: %d, as there are", line.Count)
		past.At = s.At
		return line, past
	}
	line.Batch = batch
	_, most := f.Bounds()
	r, n := arriving(f), float64(past.Count)
	need := past.Count
	line.Why = fmt.Sprintf("λ=%.1f/s, batches of %d: %.4g to %.4g/s an instance", r, batch, low, up)
	switch highest, lowest := n*up, n*low; {
	case r > highest:
		need = min(ceil(r/up), most)
		line.Why += fmt.Sprintf(", %.4g/s beyond %d: %d", r-highest, past.Count, need)
	case r < lowest+p.cfg.Alpha*(highest-lowest):
		need = min(ceil(r/up), most)
		line.Why += fmt.Sprintf(", little for %d: %d", past.Count, need)
	default:
		line.Why += fmt.Sprintf(": %d", need)
	}
	head, tail := p.windows(&past)
	next := past.turn(need, s.At)
	kept := 0
	for _, since := range next.Idle {
		if age := s.At.Sub(since); head <= age && age < tail {
			kept++
		}
	}
	if kept > 0 {
		line.Why += fmt.Sprintf(", %d idle that are kept for %v", kept, tail.Round(time.Second))
	}
	line.Count = bounded(s, f, need+kept)
	line.Why += fmt.Sprintf("; was %d", ready+starting)
	return line, next
}

// instance returns the batch size with the largest throughput, and the most and the fewest requests
// per second that an instance gets with batches of this size. All are 0 if nothing is known.
func (p INFless) instance(f *plan.Function, slo float64) (batch int, up, low float64) {
	slots := float64(max(f.Slots, 1))
	for b := 1; b <= min(max(f.Batch, 1), inflessMost); b++ {
		t := batchTime(f, b)
		if t == 0 || b > 1 && t > slo/2 {
			continue
		}
		if r := p.cfg.Load * slots * float64(b) / t; r > up*(1+1e-9) {
			batch, up, low = b, r, 0
			if b > 1 {
				low = min(slots*float64(b)/(slo-t), up)
			}
		}
	}
	return batch, up, low
}

// windows returns two idle times. After the first, head, an idle instance starts again. After the
// second, tail, the instance ends for good.
func (p INFless) windows(past *INFlessPast) (head, tail time.Duration) {
	if past.Short.count() < inflessFewest {
		return 0, p.cfg.KeepAlive
	}
	long, short := p.cfg.Gamma, 1-p.cfg.Gamma
	headLong, _ := past.Long.within(inflessHead)
	headShort, _ := past.Short.within(inflessHead)
	_, tailLong := past.Long.within(p.cfg.Tail)
	_, tailShort := past.Short.within(p.cfg.Tail)
	return time.Duration(long*headLong + short*headShort), time.Duration(long*tailLong + short*tailShort)
}

// turn gives load to as many instances as need says. Instances that get load again were idle until
// now.
func (p INFlessPast) turn(need int, now time.Time) INFlessPast {
	next := INFlessPast{At: now, Count: need, Short: p.Short.faded(now.Sub(p.At), inflessShort), Long: p.Long.faded(now.Sub(p.At), inflessLong)}
	again := min(max(need-p.Count, 0), len(p.Idle))
	for _, since := range p.Idle[:again] {
		next.Short.add(now.Sub(since))
		next.Long.add(now.Sub(since))
	}
	for range p.Count - need {
		next.Idle = append(next.Idle, now)
	}
	for _, since := range p.Idle[again:] {
		if now.Sub(since) < inflessRange {
			next.Idle = append(next.Idle, since)
		}
	}
	return next
}

func (h *IdleTimes) add(d time.Duration) {
	i, end := 0, inflessFirst
	for float64(d) > end && i < len(h)-1 {
		i, end = i+1, 2*end
	}
	h[i]++
}

func (h IdleTimes) count() (n float64) {
	for _, v := range h {
		n += v
	}
	return n
}

// faded returns h as it is some time later. by is that time, and over is the time constant of the
// fading.
func (h IdleTimes) faded(by, over time.Duration) IdleTimes {
	f := math.Exp(-by.Seconds() / over.Seconds())
	for i := range h {
		h[i] *= f
	}
	return h
}

// within returns the bounds, in nanoseconds, of the bin of a quantile.
func (h IdleTimes) within(q float64) (low, high float64) {
	left, high := q*h.count(), inflessFirst
	for _, v := range h {
		if left -= v; left <= 0 {
			break
		}
		low, high = high, 2*high
	}
	return low, high
}
