package autoscaler

import (
	"cmp"
	"container/heap"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// Gain is a plan.Sharer for a cluster that has less than all functions ask for. It shares the
// budget of replicas, and scarce memory, CPU and device memory. It gives replicas one by one to the
// function that gains most, until nothing is left (Fox 1966). A function's gain is the time that
// one more replica takes off its predicted wait, times the requests of its pipelines.
//
// Functions get replicas in the order of these classes, and within a class by gain:
//
//  1. functions without any replica
//  2. functions that cannot keep up with their calls, including calls that wait at an earlier
//     stage; the gain of such a function rises with the time that it needs for all these calls
//  3. all other functions
//  4. functions that start ahead of need, which get what nobody else asks for
//
// The order does not depend on the size of the budget, so a larger budget never gives a function
// less. A gain rises with the load, so more load never gives a function less. An existing replica
// counts more than a new one: see keeping. If all functions that use a resource need the same
// amount of it, a replica can be replaced by a replica of a function that gains more.
//
// Lines that are fixed keep their counts, which were within a budget: see [Gain.Budgets]. The other
// functions share what is left.
//
// QUART gives no rule for this: the budget (R_total) is an input of its Alg. 1, but the algorithm
// does not use it.
type Gain struct{}

// keeping is the factor by which an existing replica's gain counts more than a new one's. Without
// it, gains that swing by chance would move replicas, and each move would cost a start.
const keeping = 1.5

// moving is the same factor for pipelines that are behind. It is smaller, because all of their
// stages see the same arrivals, so their needs vary less by chance.
const moving = 1.2

// asking is the shortest time between two decisions that a line asks for, as in package dispatch.
const asking = 100 * time.Millisecond

// The resources of nodes, as sums over nodes. A replica that fits into the sum may fit on no single
// node; the placer reports that.
const (
	memory = iota
	cpu
	device
	resources
)

var resourceNames = [resources]string{"memory", "CPU", "device memory"}

// contender is a function to which replicas are given.
type contender struct {
	*stage  // set if a resource is short
	f       *plan.Function
	at      int     // index of its line
	load    float64 // requests per second of its pipelines, with waiting ones
	rate    float64 // calls per second, with those that earlier stages will let through
	lines   float64 // calls that wait here, and at earlier stages on the path with the most
	soon    float64 // calls of lines that a replica ordered now could serve: see arriving
	effort  float64 // server-seconds per request of its pipeline; the smallest of its pipelines
	burst   float64 // see load
	count   int     // replicas given so far
	there   int     // replicas that exist
	most    int     // replicas that it asks for
	needs   [resources]int64
	short   int  // the resource that has run out; -1: none
	ahead   bool // its replica would start ahead of need: see plan.Function.Ahead
	urgency int  // class of its next replica: see Gain
	gain    float64
}

// Share implements plan.Sharer.
func (Gain) Share(s plan.Snapshot, a plan.Alloc) (plan.Alloc, error) {
	a = oneAhead(&s, a)
	all := make([]contender, len(a))
	total, minimums := 0, 0
	whole := wholeDevice(&s)
	finder := s.Finder()
	for i, l := range a {
		f, ok := finder.Function(l.Function)
		if !ok {
			return nil, fmt.Errorf("line of function %q: not in snapshot %d, want lines of the same snapshot", l.Function, s.Rev)
		}
		c := &all[i]
		c.f, c.at, c.most, c.short = f, i, l.Count, -1
		least, _ := f.Bounds()
		c.count = min(least, l.Count)
		if l.Fixed {
			c.count = l.Count
		}
		c.ahead = f.Ahead() && !l.Fixed
		ready, starting := f.Current()
		c.there = ready + starting
		c.needs = [resources]int64{max(f.Memory, 0), int64(max(f.CPUMilli, 0)), cmp.Or(max(f.DeviceMemory, 0), whole) * int64(max(f.GPU, 0))}
		total, minimums = total+l.Count, minimums+c.count
	}
	free, scarce := capacity(&s, all)
	if scarce == [resources]bool{} && (s.Budget <= 0 || total <= s.Budget) {
		return a, nil
	}
	spent := s.Budget > 0 && minimums >= s.Budget
	loads, stages := pipelineLoads(&s), make([]stage, len(all))
	for i := range all {
		c := &all[i]
		stages[i] = newStage(c.f)
		c.stage = &stages[i]
		of := loads[c.f.Name]
		c.load = max(of.rate, c.lambda) + float64(c.waiting)/horizon.Seconds()
		c.rate, c.lines = max(of.rate, c.lambda), float64(c.waiting)+of.before
		c.soon = c.arriving(of)
		if c.effort = of.effort; c.effort == 0 {
			c.effort = c.mean() / float64(c.slots)
		}
		c.burst = of.burst
	}
	give(all, s.Budget, free, scarce)
	out := slices.Clone(a)
	for i := range all {
		c, l := &all[i], &out[i]
		switch {
		case c.count == c.most:
			continue
		case c.short >= 0:
			l.Why += fmt.Sprintf("; %d of these, as %s is short and gains more elsewhere", c.count, resourceNames[c.short])
		case c.ahead:
			l.Why += fmt.Sprintf("; none before its task comes, as the budget of %d gains more elsewhere", s.Budget)
		case c.count == 0:
			l.Denied = fmt.Sprintf("the budget of %d replicas is used up by the fewest that other functions may have: raise it (--budget), "+
				"or lower com.openfaas.scale.min", s.Budget)
			l.Why += "; none, as the budget is used up by minimums"
		case spent:
			l.Why += fmt.Sprintf("; %d of these, as the budget of %d is used up by minimums", c.count, s.Budget)
		default:
			l.Why += fmt.Sprintf("; %d of these, as the budget of %d gains more elsewhere", c.count, s.Budget)
		}
		l.Count = c.count
	}
	return out, nil
}

// oneAhead returns the allocation a with at most one replica for each function that would start
// ahead of need. One replica is all that such a function is sure to need when its task comes. After
// its first start, it is like any other function and may get more.
func oneAhead(s *plan.Snapshot, a plan.Alloc) plan.Alloc {
	out := a
	finder := s.Finder()
	for i, l := range a {
		if f, ok := finder.Function(l.Function); !ok || l.Count <= 1 || l.Fixed || !f.Ahead() {
			continue
		}
		if &out[0] == &a[0] {
			out = slices.Clone(a)
		}
		out[i].Count = 1
		out[i].Why += "; 1 of these before its task comes"
	}
	return out
}

// wholeDevice returns the bytes that a replica with a whole device needs. The replica may get any
// device, so the result is computed from the mean size of the devices.
func wholeDevice(s *plan.Snapshot) int64 {
	sum, n := int64(0), int64(0)
	for i := range s.Nodes {
		for _, d := range s.Nodes[i].Devices {
			sum, n = sum+d.Memory, n+1
		}
	}
	return plan.DeviceNeed(0, max(sum, 0)/max(n, 1))
}

// give gives out replicas until the budget or a scarce resource is spent, or all functions have
// what they ask for.
func give(all []contender, budget int, free [resources]int64, scarce [resources]bool) {
	var q queue
	left := math.MaxInt
	if budget > 0 {
		left = budget
	}
	moves := movable(all, scarce)
	for i := range all {
		c := &all[i]
		left -= c.count
		for r, n := range c.needs {
			if moves[r] { // all replicas are given out again
				free[r] += n * int64(c.there-c.count)
			} else {
				free[r] -= n * int64(max(c.count-c.there, 0))
			}
		}
		if c.count < c.most {
			c.look()
			q = append(q, c)
		}
	}
	heap.Init(&q)
	for left > 0 && q.Len() > 0 {
		c := q[0]
		here := c.count < c.there
		if c.short = c.lacks(free, scarce, moves, here); c.short >= 0 {
			heap.Pop(&q)
			continue
		}
		c.take(&free, moves, here)
		c.count, left = c.count+1, left-1
		if c.count < c.most {
			c.look()
			heap.Fix(&q, 0)
		} else {
			heap.Pop(&q)
		}
	}
}

// movable reports which scarce resources can move between functions. A resource can move if all
// functions that use it need the same amount per replica, so a replica that stops makes room for
// exactly one other.
func movable(all []contender, scarce [resources]bool) (moves [resources]bool) {
	for r := range moves {
		moves[r] = scarce[r]
		size := int64(0)
		for i := range all {
			if n := all[i].needs[r]; n > 0 && size > 0 && n != size {
				moves[r] = false
			} else {
				size = max(size, n)
			}
		}
	}
	return moves
}

// take subtracts what a replica needs. If here is set, the replica exists already, so it has the
// resources that cannot move.
func (c *contender) take(free *[resources]int64, moves [resources]bool, here bool) {
	for r, n := range c.needs {
		if moves[r] || !here {
			free[r] -= n
		}
	}
}

// lacks returns a resource of which too little is free for c's next replica, or -1 if there is
// none. here means that this replica exists already. It then has what it needs of the resources
// that cannot move between functions (see movable), so lacks checks only the others. For a
// function's first replica, lacks returns -1 without a check, so that the placer tries the replica
// and reports where it looked. A first replica that would start ahead of need is checked.
func (c *contender) lacks(free [resources]int64, scarce, moves [resources]bool, here bool) int {
	for r, n := range c.needs {
		if scarce[r] && n > free[r] && (c.count > 0 || c.ahead) && (moves[r] || !here) {
			return r
		}
	}
	return -1
}

// arriving returns the calls that wait here, and the calls of earlier lines that will arrive before
// a replica that is ordered now is ready. Later calls do not count, because a replica for them can
// be ordered later, and until then it serves where the line is. If only the calls that wait here
// counted, the stage where a burst waits would take replicas from the stages behind it. The burst
// would then wait there.
func (c *contender) arriving(of load) float64 {
	within := asking.Seconds() + startTime(c.f.Starts)
	return float64(c.waiting) + min(of.before, of.through*within)
}

// mean returns a task's service time in seconds, or 1 if it is unknown.
func (c *contender) mean() float64 {
	if c.known {
		return c.service
	}
	return 1
}

// look sets the urgency and the gain of c's next replica: see [Gain]. The gain of a function that
// is behind has this model, which treats calls as a fluid:
//
//   - W calls have to go through the function: those that wait at the function or at an earlier
//     stage, and those that arrive within the horizon. With capacity C, the function needs the time
//     D = W/C for these calls.
//   - The stage with the longest D decides when a pipeline's last call is done, so it should get
//     the next replica.
//   - effort is the number of replicas that raise the capacity of all stages of a pipeline by one
//     request per second. One replica is 1/effort of that, and takes D²/(W·effort) off D.
//   - W requests profit, so the gain is D²/effort. Gains of different pipelines can be compared.
//
// The line of a function that keeps up has the calls that wait for it, and those that will arrive
// from earlier lines before a new replica could be ready: see arriving.
func (c *contender) look() {
	n := float64(c.count)
	capacity := n * float64(c.slots) / c.mean()
	behind := capacity*saturated < c.rate+c.lines/DrainWithin.Seconds()
	switch {
	case c.ahead:
		c.urgency, c.gain = -1, c.load
		return
	case c.count == 0:
		c.urgency, c.gain = 2, c.load
	case !c.known && c.waiting > 0 || c.known && behind:
		done := (c.rate*horizon.Seconds() + c.lines) / capacity
		c.urgency, c.gain = 1, done*done/c.effort
		if c.count < c.there {
			c.gain *= moving
		}
		return
	default:
		c.urgency, c.gain = 0, c.load*c.soon*c.mean()/float64(c.slots)/(n*(n+1))
		if c.known {
			c.gain += c.load * max(c.wait(c.count)-c.wait(c.count+1), 0)
		}
		if c.known && c.lambda > 0 {
			rho := min(c.lambda/capacity, saturated)
			c.gain += c.burst * 2 * rho / (1 - rho) / (capacity * capacity)
		}
	}
	if c.count < c.there {
		c.gain *= keeping
	}
}

// capacity returns the free resources of all nodes for new replicas, and which of them are scarce.
// A resource is scarce if functions ask for more of it than is free, and at least two functions ask
// for more. If a single function asks for too much, the placer reports that.
func capacity(s *plan.Snapshot, all []contender) (free [resources]int64, scarce [resources]bool) {
	closed := map[string]bool{} // nodes whose cores do not count, nor what replicas there use of them
	for i := range s.Nodes {
		n := &s.Nodes[i]
		if n.Unavailable != "" || n.Leaving {
			closed[n.Name] = true
			continue
		}
		free[memory] += n.Memory - n.MemoryUsed
		free[cpu] += int64(n.CPUMilli)
		for _, z := range n.Zygotes {
			if z.Idle {
				free[memory] += z.Bytes
			}
		}
		for _, d := range n.Devices {
			if d.Unavailable == "" {
				free[device] += d.Memory - d.MemoryUsed
			}
		}
	}
	var asked [resources]int64
	var by [resources]int
	for i := range all {
		c := &all[i]
		for k := range c.f.Replicas {
			if r := &c.f.Replicas[k]; r.State != plan.Draining && !closed[r.Node] {
				free[cpu] -= c.needs[cpu]
			}
		}
		for r, n := range c.needs {
			if more := int64(max(c.most-c.there, 0)); n > 0 && more > 0 && !c.ahead {
				asked[r] += n * more
				by[r]++
			}
		}
	}
	for r := range resources {
		scarce[r] = asked[r] > max(free[r], 0) && by[r] > 1
	}
	return free, scarce
}

// queue is a heap of contenders. The first one gains most.
type queue []*contender

func (q queue) Len() int { return len(q) }

func (q queue) Less(i, j int) bool {
	x, y := q[i], q[j]
	return cmp.Or(cmp.Compare(y.urgency, x.urgency), cmp.Compare(y.gain, x.gain), cmp.Compare(x.at, y.at)) < 0
}

func (q queue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *queue) Push(x any)   { *q = append(*q, x.(*contender)) }

func (q *queue) Pop() any {
	old := *q
	last := old[len(old)-1]
	*q = old[:len(old)-1]
	return last
}
