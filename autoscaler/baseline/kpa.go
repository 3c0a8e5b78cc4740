package baseline

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// The defaults of KPAConfig, from Knative's config-autoscaler.
const (
	KPATarget    = 0.7              // container-concurrency-target-percentage
	KPAStable    = 60 * time.Second // stable-window
	KPAPanic     = 0.1              // panic-window-percentage
	KPAThreshold = 2                // panic-threshold-percentage
	KPAUp        = 1000             // max-scale-up-rate
	KPADown      = 2                // max-scale-down-rate
)

const (
	kpaTick    = 2 * time.Second // tick-interval
	kpaBucket  = time.Second     // resolution of averages
	kpaBuckets = 3600            // number of buckets in the longest stable window
)

// KPAConfig has the settings of Knative's config-autoscaler. A zero field means its default.
type KPAConfig struct {
	Target float64       // wanted share of a replica's concurrency, 0 to 1
	Stable time.Duration // window over which tasks are averaged, 6 s to 1 h
	// the part of Stable over which they are averaged to detect bursts, rounded to seconds
	Panic     float64
	Threshold float64 // panic begins when a burst needs this many times the ready replicas
	// per decision, a count is at most Up times the ready replicas, and at least their Down-th part
	Up, Down float64
}

// KPA is a plan.Allocator after Knative's Pod Autoscaler (knative/serving: pkg/autoscaler/scaling,
// docs/scaling/SYSTEM.md and config/core/configmaps/autoscaler.yaml; "Additional autoscaling
// configuration for Knative Pod Autoscaler", knative.dev). Every two seconds it computes
//
//	desired = ceil(average concurrency / (concurrency a replica can take · target utilisation))
//
// twice: over a stable window and over a shorter panic window. By default, panic begins when the
// result of the panic window is at least twice the ready replicas. In panic, counts follow the
// larger result and never fall. Panic ends after a whole stable window without such a result. A
// decision never goes below half of the ready replicas.
//
// Concurrency is the number of tasks that wait or run. A replica can take its slots times its
// batch. Differences from Knative:
//
//   - Concurrency is measured at each decision, and is assumed to change linearly in between.
//     Knative's proxies report the average of each second.
//   - All waiting tasks of a stage are in one line, as in Knative while its activator is in the
//     path. If a task waits for a function without replicas, KPA decides at once, as Knative does
//     through its activator.
//   - A function that may sleep does so after a stable window without tasks, or after its own
//     ZeroAge if that is longer.
//   - scale-down-delay is 0 and initial-scale is 1, Knative's defaults.
//
// Build it with [NewKPA].
type KPA struct{ cfg KPAConfig }

// NewKPA returns a KPA.
func NewKPA(cfg KPAConfig) KPA {
	if !(cfg.Target > 0 && cfg.Target <= 1) {
		cfg.Target = KPATarget
	}
	if cfg.Stable <= 0 {
		cfg.Stable = KPAStable
	}
	cfg.Stable = min(max(cfg.Stable.Round(kpaBucket), kpaBucket), kpaBuckets*kpaBucket)
	if !(cfg.Panic > 0 && cfg.Panic <= 1) {
		cfg.Panic = KPAPanic
	}
	if !(cfg.Threshold > 0) {
		cfg.Threshold = KPAThreshold
	}
	if !(cfg.Up > 1) {
		cfg.Up = KPAUp
	}
	if !(cfg.Down > 1) {
		cfg.Down = KPADown
	}
	return KPA{cfg}
}

// panicWindow returns the panic window, rounded to whole seconds and at least one.
func (c KPAConfig) panicWindow() time.Duration {
	return max(time.Duration(c.Panic*float64(c.Stable)).Round(kpaBucket), kpaBucket)
}

// KPAMemory is what the KPA remembers, by function.
type KPAMemory map[string]KPAPast

// KPAPast is what the KPA remembers of one function.
type KPAPast struct {
	At      time.Time // time of the last measurement
	Tasks   float64   // number of tasks at that time
	Buckets []KPABucket
	Active  time.Time // when there last were tasks, or when it was first seen

	Checked time.Time // time of the last decision
	Count   int       // count of the last decision
	Panic   time.Time `json:",omitzero"` // when a burst was last seen; zero: no panic
	Most    int       `json:",omitzero"` // largest count since the panic began
}

// KPABucket holds the measurements of one second.
type KPABucket struct {
	Second int64   // since 1970
	Area   float64 // tasks times seconds
	Time   float64 // measured seconds
}

// Merge joins the memories of two domains that have become one.
func (KPA) Merge(a, b KPAMemory) KPAMemory { return merged(a, b) }

// Allocate implements plan.Allocator.
func (k KPA) Allocate(s plan.Snapshot, d plan.Domain, m KPAMemory) (plan.Alloc, KPAMemory, error) {
	return each(&s, d, m, func(f *plan.Function, past KPAPast, known bool) (int, KPAPast, string) {
		return k.decide(f, s.At, past, known)
	})
}

