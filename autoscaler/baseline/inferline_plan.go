package baseline

import (
	"cmp"
	"container/heap"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// InferLineStage is what the planner knows about a stage of a row: its profile, for one kind of
// hardware.
type InferLineStage struct {
	Function string          // pipeline.Key
	Batches  []time.Duration // times of batches of i+1 calls, up to the largest batch
	Slots    int             // concurrent batches per replica; 0: 1
	Devices  int             // devices per replica, which are its cost; 0: 1
	Max      int             // largest number of replicas
}

// InferLinePlan is a provision, and the load that it is for. It can be encoded.
type InferLinePlan struct {
	Stages map[string]InferLineProvision // by function
	// largest number of requests of the sample within each stretch of plan.Envelope, per second
	Envelope []float64
	Service  time.Duration // sum over the stages
	Rate     float64       // of the sample, per second
	Quantile time.Duration // estimated quantile of the sample's latencies
	Feasible bool          // Quantile is within the objective
}

// InferLineProvision is the provision of one stage.
type InferLineProvision struct {
	Count, Batch int
	Throughput   float64 // μ: requests that a replica serves per second in full batches
	Ratio        float64 // ρ: share of the throughput of all its replicas that the sample took
}

// PlanInferLine is InferLine's planner (Crankshaw et al., InferLine: Latency-Aware Provisioning and
// Scaling for Prediction Serving Pipelines, SoCC'20). It searches for the cheapest provision of a
// row of stages that keeps a quantile of the sample's latencies within the objective slo. It
// estimates latencies by simulation. arrivals is the sample, in ascending order. limit is the
// number of devices; 0: no limit. It returns an error if an argument is out of range.
//
// The search begins with one replica per stage and batches of one. It has two phases:
//
//  1. Until the objective is met, the stage with the least throughput gets another replica.
//  2. While devices can be saved within the objective, the step that saves the most is taken. A
//     step removes one replica of a stage. Or it doubles a stage's batch, and removes as many of
//     the stage's replicas as the objective then allows.
//
// If no provision meets the objective, Feasible is false, and there are as many replicas as the
// bounds allow. Unlike the paper's planner, this one knows only one kind of hardware, and no
// branches.
func PlanInferLine(stages []InferLineStage, arrivals []time.Duration, slo time.Duration, quantile float64, limit int) (InferLinePlan, error) {
	out := InferLinePlan{Stages: map[string]InferLineProvision{}}
	if len(stages) == 0 || len(arrivals) < 2 || arrivals[len(arrivals)-1] <= arrivals[0] || slo <= 0 || !(quantile > 0 && quantile < 1) {
		return out, fmt.Errorf("inferline: %d stages, %d arrivals, an objective of %v for a quantile of %g, want a stage, arrivals over some time, an objective and 0 to 1",
			len(stages), len(arrivals), slo, quantile)
	}
	p := planner{stages: stages, arrivals: arrivals, slo: slo, quantile: quantile, batch: make([]int, len(stages)), count: make([]int, len(stages))}
	for i, st := range stages {
		if len(st.Batches) == 0 || slices.Min(st.Batches) <= 0 || st.Max < 1 {
			return out, fmt.Errorf("inferline: stage %q with batches of %v and %d replicas at most, want the times of batches and a replica", st.Function, st.Batches, st.Max)
		}
		p.batch[i], p.count[i] = 1, 1
		out.Service += st.Batches[0]
	}
	p.grow(limit)
	p.shrink()
	out.Quantile = p.estimate(p.count, p.batch)
	out.Feasible = out.Quantile <= slo
	out.Rate = float64(len(arrivals)-1) / (arrivals[len(arrivals)-1] - arrivals[0]).Seconds()
	out.Envelope = envelopeOf(arrivals)
	for i, st := range stages {
		mu := p.throughput(i, p.batch[i])
		out.Stages[st.Function] = InferLineProvision{Count: p.count[i], Batch: p.batch[i], Throughput: mu, Ratio: out.Rate / (float64(p.count[i]) * mu)}
	}
	return out, nil
}

// envelopeOf returns the rate of the fullest stretch of each length, per second.
func envelopeOf(arrivals []time.Duration) []float64 {
	out := make([]float64, len(plan.Envelope{}))
	for i := range out {
		length := plan.Envelope{}.Stretch(i)
		first, most := 0, 0
		for last, at := range arrivals {
			for arrivals[first] <= at-length {
				first++
			}
			most = max(most, last-first+1)
		}
		out[i] = float64(most) / length.Seconds()
	}
	return out
}

// planner is a provision in the making.
type planner struct {
	stages       []InferLineStage
	arrivals     []time.Duration
	slo          time.Duration
	quantile     float64
	batch, count []int
}

// throughput returns the requests per second that one replica of a stage serves in batches of b.
func (p *planner) throughput(i, b int) float64 {
	return float64(max(p.stages[i].Slots, 1)*b) / p.stages[i].Batches[b-1].Seconds()
}

func (p *planner) cost() (devices int) {
	for i, st := range p.stages {
		devices += p.count[i] * max(st.Devices, 1)
	}
	return devices
}

func (p *planner) feasible() bool { return p.estimate(p.count, p.batch) <= p.slo }

// grow gives the stage with the least throughput another replica until the objective is met or no
// stage may have another one.
func (p *planner) grow(limit int) {
	for !p.feasible() {
		least := -1
		for i, st := range p.stages {
			free := p.count[i] < st.Max && (limit == 0 || p.cost()+max(st.Devices, 1) <= limit)
			if free && (least < 0 || p.capacity(i) < p.capacity(least)) {
				least = i
			}
		}
		if least < 0 {
			return
		}
		p.count[least]++
	}
}

func (p *planner) capacity(i int) float64 { return float64(p.count[i]) * p.throughput(i, p.batch[i]) }

// shrink takes the steps that save devices.
func (p *planner) shrink() {
	if !p.feasible() {
		return
	}
	for {
		best, saved := p.count, 0
		batches := p.batch
		for i, st := range p.stages {
			for _, b := range []int{p.batch[i], 2 * p.batch[i]} {
				if b > len(st.Batches) {
					continue
				}
				counts, sizes := slices.Clone(p.count), slices.Clone(p.batch)
				sizes[i] = b
				for counts[i] > 1 && (b > p.batch[i] || counts[i] == p.count[i]) {
					counts[i]--
					if p.estimate(counts, sizes) > p.slo {
						counts[i]++
						break
					}
				}
				if s := (p.count[i] - counts[i]) * max(st.Devices, 1); s > saved {
					best, batches, saved = counts, sizes, s
				}
			}
		}
		if saved == 0 {
			return
		}
		p.count, p.batch = best, batches
	}
}

// estimate returns the quantile of the sample's latencies with the given counts of replicas and
// sizes of batches. Like the paper's estimator, it simulates one stage after another. Tasks go in
// order of arrival to the slot that is free first. A batch takes as many waiting tasks as fit.
func (p *planner) estimate(counts, sizes []int) time.Duration {
	at := slices.Clone(p.arrivals)
	done := make([]task, len(at))
	for i := range done {
		done[i].of = i
	}
	for i, st := range p.stages {
		free := make(slots, counts[i]*max(st.Slots, 1))
		for k := 0; k < len(at); {
			begin := max(at[k], free[0])
			size := 1
			for size < sizes[i] && k+size < len(at) && at[k+size] <= begin {
				size++
			}
			end := begin + st.Batches[size-1]
			free[0] = end
			heap.Fix(&free, 0)
			for range size {
				done[k].at = end
				k++
			}
		}
		if first := func(a, b task) int { return cmp.Compare(a.at, b.at) }; !slices.IsSortedFunc(done, first) {
			slices.SortStableFunc(done, first)
		}
		for k := range done {
			at[k] = done[k].at
		}
	}
	latencies := make([]time.Duration, len(done))
	for k, d := range done {
		latencies[k] = d.at - p.arrivals[d.of]
	}
	slices.Sort(latencies)
	return latencies[min(int(math.Ceil(p.quantile*float64(len(latencies))))-1, len(latencies)-1)]
}

// task is a request under way: when it left the latest stage, and its index.
type task struct {
	at time.Duration
	of int
}

// slots holds when each slot becomes free. It is a heap with the earliest first.
type slots []time.Duration

func (s slots) Len() int           { return len(s) }
func (s slots) Less(i, j int) bool { return s[i] < s[j] }
func (s slots) Swap(i, j int)      { s[i], s[j] = s[j], s[i] }
func (s *slots) Push(x any)        { *s = append(*s, x.(time.Duration)) }
func (s *slots) Pop() any {
	old := *s
	last := old[len(old)-1]
	*s = old[:len(old)-1]
	return last
}
