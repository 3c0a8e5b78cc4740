package dispatch

import (
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

func ranked(rank string) Routed { return Routed{Rank: rank} }

// TestFairKeepsItsBound runs applications with random weights and service times that always have
// waiting tasks, on several replicas with batches. Service time divided by weight must never differ
// by more than the bound in fair.go.
func TestFairKeepsItsBound(t *testing.T) {
	for seed := range uint64(20) {
		rnd := rand.New(rand.NewPCG(seed, 7))
		const replicas, batch = 3, 2
		c := NewCore(CoreConfig{Function: "f.ns", QueueLimit: 1 << 20})
		c.Step(epoch, ranked(pipeline.RankFair))
		weights, longest := []int{1, 2, 5}, make([]float64, 3)
		for i := range longest {
			longest[i] = 0.001 + rnd.Float64()*0.05
		}
		number := 0
		add := func(now time.Time, app int) {
			number++
			s := submit(fmt.Sprint(number), 0)
			s.Task.App, s.Task.Weight = fmt.Sprint(app), weights[app]
			c.Step(now, s)
		}
		for app := range weights {
			for range 50 {
				add(epoch, app)
			}
		}
		had := make([]float64, 3) // service time divided by weight
		type running struct {
			end time.Time
			ev  []Result
		}
		var calls []running
		now := epoch
		carry := func(effects []Effect) {
			var again []int
			for _, e := range effects {
				s, ok := e.(Send)
				if !ok {
					continue
				}
				took := 0.0
				r := running{}
				for i, task := range s.Tasks {
					app := int(task.App[0] - '0')
					took = max(took, longest[app]*(0.2+0.8*rnd.Float64()))
					r.ev = append(r.ev, Result{Replica: s.Replica, Batch: s.Batch, Call: i})
					again = append(again, app)
				}
				for _, app := range again[len(again)-len(s.Tasks):] {
					had[app] += took / float64(len(s.Tasks)) / float64(weights[app])
				}
				r.end = now.Add(seconds(took))
				calls = append(calls, r)
			}
			for _, app := range again {
				add(now, app)
			}
		}
		for i := range replicas {
			carry(slices.Clone(c.Step(now, ReplicaUp{Name: fmt.Sprint("r", i), Slots: 1, MaxBatch: batch})))
		}
		most := slices.Max(longest) // a batch takes as long as its longest task
		for range 4000 {
			slices.SortStableFunc(calls, func(a, b running) int { return a.end.Compare(b.end) })
			next := calls[0]
			calls = calls[1:]
			now = next.end
			for _, ev := range next.ev {
				ev.Reply = &task.Reply{}
				carry(slices.Clone(c.Step(now, ev)))
			}
			for a := range had {
				for b := range had {
					bound := (replicas*batch + 1) * most * (1/float64(weights[a]) + 1/float64(weights[b]))
					if had[a]-had[b] > bound {
						t.Fatalf("seed %d: %v of service per weight after %v: %d is %.3f s ahead of %d, want at most %.3f", seed, had, now.Sub(epoch), a, had[a]-had[b], b, bound)
					}
				}
			}
		}
		if had[0] < 1 {
			t.Errorf("seed %d: service per weight is %v, so the run proves little", seed, had)
		}
	}
}

// TestFairForgetsApplications checks that an application gets nothing for the time in which it had
// no tasks, and that idle applications are forgotten.
func TestFairForgetsApplications(t *testing.T) {
	c := NewCore(CoreConfig{Function: "f.ns", QueueLimit: 1 << 20})
	c.Step(epoch, ranked(pipeline.RankFair))
	c.Step(epoch, ReplicaUp{Name: "r1"})
	batch := uint64(0)
	serve := func(app string) {
		s := submit(fmt.Sprint(app, batch), 0)
		s.Task.App = app
		batch++
		c.Step(epoch.Add(time.Duration(batch)*ms), s)
		c.Step(epoch.Add(time.Duration(batch+1)*ms), answer("r1", batch, 0))
	}
	for n := range 1000 {
		serve(fmt.Sprint("app", n))
	}
	if n := len(c.lanes[0].fair.apps); n > 2*idleFlows {
		t.Errorf("%d applications are kept, want at most %d", n, 2*idleFlows)
	}
	fair := c.lanes[0].fair
	for i, f := range fair.flows {
		if i > 0 && !fair.flows[i-1].before(f) || fair.apps[f.app] != f || len(fair.flows) != len(fair.apps) {
			t.Errorf("flow %d of %d, of %q, is in the wrong place", i, len(fair.flows), f.app)
		}
	}
	late := &item{task: &task.Task{Origin: task.Origin{App: fair.flows[0].app}}}
	if fair.flows[0].tag >= fair.clock {
		t.Fatal("no application is behind the clock")
	}
	fair.put(late)
	if late.flow.tag < fair.clock {
		t.Errorf("an application that comes late begins at %v, before the clock %v", late.flow.tag, fair.clock)
	}
}

// TestLeastSlackOrder checks the keys of least-slack.
func TestLeastSlackOrder(t *testing.T) {
	entered := at(time.Hour)
	in := func(d time.Duration) float64 { return instant(entered.Add(d)) }
	for name, tc := range map[string]struct {
		task  task.Task
		now   time.Duration
		key   time.Duration // since it entered
		until time.Duration
	}{
		"rank":                        {task.Task{Origin: task.Origin{Due: entered.Add(9 * time.Second)}, Place: task.Place{Rank: in(5 * time.Second)}}, 0, 5 * time.Second, 0},
		"due":                         {task.Task{Origin: task.Origin{Due: entered.Add(9 * time.Second)}, Deadline: entered.Add(20 * time.Second)}, 0, 9 * time.Second, 0},
		"deadline":                    {task.Task{Deadline: entered.Add(20 * time.Second)}, 0, 20 * time.Second, 0},
		"arrival":                     {task.Task{}, 0, 0, 0},
		"far":                         {task.Task{Deadline: entered.Add(time.Hour)}, 0, Horizon, 0},
		"hopeless":                    {task.Task{Place: task.Place{Rank: in(-time.Hour)}}, 0, -Horizon, 0},
		"not a number":                {task.Task{Origin: task.Origin{Due: entered.Add(time.Second)}, Place: task.Place{Rank: math.NaN()}}, 0, time.Second, 0},
		"a later rank, for a while":   {task.Task{Place: task.Place{Rank: in(5 * time.Second), RankUntil: entered.Add(time.Second)}}, 0, 5 * time.Second, time.Second},
		"a later rank, expired":       {task.Task{Place: task.Place{Rank: in(5 * time.Second), RankUntil: entered.Add(time.Second)}}, time.Second, 0, 0},
		"an earlier rank, expired":    {task.Task{Origin: task.Origin{Due: entered.Add(9 * time.Second)}, Place: task.Place{Rank: in(5 * time.Second), RankUntil: entered.Add(time.Second)}}, time.Second, 5 * time.Second, 0},
		"an earlier rank for a while": {task.Task{Origin: task.Origin{Due: entered.Add(9 * time.Second)}, Place: task.Place{Rank: in(5 * time.Second), RankUntil: entered.Add(time.Second)}}, 0, 5 * time.Second, 0},
	} {
		tc.task.Entered = entered
		key, until := LeastSlack{}.Key(&task.View{Now: entered.Add(tc.now)}, &tc.task)
		want := time.Time{}
		if tc.until > 0 {
			want = entered.Add(tc.until)
		}
		if math.Abs(key-in(tc.key)) > 1e-6 || !until.Equal(want) {
			t.Errorf("%s: %v after it entered until %v, want %v until %v", name, seconds(key-in(0)), until, tc.key, want)
		}
	}
}

// TestLeastSlackStarvesNobody checks the bound of LeastSlack while more urgent tasks come all the
// time, and more than the replica can run.
func TestLeastSlackStarvesNobody(t *testing.T) {
	c := NewCore(CoreConfig{Function: "f.ns", QueueLimit: 1 << 20})
	c.Step(epoch, ranked(pipeline.RankLeastSlack))
	c.Step(epoch, ReplicaUp{Name: "r1"})
	now, rnd := epoch, rand.New(rand.NewPCG(1, 2))
	entered := map[string]time.Time{}
	var begun []string
	batch := uint64(0)
	for n := range 4000 {
		now = now.Add(50 * ms)
		for k := range 2 { // twice what the replica can run
			s := submit(fmt.Sprint(n, "/", k), 0)
			switch rnd.IntN(3) {
			case 0: // hopeless
				s.Task.Rank, s.Task.RankUntil = instant(now)-rnd.Float64()*1000, now.Add(time.Duration(rnd.IntN(100))*ms)
			case 1:
				s.Task.Due = now.Add(time.Duration(rnd.IntN(10_000)) * ms)
			}
			entered[s.Task.Request] = now
			for _, e := range c.Step(now, s) {
				if s, ok := e.(Send); ok {
					begun = append(begun, s.Tasks[0].Request)
				}
			}
		}
		batch++
		for _, e := range c.Step(now, answer("r1", batch, 0)) {
			if s, ok := e.(Send); ok {
				begun = append(begun, s.Tasks[0].Request)
			}
		}
	}
	latest := time.Time{} // when the latest of the begun tasks entered
	left := maps.Clone(entered)
	for _, name := range begun {
		if at := entered[name]; at.After(latest) {
			latest = at
		}
		delete(left, name)
	}
	for name, at := range left {
		if overtaken := latest.Sub(at); overtaken > 2*Horizon {
			t.Errorf("%s waits and was overtaken by a task that entered %v after it, want at most %v", name, overtaken, 2*Horizon)
		}
	}
	if len(begun) < 3900 {
		t.Errorf("only %d tasks ran", len(begun))
	}
}

// TestRankChangesTheOrder checks that a new rank holds at the next free slot.
func TestRankChangesTheOrder(t *testing.T) {
	c := NewCore(CoreConfig{Function: "f.ns"})
	c.Step(epoch, ReplicaUp{Name: "r1"})
	for i, app := range []string{"x", "x", "x", "x", "y"} {
		s := submit(fmt.Sprint("q", i), 0)
		s.Task.App, s.Task.Due = app, at(time.Duration(10-i)*time.Second)
		c.Step(epoch, s)
	}
	suspect := submit("s", 0)
	suspect.Task.Alone, suspect.Task.Attempt, suspect.Task.App, suspect.Task.Due = true, 2, "z", at(time.Minute)
	c.Step(epoch, suspect)
	next := func(rank, want string) {
		t.Helper()
		c.Step(at(ms), ranked(rank))
		if n := c.Waiting(); n != len(c.lanes[0].waitingFor()) {
			t.Errorf("%s: %d tasks wait, and the line has %d", rank, n, len(c.lanes[0].waitingFor()))
		}
		for _, e := range c.Step(at(ms), answer("r1", c.lanes[0].batches, 0)) {
			if s, ok := e.(Send); ok && s.Tasks[0].Request != want {
				t.Errorf("%s: %s goes next, want %s", rank, s.Tasks[0].Request, want)
			}
		}
	}
	next("", "q1")
	next(pipeline.RankLeastSlack, "q4")
	next(pipeline.RankFIFO, "q2")
	next(pipeline.RankFair, "q3")
	next("unknown", "s")
}

// BenchmarkRank measures what an order costs per task, while 10,000 tasks of 100 applications wait:
// the task's place in the line, the search for the first task, and the charge.
func BenchmarkRank(b *testing.B) {
	for _, rank := range []string{pipeline.RankFIFO, pipeline.RankFair, pipeline.RankLeastSlack} {
		b.Run(rank, func(b *testing.B) {
			c := NewCore(CoreConfig{Function: "f.ns", QueueLimit: 20_000})
			c.Step(epoch, ranked(rank))
			for n := range 10_000 {
				s := submit(fmt.Sprint(n), 0)
				s.Task.App, s.Task.Weight, s.Task.Due = fmt.Sprint("pipeline-", n*7919%100, ".ns"), 1+n%3, at(time.Duration(n*7919%1000)*ms)
				c.Step(epoch, s)
			}
			l, now, items := c.lanes[0], epoch, make([]*item, 1)
			b.ReportAllocs()
			for b.Loop() {
				it := l.first(&l.fleet, -1)
				l.take(it)
				if l.fair != nil {
					items[0] = it
					l.fair.served(it, 0.002, float64(l.fair.sent(items, ms)))
				}
				now = now.Add(ms)
				it.task.Entered, it.task.Due = now, now.Add(time.Second)
				c.seq++
				it.seq = c.seq
				l.rank(now, it)
			}
		})
	}
}
