package baseline

import (
	"cmp"
	"fmt"
	"math"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// The defaults of HPAConfig.
const (
	HPATarget    = 0.8             // what autoscaling/v2 sets where no metric is named: 80 % of what pods request
	HPAStabilize = 5 * time.Minute // --horizontal-pod-autoscaler-downscale-stabilization
)

const (
	hpaSync      = 15 * time.Second // --horizontal-pod-autoscaler-sync-period; scaling policies are of the same period
	hpaTolerance = 0.1              // --horizontal-pod-autoscaler-tolerance
	hpaPods      = 4                // that may be added a period, or as many as there are, if that is more
	hpaWindow    = 15 * time.Second // that a pod's usage is measured over: metrics-server's resolution, and that of plan.Busy
)

// HPAConfig is what a HorizontalPodAutoscaler may set. A zero field means Kubernetes' default.
type HPAConfig struct {
	Target    float64       // the part of the time that a slot should be taken, 0 to 1
	Stabilize time.Duration // counts are lowered to the most that was recommended within
}

// HPA is a plan.Allocator after the HorizontalPodAutoscaler of Kubernetes (autoscaling/v2; "Horizontal Pod Autoscaling", section
// "Algorithm details", kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale, and pkg/controller/podautoscaler): every 15 s
//
//	desired = ceil(current · usage/target)
//
// unless usage is within a tenth of the target. Not yet ready pods are set aside: when there is need for more, they count as pods
// without usage, and a change of direction by that is no change. A count at most doubles in 15 s, or grows by four, if that is more; it falls to
// the highest recommendation of the last five minutes.
//
// Its usage of a CPU is here the part of the time that slots of replicas are taken, plan.Busy: where a stage has its device for itself, this
// is the device's. It is not more than 1, so that counts grow by at most 1/target at a time, as with a limit on the CPU at its request. It is
// measured for all replicas together, so that there are none whose usage is missing (Kubernetes takes it for 0 to scale up, and for all of
// what is requested to scale down); while it is not known, counts stay. A function keeps a replica, as with minReplicas' least value.
// Build it with [NewHPA].
type HPA struct{ cfg HPAConfig }

// NewHPA returns an HPA.
func NewHPA(cfg HPAConfig) HPA {
	if !(cfg.Target > 0 && cfg.Target <= 1) {
		cfg.Target = HPATarget
	}
	if cfg.Stabilize <= 0 {
		cfg.Stabilize = HPAStabilize
	}
	return HPA{cfg}
}

// HPAMemory is what the HPA remembers, by function.
type HPAMemory map[string]HPAPast

// HPAPast is what the HPA remembers of one function.
type HPAPast struct {
	Checked     time.Time // when it decided
	Count       int       // what it decided
	Recommended []HPARecommendation
}

// HPARecommendation is what the metric asked for, and when.
type HPARecommendation struct {
	At    time.Time
	Count int
}

// Merge joins the memories of two domains that have become one.
func (HPA) Merge(a, b HPAMemory) HPAMemory { return merged(a, b) }

// Allocate implements plan.Allocator.
func (h HPA) Allocate(s plan.Snapshot, d plan.Domain, m HPAMemory) (plan.Alloc, HPAMemory, error) {
	return each(&s, d, m, func(f *plan.Function, past HPAPast, known bool) (int, HPAPast, string) {
		return h.decide(f, s.At, past, known)
	})
}

func (h HPA) decide(f *plan.Function, now time.Time, past HPAPast, known bool) (int, HPAPast, string) {
	least, most := f.Bounds()
	least = max(least, 1)
	if !known { // what there is counts as recommended
		ready, starting := f.Current()
		count := min(max(ready+starting, least), most)
		past = HPAPast{Count: count, Recommended: []HPARecommendation{{now, count}}}
	}
	past.Count = min(max(past.Count, least), most)
	if age := now.Sub(past.Checked); 0 <= age && age < hpaSync {
		return past.Count, past, fmt.Sprintf("%d as decided %v ago", past.Count, age.Round(100*time.Millisecond))
	}
	past.Checked = now
	desired, why := h.desired(f, now, past.Count)
	if desired < 0 {
		return past.Count, past, why
	}
	desired = min(max(desired, least), most)
	highest := desired
	kept := make([]HPARecommendation, 0, len(past.Recommended)+1)
	for _, r := range past.Recommended {
		if age := now.Sub(r.At); 0 <= age && age < h.cfg.Stabilize {
			kept, highest = append(kept, r), max(highest, r.Count)
		}
	}
	past.Recommended = append(kept, HPARecommendation{now, desired})
	count := min(max(past.Count, desired), highest)
	if count > desired {
		why += fmt.Sprintf("; %d was recommended within %v", highest, h.cfg.Stabilize)
	}
	if limit := max(2*past.Count, past.Count+hpaPods); count > limit {
		count = limit
		why += fmt.Sprintf("; at most %d in %v", limit, hpaSync)
	}
	past.Count = min(count, most)
	return past.Count, past, fmt.Sprintf("%s; %d, was %d", why, past.Count, current(f))
}

func current(f *plan.Function) int {
	ready, starting := f.Current()
	return ready + starting
}

// desired returns what usage asks for; -1: it is not known.
func (h HPA) desired(f *plan.Function, now time.Time, count int) (int, string) {
	measured := 0 // replicas that were ready for all of the window
	for i := range f.Replicas {
		if r := &f.Replicas[i]; r.Revision == f.Revision && r.State == plan.Ready && now.Sub(r.Since) >= hpaWindow {
			measured++
		}
	}
	if !f.Busy.Known || !(f.Busy.Share >= 0) || measured == 0 {
		return -1, fmt.Sprintf("%d, usage not known", count)
	}
	usage := min(f.Busy.Share, 1)
	ratio := usage / h.cfg.Target
	why := fmt.Sprintf("usage %.0f%% of %d replicas, target %.0f%%", 100*usage, measured, 100*h.cfg.Target)
	of := measured
	if aside := count - measured; aside > 0 && ratio > 1 {
		of = count
		ratio *= float64(measured) / float64(of)
		why += fmt.Sprintf(", %d not ready yet", aside)
		if ratio < 1 {
			return count, why + ": enough"
		}
	}
	if math.Abs(ratio-1) <= hpaTolerance {
		return count, why + ": close enough"
	}
	desired := int(math.Ceil(ratio * float64(of)))
	if cmp.Compare(ratio, 1) != cmp.Compare(desired, count) { // pods that are not ready count for nothing when there are to be fewer
		return count, why
	}
	return desired, why + fmt.Sprintf(": %d", desired)
}
