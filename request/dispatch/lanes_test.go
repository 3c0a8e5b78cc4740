package dispatch

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// shares returns a table with one row of one level.
func shares(version uint64, level plan.Level) Routed {
	t := plan.NewTable("f.ns", version, map[string]plan.Row{plan.FromClient: {Levels: []plan.Level{level}}})
	return Routed{Table: &t}
}

func sharesOf(version uint64, parts map[string]float64, backups ...string) Routed {
	l := plan.Level{Backups: backups}
	for _, lane := range []string{"f.ns", "g.ns", "h.ns"} {
		if p := parts[lane]; p > 0 {
			l.Shares = append(l.Shares, plan.Share{Lane: lane, Part: p})
		}
	}
	return shares(version, l)
}

// direct is the task of a client that invoked a function by its own name.
func direct(name, function string) Submit {
	t := newTask(name, 0)
	t.Function = function
	return Submit{t}
}

func long(name string, length int) Submit {
	t := newTask(name, 0)
	t.Length = length
	return Submit{t}
}

func pinnedTo(name string, n uint32, pins ...task.Pin) Submit {
	t := newTask(name, 0)
	t.Task, t.Pins, t.Together = n, pins, true
	return Submit{t}
}

func replicaOf(lane, name string) ReplicaUp { return ReplicaUp{Lane: lane, Name: name} }

