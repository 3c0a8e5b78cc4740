package dispatch

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
)

// again makes the second attempt of task "a" of request "a", after a replica ended under the first.
func again(name string, timeout time.Duration) Submit {
	t := newTask(name, timeout)
	t.Attempt, t.Alone = 2, true
	return Submit{t}
}

// of makes s need a revision.
func of(s Submit, revision uint64) Submit {
	s.Task.Pins = []task.Pin{{Function: "f.ns", Revision: revision}}
	return s
}

func cancelAgain(name string) Cancel {
	return Cancel{task.Key{Request: name, Attempt: 2}}
}

func TestSuspectsRunAlone(t *testing.T) {
	up := func(name string, slots, batch int) ReplicaUp {
		return ReplicaUp{Name: name, Slots: slots, MaxBatch: batch}
	}
	for name, tc := range map[string]struct {
		cfg   CoreConfig
		steps []step
	}{
		"runs in a batch of one, and nothing else beside it": {CoreConfig{}, []step{
			{0, again("a", 0), "wanted"},
			{0, submit("b", 0), "wanted"},
			{0, submit("c", 0), "wanted"},
			{1 * ms, up("r1", 4, 8), "send r1 #1 a"},
			{1 * ms, submit("d", 0), ""},
			{2 * ms, answer("r1", 1, 0), "reply a ok wait=1ms service=1ms; send r1 #2 b+c+d"},
		}},
		"waits for a replica to be empty, which gets nothing more": {CoreConfig{}, []step{
			{0, up("r1", 3, 1), ""},
			{0, submit("a", 0), "send r1 #1 a"},
			{0, submit("b", 0), "send r1 #2 b"},
			{1 * ms, again("x", 0), ""},
			{1 * ms, submit("c", 0), ""},
			{2 * ms, answer("r1", 1, 0), "reply a ok wait=0s service=2ms"},
			{3 * ms, answer("r1", 2, 0), "reply b ok wait=0s service=3ms; send r1 #3 x"},
			{4 * ms, answer("r1", 3, 0), "reply x ok wait=2ms service=1ms; send r1 #4 c"},
		}},
		"what came before it goes first": {CoreConfig{}, []step{
			{0, up("r1", 1, 1), ""},
			{0, submit("a", 0), "send r1 #1 a"},
			{0, submit("b", 0), ""},
			{1 * ms, again("x", 0), "wanted"},
			{1 * ms, submit("c", 0), "wanted"},
			{2 * ms, answer("r1", 1, 0), "reply a ok wait=0s service=2ms; send r1 #2 b"},
			{3 * ms, answer("r1", 2, 0), "reply b ok wait=2ms service=1ms; send r1 #3 x"},
			{4 * ms, answer("r1", 3, 0), "reply x ok wait=2ms service=1ms; send r1 #4 c"},
		}},
		"one of several replicas at a time, while the others serve": {CoreConfig{}, []step{
			{0, up("r1", 1, 1), ""},
			{0, up("r2", 1, 1), ""},
			{0, again("x", 0), "send r1 #1 x"},
			{0, again("y", 0), ""},
			{0, submit("a", 0), "send r2 #2 a"},
			{1 * ms, answer("r2", 2, 0), "reply a ok wait=0s service=1ms"},
			{1 * ms, submit("b", 0), "send r2 #3 b"},
			{2 * ms, ReplicaDown{Name: "r1", End: task.EndItself}, "reply x lost wait=0s service=2ms"},
			{3 * ms, answer("r2", 3, 0), "reply b ok wait=0s service=2ms; send r2 #4 y"},
		}},
		"half of the replicas": {CoreConfig{}, []step{
			{0, up("r1", 1, 1), ""},
			{0, up("r2", 1, 1), ""},
			{0, up("r3", 1, 1), ""},
			{0, up("r4", 1, 1), ""},
			{0, again("w", 0), "send r1 #1 w"},
			{0, again("x", 0), "send r2 #2 x"},
			{0, again("y", 0), ""},
			{0, submit("a", 0), "send r3 #3 a"},
			{1 * ms, answer("r1", 1, 0), "reply w ok wait=0s service=1ms; send r1 #4 y"},
		}},
		"takes a replica that has become idle rather than wait for the one that is reserved": {CoreConfig{}, []step{
			{0, up("r1", 2, 1), ""},
			{0, up("r2", 2, 1), ""},
			{0, submit("a", 0), "send r1 #1 a"},
			{0, submit("b", 0), "send r2 #2 b"},
			{0, again("x", 0), ""},
			{1 * ms, answer("r2", 2, 0), "reply b ok wait=0s service=1ms; send r2 #3 x"},
			{1 * ms, submit("c", 0), "send r1 #4 c"}, // free again
		}},
		"canceled while it waits": {CoreConfig{}, []step{
			{0, up("r1", 2, 1), ""},
			{0, submit("a", 0), "send r1 #1 a"},
			{0, again("x", 0), ""},
			{0, submit("b", 0), ""},
			{1 * ms, cancelAgain("x"), "reply x canceled wait=1ms service=0s; send r1 #2 b"},
		}},
		"expired while it waits": {CoreConfig{}, []step{
			{0, up("r1", 2, 1), ""},
			{0, submit("a", 0), "send r1 #1 a"},
			{0, again("x", 5*ms), "wake 5ms"},
			{0, submit("b", 0), ""},
			{5 * ms, Tick{}, "reply x expired wait=5ms service=0s; send r1 #2 b"},
		}},
		"canceled while it runs, and still on the replica": {CoreConfig{CancelGrace: 50 * ms}, []step{
			{0, up("r1", 2, 1), ""},
			{0, again("x", 0), "send r1 #1 x"},
			{1 * ms, cancelAgain("x"), "cancel r1 #1.0; reply x canceled wait=0s service=1ms; wake 1m0.001s"},
			{2 * ms, submit("b", 0), ""},
			{3 * ms, answer("r1", 1, 0), "send r1 #2 b"},
		}},
		"its replica drains": {CoreConfig{}, []step{
			{0, up("r1", 2, 1), ""},
			{0, submit("a", 0), "send r1 #1 a"},
			{0, again("x", 0), ""},
			{1 * ms, ReplicaDrain{"r1"}, ""},
			{2 * ms, up("r2", 1, 1), "send r2 #2 x"},
			{3 * ms, answer("r1", 1, 0), "reply a ok wait=0s service=3ms; idle r1"},
		}},
		"its replica takes nothing for now": {CoreConfig{}, []step{
			{0, up("r1", 2, 1), ""},
			{0, Credit{"r1", 0}, ""},
			{0, again("x", 0), "wanted"},
			{1 * ms, Credit{"r1", 1}, "send r1 #1 x"},
		}},
		"its replica is lost before it has it": {CoreConfig{}, []step{
			{0, up("r1", 2, 1), ""},
			{0, submit("a", 0), "send r1 #1 a"},
			{0, again("x", 0), ""},
			{1 * ms, ReplicaDown{Name: "r1"}, "reply a lost wait=0s service=1ms; wanted"},
			{2 * ms, up("r2", 2, 1), "send r2 #2 x"},
		}},
		"no replica is to be had": {CoreConfig{}, []step{
			{0, again("x", 0), "wanted"},
			{1 * ms, Fail{Revision: 0, Cause: "crashes"}, "reply x unavailable wait=1ms service=0s"},
		}},
		"closed": {CoreConfig{}, []step{
			{0, up("r1", 2, 1), ""},
			{0, submit("a", 0), "send r1 #1 a"},
			{0, again("x", 0), ""},
			{1 * ms, Close{"removed"}, "reply x unavailable wait=1ms service=0s; reply a unavailable wait=0s service=1ms"},
		}},
		"a later attempt finds room in a full line": {CoreConfig{QueueLimit: 1}, []step{
			{0, submit("a", 0), "wanted"},
			{0, again("x", 0), "wanted"},
			{0, submit("b", 0), "reply b overloaded wait=0s service=0s; wanted"},
		}},
		"its revision is gone": {CoreConfig{Revision: 1}, []step{
			{0, ReplicaUp{Name: "old", Slots: 2, MaxBatch: 1, Revision: 1}, ""},
			{0, together("a", 1, 1), "send old #1 a"},
			{0, Submit{&task.Task{Key: task.Key{Request: "x", Attempt: 2}, ReplyTo: "x", Alone: true, Pins: []task.Pin{{Function: "f.ns", Revision: 1}}}}, ""},
			{1 * ms, Deployed{Revision: 2}, ""},
			{2 * ms, ReplicaDown{Name: "old"}, "reply a lost wait=0s service=2ms; revive 1; wanted"},
			{3 * ms, NoReplica{Revision: 1, Cause: "it does not start"}, "reply x redeployed wait=3ms service=0s"},
		}},
		"of its revision, on a replica that drains": {CoreConfig{Revision: 1}, []step{
			{0, ReplicaUp{Name: "old", Slots: 2, MaxBatch: 1, Revision: 1}, ""},
			{0, together("a", 1, 1), "send old #1 a"},
			{0, Submit{&task.Task{Key: task.Key{Request: "x", Attempt: 2}, ReplyTo: "x", Alone: true, Pins: []task.Pin{{Function: "f.ns", Revision: 1}}}}, ""},
			{1 * ms, Deployed{Revision: 2}, ""},
			{1 * ms, ReplicaUp{Name: "new", Slots: 2, MaxBatch: 1, Revision: 2}, ""},
			{1 * ms, ReplicaDrain{"old"}, ""},
			{1 * ms, submit("b", 0), "send new #2 b"},
			{2 * ms, answer("old", 1, 0), "reply a ok wait=0s service=2ms; send old #3 x; wake 1m0.002s"},
		}},
		"one that drains counts separately": {CoreConfig{Revision: 1}, []step{
			{0, ReplicaUp{Name: "old", Slots: 2, MaxBatch: 1, Revision: 1}, ""},
			{0, together("a", 1, 1), "send old #1 a"},
			{1 * ms, Deployed{Revision: 2}, ""},
			{1 * ms, ReplicaUp{Name: "new", Slots: 2, MaxBatch: 1, Revision: 2}, ""},
			{1 * ms, ReplicaDrain{"old"}, ""},
			{1 * ms, of(again("x", 0), 1), ""}, // waits until the old replica is empty
			{1 * ms, again("y", 0), "send new #2 y"},
			{1 * ms, again("z", 0), ""},
			{2 * ms, answer("new", 2, 0), "reply y ok wait=0s service=1ms; send new #3 z"},
			{3 * ms, answer("old", 1, 0), "reply a ok wait=0s service=3ms; send old #4 x; wake 1m0.003s"},
		}},
		"those that drain count by revision": {CoreConfig{Revision: 3}, []step{
			{0, ReplicaUp{Name: "one", Slots: 2, MaxBatch: 1, Revision: 1}, ""},
			{0, ReplicaUp{Name: "two", Slots: 2, MaxBatch: 1, Revision: 2}, ""},
			{0, together("a", 1, 1), "send one #1 a"},
			{0, together("b", 1, 2), "send two #2 b"},
			{1 * ms, ReplicaDrain{"one"}, ""},
			{1 * ms, ReplicaDrain{"two"}, ""},
			{1 * ms, of(again("x", 0), 1), "wanted"},
			{2 * ms, answer("two", 2, 0), "reply b ok wait=0s service=2ms; wake 1m0.002s"},
			{3 * ms, of(again("y", 0), 2), "send two #3 y; wanted"},
		}},
		"one that drains is to be had while the others are reserved": {CoreConfig{Revision: 1}, []step{
			{0, ReplicaUp{Name: "old1", Slots: 2, MaxBatch: 1, Revision: 1}, ""},
			{0, ReplicaUp{Name: "old2", Slots: 2, MaxBatch: 1, Revision: 1}, ""},
			{1 * ms, Deployed{Revision: 2}, ""},
			{1 * ms, together("a", 1, 1), "send old1 #1 a"},
			{1 * ms, together("a", 2, 1), "send old2 #2 a"},
			{1 * ms, ReplicaUp{Name: "new", Slots: 2, MaxBatch: 1, Revision: 2}, ""},
			{1 * ms, ReplicaDrain{"old1"}, ""},
			{1 * ms, ReplicaDrain{"old2"}, ""},
			{1 * ms, again("w", 0), "send new #3 w"},
			{2 * ms, answer("old1", 1, 0), "reply a ok wait=0s service=1ms"},
			{2 * ms, of(again("x", 0), 1), "send old1 #4 x"},
			{2 * ms, of(again("y", 0), 1), ""}, // half of the old replicas are reserved
			{2 * ms, together("a", 3, 1), "send old2 #5 a"},
		}},
	} {
		tc.cfg.Function = "f.ns"
		t.Run(name, func(t *testing.T) { run(t, NewCore(named(tc.cfg)), tc.steps) })
	}
}

