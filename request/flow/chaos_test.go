package flow

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// chaos surrounds one core with many random requests and checks every effect.
type chaos struct {
	t    *testing.T
	seed uint64
	r    *rand.Rand
	core *Core
	now  time.Time

	alive    map[string]time.Time // deadlines of the running requests
	out      []*task.Task         // submitted, not answered, not canceled
	answered []task.Key
	attempts map[task.Key]uint8 // last attempt, by the key without its attempt
	counted  map[task.Key]int   // attempts that count, see Attempts
	suspects map[task.Key]bool  // calls that may have ended a replica
	ends     map[string]int
	status   map[int]int // number of requests by status, over all seeds
}

func (c *chaos) fatalf(format string, args ...any) {
	c.t.Helper()
	c.t.Fatalf("seed %d: %s", c.seed, fmt.Sprintf(format, args...))
}

// step runs the core and checks its effects.
func (c *chaos) step(ev Event) {
	c.t.Helper()
	for _, e := range c.core.Step(c.now, ev) {
		switch e := e.(type) {
		case Submit:
			c.submitted(e.Task)
		case Cancel:
			i := slices.IndexFunc(c.out, func(t *task.Task) bool { return t.Key == e.Key && t.Function == e.Function })
			if i < 0 {
				c.fatalf("cancel of %v at %s, which is not out", e.Key, e.Function)
			}
			c.out = slices.Delete(c.out, i, i+1)
		case Finish:
			if _, runs := c.alive[e.Request]; !runs || (e.Response == nil) == (e.Error == nil) {
				c.fatalf("end %+v of a request that runs: %v", e, runs)
			}
			if i := slices.IndexFunc(c.out, func(t *task.Task) bool { return t.Request == e.Request }); i >= 0 {
				c.fatalf("request %s ended with task %v out and not canceled", e.Request, c.out[i].Key)
			}
			delete(c.alive, e.Request)
			c.ends[e.Request]++
			if e.Error == nil {
				c.status[0]++
			} else {
				c.status[e.Error.Status]++
			}
		}
	}
	for id, deadline := range c.alive {
		if !slices.ContainsFunc(c.out, func(t *task.Task) bool { return t.Request == id }) {
			c.fatalf("request %s runs and nothing of it is out", id)
		}
		if _, tick := ev.(Tick); tick && !deadline.After(c.now) {
			c.fatalf("request %s runs after its deadline", id)
		}
	}
}

func (c *chaos) submitted(k *task.Task) {
	c.t.Helper()
	if _, runs := c.alive[k.Request]; !runs {
		c.fatalf("task %v of a request that does not run", k.Key)
	}
	first := task.Key{Request: k.Request, Task: k.Task}
	if want := c.attempts[first] + 1; k.Attempt != want || c.counted[first] >= Attempts {
		c.fatalf("attempt %d of %v after %d that count, want %d and less than %d", k.Attempt, first, c.counted[first], want, Attempts)
	}
	if k.Alone != c.suspects[first] {
		c.fatalf("attempt %d of %v runs alone: %v, want %v", k.Attempt, first, k.Alone, c.suspects[first])
	}
	c.attempts[first] = k.Attempt
	c.out = append(c.out, k)
	calls := 0
	for _, o := range c.out {
		if o.Request == k.Request && o.Stage == k.Stage {
			calls++
		}
	}
	if calls > EachWindow {
		c.fatalf("%d calls of stage %s out for request %s, want at most %d", calls, k.Stage, k.Request, EachWindow)
	}
}

func (c *chaos) start(i int) {
	g := randomGraph(c.t, c.r, true)
	req := task.Request{ID: fmt.Sprint("r", i), Target: g.Key().String(), Input: c.items()}
	deadline := c.now.Add(time.Duration(1+c.r.IntN(100)) * time.Second)
	if req.Deadline = deadline; c.r.IntN(4) == 0 {
		req.Deadline, deadline = time.Time{}, c.now.Add(1000*time.Hour)
	}
	c.alive[req.ID] = deadline
	c.step(Start{Request: req, Graph: g, Loads: make([]task.Load, len(g.Stages))})
}

// items returns 0 to 3 items, and sometimes more than EachWindow.
func (c *chaos) items() tensor.Activation {
	n := c.r.IntN(4)
	if c.r.IntN(10) == 0 {
		n = EachWindow + c.r.IntN(40)
	}
	return make(tensor.Activation, n)
}