// TestLaneScenarios checks what a stage with several lanes does.
func TestLaneScenarios(t *testing.T) {
	g, h := Deployed{Lane: "g.ns", Revision: 1}, Deployed{Lane: "h.ns", Revision: 1}
	all := sharesOf(1, map[string]float64{"g.ns": 1}, "h.ns", "f.ns")
	for name, tc := range map[string]struct {
		cfg   CoreConfig
		steps []step
	}{
		"without a table, the own lane gets all": {CoreConfig{}, []step{
			{0, g, ""},
			{0, replicaOf("g.ns", "g1"), ""},
			{0, submit("a", 0), "wanted"},
			{0, replicaOf("f.ns", "f1"), "send f1 #1 a"},
		}},
		"without its own function, the first variant gets all": {CoreConfig{Bare: true}, []step{
			{0, h, ""},
			{0, g, ""},
			{0, submit("a", 0), "wanted g.ns"},
			{0, replicaOf("g.ns", "g1"), "send g1 #1 a"},
		}},
		"no lane": {CoreConfig{Bare: true}, []step{
			{0, submit("a", 0), "reply a dropped wait=0s service=0s"},
		}},
		"a variant by its own name": {CoreConfig{}, []step{
			{0, g, ""},
			{0, replicaOf("f.ns", "f1"), ""},
			{0, direct("a", "g.ns"), "wanted g.ns"},
			{1 * ms, replicaOf("g.ns", "g1"), "send g1 #1 a"},
		}},
		"a function that the request names, whatever the table says": {CoreConfig{}, []step{
			{0, g, ""},
			{0, h, ""},
			{0, all, ""},
			{0, replicaOf("g.ns", "g1"), ""},
			{0, replicaOf("h.ns", "h1"), ""},
			{0, pinnedTo("a", 1, task.Pin{Function: "h.ns"}), "send h1 #1 a"},
			{0, pinnedTo("b", 1, task.Pin{Function: "h.ns"}, task.Pin{Function: "g.ns", Revision: 1}), ""},
			{0, pinnedTo("c", 1, task.Pin{Function: "f.ns"}), "wanted"}, // it does not move to a backup
			{1 * ms, sharesOf(2, map[string]float64{"g.ns": 1}), ""},    // nor with a new table
			{2 * ms, answer("h1", 1, 0), "reply a ok wait=0s service=2ms; send h1 #2 b"},
			{3 * ms, pinnedTo("d", 1, task.Pin{Function: "z.ns"}), "reply d dropped wait=0s service=0s; wanted"},
			{4 * ms, replicaOf("f.ns", "f1"), "send f1 #1 c"},
		}},
		"a function that is not the only lane": {CoreConfig{}, []step{
			{0, replicaOf("f.ns", "f1"), ""},
			{0, pinnedTo("a", 1, task.Pin{Function: "g.ns"}), "reply a dropped wait=0s service=0s"},
			{0, pinnedTo("b", 1, task.Pin{Function: "f.ns"}), "send f1 #1 b"},
		}},
		"a held task blocks no other lane": {CoreConfig{}, []step{
			{0, g, ""},
			{0, sharesOf(1, map[string]float64{"f.ns": 0.5, "g.ns": 0.5}), ""},
			{0, replicaOf("g.ns", "g1"), ""},
			{0, submit("a", 0), "wanted"},
			{0, submit("b", 0), "wanted; send g1 #1 b"},
			{0, submit("c", 0), "wanted"},
			{1 * ms, answer("g1", 1, 0), "reply b ok wait=0s service=1ms"},
			{1 * ms, submit("d", 0), "wanted; send g1 #2 d"},
		}},
		"a crashed lane's tasks go to its backup, and come back": {CoreConfig{}, []step{
			{0, g, ""},
			{0, h, ""},
			{0, all, ""},
			{0, replicaOf("g.ns", "g1"), ""},
			{0, replicaOf("h.ns", "h1"), ""},
			{0, submit("a", 0), "send g1 #1 a"},
			{0, submit("b", 0), ""}, // it waits in g
			{1 * ms, ReplicaDown{Name: "g1", Cause: "x"}, "reply a lost wait=0s service=1ms; send h1 #1 b"},
			{2 * ms, submit("c", 0), "wanted g.ns"}, // it waits in h
			{3 * ms, replicaOf("g.ns", "g2"), "send g2 #2 c"},
			{4 * ms, submit("d", 0), ""},
			{5 * ms, answer("g2", 2, 0), "reply c ok wait=1ms service=2ms; send g2 #3 d"},
		}},
		"a lane that cannot start": {CoreConfig{}, []step{
			{0, g, ""},
			{0, h, ""},
			{0, all, ""},
			{0, replicaOf("h.ns", "h1"), ""},
			{0, submit("a", 0), "wanted g.ns"}, // g may wake
			{0, direct("b", "g.ns"), "wanted g.ns"},
			{1 * ms, Fail{Lane: "g.ns", Revision: 1, Cause: "no image"}, "reply b unavailable wait=1ms service=0s; send h1 #1 a"},
			{2 * ms, submit("c", 0), "wanted g.ns"},
			{3 * ms, Deployed{Lane: "g.ns", Revision: 2}, "wanted g.ns"}, // it may start, so c waits for it
			{4 * ms, replicaOf("g.ns", "g1"), "send g1 #1 c"},
		}},
		"no backup": {CoreConfig{}, []step{
			{0, g, ""},
			{0, h, ""},
			{0, all, ""},
			{0, submit("a", 0), "wanted g.ns"},
			{1 * ms, Fail{Lane: "g.ns", Revision: 1, Cause: "no image"}, "reply a unavailable wait=1ms service=0s"},
			{2 * ms, submit("b", 0), "wanted g.ns"},
		}},
		"a lane whose replicas take nothing": {CoreConfig{}, []step{
			{0, g, ""},
			{0, h, ""},
			{0, all, ""},
			{0, replicaOf("g.ns", "g1"), ""},
			{0, replicaOf("h.ns", "h1"), ""},
			{0, Credit{Replica: "g1"}, ""},
			{0, submit("a", 0), "wanted g.ns; send h1 #1 a"},
			{0, submit("b", 0), "wanted g.ns"},
			{1 * ms, Credit{Replica: "g1", Slots: 1}, "send g1 #1 b"},
		}},
		"a full lane's tasks go to its overflow": {CoreConfig{}, []step{
			{0, Deployed{Lane: "g.ns", QueueLimit: 1}, ""},
			{0, shares(1, plan.Level{Shares: []plan.Share{{Lane: "g.ns", Part: 1}}, Overflow: "f.ns"}), ""},
			{0, replicaOf("f.ns", "f1"), ""},
			{0, submit("a", 0), "wanted g.ns"},
			{0, submit("b", 0), "wanted g.ns; send f1 #1 b; wanted g.ns"},
			{1 * ms, replicaOf("g.ns", "g1"), "send g1 #1 a"},
			{1 * ms, submit("c", 0), ""},
		}},
		"a full lane keeps its tasks while its overflow is full": {CoreConfig{}, []step{
			{0, Deployed{Lane: "g.ns", QueueLimit: 1}, ""},
			{0, Deployed{Lane: "h.ns", QueueLimit: 1}, ""},
			{0, shares(1, plan.Level{Shares: []plan.Share{{Lane: "g.ns", Part: 1}}, Overflow: "h.ns"}), ""},
			{0, replicaOf("h.ns", "h1"), ""},
			{0, submit("a", 0), "wanted g.ns"},
			{0, submit("b", 0), "wanted g.ns; wanted g.ns; send h1 #1 b"},
			{0, submit("c", 0), "wanted g.ns; wanted g.ns"}, // it waits in h
			{0, submit("d", 0), "wanted g.ns"},
			{1 * ms, ReplicaUp{Lane: "g.ns", Name: "g1", MaxBatch: 2}, "send g1 #1 a+d"},
		}},
		"a lane with more than its share of the limit is full": {CoreConfig{QueueLimit: 4}, []step{
			{0, g, ""},
			{0, shares(1, plan.Level{Shares: []plan.Share{{Lane: "f.ns", Part: 0.25}, {Lane: "g.ns", Part: 0.75}}, Overflow: "g.ns"}), ""},
			{0, ReplicaUp{Lane: "g.ns", Name: "g1", Slots: 9}, ""},
			{0, submit("a", 0), "send g1 #1 a"},
			{0, submit("b", 0), "wanted"}, // in f
			{0, submit("c", 0), "wanted; send g1 #2 c"},
			{0, submit("d", 0), "wanted; send g1 #3 d"},
			{0, submit("e", 0), "wanted; send g1 #4 e"},
			{0, submit("f", 0), "wanted; wanted; send g1 #5 f"}, // it belongs to f
		}},
		"lengths": {CoreConfig{}, []step{
			{0, Deployed{Lane: "g.ns", MaxLength: 10}, ""},
			{0, Deployed{Lane: "h.ns", MaxLength: 20}, ""},
			{0, Deployed{Lane: "f.ns", MaxLength: 5}, ""},
			{0, replicaOf("g.ns", "g1"), ""},
			{0, replicaOf("h.ns", "h1"), ""},
			{0, long("a", 7), "send g1 #1 a"},
			{0, long("b", 11), "send h1 #1 b"},
			{0, long("c", 21), "reply c dropped wait=0s service=0s"},
			{0, long("d", 20), ""},
			{1 * ms, Removed{Lane: "h.ns", Cause: "gone"}, "reply d dropped wait=1ms service=0s"},
		}},
		"a single lane has a longest input too": {CoreConfig{}, []step{
			{0, Deployed{MaxLength: 10}, ""},
			{0, long("a", 10), "wanted"},
			{0, long("b", 11), "reply b dropped wait=0s service=0s; wanted"},
		}},
		"a removed variant drains into the others": {CoreConfig{}, []step{
			{0, g, ""},
			{0, all, "unknown 1 h.ns"},
			{0, replicaOf("g.ns", "g1"), ""},
			{0, submit("a", 0), "send g1 #1 a"},
			{0, submit("b", 0), ""},
			{0, direct("c", "g.ns"), "wanted g.ns"},
			{1 * ms, Removed{Lane: "g.ns", Cause: "gone"}, "reply c unavailable wait=1ms service=0s; wanted"},
			{2 * ms, replicaOf("f.ns", "f1"), "send f1 #1 b"},
			{3 * ms, ReplicaDrain{Name: "g1"}, ""},
			{4 * ms, answer("g1", 1, 0), "reply a ok wait=0s service=4ms; idle g1; gone g.ns"},
			{5 * ms, direct("d", "g.ns"), ""},
		}},
		"the own function is removed while a variant lives": {CoreConfig{}, []step{
			{0, g, ""},
			{0, replicaOf("f.ns", "f1"), ""},
			{0, replicaOf("g.ns", "g1"), ""},
			{0, submit("a", 0), "send f1 #1 a"},
			{0, submit("b", 0), ""},
			{1 * ms, Removed{Lane: "f.ns", Cause: "gone"}, "send g1 #1 b"},
			{2 * ms, answer("f1", 1, 0), "reply a ok wait=0s service=2ms"},
			{2 * ms, submit("c", 0), ""},
			{3 * ms, ReplicaDown{Name: "f1", Cause: "stopped"}, "gone f.ns"},
			{3 * ms, answer("g1", 1, 0), "reply b ok wait=1ms service=2ms; send g1 #2 c"},
			{4 * ms, Removed{Lane: "g.ns", Cause: "gone too"}, "reply c unavailable wait=1ms service=1ms"},
			{5 * ms, submit("d", 0), "reply d unavailable wait=0s service=0s"},
		}},
		"a table names a lane that is gone": {CoreConfig{}, []step{
			{0, g, ""},
			{0, sharesOf(7, map[string]float64{"f.ns": 0.25, "g.ns": 0.25, "h.ns": 0.5}), "unknown 7 h.ns"},
			{0, sharesOf(7, map[string]float64{"f.ns": 0.25, "g.ns": 0.25, "h.ns": 0.5}), ""},
			{0, replicaOf("f.ns", "f1"), ""},
			{0, replicaOf("g.ns", "g1"), ""},
			{0, submit("a", 0), "send f1 #1 a"},
			{0, submit("b", 0), "send g1 #1 b"},
			{0, h, ""}, // the share holds now
			{0, submit("c", 0), "wanted h.ns"},
			{0, Removed{Lane: "h.ns", Cause: "gone"}, "gone h.ns"}, // said once per version
			{0, sharesOf(8, map[string]float64{"h.ns": 1}), "unknown 8 h.ns"},
		}},
		"pinned per variant": {CoreConfig{Revision: 1}, []step{
			{0, g, ""},
			{0, sharesOf(1, map[string]float64{"f.ns": 0.5, "g.ns": 0.5}), ""},
			{0, ReplicaUp{Lane: "g.ns", Name: "g1", Slots: 4, Revision: 1}, ""},
			{0, ReplicaUp{Lane: "g.ns", Name: "g2", Slots: 9, Revision: 2}, ""},
			{0, ReplicaUp{Lane: "f.ns", Name: "f1", Slots: 9, Revision: 1}, ""},
			{0, Deployed{Lane: "g.ns", Revision: 2}, ""},
			{0, pinnedTo("a", 1, task.Pin{Function: "g.ns", Revision: 1}), "send g1 #1 a"},
			{0, pinnedTo("a", 2, task.Pin{Function: "g.ns", Revision: 1}), "send g1 #2 a"},
			{0, ReplicaDown{Name: "g1", Cause: "x"}, "reply a lost wait=0s service=0s; reply a lost wait=0s service=0s"},
			// Revision 1 of g serves no more, so the table decides; a is free to run on f.
			{0, pinnedTo("a", 3, task.Pin{Function: "g.ns", Revision: 1}), "send f1 #1 a"},
			{0, pinnedTo("a", 4, task.Pin{Function: "g.ns", Revision: 1}), "revive 1"},
		}},
		"an expected request wakes the lanes with a share": {CoreConfig{}, []step{
			{0, g, ""},
			{0, h, ""},
			{0, sharesOf(1, map[string]float64{"g.ns": 0.5, "h.ns": 0.5}), ""},
			{0, replicaOf("h.ns", "h1"), ""},
			{0, Expect{}, "wanted g.ns"},
		}},
		"the limit is that of the stage": {CoreConfig{QueueLimit: 3}, []step{
			{0, Deployed{Lane: "g.ns", QueueLimit: 1}, ""},
			{0, submit("a", 0), "wanted"},
			{0, direct("b", "g.ns"), "wanted; wanted g.ns"},
			{0, direct("c", "g.ns"), "reply c overloaded wait=0s service=0s; wanted; wanted g.ns"},
			{0, submit("d", 0), "wanted; wanted g.ns"},
			{0, submit("e", 0), "reply e overloaded wait=0s service=0s; wanted; wanted g.ns"},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			tc.cfg.Function = "f.ns"
			run(t, NewCore(tc.cfg), tc.steps)
		})
	}
}