// TestBlameDependsOnEndAndOtherTasks checks that the blame of a replica's tasks depends on how it
// ended, and on which other tasks it had.
func TestBlameDependsOnEndAndOtherTasks(t *testing.T) {
	for name, tc := range map[string]struct {
		slots, batch int
		tasks        []Event
		end          task.End
		want         string
	}{
		"alone":                 {1, 1, []Event{submit("a", 0)}, task.EndItself, "a alone"},
		"a suspect":             {4, 4, []Event{again("x", 0), submit("a", 0)}, task.EndItself, "x alone"},
		"in one batch":          {1, 2, []Event{submit("a", 0), submit("b", 0), submit("c", 0), answer("r1", 1, 0)}, task.EndItself, "b company; c company"},
		"in two batches":        {2, 1, []Event{submit("a", 0), submit("b", 0)}, task.EndItself, "a company; b company"},
		"killed from outside":   {1, 1, []Event{submit("a", 0)}, task.EndUnclear, "a unclear"},
		"killed with others":    {2, 1, []Event{submit("a", 0), submit("b", 0)}, task.EndUnclear, "a company; b company"},
		"its zygote ended":      {2, 1, []Event{submit("a", 0), submit("b", 0)}, task.EndShared, "a shared; b shared"},
		"beside a canceled one": {2, 1, []Event{submit("a", 0), submit("b", 0), cancelOf("a")}, task.EndItself, "b company"},
		"the last of several":   {2, 1, []Event{submit("a", 0), submit("b", 0), answer("r1", 1, 0)}, task.EndItself, "b alone"},
	} {
		t.Run(name, func(t *testing.T) {
			c := NewCore(CoreConfig{Function: "f.ns"})
			c.Step(epoch, ReplicaUp{Name: "r1", Slots: tc.slots, MaxBatch: tc.batch})
			for _, ev := range tc.tasks {
				c.Step(epoch, ev)
			}
			var got []string
			for _, e := range c.Step(at(ms), ReplicaDown{Name: "r1", End: tc.end}) {
				if r, ok := e.(Reply); ok {
					got = append(got, fmt.Sprint(r.To, " ", []string{"none", "shared", "company", "unclear", "alone"}[r.Reply.Blame]))
				}
			}
			slices.Sort(got)
			if got := strings.Join(got, "; "); got != tc.want {
				t.Errorf("blame %q, want %q", got, tc.want)
			}
		})
	}
}

// TestSuspectsAreCounted checks that control and admission count waiting suspects like other tasks.
func TestSuspectsAreCounted(t *testing.T) {
	c := NewCore(CoreConfig{Function: "f.ns"})
	c.Step(epoch, again("x", 0))
	c.Step(at(ms), submit("a", 0))
	if s := c.Signals(at(3 * ms)); s.Waiting != 2 || s.Wait.Oldest != 3*ms {
		t.Errorf("%d wait, the oldest for %v, want 2 and 3ms", s.Waiting, s.Wait.Oldest)
	}
}
