package dispatch

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
)

var epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func at(d time.Duration) time.Time { return epoch.Add(d) }

// newTask returns a task of the request with this name. The task's reply subject is the same name.
// A timeout of 0 means no deadline.
func newTask(name string, timeout time.Duration) *task.Task {
	t := &task.Task{Key: task.Key{Request: name, Attempt: 1}, Function: "f.ns", ReplyTo: name}
	if timeout > 0 {
		t.Deadline = at(timeout)
	}
	return t
}

// named returns cfg for the function of newTask's tasks.
func named(cfg CoreConfig) CoreConfig {
	cfg.Function = "f.ns"
	return cfg
}

func show(e Effect) string {
	switch e := e.(type) {
	case Send:
		var names []string
		for _, t := range e.Tasks {
			names = append(names, t.Request)
		}
		return fmt.Sprintf("send %s #%d %s", e.Replica, e.Batch, strings.Join(names, "+"))
	case CancelCall:
		return fmt.Sprintf("cancel %s #%d.%d", e.Replica, e.Batch, e.Call)
	case Reply:
		return fmt.Sprintf("reply %s %v wait=%v service=%v", e.To, codeNames[e.Reply.Code], e.Reply.Wait, e.Reply.Service)
	case Idle:
		return "idle " + e.Replica
	case Exhausted:
		return "exhausted " + e.Replica
	case Stuck:
		return fmt.Sprintf("stuck %s (%s)", e.Replica, e.Cause)
	case Halved:
		return fmt.Sprintf("halved %d to %d", e.Size, e.Most)
	case Evict:
		return "evict " + e.Replica
	case Revive:
		return fmt.Sprintf("revive %d", e.Revision)
	case Wanted:
		if e.Lane != "f.ns" {
			return "wanted " + e.Lane
		}
		return "wanted"
	case Unknown:
		return fmt.Sprintf("unknown %d %s", e.Version, strings.Join(e.Lanes, "+"))
	case Gone:
		return "gone " + e.Lane
	case Wake:
		return fmt.Sprintf("wake %v", e.At.Sub(epoch))
	}
	return fmt.Sprintf("%T", e)
}

var codeNames = map[task.Code]string{
	task.OK: "ok", task.BadInput: "bad", task.Failed: "failed", task.ReplicaLost: "lost",
	task.Expired: "expired", task.Overloaded: "overloaded", task.Canceled: "canceled", task.Unavailable: "unavailable",
	task.Redeployed: "redeployed", task.OutOfMemory: "memory", task.Dropped: "dropped", task.InputLost: "input lost",
}

type step struct {
	at   time.Duration
	ev   Event
	want string // effects, joined by "; "
}

const ms = time.Millisecond

func submit(name string, timeout time.Duration) Submit { return Submit{newTask(name, timeout)} }

func answer(replica string, batch uint64, call int) Result {
	return Result{Replica: replica, Batch: batch, Call: call, Reply: &task.Reply{}}
}

func memory(replica string, batch uint64, call int) Result {
	return Result{Replica: replica, Batch: batch, Call: call, Reply: &task.Reply{Code: task.OutOfMemory, Message: "want 2 GiB"}}
}

func askFor(name string) Ask { return Ask{newTask(name, 0).Key, name} }

func cancelOf(name string) Cancel { return Cancel{newTask(name, 0).Key} }

// TestLostTasksMayHaveRun checks that the answer about a task that the owner does not have names a
// replica, because coordinators take that to mean that the task may have run.
func TestLostTasksMayHaveRun(t *testing.T) {
	fx := NewCore(CoreConfig{}).Step(epoch, askFor("a"))
	if r, ok := fx[0].(Reply); !ok || r.Reply.Replica == "" || r.Reply.Code != task.ReplicaLost || r.Reply.Key != askFor("a").Key {
		t.Errorf("got %+v", fx)
	}
}