func (k KPA) decide(f *plan.Function, now time.Time, past KPAPast, known bool) (int, KPAPast, string) {
	least, most := f.Bounds()
	ready, starting := f.Current()
	tasks := float64(max(f.Waiting, 0)) + float64(max(f.Running, 0))
	if !known {
		past = KPAPast{Active: now, Count: max(ready+starting, least, 1)}
		if ready > 1 { // the past is unknown: keep the present count until it is known
			past.Panic, past.Most = now, ready
		}
	}
	if past.Active.After(now) || tasks > 0 {
		past.Active = now
	}
	past.look(now, tasks, k.cfg.Stable)
	asleep := past.Count == 0 && tasks > 0
	if age := now.Sub(past.Checked); !asleep && 0 <= age && age < kpaTick {
		past.Count = min(max(past.Count, least), most)
		return past.Count, past, fmt.Sprintf("%d as decided %v ago", past.Count, age.Round(100*time.Millisecond))
	}
	past.Checked = now
	stable, panicked := past.average(now, k.cfg.Stable), past.average(now, k.cfg.panicWindow())
	target := k.cfg.Target * float64(max(f.Slots, 1)) * float64(max(f.Batch, 1))
	if len(past.Buckets) > 0 {
		past = k.scale(past, now, stable, panicked, target, ready)
	}
	if idle := now.Sub(past.Active); past.Count == 0 && (tasks > 0 || idle < max(k.cfg.Stable, f.ZeroAge)) {
		past.Count = 1
	}
	past.Count = min(max(past.Count, least), most)
	why := fmt.Sprintf("%.3g tasks over %v, %.3g over %v, %.3g a replica", stable, k.cfg.Stable, panicked, k.cfg.panicWindow(), target)
	if !past.Panic.IsZero() {
		why += fmt.Sprintf("; panics, a burst was %v ago", now.Sub(past.Panic).Round(100*time.Millisecond))
	}
	return past.Count, past, fmt.Sprintf("%s: %d, was %d", why, past.Count, ready+starting)
}

// scale decides by averages of concurrency. target is the concurrency that a replica should have.
func (k KPA) scale(past KPAPast, now time.Time, stable, panicked, target float64, ready int) KPAPast {
	serving := float64(max(ready, 1))
	highest, lowest := math.Ceil(k.cfg.Up*serving), math.Floor(serving/k.cfg.Down)
	within := func(v float64) int { return int(min(max(v, lowest), highest, math.MaxInt32)) }
	byStable, byPanic := math.Ceil(stable/target), math.Ceil(panicked/target)

	switch burst := byPanic/serving >= k.cfg.Threshold; {
	case burst:
		past.Panic = now
	case !past.Panic.IsZero() && (past.Panic.Add(k.cfg.Stable).Before(now) || past.Panic.After(now)):
		past.Panic, past.Most = time.Time{}, 0
	}
	past.Count = within(byStable)
	if !past.Panic.IsZero() {
		past.Most = max(past.Most, past.Count, within(byPanic))
		past.Count = past.Most
	}
	return past
}

// look adds the time since the last look to the buckets, and drops buckets older than the window.
// If the clock was set back, look starts again with no buckets.
func (p *KPAPast) look(now time.Time, tasks float64, window time.Duration) {
	since, before := now.Sub(p.At).Seconds(), p.Tasks
	first := p.At.IsZero() || since < 0
	p.At, p.Tasks = now, tasks
	switch {
	case first:
		p.Buckets = nil
		return
	case since == 0:
		return
	}
	second := now.Unix()
	oldest := second - int64(window/kpaBucket)
	i := slices.IndexFunc(p.Buckets, func(b KPABucket) bool { return b.Second > oldest })
	if i < 0 {
		i = len(p.Buckets)
	}
	kept := p.Buckets[i:]
	p.Buckets = append(make([]KPABucket, 0, len(kept)+1), kept...)
	if n := len(p.Buckets); n == 0 || p.Buckets[n-1].Second != second {
		p.Buckets = append(p.Buckets, KPABucket{Second: second})
	}
	b := &p.Buckets[len(p.Buckets)-1]
	b.Area += (before + tasks) / 2 * since
	b.Time += since
}

// average returns the mean number of tasks over the measured part of the window. The first second
// counts in full.
func (p *KPAPast) average(now time.Time, window time.Duration) float64 {
	oldest := now.Unix() - int64(window/kpaBucket)
	var area, seconds float64
	for _, b := range p.Buckets {
		if b.Second > oldest {
			area, seconds = area+b.Area, seconds+b.Time
		}
	}
	if seconds == 0 {
		return 0
	}
	return area / seconds
}
