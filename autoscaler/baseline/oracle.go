package baseline

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"sort"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// OracleConfig is what an [Oracle] knows about the run, and its knobs, Wait and Floor.
type OracleConfig struct {
	Arrivals []time.Duration // of all requests, since the run began, ascending
	Stages   []OracleStage   // of the pipeline: a row; every request visits each once
	Wait     float64         // longest total wait of a request, per total service time; 0: none waits
	// replicas that a stage always has, on average over stages, like [Static]'s Level
	Floor float64
	Tick  time.Duration // between decisions, 0: 1 s
}

// OracleStage is what an Oracle knows about a stage.
type OracleStage struct {
	Function  string        // name in a Snapshot
	Service   time.Duration // mean of a single call
	Start     time.Duration // of a replica, from its order until it is ready
	Batch     int           // largest batch; 0: 1
	BatchCost float64       // what each further call of a batch adds, per Service
	Slots     int           // per replica; 0: 1
	Most      int           // largest number of replicas; 0: unbounded
}

// Oracle is a plan.Allocator that knows the run: when every request will come, and how long
// services and starts take on average. Before the run, it plans how many replicas each stage has at
// each instant. The plan keeps the wait of each request within a bound, with little replica time:
// see [NewOracle]. Oracle is a reference that shows what better knowledge of the load could be
// worth.
//
// It has two advantages:
//
//   - Its replicas are ready when their requests come, because it orders them one start ahead.
//   - It lets a burst through one stage no faster than the other stages will serve it.
//
// But a better allocator may exist, because Oracle has limits:
//
//   - It packs requests greedily, first fit, one stage after another. Cheaper plans may exist.
//   - It bounds the wait of each request. If a few requests waited longer, the mean latency might
//     be shorter for the same replica time.
//   - It knows only the means of service times. It never reacts to the lines that longer services
//     cause.
//   - It plans for the whole cluster. It does not know that a sharer may take replicas away, or
//     that replicas die.
//   - It assumes that a start takes the configured time on every node.
//
// So its knobs, Wait and Floor, must be tuned like those of other allocators. If a load changes and
// stays, Oracle is far better than an allocator that has to see the change first. If bursts are
// shorter than a start, a Floor is worth more than foresight alone. An example has eight stages of
// 500 ms, starts of 4.5 s, and gaps between requests with a CV of 4:
//
//	allocator               replicas  mean latency
//	Oracle without a Floor  23        7.47 s
//	Static                  24        6.71 s
//	Oracle, Floor 3         25        6.33 s
type Oracle struct {
	stages map[string]stretches
}

// stretches holds when one more replica of a stage is wanted, and when one less. Both are sorted.
type stretches struct{ from, until []time.Duration }

// at returns how many replicas are wanted at t.
func (z stretches) at(t time.Duration) int {
	upTo := func(x []time.Duration) int { return sort.Search(len(x), func(i int) bool { return x[i] > t }) }
	return upTo(z.from) - upTo(z.until)
}

// next returns the first tick after t at which the number may change.
func (z stretches) next(t, tick time.Duration) time.Duration {
	event := time.Duration(math.MaxInt64 / 2)
	for _, x := range [][]time.Duration{z.from, z.until} {
		if i := sort.Search(len(x), func(i int) bool { return x[i] > t }); i < len(x) {
			event = min(event, x[i])
		}
	}
	return (event + tick - 1) / tick * tick
}

