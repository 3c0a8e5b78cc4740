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
	// default of autoscaling/v2 if no metric is named: 80 % of the pods' requests
	HPATarget    = 0.8
	HPAStabilize = 5 * time.Minute // --horizontal-pod-autoscaler-downscale-stabilization
)

const (
	// --horizontal-pod-autoscaler-sync-period; scaling policies have the same period
	hpaSync      = 15 * time.Second
	hpaTolerance = 0.1 // --horizontal-pod-autoscaler-tolerance
	// pods that may be added per period; if the present count is larger, that many
	hpaPods = 4
	// window of a pod's usage: metrics-server's resolution, and that of plan.Busy
	hpaWindow = 15 * time.Second
)

// HPAConfig has the settings of a HorizontalPodAutoscaler. A zero field means Kubernetes' default.
type HPAConfig struct {
	Target    float64       // wanted share of time that a slot is taken, 0 to 1
	Stabilize time.Duration // counts fall to the largest recommendation within this time
}

// HPA is a plan.Allocator after the HorizontalPodAutoscaler of Kubernetes (autoscaling/v2;
// "Horizontal Pod Autoscaling", section "Algorithm details",
// kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale, and
// pkg/controller/podautoscaler). Every 15 s it computes
//
//	desired = ceil(current · usage/target)
//
// with these exceptions:
//
//   - The count stays if usage is within a tenth of the target.
//   - Pods that are not ready are left out. If usage asks for more pods, the pods that are not
//     ready are included, as pods without usage. The count stays if the result would then go in the
//     other direction.
//   - A count at most doubles in 15 s, or grows by four if that is more.
//   - A count falls only to the highest recommendation of the last five minutes.
//
// Differences from Kubernetes:
//
//   - Usage is plan.Busy, the share of time that the slots of replicas are taken, not CPU usage. If
//     a stage has its device for itself, that is the device's usage. Usage is at most 1, so a count
//     grows at most by a factor of 1/target per step. Pods whose CPU limit equals their request
//     have the same bound.
//   - Busy is measured for all replicas together, so no single replica's usage is missing.
//     Kubernetes takes missing usage as 0 to scale up, and as 100 % of the request to scale down.
//   - While Busy is unknown, counts stay.
//   - A function always keeps at least one replica, because minReplicas is at least 1.
//
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
	Checked     time.Time // time of its last decision
	Count       int       // count of its last decision
	Recommended []HPARecommendation
}

// HPARecommendation is a count that the metric asked for, and when.
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
	if !known { // the present count counts as recommended
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

// desired returns the count that usage asks for; -1: usage is unknown.
func (h HPA) desired(f *plan.Function, now time.Time, count int) (int, string) {
	measured := 0 // replicas that were ready for the whole window
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
	// pods that are not ready do not count when the count falls
	if cmp.Compare(ratio, 1) != cmp.Compare(desired, count) {
		return count, why
	}
	return desired, why + fmt.Sprintf(": %d", desired)
}
