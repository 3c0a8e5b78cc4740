package baseline

import (
	"fmt"
	"math"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// The defaults of INFlessConfig.
const (
	INFlessAlpha     = 0.8         // PodLoadRate in the authors' code, gpu/aside/dispatcher.go
	INFlessGamma     = 0.5         // the same weight to both
	INFlessTail      = 0.99        // as the hybrid histogram has it (Shahrad et al., Serverless in the Wild, USENIX ATC'20)
	INFlessKeepAlive = time.Minute // a bin of that histogram
	INFlessLoad      = 1
)

const (
	inflessHead   = 0.05                 // of the hybrid histogram
	inflessRange  = 4 * time.Hour        // the same: a longer idle time is out of its bounds
	inflessShort  = time.Hour            // what LSTH's short-term histogram is of
	inflessLong   = 24 * time.Hour       // and its long-term one
	inflessMost   = 1024                 // calls of a batch
	inflessFewest = 5                    // idle times to go by a histogram
	inflessFirst  = float64(time.Second) // the end of the first bin; each other is twice as long as those before it
)

// INFlessConfig is what INFless leaves to be set. A zero field means its default.
//
//	knob       default  searched       what it is
//	Alpha      0.8      0.2 to 1       how much of the way from R_min to R_max the load has to be, or instances are let go
//	Load       1        0.5 to 1       the part of r_up that an instance is counted on for; the paper has all of it
//	Tail       0.99     0.5 to 0.99    the part of idle times that keep-alive covers
//	KeepAlive  1 min    5 s to 5 min   of an idle instance while fewer than five idle times are known
//
// Gamma is the weight of the long-term histogram. Of scenarios of minutes both histograms have the same, and it changes nothing.
type INFlessConfig struct {
	Alpha, Gamma, Tail, Load float64
	KeepAlive                time.Duration
}

// INFless is a plan.Allocator after INFless (Yang et al., INFless: A Native Serverless System for Low-Latency, High-Throughput Inference,
// ASPLOS'22; github.com/TankLabTJU/INFless). It scales a function, a whole model there, by itself.
//
// Batches: with an objective of t_slo, a batch of b that takes t_exec(b) needs t_wait + t_exec ≤ t_slo, and as the next one fills
// while it runs, t_exec ≤ t_slo/2; a batch of one does not wait to fill, and needs t_exec ≤ t_slo. An instance then takes up to
// r_up = b/t_exec requests a second, and no fewer than r_low = b/(t_slo − t_exec), or the first would wait too long for the last.
//
// Instances: R_max and R_min are the sums of r_up and r_low. A load R above R_max gets as many more as serve R − R_max. One below
// R_min + α(R_max − R_min), as the authors' code has it, is given to as many as it needs, and the others are idle. R is what arrives, there as here: what waits is not in it, so that with Load
// at 1 a line drains by what rounding up leaves.
//
// Idle instances (LSTH): an instance that was idle for less than a pre-warm window is let go, after it started again and kept
// until a keep-alive window ends. They are the head, the 5th percentile, and the tail of the times that instances of the function
// were idle, γ of those of a long time and 1 − γ of those of a short one.
//
// Where it differs: all replicas of a function have one batch here, so that the choice among non-uniform ⟨batch, CPU, GPU⟩ is that of
// the batch with the most throughput, with CPU and GPU as they are declared. No batch is waited for to fill, so that r_low excludes
// none, and that of a batch of one is 0. Histograms have bins that double from a second, of faded counts, in place of a minute's, that
// a load of minutes tells nothing of; both let instances go sooner. Times are of the profile, or as measured while there is none. Build
// it with [NewINFless].
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
	Count int         // instances that the load is given to
	Idle  []time.Time // since when those after are idle, in their order; let go or not
	Short IdleTimes   // how long instances were idle, lately
	Long  IdleTimes   // the same, over a day
}

// IdleTimes is a histogram of faded counts. Bin i is of times up to 2^i seconds.
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
	if past.At.IsZero() || past.At.After(s.At) { // a clock that was set back begins anew
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

// instance is the batch that an instance serves the most with, and what it takes a second, at most and at least; 0: nothing is known.
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

// windows are how long an idle instance is let go for, and when it is let go for good.
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

// turn gives the load to another number of instances: those that take it again were idle until now.
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

// faded returns h so much later.
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