// lexical is an Orderer by request name whose keys expire after 10 ms.
type lexical struct{ rekeyed *int }

func (l lexical) Key(v *task.View, t *task.Task) (float64, time.Time) {
	if t.Entered != v.Now {
		*l.rekeyed++
		return -float64(t.Request[0]), v.Now.Add(10 * ms)
	}
	return float64(t.Request[0]), v.Now.Add(10 * ms)
}

// pairs is a Batcher that waits up to 5 ms for two tasks.
type pairs struct{}

func (pairs) Batch(v *task.View, _ *task.Replica, head []*task.Task) (int, time.Duration) {
	if left := head[0].Entered.Add(5 * ms).Sub(v.Now); len(head) < 2 && left > 0 {
		return 0, left
	}
	return min(len(head), 2), 0
}

// dropper is a Binder that drops tasks named "x" and binds all others to replica 0, even if it is
// full.
type dropper struct{}

func (dropper) Bind(_ *task.View, t *task.Task) task.Choice {
	if t.Request == "x" {
		return task.Choice{Action: task.Drop, Reason: "not wanted"}
	}
	return task.Choice{Action: task.Bind}
}

func TestScenarios(t *testing.T) {
	rekeyed := 0
	up := ReplicaUp{Name: "r1", Slots: 1, MaxBatch: 1}
	for name, tc := range map[string]struct {
		cfg   CoreConfig
		steps []step
	}{
		"one after the other": {CoreConfig{}, []step{
			{0, up, ""},
			{1 * ms, submit("a", 0), "send r1 #1 a"},
			{2 * ms, submit("b", 0), ""},
			{3 * ms, submit("c", 0), "wanted"},
			{11 * ms, answer("r1", 1, 0), "reply a ok wait=0s service=10ms; send r1 #2 b"},
			{21 * ms, answer("r1", 2, 0), "reply b ok wait=9ms service=10ms; send r1 #3 c"},
		}},
		"asked for": {CoreConfig{}, []step{
			{0, up, ""},
			{0, submit("a", 0), "send r1 #1 a"},
			{0, submit("b", 0), ""},
			{1 * ms, askFor("a"), ""},
			{1 * ms, askFor("b"), ""},
			{2 * ms, askFor("c"), "reply c lost wait=0s service=0s"},
			{10 * ms, answer("r1", 1, 0), "reply a ok wait=0s service=10ms; send r1 #2 b"},
			{11 * ms, askFor("a"), "reply a lost wait=0s service=0s"},
		}},
		"no replica yet": {CoreConfig{}, []step{
			{0, submit("a", 0), "wanted"},
			{5 * ms, up, "send r1 #1 a"},
		}},
		"full line": {CoreConfig{QueueLimit: 2}, []step{
			{0, submit("a", 0), "wanted"},
			{0, submit("b", 0), "wanted"},
			{1 * ms, submit("c", 0), "reply c overloaded wait=0s service=0s; wanted"},
			{1 * ms, submit("c", 0), "wanted"}, // a duplicate of a known task
		}},
		"the expired make room": {CoreConfig{QueueLimit: 1}, []step{
			{0, submit("a", 5*ms), "wanted; wake 5ms"},
			{6 * ms, submit("b", 0), "reply a expired wait=6ms service=0s; wanted"},
		}},
		"expired costs no replica": {CoreConfig{}, []step{
			{0, up, ""},
			{0, submit("a", 0), "send r1 #1 a"},
			{0, submit("b", 5*ms), "wake 5ms"},
			{0, submit("c", 9*ms), "wanted"},
			{5 * ms, Tick{}, "reply b expired wait=5ms service=0s; wake 9ms"},
			{10 * ms, answer("r1", 1, 0), "reply a ok wait=0s service=10ms; reply c expired wait=10ms service=0s"},
			{11 * ms, submit("d", 11*ms), "reply d expired wait=0s service=0s"},
		}},
		"expired while it ran": {CoreConfig{CancelGrace: 50 * ms}, []step{
			{0, up, ""},
			{0, submit("a", 10*ms), "send r1 #1 a; wake 10ms"},
			{0, submit("b", 0), ""},
			{10 * ms, Tick{}, "cancel r1 #1.0; reply a expired wait=0s service=10ms; wake 60ms"},
			{20 * ms, answer("r1", 1, 0), "send r1 #2 b"},
			{60 * ms, Tick{}, ""},
		}},
		"canceled while it waits": {CoreConfig{}, []step{
			{0, submit("a", 0), "wanted"},
			{2 * ms, cancelOf("a"), "reply a canceled wait=2ms service=0s"},
			{3 * ms, cancelOf("a"), ""},
			{3 * ms, submit("a", 0), ""},
			{4 * ms, up, ""},
		}},
		"canceled while it runs": {CoreConfig{CancelGrace: 50 * ms}, []step{
			{0, up, ""},
			{0, submit("a", 0), "send r1 #1 a"},
			{0, submit("b", 0), ""},
			{2 * ms, cancelOf("a"), "cancel r1 #1.0; reply a canceled wait=0s service=2ms; wake 1m0.002s"},
			{2 * ms, cancelOf("a"), ""},
			{2 * ms, submit("a", 0), ""}, // a duplicate
			{7 * ms, answer("r1", 1, 0), "send r1 #2 b"},
		}},
		"replica lost": {CoreConfig{}, []step{
			{0, up, ""},
			{0, submit("a", 0), "send r1 #1 a"},
			{0, submit("b", 0), ""},
			{2 * ms, ReplicaDown{Name: "r1", Cause: "signal 9"}, "reply a lost wait=0s service=2ms; wanted"},
			{2 * ms, answer("r1", 1, 0), ""},
			{3 * ms, ReplicaUp{Name: "r2"}, "send r2 #2 b"},
		}},
		"same name again": {CoreConfig{}, []step{
			{0, up, ""},
			{0, submit("a", 0), "send r1 #1 a"},
			{2 * ms, up, "reply a lost wait=0s service=2ms"},
			{3 * ms, answer("r1", 1, 0), "evict r1"},
		}},
		"draining": {CoreConfig{}, []step{
			{0, up, ""},
			{0, submit("a", 0), "send r1 #1 a"},
			{0, submit("b", 0), ""},
			{1 * ms, ReplicaDrain{"r1"}, ""},
			{2 * ms, answer("r1", 1, 0), "reply a ok wait=0s service=2ms; idle r1"},
			{3 * ms, ReplicaDown{Name: "r1", Cause: "closed"}, ""},
			{4 * ms, up, "send r1 #2 b"},
			{4 * ms, answer("r1", 2, 0), "reply b ok wait=4ms service=0s"},
			{5 * ms, ReplicaDrain{"r1"}, "idle r1"},
		}},
		"out of memory": {CoreConfig{}, []step{
			{0, ReplicaUp{Name: "r1", Slots: 2, MaxBatch: 2}, ""},
			{0, submit("a", 0), "send r1 #1 a"},
			{0, submit("b", 0), "send r1 #2 b"},
			{0, submit("c", 0), ""},
			{0, submit("d", 0), ""},
			// c and d do not go to r1, and a is not tried there again.
			{1 * ms, memory("r1", 1, 0), "exhausted r1; reply a memory wait=0s service=1ms"},
			{2 * ms, memory("r1", 2, 0), "reply b memory wait=0s service=2ms; idle r1"},
			{3 * ms, ReplicaUp{Name: "r2", Slots: 1, MaxBatch: 2}, "send r2 #3 c+d"},
		}},
		"out of memory under one that is canceled": {CoreConfig{}, []step{
			{0, up, ""},
			{0, submit("a", 0), "send r1 #1 a"},
			{1 * ms, cancelOf("a"), "cancel r1 #1.0; reply a canceled wait=0s service=1ms; wake 1m0.001s"},
			{2 * ms, memory("r1", 1, 0), "exhausted r1; idle r1"},
		}},
		"out of memory while it drains": {CoreConfig{}, []step{
			{0, up, ""},
			{0, submit("a", 0), "send r1 #1 a"},
			{1 * ms, ReplicaDrain{"r1"}, ""},
			{2 * ms, memory("r1", 1, 0), "exhausted r1; reply a memory wait=0s service=2ms; idle r1"},
		}},
		"answers nobody waits for": {CoreConfig{}, []step{
			{0, ReplicaUp{Name: "r1", Slots: 2}, ""},
			{0, submit("a", 0), "send r1 #1 a"},
			{0, submit("b", 0), "send r1 #2 b"},
			{2 * ms, answer("r1", 1, 1), "evict r1; reply a lost wait=0s service=2ms; reply b lost wait=0s service=2ms"},
		}},
		"credits": {CoreConfig{}, []step{
			{0, up, ""},
			{0, Credit{"r1", 0}, ""},
			{0, submit("a", 0), "wanted"},
			{0, submit("b", 0), "wanted"},
			{1 * ms, Credit{"r1", 2}, "send r1 #1 a; send r1 #2 b"},
		}},
		"batches fill up": {CoreConfig{}, []step{
			{0, ReplicaUp{Name: "r1", Slots: 1, MaxBatch: 2}, ""},
			{0, submit("a", 0), "send r1 #1 a"},
			{1 * ms, submit("b", 0), ""},
			{2 * ms, submit("c", 0), ""},
			{3 * ms, submit("d", 0), "wanted"},
			{4 * ms, answer("r1", 1, 0), "reply a ok wait=0s service=4ms; send r1 #2 b+c"},
			{6 * ms, answer("r1", 2, 1), "reply c ok wait=2ms service=2ms"},
			{8 * ms, answer("r1", 2, 0), "reply b ok wait=3ms service=4ms; send r1 #3 d"},
		}},
		"the smallest limit of a batch holds": {CoreConfig{}, []step{
			{0, ReplicaUp{Name: "r1", Slots: 1, MaxBatch: 3}, ""},
			{0, Deployed{Revision: 1, Batch: 4}, ""},
			{0, submit("a", 0), "send r1 #1 a"},
			{0, submit("b", 0), ""},
			{0, submit("c", 0), ""},
			{0, submit("d", 0), ""},
			{0, submit("e", 0), "wanted"},
			{0, submit("f", 0), "wanted"},
			{0, submit("g", 0), "wanted"},
			{1 * ms, Batched{Most: 2}, ""}, // the plan's
			{1 * ms, answer("r1", 1, 0), "reply a ok wait=0s service=1ms; send r1 #2 b+c"},
			{2 * ms, Batched{Most: 9}, ""}, // the replica's
			{2 * ms, answer("r1", 2, 0), "reply b ok wait=1ms service=1ms"},
			{2 * ms, answer("r1", 2, 1), "reply c ok wait=1ms service=1ms; send r1 #3 d+e+f"},
			{3 * ms, Deployed{Revision: 1, Batch: 1}, ""}, // the declared one
			{3 * ms, submit("h", 0), "wanted"},
			{3 * ms, ReplicaUp{Name: "r2", Slots: 1, MaxBatch: 3}, "send r2 #4 g"},
		}},
		"auto is 1 until a plan says more": {CoreConfig{}, []step{
			{0, Deployed{Revision: 1, Batch: 8, AutoBatch: true}, ""},
			{0, submit("a", 0), "wanted"},
			{0, submit("b", 0), "wanted"},
			{0, submit("c", 0), "wanted"},
			{1 * ms, ReplicaUp{Name: "r1", Slots: 1, MaxBatch: 8}, "send r1 #1 a"},
			{2 * ms, Batched{Most: 4}, ""},
			{2 * ms, Deployed{Revision: 2, Batch: 8, AutoBatch: true}, ""}, // the plan still holds
			{3 * ms, answer("r1", 1, 0), "reply a ok wait=1ms service=2ms; send r1 #2 b+c"},
		}},
		"a batch waits to fill": {CoreConfig{}, []step{
			{0, ReplicaUp{Name: "r1", Slots: 3, MaxBatch: 2}, ""},
			{0, Deployed{Revision: 1, BatchWait: 5 * ms}, ""},
			{0, submit("a", 0), "wake 5ms"},
			{1 * ms, submit("b", 0), "send r1 #1 a+b"}, // it is full
			{2 * ms, submit("c", 0), ""},
			{5 * ms, Tick{}, "wake 7ms"},
			{7 * ms, Tick{}, "send r1 #2 c"},
			{8 * ms, submit("d", 10*ms), "wake 10ms"}, // a deadline holds
			{10 * ms, Tick{}, "reply d expired wait=2ms service=0s"},
			{11 * ms, submit("e", 0), "wake 16ms"},
			{12 * ms, Deployed{Revision: 1}, "send r1 #3 e"}, // no waiting from now on
		}},
		"least loaded": {CoreConfig{}, []step{
			{0, ReplicaUp{Name: "r2", Slots: 2}, ""},
			{0, ReplicaUp{Name: "r1", Slots: 2}, ""},
			{0, submit("a", 0), "send r1 #1 a"},
			{0, submit("b", 0), "send r2 #2 b"},
			{0, submit("c", 0), "send r1 #3 c"},
			{1 * ms, answer("r1", 1, 0), "reply a ok wait=0s service=1ms"},
			{1 * ms, answer("r1", 3, 0), "reply c ok wait=0s service=1ms"},
			{1 * ms, submit("d", 0), "send r1 #4 d"},
		}},
		"a batcher that waits": {CoreConfig{Batcher: pairs{}}, []step{
			{0, ReplicaUp{Name: "r1", Slots: 2, MaxBatch: 4}, ""},
			{0, submit("a", 0), "wake 5ms"},
			{1 * ms, submit("b", 0), "send r1 #1 a+b"},
			{2 * ms, submit("c", 0), ""},
			{5 * ms, Tick{}, "wake 7ms"},
			{7 * ms, Tick{}, "send r1 #2 c"},
		}},
		"a binder that drops, and one that overloads": {CoreConfig{Binder: dropper{}}, []step{
			{0, up, ""},
			{0, submit("a", 0), "send r1 #1 a"},
			{0, submit("x", 0), "reply x dropped wait=0s service=0s"},
			{0, submit("b", 0), ""},
		}},
		"keys end": {CoreConfig{Orderer: lexical{&rekeyed}}, []step{
			{0, submit("b", 0), "wanted; wake 10ms"},
			{1 * ms, submit("a", 0), "wanted"},
			{10 * ms, Tick{}, "wake 11ms"}, // b is now -'b', before a
			{10 * ms, up, "send r1 #1 b"},
		}},
		"closed": {CoreConfig{}, []step{
			{0, up, ""},
			{0, submit("a", 0), "send r1 #1 a"},
			{0, submit("b", 0), ""},
			{1 * ms, Close{"removed"}, "reply b unavailable wait=1ms service=0s; reply a unavailable wait=0s service=1ms"},
			{2 * ms, submit("c", 0), "reply c unavailable wait=0s service=0s"},
			{2 * ms, answer("r1", 1, 0), ""},
			{3 * ms, up, "evict r1"},
		}},
		"no replica to be had": {CoreConfig{}, []step{
			{0, up, ""},
			{0, submit("a", 0), "send r1 #1 a"},
			{0, submit("b", 0), ""},
			{0, submit("c", 0), "wanted"},
			{1 * ms, Fail{Cause: "crashes"}, "reply b unavailable wait=1ms service=0s; reply c unavailable wait=1ms service=0s"},
			{2 * ms, submit("d", 0), ""},
			{3 * ms, answer("r1", 1, 0), "reply a ok wait=0s service=3ms; send r1 #2 d"},
		}},
		"few are remembered": {CoreConfig{Remember: 1}, []step{
			{0, submit("a", 0), "wanted"},
			{0, cancelOf("a"), "reply a canceled wait=0s service=0s"},
			{0, submit("a", 0), ""},
			{0, submit("b", 0), "wanted"},
			{0, cancelOf("b"), "reply b canceled wait=0s service=0s"},
			{0, submit("a", 0), "wanted"}, // the key of the first a was forgotten
		}},
	} {
		tc.cfg.Function = "f.ns"
		t.Run(name, func(t *testing.T) { run(t, NewCore(named(tc.cfg)), tc.steps) })
	}
}