// answer ends a random submitted task, mostly with success.
func (c *chaos) answer() {
	if len(c.out) == 0 {
		return
	}
	i := c.r.IntN(len(c.out))
	k := c.out[i]
	c.out = slices.Delete(c.out, i, i+1)
	c.answered = append(c.answered, k.Key)
	reply := &task.Reply{Key: k.Key, Replica: "r1", Output: c.items()}
	first := task.Key{Request: k.Request, Task: k.Task}
	switch p := c.r.IntN(100); {
	case p < 15:
		reply.Code, reply.Output = task.ReplicaLost, nil
		if c.r.IntN(2) == 0 {
			reply.Replica = ""
		} else {
			reply.Blame = task.Blame(c.r.IntN(int(task.BlameAlone) + 1))
		}
		if reply.Blame == task.BlameAlone && c.suspects[first] {
			c.counted[first] = Attempts // convicted
		}
		c.suspects[first] = c.suspects[first] || reply.Blame >= task.BlameCompany
	case p < 17:
		reply.Code, reply.Output = task.Code(1+c.r.IntN(int(task.Dropped))), nil
	}
	if reply.Blame != task.BlameShared && reply.Blame != task.BlameCompany {
		c.counted[first]++
	}
	c.step(Replied{reply})
}

// noise sends events that must change nothing.
func (c *chaos) noise() {
	k := task.Key{Request: "stranger", Task: 1, Attempt: 1}
	switch {
	case c.r.IntN(3) == 0 && len(c.out) > 0:
		k = c.out[c.r.IntN(len(c.out))].Key
		k.Attempt += []uint8{255, 1, 7}[c.r.IntN(3)] // not the current attempt
	case c.r.IntN(3) == 0 && len(c.out) > 0:
		k = c.out[c.r.IntN(len(c.out))].Key
		k.Task = []uint32{0, 1 << 20, 1<<32 - 1}[c.r.IntN(3)]
	case len(c.answered) > 0:
		k = c.answered[c.r.IntN(len(c.answered))]
	}
	code := task.Code(c.r.IntN(9))
	if effects := c.core.Step(c.now, Replied{&task.Reply{Key: k, Code: code, Output: c.items()}}); len(effects) > 0 {
		c.fatalf("a reply to %v, which is not out, does %+v", k, effects)
	}
}

// TestRequestsEndOnceDespiteChaos runs many requests in one core with losses, duplicates, stray
// replies, failures, clients that leave, and deadlines. Each request must end exactly once and
// leave nothing behind.
func TestRequestsEndOnceDespiteChaos(t *testing.T) {
	ends := map[int]int{} // by status; 0: success
	for seed := range uint64(60) {
		c := &chaos{
			t: t, seed: seed, r: rand.New(rand.NewPCG(seed, 3)), core: NewCore(), now: t0,
			alive: map[string]time.Time{}, attempts: map[task.Key]uint8{}, counted: map[task.Key]int{}, suspects: map[task.Key]bool{}, ends: map[string]int{}, status: ends,
		}
		const requests = 30
		started := 0
		for events := 0; started < requests || len(c.alive) > 0; events++ {
			if events > 200_000 {
				c.fatalf("%d requests still run", len(c.alive))
			}
			switch p := c.r.IntN(1000); {
			case p < 20 && started < requests:
				c.start(started)
				started++
			case p < 100:
				c.noise()
			case p < 115:
				// A request that runs, has ended, or never existed.
				c.step(Canceled{fmt.Sprint("r", c.r.IntN(started+2))})
			case p < 119:
				c.now = c.now.Add(time.Duration(c.r.IntN(5)) * time.Second)
				c.step(Tick{})
			default:
				c.answer()
			}
		}
		for i := range requests {
			if n := c.ends[fmt.Sprint("r", i)]; n != 1 {
				c.fatalf("request %d ended %d times, want once", i, n)
			}
		}
		if _, timed := c.core.Next(); timed || c.core.Requests() != 0 || len(c.out) != 0 {
			c.fatalf("%d requests, %d tasks and a timer (%v) are left", c.core.Requests(), len(c.out), timed)
		}
	}
	for _, status := range []int{0, 400, 429, statusClientClosed, 500, 502, 503, 504} {
		if ends[status] < 10 {
			t.Errorf("%d requests ended with %d, want at least 10 for the test to mean something: %v", ends[status], status, ends)
		}
	}
}
