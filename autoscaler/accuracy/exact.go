package accuracy

import (
	"fmt"
	"math/big"
	"slices"
)

// settle computes the shares, the served part and the accuracy of a solution exactly, in rational
// numbers. Flows of a simplex have errors of rounding. So settle first makes the flows of all
// leaves agree, and then scales them by what the replicas can exactly do. An error means that the
// errors are larger than rounding explains.
func (s *Solution) settle(p *Problem) error {
	e := exact{p: p, s: s}
	if err := e.bounds(); err != nil {
		return err
	}
	for e.drop() {
	}
	for _, f := range s.Flows {
		e.shares = append(e.shares, rat(f.Share))
	}
	for i := range p.Pipelines {
		e.agree(i)
	}
	if err := e.scale(); err != nil {
		return err
	}
	return e.measure()
}

// mostError is how much rounding may change a share.
var mostError = rat(1e-6)

// exact is a check under way.
type exact struct {
	p      *Problem
	s      *Solution
	shares []*big.Rat // of the solution's flows
}

func rat(x float64) *big.Rat { return new(big.Rat).SetFloat64(x) }

func sum(xs ...*big.Rat) *big.Rat {
	out := new(big.Rat)
	for _, x := range xs {
		out.Add(out, x)
	}
	return out
}

func product(x, y *big.Rat) *big.Rat { return new(big.Rat).Mul(x, y) }

// bounds checks the replicas, and that all chains are in time.
func (e *exact) bounds() error {
	total, used := 0, make([]*big.Rat, len(e.p.Budgets))
	for k := range used {
		used[k] = new(big.Rat)
	}
	for i, counts := range e.s.Counts {
		for k, c := range counts {
			v := &e.p.Stages[i].Variants[k]
			if total += c.Replicas; c.Replicas < v.Least || c.Replicas > e.p.most(v) {
				return fmt.Errorf("accuracy: %d replicas of %s, want %d to %d", c.Replicas, v.Name, v.Least, e.p.most(v))
			}
			for b := range used {
				used[b].Add(used[b], product(rat(v.uses(b)), rat(float64(c.Replicas))))
			}
		}
	}
	if most := e.p.replicas(); total > most {
		return fmt.Errorf("accuracy: %d replicas, want at most %d", total, most)
	}
	for b, u := range used {
		if most := e.p.budget(b); u.Cmp(rat(most)) > 0 && u.Cmp(rat(most*(1+1e-9))) > 0 {
			return fmt.Errorf("accuracy: %v of budget %d, want at most %v", u.FloatString(6), b, most)
		}
	}
	for _, f := range e.s.Flows {
		p, time := &e.p.Pipelines[f.Pipeline], new(big.Rat)
		for k := range f.Stages {
			time.Add(time, rat(e.batch(&f, k).Time))
		}
		time.Quo(time, rat(1-p.Queueing))
		time.Add(time, product(rat(p.Hop), rat(float64(len(f.Stages)))))
		if time.Cmp(rat(p.Objective*(1+2*roundOff))) > 0 {
			return fmt.Errorf("accuracy: a chain of pipeline %s takes %s s, want at most %v", p.Name, time.FloatString(9), p.Objective)
		}
	}
	return nil
}

// batch returns the batch of a flow's k-th stage.
func (e *exact) batch(f *Flow, k int) Batch {
	at := e.s.Counts[f.Stages[k]][f.Variants[k]]
	return e.p.Stages[f.Stages[k]].Variants[f.Variants[k]].Batches[at.Batch]
}

// drop removes flows that are rounding errors: those through a variant without replicas, and those
// without a flow to another leaf that begins alike. It reports whether there were any.
func (e *exact) drop() bool {
	had := len(e.s.Flows)
	e.s.Flows = slices.DeleteFunc(e.s.Flows, func(f Flow) bool {
		for k := range f.Stages {
			if e.s.Counts[f.Stages[k]][f.Variants[k]].Replicas == 0 {
				return true
			}
		}
		return false
	})
	all := slices.Clone(e.s.Flows)
	e.s.Flows = slices.DeleteFunc(e.s.Flows, func(f Flow) bool {
		return slices.ContainsFunc(e.leaves(f.Pipeline), func(path []int) bool {
			n := common(f.Stages, path)
			return !slices.ContainsFunc(all, func(g Flow) bool {
				return g.Pipeline == f.Pipeline && slices.Equal(g.Stages, path) && slices.Equal(g.Variants[:n], f.Variants[:n])
			})
		})
	})
	return len(e.s.Flows) < had
}

// leaves returns the paths to a pipeline's leaves.
func (e *exact) leaves(pipeline int) [][]int {
	p := &e.p.Pipelines[pipeline]
	t := tree{next: make([][]Step, len(e.p.Stages))}
	for _, s := range p.Steps {
		t.next[s.From] = append(t.next[s.From], s)
	}
	return t.paths(p.Root)
}

// common returns how many stages two paths have in common.
func common(a, b []int) int {
	n := 0
	for n < len(a) && n < len(b) && a[n] == b[n] {
		n++
	}
	return n
}