func run(t *testing.T, c *Core, steps []step) {
	t.Helper()
	for i, s := range steps {
		var got []string
		for _, e := range c.Step(at(s.at), s.ev) {
			got = append(got, show(e))
		}
		if got := strings.Join(got, "; "); got != s.want {
			t.Fatalf("step %d at %v, %T:\n got %q\nwant %q", i, s.at, s.ev, got, s.want)
		}
	}
}

func TestReplyHasReplicaAndCause(t *testing.T) {
	c := NewCore(CoreConfig{Function: "f.ns"})
	c.Step(epoch, ReplicaUp{Name: "r1"})
	c.Step(epoch, submit("a", 0))
	fx := slices.Clone(c.Step(at(ms), ReplicaDown{Name: "r1", Cause: "killed by signal 9"}))
	r := fx[0].(Reply).Reply
	if r.Key != newTask("a", 0).Key || r.Replica != "r1" || r.Message != "killed by signal 9" {
		t.Errorf("reply %+v, want key of a, replica r1 and the cause", r)
	}
}

// The first batch of a replica and batches with canceled calls do not count as service times.
func TestServiceIsOfWholeBatches(t *testing.T) {
	c := NewCore(CoreConfig{Function: "f.ns", CancelGrace: time.Hour})
	c.Step(epoch, ReplicaUp{Name: "r1"})
	now := epoch
	for i, busy := range []time.Duration{time.Second, 10 * ms, 2 * time.Second, 10 * ms, 10 * ms} {
		name := fmt.Sprint(i)
		c.Step(now, submit(name, 0))
		if busy == 2*time.Second {
			c.Step(now, cancelOf(name))
		}
		now = now.Add(busy)
		c.Step(now, answer("r1", uint64(i+1), 0))
	}
	if got := c.lanes[0].service.read(); !got.Known || got.Mean != 10*ms {
		t.Errorf("service %+v, want 10ms", got)
	}
}

func TestLoadCountsSlotsAndCalls(t *testing.T) {
	c := NewCore(CoreConfig{Function: "f.ns"})
	c.Step(epoch, ReplicaUp{Name: "r1", Slots: 2, MaxBatch: 4})
	c.Step(epoch, ReplicaUp{Name: "r2", Slots: 1, MaxBatch: 1})
	if got := c.Servers(); got != 9 {
		t.Errorf("%d servers, want 2*4 + 1*1", got)
	}
	for i := range 5 {
		c.Step(epoch, submit(fmt.Sprint(i), 0))
	}
	if c.Running() != 3 || c.Waiting() != 2 {
		t.Errorf("running %d, waiting %d, want 3 and 2", c.Running(), c.Waiting())
	}
	c.Step(epoch, ReplicaDrain{"r1"})
	if got := c.Servers(); got != 1 {
		t.Errorf("%d servers while r1 drains, want 1", got)
	}
	c.Step(epoch, ReplicaDown{Name: "r1", Cause: "gone"})
	if c.Running() != 1 {
		t.Errorf("running %d after r1 was lost, want 1", c.Running())
	}
}
