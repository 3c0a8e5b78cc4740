package accuracy

import (
	"errors"
	"fmt"
	"math"
)

// Problem is what a plan is made for: stages with variants, pipelines through them, and a budget.
type Problem struct {
	Stages    []Stage
	Pipelines []Pipeline
	Replicas  int // of all variants together; their Least may exceed it
	// Budgets bound what all replicas use together, in units of [Variant.Uses].
	Budgets []float64 `json:",omitempty"`
	// Work bounds the search of each of the four objectives, in operations on numbers; 0:
	// [DefaultWork]. About 1e9 take a second. A search that ends early has a gap: see [Solution.Gaps].
	Work float64 `json:",omitempty"`
	// CountChanges says that Running of the variants is a plan in force, and that the best plan with
	// the fewest changes is wanted.
	CountChanges bool `json:",omitempty"`
}

// Stage is a step of pipelines, which any of its variants can do.
type Stage struct {
	Name     string
	Variants []Variant
}

// Variant is one way to serve a stage.
type Variant struct {
	Name     string
	Accuracy float64 // above 0, at most 1
	Factor   float64 // items that it returns per item; 0: 1
	Batches  []Batch // of which a plan chooses one
	// Least and Most bound its replicas. Most 0: only the budget does.
	Least, Most int       `json:",omitempty"`
	Price       float64   `json:",omitempty"` // per replica, for the third objective; 0: 1
	Uses        []float64 `json:",omitempty"` // per replica, of each of the problem's Budgets
	Running     int       `json:",omitempty"` // replicas in the plan in force
}

// Batch is a size of batches, with what was measured with it.
type Batch struct {
	Size int
	Time float64 // of one batch, in seconds
	Rate float64 `json:",omitempty"` // items per second and replica; 0: Size divided by Time
}

// Pipeline is a tree of stages. Requests enter at its root.
type Pipeline struct {
	Name      string
	Root      int // index of a stage
	Steps     []Step
	Objective float64 // end to end, in seconds
	Hop       float64 // from one stage to the next, in seconds; the way to the first stage has one too
	// Queueing is the part of the objective, without hops, for waits in lines.
	Queueing float64
	Demand   float64 // requests per second
	// MinAccuracy is the least mean accuracy of answers. Where it cannot be kept, fewer requests are
	// served.
	MinAccuracy float64 `json:",omitempty"`
	// Chains has measured accuracies of chains. Other chains have the product of their variants'.
	Chains []Measured `json:",omitempty"`
}

// Step leads from a stage to a next one.
type Step struct {
	From, To int     // indices of stages
	Branch   float64 // items for To per item that a variant of From returns; 0: 1
	// Whole means that To gets Branch items per item that came to From, whatever its variant returns.
	Whole bool `json:",omitempty"`
}

// Measured is the measured accuracy of a chain from the root to a leaf.
type Measured struct {
	Stages   []int // from the root to the leaf
	Variants []int // of these stages
	Accuracy float64
}

// HalfForQueueing is the usual [Pipeline.Queueing]: a task that just misses a batch waits for one.
const HalfForQueueing = 0.5

// DefaultWork is the usual [Problem.Work].
const DefaultWork = 2e9

// mostChains bounds the fitting chains of a problem.
const mostChains = 200_000

// FaultError means that a pipeline cannot be planned for, whatever the budget.
type FaultError struct {
	Pipeline string
	Reason   string
	// Fastest is the least objective that the pipeline's fastest chain keeps, in seconds, if the
	// objective is too short; else 0.
	Fastest float64
}

// Error returns the pipeline and the reason.
func (e *FaultError) Error() string { return fmt.Sprintf("pipeline %s: %s", e.Pipeline, e.Reason) }

// Check returns what is wrong with a problem's numbers, joined.
func (p *Problem) Check() error {
	var errs []error
	add := func(format string, args ...any) { errs = append(errs, fmt.Errorf("accuracy: "+format, args...)) }
	if p.Replicas < 0 {
		add("%d replicas, want at least 0", p.Replicas)
	}
	for i := range p.Stages {
		st := &p.Stages[i]
		if len(st.Variants) == 0 {
			add("stage %s has no variant, want at least one", st.Name)
		}
		for k := range st.Variants {
			v := &st.Variants[k]
			for _, why := range v.faults(len(p.Budgets)) {
				add("variant %s of stage %s: %s", v.Name, st.Name, why)
			}
		}
	}
	for _, b := range p.Budgets {
		if !(b >= 0) {
			add("budget %v, want at least 0", b)
		}
	}
	if len(errs) > 0 {
		return errors.Join(errs...)
	}
	for i := range p.Pipelines {
		if why := p.Pipelines[i].fault(len(p.Stages)); why != "" {
			errs = append(errs, &FaultError{Pipeline: p.Pipelines[i].Name, Reason: why})
		}
	}
	return errors.Join(errs...)
}