// NewOracle makes the plan, one stage after another. It returns an error if cfg is out of range.
//
// Requests go to servers (slots) in order of arrival. Each request takes the first server that can
// begin it in time, so that its total wait is at most Wait. So the first servers are always busy,
// and the last ones only at the height of a burst.
//
// A replica needs a start and a tick to be ready after its order. If the gap between two requests
// of a replica is at most this long, the replica is kept. Otherwise it ends, and is ordered again
// this long before the next request.
//
// Requests reach the next stage as from a first-come-first-served queue with the planned replicas.
// If all services take the same time and batches have one request, no request is late: this queue's
// k-th start is no later than in any other schedule.
func NewOracle(cfg OracleConfig) (Oracle, error) {
	cfg.Tick = cmp.Or(cfg.Tick, time.Second)
	if err := cfg.check(); err != nil {
		return Oracle{}, err
	}
	var service time.Duration
	for _, st := range cfg.Stages {
		service += st.Service
	}
	wait := time.Duration(cfg.Wait * float64(service))
	requests := make([]visit, len(cfg.Arrivals))
	for i, at := range cfg.Arrivals {
		requests[i] = visit{at, at + wait}
	}
	o := Oracle{make(map[string]stretches, len(cfg.Stages))}
	floor, more := level(cfg.Floor, len(cfg.Stages))
	for i, st := range cfg.Stages {
		st.Batch, st.Slots, st.Most = max(st.Batch, 1), max(st.Slots, 1), max(st.Most, 0)
		least := floor
		if i < more {
			least++
		}
		wanted := st.pack(requests, max(least, 1), cfg.Tick)
		o.stages[st.Function] = wanted
		st.pass(requests, wanted, cfg.Tick)
	}
	return o, nil
}

// latest is the end of the longest possible run.
const latest = 400 * 24 * time.Hour

func (c *OracleConfig) check() error {
	var errs []error
	if n := len(c.Arrivals); !slices.IsSorted(c.Arrivals) || n > 0 && (c.Arrivals[0] < 0 || c.Arrivals[n-1] > latest) {
		errs = append(errs, fmt.Errorf("oracle: arrivals do not ascend from 0 to at most %v, want them so", latest))
	}
	if !(c.Wait >= 0 && c.Wait <= 1000) {
		errs = append(errs, fmt.Errorf("oracle: wait of %g times the service, want 0 to 1000", c.Wait))
	}
	if c.Tick < 10*time.Millisecond || c.Tick > time.Hour {
		errs = append(errs, fmt.Errorf("oracle: tick of %v, want 10ms to 1h", c.Tick))
	}
	for i, st := range c.Stages {
		if st.Service <= 0 || st.Service > time.Hour || st.Start < 0 || st.Start > time.Hour || !(st.BatchCost >= 0 && st.BatchCost <= 100) {
			errs = append(errs, fmt.Errorf("oracle: stage %d, %q: %+v, want a service time and a start of at most 1h, and a batch cost of at most 100", i, st.Function, st))
		}
	}
	return errors.Join(errs...)
}

// visit is a request at a stage: when it arrives, and when it should begin at the latest.
type visit struct{ at, due time.Duration }

// server is a slot while requests are packed. It holds the slot's last batch.
type server struct {
	begin, end time.Duration
	calls      int
}

// takes returns the time of a batch of this many calls.
func (st *OracleStage) takes(calls int) time.Duration {
	return time.Duration(float64(st.Service) * (1 + st.BatchCost*float64(calls-1)))
}

// pack gives requests to servers, and returns when replicas are wanted for them.
func (st *OracleStage) pack(requests []visit, least int, tick time.Duration) stretches {
	servers := make([]server, least*st.Slots)
	replicas := make([][]span, least)
	for i := range replicas {
		replicas[i] = []span{{0, math.MaxInt64 / 2}}
	}
	for _, r := range requests {
		i := 0
		for i < len(servers) && servers[i].next(r.at, st.Batch) > max(r.due, r.at) {
			i++
		}
		if i == len(servers) {
			if st.Most > 0 && i == st.Most*st.Slots {
				i = soonest(servers, r.at, st.Batch)
			} else {
				servers = append(servers, server{end: math.MinInt64})
			}
		}
		sv := &servers[i]
		if begin := sv.next(r.at, st.Batch); begin == sv.begin && sv.calls > 0 {
			sv.calls++
		} else {
			sv.begin, sv.calls = begin, 1
		}
		sv.end = sv.begin + st.takes(sv.calls)
		if i/st.Slots == len(replicas) {
			replicas = append(replicas, nil)
		}
		replicas[i/st.Slots] = join(replicas[i/st.Slots], span{sv.begin, sv.end}, st.Start+tick)
	}
	var out stretches
	for _, spans := range replicas {
		for _, s := range spans {
			out.from, out.until = append(out.from, s.from-st.Start-tick), append(out.until, s.until)
		}
	}
	slices.Sort(out.from)
	slices.Sort(out.until)
	return out
}