// TestSharesAreExact checks that after n tasks, each lane has had its share of n, give or take the
// number of lanes, whatever new tables come meanwhile.
func TestSharesAreExact(t *testing.T) {
	parts := map[string]float64{"f.ns": 0.13, "g.ns": 0.29, "h.ns": 0.58}
	for _, every := range []int{0, 1, 2, 7} { // a new table after so many tasks
		c := NewCore(CoreConfig{Function: "f.ns", QueueLimit: 1 << 20})
		for _, lane := range []string{"g.ns", "h.ns"} {
			c.Step(epoch, Deployed{Lane: lane})
		}
		for lane := range parts {
			c.Step(epoch, ReplicaUp{Lane: lane, Name: lane, Slots: 1 << 20})
		}
		c.Step(epoch, sharesOf(1, parts))
		got := map[string]int{}
		for n := range 3000 {
			if every > 0 && n%every == 0 {
				ev := sharesOf(uint64(n), parts)
				// The backups make it differ from the one before.
				ev.Table.Rows[0].Levels[0].Backups = []string{"f.ns", "g.ns"}[:n/every%2+1]
				c.Step(epoch, ev)
			}
			for _, e := range c.Step(epoch, submit(fmt.Sprint(n), 0)) {
				if s, ok := e.(Send); ok {
					got[s.Replica]++
				}
			}
			for lane, part := range parts {
				if off := float64(got[lane]) - part*float64(n+1); math.Abs(off) > float64(len(parts)) {
					t.Fatalf("a table every %d: %s has %d of %d tasks, want %.2f of them", every, lane, got[lane], n+1, part)
				}
			}
		}
	}
}

