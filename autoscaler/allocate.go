package autoscaler

import (
	"container/heap"
)

// negligible is a part of a stage's share of its pipeline's budget. A stage whose wait is below
// this part gets no more replicas, even if the pipeline still misses its objective, because the
// stage's wait is not the cause.
const negligible = 0.05

// allocate returns a count of replicas for each stage, between least and most. With these counts,
// the mean waits on each path fit the budget of the path's pipeline, unless the limits in most
// prevent that. by[i] is the index in pipes of the pipeline for which stage i got its last replica,
// or -1 if the stage has not got any beyond least[i]. wait[i] is stage i's mean wait with its
// count, in seconds.
//
// allocate gives replicas one by one, each to the stage whose wait falls most. This is Fox's greedy
// method (Discrete Optimization via Marginal Analysis, Management Science 13, 1966). On a single
// path, the first allocation within the budget has the smallest total. The reason is that mean
// waits are convex in the number of servers (Dyer and Proll, On the Validity of Marginal Analysis
// for Allocating Servers in M/M/c Queues, 1977).
//
// A stage can get replicas while any path through it is too long, in any pipeline. If a stage is on
// several paths, it gets what its most demanding path alone would give it. So more load never takes
// a replica from a stage.
func (m *model) allocate(least, most []int) (counts, by []int, wait []float64) {
	n := len(m.stages)
	ints := make([]int, 3*n)
	a := allocation{model: m, counts: ints[:n:n], by: ints[n : 2*n : 2*n], most: most, next: make([]float64, n), heap: ints[2*n : 2*n]}
	copy(a.counts, least)
	for i := range m.stages {
		a.by[i] = -1
		if count := m.stages[i].forBursts(most[i]); count > a.counts[i] {
			a.counts[i], a.by[i] = count, m.stages[i].patient
		}
	}
	a.wait = m.waits(a.counts)
	a.paths = make([][]float64, len(m.pipes))
	steps := 0
	for k := range m.pipes {
		steps += len(m.pipes[k].steps)
	}
	buf := make([]float64, 3*steps)
	for k := range m.pipes {
		n := 3 * len(m.pipes[k].steps)
		a.paths[k], buf = m.pipes[k].waitsIn(buf[:n], a.wait), buf[n:]
	}
	for i := range m.stages {
		if m.stages[i].known && a.asks(i) >= 0 && a.look(i) {
			a.heap = append(a.heap, i)
		}
	}
	heap.Init(&a)
	for a.Len() > 0 {
		i := a.heap[0]
		pipe := a.asks(i)
		if pipe < 0 {
			heap.Pop(&a)
			continue
		}
		a.counts[i], a.by[i] = a.counts[i]+1, pipe
		a.wait[i] = a.next[i]
		for _, at := range m.stages[i].in {
			m.pipes[at.pipe].waitsIn(a.paths[at.pipe][:3*len(m.pipes[at.pipe].steps)], a.wait) // in place
		}
		if a.look(i) {
			heap.Fix(&a, 0)
		} else {
			heap.Pop(&a)
		}
	}
	return a.counts, a.by, a.wait
}

// allocation is an allocation under way. It is a heap of the stages that may get more replicas. The
// first stage is the one whose wait falls most with its next replica.
type allocation struct {
	*model
	counts, by, most []int
	wait, next       []float64 // seconds: with counts, and with one replica more
	paths            [][]float64
	heap             []int
}

// look predicts stage i's wait with one more replica. It returns false if the stage cannot have
// one, or if one more would not shorten the wait.
func (a *allocation) look(i int) bool {
	if a.counts[i] >= a.most[i] {
		return false
	}
	a.next[i] = min(a.stages[i].wait(a.counts[i]+1), a.wait[i])
	return a.wait[i] > a.next[i]
}

// asks returns the pipeline that needs one more replica of stage i. It returns -1 if no pipeline
// needs one, now or later.
func (a *allocation) asks(i int) int {
	for _, at := range a.stages[i].in {
		p := &a.pipes[at.pipe]
		if a.paths[at.pipe][at.step] > p.limit-p.patience && a.wait[i] > negligible*p.steps[at.step].share {
			return at.pipe
		}
	}
	return -1
}

func (a *allocation) Len() int { return len(a.heap) }

func (a *allocation) Less(x, y int) bool {
	i, j := a.heap[x], a.heap[y]
	if fi, fj := a.wait[i]-a.next[i], a.wait[j]-a.next[j]; fi != fj {
		return fi > fj
	}
	return i < j
}

func (a *allocation) Swap(x, y int) { a.heap[x], a.heap[y] = a.heap[y], a.heap[x] }
func (a *allocation) Push(x any)    { a.heap = append(a.heap, x.(int)) }

func (a *allocation) Pop() any {
	last := a.heap[len(a.heap)-1]
	a.heap = a.heap[:len(a.heap)-1]
	return last
}
