package dispatch

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
)

// together makes the n-th task of a request with several tasks, for a revision; 0: any.
func together(request string, n uint32, revision uint64) Submit {
	t := newTask(request, 0)
	t.Task, t.Together = n, true
	if revision != 0 {
		t.Pins = []task.Pin{{Function: "f.ns", Revision: revision}}
	}
	return Submit{t}
}

// due gives a task a deadline.
func due(s Submit, after time.Duration) Submit {
	s.Task.Deadline = at(after)
	return s
}

func TestTasksOfARequestRunOnOneRevision(t *testing.T) {
	up := func(name string, revision uint64) ReplicaUp {
		return ReplicaUp{Name: name, Slots: 1, MaxBatch: 1, Revision: revision}
	}
	for name, tc := range map[string]struct {
		cfg   CoreConfig
		steps []step
	}{
		"those of one request wait for its revision, others pass them": {CoreConfig{Revision: 1}, []step{
			{0, up("old", 1), ""},
			{0, together("a", 1, 0), "send old #1 a"},
			{0, together("a", 2, 0), ""},
			{0, submit("b", 0), "wanted"},
			{1 * ms, Deployed{Revision: 2}, ""},
			{1 * ms, up("new", 2), "send new #2 b"},
			{2 * ms, answer("new", 2, 0), "reply b ok wait=1ms service=1ms"},
			{3 * ms, answer("old", 1, 0), "reply a ok wait=0s service=3ms; send old #3 a"},
		}},
		"what nobody has begun goes to the new one": {CoreConfig{Revision: 1}, []step{
			{0, together("a", 1, 0), "wanted"},
			{0, together("a", 2, 0), "wanted"},
			{1 * ms, Deployed{Revision: 2}, ""},
			{1 * ms, up("new", 2), "send new #1 a"},
		}},
		"a draining one takes what has nowhere else to go, and waits for the next": {CoreConfig{Revision: 1}, []step{
			{0, up("old", 1), ""},
			{0, together("a", 1, 0), "send old #1 a"},
			{0, together("a", 2, 0), ""},
			{0, submit("b", 0), "wanted"},
			{1 * ms, Deployed{Revision: 2}, ""},
			{1 * ms, ReplicaDrain{"old"}, ""},
			{2 * ms, answer("old", 1, 0), "reply a ok wait=0s service=2ms; send old #2 a"},
			{3 * ms, answer("old", 2, 0), "reply a ok wait=2ms service=1ms; wake 1m0.003s"},
			{10 * time.Second, together("a", 3, 1), "send old #3 a; wanted"},
			{11 * time.Second, answer("old", 3, 0), "reply a ok wait=0s service=1s"},
			{12 * time.Second, Leave{"a"}, "idle old"},
		}},
		"one that leaves while its tasks are here leaves with the last of them": {CoreConfig{Revision: 1}, []step{
			{0, up("old", 1), ""},
			{0, together("a", 1, 0), "send old #1 a"},
			{1 * ms, Deployed{Revision: 2}, ""},
			{1 * ms, ReplicaDrain{"old"}, ""},
			{1 * ms, Leave{"a"}, ""},
			{2 * ms, answer("old", 1, 0), "reply a ok wait=0s service=2ms; idle old"},
		}},
		"the deadline ends what its coordinator does not": {CoreConfig{Revision: 1}, []step{
			{0, up("old", 1), ""},
			{0, due(together("a", 1, 0), 5*time.Second), "send old #1 a; wake 5s"},
			{0, due(together("b", 1, 0), 9*time.Second), ""},
			{1 * ms, ReplicaDrain{"old"}, ""},
			{2 * ms, answer("old", 1, 0), "reply a ok wait=0s service=2ms"},
			{3 * ms, ReplicaUp{Name: "new", Slots: 1, MaxBatch: 1, Revision: 2, Timeout: 0}, "send new #2 b"},
			{4 * ms, Deployed{Revision: 2}, ""},
			{5 * time.Second, Tick{}, "idle old; wake 9s"},
		}},
		"one that dies while it waits is not brought back until a task comes": {CoreConfig{Revision: 1}, []step{
			{0, up("old", 1), ""},
			{0, together("a", 1, 0), "send old #1 a"},
			{1 * ms, Deployed{Revision: 2}, ""},
			{1 * ms, ReplicaDrain{"old"}, ""},
			{2 * ms, answer("old", 1, 0), "reply a ok wait=0s service=2ms; wake 1m0.002s"},
			{3 * ms, ReplicaDown{Name: "old", Cause: "died"}, ""},
			{4 * ms, up("new", 2), ""},
			{5 * ms, together("a", 2, 1), "revive 1"},
			{6 * ms, together("a", 3, 1), "wanted"},
			{7 * ms, up("again", 1), "send again #2 a"},
			{7 * ms, ReplicaDrain{"again"}, ""},
			{8 * ms, ReplicaDown{Name: "again", Cause: "died"}, "reply a lost wait=2ms service=1ms; revive 1"},
			{9 * ms, NoReplica{Revision: 1, Cause: "it does not start"}, "reply a redeployed wait=3ms service=0s"},
			{10 * ms, NoReplica{Revision: 2, Cause: "it is the deployed one"}, ""},
		}},
		"one that is not alone does not wait": {CoreConfig{Revision: 1}, []step{
			{0, up("one", 1), ""},
			{0, up("two", 1), ""},
			{0, together("a", 1, 0), "send one #1 a"},
			{1 * ms, ReplicaDrain{"one"}, ""},
			{1 * ms, together("a", 2, 0), "send two #2 a"},
			{2 * ms, answer("one", 1, 0), "reply a ok wait=0s service=2ms; idle one"},
		}},
		"the last of an old revision goes, and is asked for again": {CoreConfig{Revision: 1}, []step{
			{0, up("old", 1), ""},
			{0, together("a", 1, 0), "send old #1 a"},
			{0, together("a", 2, 0), ""},
			{0, together("a", 3, 0), "wanted"},
			{1 * ms, Deployed{Revision: 2}, ""},
			{2 * ms, answer("old", 1, 0), "reply a ok wait=0s service=2ms; send old #2 a"},
			{3 * ms, ReplicaDown{Name: "old", Cause: "died"}, "reply a lost wait=2ms service=1ms; revive 1; wanted"},
			{4 * ms, up("new", 2), ""},
			{5 * ms, up("again", 1), "send again #3 a"},
		}},
		"the last of an old revision goes, and what has used nothing of it goes on with the new one": {CoreConfig{Revision: 1}, []step{
			{0, up("old", 1), ""},
			{0, together("a", 1, 0), "send old #1 a"},
			{0, together("a", 2, 0), ""},
			{1 * ms, Deployed{Revision: 2}, ""},
			{2 * ms, ReplicaDown{Name: "old", Cause: "died"}, "reply a lost wait=0s service=2ms; wanted"},
			{3 * ms, up("new", 2), "send new #2 a"},
		}},
		"the last of the present revision goes: its like is waited for": {CoreConfig{Revision: 1}, []step{
			{0, up("one", 1), ""},
			{0, together("a", 1, 0), "send one #1 a"},
			{0, together("a", 2, 0), ""},
			{1 * ms, ReplicaDown{Name: "one", Cause: "died"}, "reply a lost wait=0s service=1ms; wanted"},
			{2 * ms, together("a", 3, 1), "wanted"},
			{3 * ms, up("two", 1), "send two #2 a"},
			{4 * ms, Deployed{Revision: 2}, ""},
			{5 * ms, ReplicaDown{Name: "two", Cause: "died"}, "reply a lost wait=3ms service=2ms; revive 1; wanted"},
		}},
		"a redeploy asks for what waits for a revision that has nobody": {CoreConfig{Revision: 1}, []step{
			{0, together("a", 1, 1), "wanted"},
			{1 * ms, Deployed{Revision: 2}, "revive 1"},
			{1 * ms, Deployed{Revision: 3}, ""},
			{2 * ms, NoReplica{Revision: 1, Cause: "no room"}, "reply a redeployed wait=2ms service=0s"},
		}},
		"a batch is of one revision": {CoreConfig{Revision: 2}, []step{
			{0, ReplicaUp{Name: "old", Slots: 1, MaxBatch: 4, Revision: 1, Timeout: 0}, ""},
			{0, ReplicaUp{Name: "new", Slots: 1, MaxBatch: 4, Revision: 2, Timeout: 0}, ""},
			{0, together("a", 1, 1), "send old #1 a"},
			{0, together("b", 1, 2), "send new #2 b"},
			{1 * ms, together("a", 2, 1), ""},
			{1 * ms, together("b", 2, 2), ""},
			{1 * ms, submit("c", 0), ""},
			{1 * ms, together("a", 3, 1), ""},
			{2 * ms, answer("old", 1, 0), "reply a ok wait=0s service=2ms; send old #3 a+c+a"},
			{2 * ms, answer("new", 2, 0), "reply b ok wait=0s service=2ms; send new #4 b"},
		}},
		"one that is out of memory takes nothing, whoever needs its revision": {CoreConfig{Revision: 1}, []step{
			{0, up("old", 1), ""},
			{0, together("a", 1, 0), "send old #1 a"},
			{0, together("a", 2, 0), ""},
			{1 * ms, Deployed{Revision: 2}, ""},
			{1 * ms, memory("old", 1, 0), "exhausted old; reply a memory wait=0s service=1ms; idle old"},
			{2 * ms, up("new", 2), "send new #2 a"},
		}},
		"the present revision's tasks wait for another one of it": {CoreConfig{Revision: 1}, []step{
			{0, ReplicaUp{Name: "one", Slots: 2, MaxBatch: 1, Revision: 1, Timeout: 0}, ""},
			{0, together("a", 1, 0), "send one #1 a"},
			{0, together("a", 2, 0), "send one #2 a"},
			{0, together("a", 3, 0), ""},
			{1 * ms, memory("one", 1, 0), "exhausted one; reply a memory wait=0s service=1ms"},
			{2 * ms, up("two", 1), "send two #3 a"},
			{3 * ms, answer("one", 2, 0), "reply a ok wait=0s service=3ms; idle one"},
		}},
		"the deployed revision cannot be had: a draining replica of the old one serves on": {CoreConfig{Revision: 1}, []step{
			{0, up("old", 1), ""},
			{0, together("a", 1, 1), "send old #1 a"},
			{1 * ms, Deployed{Revision: 2}, ""},
			{1 * ms, ReplicaDrain{"old"}, ""},
			{2 * ms, together("b", 1, 2), "wanted"},
			{2 * ms, submit("c", 0), "wanted"},
			{2 * ms, together("a", 2, 1), "wanted"},
			{3 * ms, Fail{Revision: 2, Cause: "it does not start"}, "reply b unavailable wait=1ms service=0s; reply c unavailable wait=1ms service=0s; wake 1m0.003s"},
			{4 * ms, answer("old", 1, 0), "reply a ok wait=0s service=4ms; send old #2 a"},
			{5 * ms, together("a", 3, 1), "wanted"},
			{6 * ms, Close{"removed"}, "reply a unavailable wait=1ms service=0s; reply a unavailable wait=2ms service=2ms"},
		}},
		"the deployed revision cannot be had: one of the old one is being revived": {CoreConfig{Revision: 1}, []step{
			{0, together("a", 1, 1), "wanted"},
			{0, again("x", 0), "wanted"},
			{1 * ms, Deployed{Revision: 2}, "revive 1"},
			{1 * ms, Fail{Revision: 1, Cause: "the one before does not start"}, ""},
			{2 * ms, Fail{Revision: 2, Cause: "it does not start"}, "reply x unavailable wait=2ms service=0s"},
			{3 * ms, up("again", 1), "send again #1 a"},
		}},
		"canceled ones need nothing": {CoreConfig{Revision: 1}, []step{
			{0, up("old", 1), ""},
			{0, together("a", 1, 0), "send old #1 a"},
			{0, together("a", 2, 0), ""},
			{1 * ms, Deployed{Revision: 2}, ""},
			{1 * ms, ReplicaDrain{"old"}, ""},
			{2 * ms, answer("old", 1, 0), "reply a ok wait=0s service=2ms; send old #2 a"},
			{3 * ms, Cancel{task.Key{Request: "a", Task: 2, Attempt: 1}}, "cancel old #2.0; reply a canceled wait=2ms service=1ms; wake 1m0.003s"},
			{4 * ms, Leave{"a"}, ""},
			{5 * ms, answer("old", 2, 0), "idle old"},
		}},
	} {
		t.Run(name, func(t *testing.T) { run(t, NewCore(named(tc.cfg)), tc.steps) })
	}
}