// TestTableMovesWaitingTasks checks that a new table holds for tasks that wait already, in their
// order.
func TestTableMovesWaitingTasks(t *testing.T) {
	c := NewCore(CoreConfig{Function: "f.ns"})
	c.Step(epoch, Deployed{Lane: "g.ns"})
	for n := range 100 {
		c.Step(epoch, submit(fmt.Sprint(n), 0))
	}
	c.Step(epoch, sharesOf(1, map[string]float64{"f.ns": 0.2, "g.ns": 0.8}))
	if f, g := c.Lane("").Waiting(), c.Lane("g.ns").Waiting(); f != 20 || g != 80 {
		t.Errorf("%d and %d tasks wait, want 20 and 80", f, g)
	}
	last := uint64(0)
	for _, it := range c.Lane("g.ns").waitingFor() {
		if it.seq <= last || it.task.Entered != epoch {
			t.Errorf("task %d after %d, entered %v", it.seq, last, it.task.Entered)
		}
		last = it.seq
	}
}

// TestSignalsOfLanes checks what is measured per stage and per lane.
func TestSignalsOfLanes(t *testing.T) {
	c := NewCore(CoreConfig{Function: "f.ns", QueueLimit: 1 << 20})
	now := epoch
	for n := range 100 { // 20 per second, before there are variants
		now = now.Add(50 * ms)
		c.Step(now, submit(fmt.Sprint("before", n), 0))
	}
	if is := c.Signals(now); is.Stage.Known {
		t.Errorf("a stage with one lane has the demand %+v", is.Stage)
	}
	c.Step(now, Deployed{Lane: "g.ns"})
	c.Step(now, ReplicaUp{Lane: "g.ns", Name: "g1", Slots: 1 << 10})
	if is := c.Signals(now).Stage; !is.Known || math.Abs(is.Rate-20) > 2 {
		t.Errorf("the stage's demand is %+v when it gets a variant, want 20 per second", is)
	}
	c.Step(now, sharesOf(1, map[string]float64{"f.ns": 0.25, "g.ns": 0.75}))
	for n := range 600 {
		now = now.Add(50 * ms)
		for _, e := range c.Step(now, submit(fmt.Sprint(n), 0)) {
			if s, ok := e.(Send); ok {
				c.Step(now, Result{Replica: "g1", Batch: s.Batch, Reply: &task.Reply{Output: make(tensor.Activation, 3)}})
			}
		}
		if n%2 == 0 {
			c.Step(now, direct(fmt.Sprint("direct", n), "g.ns"))
		}
	}
	f, g := c.Lane("").Signals(now), c.Lane("g.ns").Signals(now)
	for what, got := range map[string][2]float64{
		"stage": {f.Stage.Rate, 20}, "stage, as the variant says": {g.Stage.Rate, 20},
		"own lane": {f.Demand.Rate, 5}, "variant": {g.Demand.Rate, 25}, "items per call": {g.Items.Mean, 3},
	} {
		if math.Abs(got[0]-got[1]) > got[1]/10 {
			t.Errorf("%s: %v, want about %v", what, got[0], got[1])
		}
	}
	if f.Items.Known {
		t.Errorf("the own lane ran nothing and has %+v", f.Items)
	}
	if f.Wait.Oldest < 20*time.Second || g.Wait.Oldest > 0 {
		t.Errorf("the oldest tasks wait for %v and %v", f.Wait.Oldest, g.Wait.Oldest)
	}
}