func (v *Variant) faults(budgets int) (why []string) {
	add := func(format string, args ...any) { why = append(why, fmt.Sprintf(format, args...)) }
	if !(v.Accuracy > 0 && v.Accuracy <= 1) {
		add("accuracy %v, want above 0 and at most 1", v.Accuracy)
	}
	if !(v.Factor >= 0) || v.Factor > mostNumber {
		add("factor %v, want from 0 to %g", v.Factor, float64(mostNumber))
	}
	if len(v.Batches) == 0 {
		add("no batch, want at least one")
	}
	for _, b := range v.Batches {
		if b.Size < 1 || !(b.Time > 0) || b.Time > mostNumber || !(b.Rate >= 0) || b.Rate > mostNumber {
			add("batch of %d takes %v s at %v items/s, want a size of at least 1 and a time above 0", b.Size, b.Time, b.Rate)
		}
	}
	if v.Least < 0 || v.Most < 0 || v.Most > 0 && v.Most < v.Least || v.Running < 0 {
		add("at least %d, at most %d, running %d replicas, want them ascending from 0", v.Least, v.Most, v.Running)
	}
	if !(v.Price >= 0) || v.Price > mostNumber {
		add("price %v, want from 0 to %g", v.Price, float64(mostNumber))
	}
	if len(v.Uses) > budgets {
		add("uses of %d budgets, want at most %d", len(v.Uses), budgets)
	}
	for _, u := range v.Uses {
		if !(u >= 0) || u > mostNumber {
			add("uses %v, want from 0 to %g", u, float64(mostNumber))
		}
	}
	return why
}

// mostNumber bounds rates, times, factors and prices, so that sums and products stay finite.
const mostNumber = 1e9

// fault returns what is wrong with a pipeline, or "".
func (p *Pipeline) fault(stages int) string {
	switch {
	case math.IsInf(p.Demand, 0) || !(p.Demand >= 0) || p.Demand > mostNumber:
		return fmt.Sprintf("demand %v, want from 0 to %g requests per second", p.Demand, float64(mostNumber))
	case !(p.Objective > 0) || p.Objective > mostNumber:
		return fmt.Sprintf("objective %v s, want above 0", p.Objective)
	case !(p.Hop >= 0):
		return fmt.Sprintf("hop %v s, want at least 0", p.Hop)
	case !(p.Queueing >= 0 && p.Queueing < 1):
		return fmt.Sprintf("part %v for queueing, want at least 0 and below 1", p.Queueing)
	case !(p.MinAccuracy >= 0 && p.MinAccuracy <= 1):
		return fmt.Sprintf("min-accuracy %v, want from 0 to 1", p.MinAccuracy)
	case p.Root < 0 || p.Root >= stages:
		return fmt.Sprintf("root %d, want one of %d stages", p.Root, stages)
	}
	into := map[int]bool{p.Root: true}
	for _, s := range p.Steps {
		switch {
		case s.From < 0 || s.From >= stages || s.To < 0 || s.To >= stages:
			return fmt.Sprintf("step from %d to %d, want two of %d stages", s.From, s.To, stages)
		case !into[s.From]:
			return fmt.Sprintf("step from stage %d, to which no step before leads", s.From)
		case into[s.To]:
			return fmt.Sprintf("stage %d has two ways to it, want a tree", s.To)
		case !(s.Branch >= 0) || s.Branch > mostNumber:
			return fmt.Sprintf("branch %v, want from 0 to %g", s.Branch, float64(mostNumber))
		}
		into[s.To] = true
	}
	for _, c := range p.Chains {
		if !(c.Accuracy > 0 && c.Accuracy <= 1) || len(c.Stages) != len(c.Variants) {
			return fmt.Sprintf("measured chain of %d stages and %d variants with accuracy %v, want as many of each, and above 0 and at most 1", len(c.Stages), len(c.Variants), c.Accuracy)
		}
	}
	return ""
}

func (v *Variant) factor() float64 { return orOne(v.Factor) }
func (v *Variant) price() float64  { return orOne(v.Price) }

// items returns the number of items for a stage by a step, per item that came to the variant before
// it.
func (s Step) items(v *Variant) float64 {
	if s.Whole {
		return orOne(s.Branch)
	}
	return v.factor() * orOne(s.Branch)
}

// uses returns what a replica uses of a budget.
func (v *Variant) uses(budget int) float64 {
	if budget < len(v.Uses) {
		return v.Uses[budget]
	}
	return 0
}

func (b Batch) rate() float64 {
	if b.Rate > 0 {
		return b.Rate
	}
	return float64(b.Size) / b.Time
}

func orOne(x float64) float64 {
	if x == 0 {
		return 1
	}
	return x
}

// most returns the largest number of replicas of a variant that the budgets allow.
func (p *Problem) most(v *Variant) int {
	n := p.replicas()
	if v.Most > 0 {
		n = min(n, v.Most)
	}
	return max(n, v.Least)
}

// replicas returns the budget of replicas, which has at least all minimums.
func (p *Problem) replicas() int {
	sum := 0
	for i := range p.Stages {
		for k := range p.Stages[i].Variants {
			sum += p.Stages[i].Variants[k].Least
		}
	}
	return max(sum, p.Replicas)
}

// budget returns one of the budgets, which has at least what all minimums use.
func (p *Problem) budget(k int) float64 {
	sum := 0.0
	for i := range p.Stages {
		for j := range p.Stages[i].Variants {
			v := &p.Stages[i].Variants[j]
			sum += float64(v.Least) * v.uses(k)
		}
	}
	return max(sum, p.Budgets[k])
}