// shuffled is an Orderer with random keys.
type shuffled struct{ *rand.Rand }

func (o shuffled) Key(*task.View, *task.Task) (float64, time.Time) {
	return float64(o.IntN(10)), time.Time{}
}

// TestFirstMatchesFullScan compares the search of the line with a scan of all of it.
func TestFirstMatchesFullScan(t *testing.T) {
	for seed := range uint64(50) {
		rng := rand.New(rand.NewPCG(seed, 5))
		c := NewCore(CoreConfig{Function: "f.ns", Revision: 3, Orderer: shuffled{rng}})
		for i := range 4 {
			name := fmt.Sprint("r", i)
			c.Step(epoch, ReplicaUp{Name: name, Slots: 1, MaxBatch: 1, Revision: uint64(1 + i/2)})
			c.Step(epoch, Credit{Replica: name}) // no slots, so that all tasks wait
		}
		for n := range uint32(40) {
			c.Step(epoch, together(fmt.Sprint("q", n%13), n, rng.Uint64N(4)))
		}
		c.Step(epoch, ReplicaDrain{fmt.Sprint("r", rng.IntN(4))})
		l := c.lanes[0]
		l.blocked = []uint64{rng.Uint64N(6), rng.Uint64N(6)}
		for i := -1; i < len(l.replicas); i++ {
			var want *item
			for _, it := range l.sorted.items {
				r := it.revision()
				if !slices.Contains(l.blocked, r) && (i < 0 || l.fits(r, i)) && (want == nil || l.less(it, want)) {
					want = it
				}
			}
			if got := l.first(&l.fleet, i); got != want {
				t.Fatalf("seed %d, replica %d, blocked %v: %+v, want %+v", seed, i, l.blocked, got, want)
			}
		}
	}
}