// agree scales the flows to each leaf, so that all leaves get the same requests.
func (e *exact) agree(pipeline int) {
	paths := e.leaves(pipeline)
	for l := 1; l < len(paths); l++ {
		like := 0
		for k := 1; k < l; k++ {
			if common(paths[k], paths[l]) > common(paths[like], paths[l]) {
				like = k
			}
		}
		n := common(paths[like], paths[l])
		sums := map[string][2]*big.Rat{}
		e.each(pipeline, func(at int, f *Flow) {
			for side, path := range [2][]int{paths[like], paths[l]} {
				if slices.Equal(f.Stages, path) {
					key := fmt.Sprint(f.Variants[:n])
					of := sums[key]
					if of[0] == nil {
						of = [2]*big.Rat{new(big.Rat), new(big.Rat)}
					}
					of[side].Add(of[side], e.shares[at])
					sums[key] = of
				}
			}
		})
		e.each(pipeline, func(at int, f *Flow) {
			if of := sums[fmt.Sprint(f.Variants[:n])]; slices.Equal(f.Stages, paths[l]) && of[1].Sign() > 0 {
				e.shares[at] = product(e.shares[at], new(big.Rat).Quo(of[0], of[1]))
			}
		})
	}
}

func (e *exact) each(pipeline int, visit func(at int, f *Flow)) {
	for i := range e.s.Flows {
		if f := &e.s.Flows[i]; f.Pipeline == pipeline {
			visit(i, f)
		}
	}
}

// scale makes all shares smaller, if replicas have more to do than they can.
func (e *exact) scale() error {
	most := rat(1)
	loads := map[[2]int]*big.Rat{}
	for i := range e.p.Pipelines {
		seen := map[int]int{} // by stage: the first leaf behind it
		paths := e.leaves(i)
		for l := len(paths) - 1; l >= 0; l-- {
			for _, st := range paths[l] {
				seen[st] = l
			}
		}
		first := new(big.Rat)
		e.each(i, func(at int, f *Flow) {
			items := rat(e.p.Pipelines[i].Demand)
			for k, st := range f.Stages {
				if slices.Equal(f.Stages, paths[seen[st]]) {
					key := [2]int{st, f.Variants[k]}
					if loads[key] == nil {
						loads[key] = new(big.Rat)
					}
					need := new(big.Rat).Quo(items, rat(e.batch(f, k).rate()))
					loads[key].Add(loads[key], product(need, e.shares[at]))
				}
				if k+1 < len(f.Stages) {
					step := e.p.Pipelines[i].step(st, f.Stages[k+1])
					items = product(items, rat(step.items(&e.p.Stages[st].Variants[f.Variants[k]])))
				}
			}
			if slices.Equal(f.Stages, paths[0]) {
				first.Add(first, e.shares[at])
			}
		})
		if first.Cmp(most) > 0 {
			most = first
		}
	}
	for key, load := range loads {
		over := new(big.Rat).Quo(load, rat(float64(e.s.Counts[key[0]][key[1]].Replicas)))
		if over.Cmp(most) > 0 {
			most = over
		}
	}
	if most.Cmp(sum(rat(1), mostError)) > 0 {
		return fmt.Errorf("accuracy: the plan has %s times the work that its replicas can do", most.FloatString(9))
	}
	for i := range e.shares {
		e.shares[i].Quo(e.shares[i], most)
	}
	return nil
}

// step returns the step between two stages.
func (p *Pipeline) step(from, to int) Step {
	return p.Steps[slices.IndexFunc(p.Steps, func(s Step) bool { return s.From == from && s.To == to })]
}

// measure sets what the flows serve, and how accurately.
func (e *exact) measure() error {
	demand, all, value := new(big.Rat), new(big.Rat), new(big.Rat)
	for i := range e.p.Pipelines {
		p := &e.p.Pipelines[i]
		demand.Add(demand, rat(p.Demand))
		paths := e.leaves(i)
		of, good := new(big.Rat), new(big.Rat)
		e.each(i, func(at int, f *Flow) {
			if slices.Equal(f.Stages, paths[0]) {
				of.Add(of, e.shares[at])
			}
			good.Add(good, product(e.shares[at], rat(f.Accuracy)))
		})
		good.Quo(good, rat(float64(len(paths))))
		if least := product(of, rat(p.MinAccuracy)); sum(good, mostError).Cmp(least) < 0 {
			return fmt.Errorf("accuracy: answers of pipeline %s are less accurate than %v", p.Name, p.MinAccuracy)
		}
		all.Add(all, product(of, rat(p.Demand)))
		value.Add(value, product(good, rat(p.Demand)))
	}
	for i := range e.shares {
		e.s.Flows[i].Share, _ = e.shares[i].Float64()
	}
	e.s.Served, e.s.Accuracy = 0, 0
	if all.Sign() > 0 {
		e.s.Served, _ = new(big.Rat).Quo(all, demand).Float64()
		e.s.Accuracy, _ = new(big.Rat).Quo(value, all).Float64()
	}
	return nil
}