// next returns when the server could begin a request that arrives at some time. The request joins
// the last batch if that has room and has not begun.
func (sv *server) next(at time.Duration, batch int) time.Duration {
	if sv.calls < batch && sv.begin > at && sv.calls > 0 {
		return sv.begin
	}
	return max(sv.end, at)
}

func soonest(servers []server, at time.Duration, batch int) int {
	best := 0
	for i := range servers {
		if servers[i].next(at, batch) < servers[best].next(at, batch) {
			best = i
		}
	}
	return best
}

// span is a stretch of time.
type span struct{ from, until time.Duration }

// join adds a span to a replica's spans, and joins spans that are at most gap apart.
func join(spans []span, s span, gap time.Duration) []span {
	for n := len(spans); n > 0 && s.from <= spans[n-1].until+gap; n-- {
		last := spans[n-1]
		s = span{min(last.from, s.from), max(last.until, s.until)}
		spans = spans[:n-1]
	}
	return append(spans, s)
}

// pass sets when each request arrives at the next stage, and when it is due there. The requests
// leave a queue whose replicas change at each tick.
func (st *OracleStage) pass(requests []visit, wanted stretches, tick time.Duration) {
	have := max(wanted.at(0), 1)
	free := make(times, have*st.Slots) // when each server is free
	next := wanted.next(0, tick)
	for i := 0; i < len(requests); {
		begin := max(requests[i].at, free[0])
		if next <= begin {
			count := max(wanted.at(next), 1)
			for ; have < count; have++ {
				for range st.Slots {
					free.push(next + st.Start)
				}
			}
			for ; have > count; have-- {
				for range st.Slots {
					free.pop()
				}
			}
			next = wanted.next(next, tick)
			continue
		}
		k := i + 1
		// a request that finds a free server does not wait for others
		for k < len(requests) && k-i < st.Batch && requests[k].at < begin {
			k++
		}
		free.pop()
		end := begin + st.takes(k-i)
		free.push(end)
		for ; i < k; i++ {
			requests[i] = visit{end, requests[i].due + st.Service}
		}
	}
	slices.SortStableFunc(requests, func(a, b visit) int { return cmp.Compare(a.at, b.at) })
}

// OracleMemory is what the Oracle remembers: when the run began.
type OracleMemory struct{ Begin time.Time }

// Merge joins the memories of two domains that have become one.
func (Oracle) Merge(a, b OracleMemory) OracleMemory {
	if a.Begin.IsZero() || !b.Begin.IsZero() && b.Begin.Before(a.Begin) {
		return b
	}
	return a
}

// Allocate implements plan.Allocator. The run begins with the first decision. Functions that are
// not in the Oracle's plan get their minimum.
func (o Oracle) Allocate(s plan.Snapshot, d plan.Domain, m OracleMemory) (plan.Alloc, OracleMemory, error) {
	if m.Begin.IsZero() {
		m.Begin = s.At
	}
	t := max(s.At.Sub(m.Begin), 0)
	out, _, err := each(&s, d, nil, func(f *plan.Function, _ struct{}, _ bool) (int, struct{}, string) {
		z, ok := o.stages[f.Name]
		if !ok {
			return 0, struct{}{}, "the minimum: not of the oracle's pipeline"
		}
		count := z.at(t)
		return count, struct{}{}, fmt.Sprintf("%d foreseen for %v from the beginning", count, t.Round(time.Millisecond))
	})
	return out, m, err
}

// times is a heap with the earliest first.
type times []time.Duration

func (h *times) push(t time.Duration) {
	a := append(*h, t)
	i := len(a) - 1
	for ; i > 0 && a[(i-1)/2] > t; i = (i - 1) / 2 {
		a[i] = a[(i-1)/2]
	}
	a[i] = t
	*h = a
}

func (h *times) pop() time.Duration {
	a := *h
	top, n := a[0], len(a)-1
	t := a[n]
	a = a[:n]
	i := 0
	for k := 1; k < n; k = 2*i + 1 {
		if k+1 < n && a[k+1] < a[k] {
			k++
		}
		if a[k] >= t {
			break
		}
		a[i] = a[k]
		i = k
	}
	if n > 0 {
		a[i] = t
	}
	*h = a
	return top
}