// BenchmarkStepTogether is BenchmarkStep for requests with 64 tasks, while replicas of two
// revisions serve.
func BenchmarkStepTogether(b *testing.B) {
	for _, revisions := range []int{1, 2} {
		b.Run(fmt.Sprintf("revisions=%d", revisions), func(b *testing.B) {
			c := NewCore(CoreConfig{Function: "f.ns", QueueLimit: 1000, Revision: uint64(revisions)})
			for i := range 10 {
				c.Step(epoch, ReplicaUp{Name: fmt.Sprint("r", i), Slots: 1, MaxBatch: 1, Revision: uint64(1 + i%revisions)})
			}
			now, n := epoch, uint32(0)
			var running []Send
			step := func(ev Event) {
				now = now.Add(time.Microsecond)
				for _, e := range c.Step(now, ev) {
					if s, ok := e.(Send); ok {
						running = append(running, s)
					}
				}
			}
			submit := func() {
				if n++; n%64 == 0 {
					step(Leave{fmt.Sprint(n/64 - 3)}) // a request whose tasks have ended
				}
				step(Submit{&task.Task{Key: task.Key{Request: fmt.Sprint(n / 64), Task: n, Attempt: 1}, Deadline: now.Add(time.Minute), Together: true}})
			}
			for range 110 {
				submit()
			}
			b.ReportAllocs()
			for b.Loop() {
				submit()
				s := running[0]
				running = running[1:]
				step(Result{Replica: s.Replica, Batch: s.Batch, Reply: &task.Reply{}})
			}
		})
	}
}