// TestDetachKeepsDuplicatesOut checks that a task that moved with its lane, or ended before, runs
// at neither owner again.
func TestDetachKeepsDuplicatesOut(t *testing.T) {
	c, to := NewCore(CoreConfig{Function: "f.ns"}), NewCore(CoreConfig{Function: "g.ns", Bare: true})
	c.Step(epoch, Deployed{Lane: "g.ns"})
	c.Step(epoch, sharesOf(1, map[string]float64{"g.ns": 1}))
	c.Step(epoch, replicaOf("g.ns", "g1"))
	for _, ev := range []Event{submit("ended", 0), answer("g1", 1, 0), submit("runs", 0), direct("waits", "g.ns"), submit("stays", 0)} {
		c.Step(epoch, ev)
	}
	d, _ := c.Detach(epoch, "g.ns")
	to.Attach(epoch, d)
	if c.Waiting() != 1 || c.Running() != 0 || to.Waiting() != 1 || to.Running() != 1 {
		t.Fatalf("%d wait and %d run here, %d and %d there, want 1, 0, 1, 1", c.Waiting(), c.Running(), to.Waiting(), to.Running())
	}
	for _, name := range []string{"ended", "runs", "waits"} {
		for _, at := range []*Core{c, to} {
			before := at.Waiting()
			if at.Step(epoch, submit(name, 0)); at.Waiting() != before {
				t.Errorf("%q waits again at %s", name, at.cfg.Function)
			}
		}
	}
	var got []string
	for _, e := range to.Step(at(ms), answer("g1", 2, 0)) {
		got = append(got, show(e))
	}
	if all := strings.Join(got, "; "); all != "reply runs ok wait=0s service=1ms; send g1 #3 waits" {
		t.Errorf("the lane goes on with %q", all)
	}
}
