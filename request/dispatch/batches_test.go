package dispatch

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// ofApp sets the application that sent the task.
func ofApp(s Submit, app string) Submit {
	s.Task.App = app
	return s
}

func TestBatchesMixApplicationsAndNeverRevisions(t *testing.T) {
	up := func(name string, revision uint64) ReplicaUp {
		return ReplicaUp{Name: name, Slots: 1, MaxBatch: 8, Revision: revision}
	}
	for name, steps := range map[string][]step{
		"applications": {
			{0, ofApp(submit("a", 0), "p.ns"), "wanted"},
			{0, ofApp(submit("b", 0), "q.ns"), "wanted"},
			{0, ofApp(submit("c", 0), "p.ns"), "wanted"},
			{1 * ms, up("r1", 1), "send r1 #1 a+b+c"},
		},
		"applications that share by weight": {
			{0, ranked(pipeline.RankFair), ""},
			{0, ofApp(submit("a", 0), "p.ns"), "wanted"},
			{0, ofApp(submit("b", 0), "p.ns"), "wanted"},
			{0, ofApp(submit("c", 0), "q.ns"), "wanted"},
			{1 * ms, up("r1", 1), "send r1 #1 a+b+c"},
		},
		"revisions": {
			{0, up("old", 1), ""},
			{0, Deployed{Revision: 2}, ""},
			{0, up("new", 2), ""},
			{0, together("a", 1, 1), "send old #1 a"},
			{0, together("b", 1, 2), "send new #2 b"},
			{0, together("a", 2, 1), ""},
			{0, together("b", 2, 2), ""},
			{0, submit("c", 0), ""}, // takes any revision
			{0, together("a", 3, 1), ""},
			{0, together("b", 3, 2), ""},
			{1 * ms, answer("new", 2, 0), "reply b ok wait=0s service=1ms; send new #3 b+c+b"},
			{2 * ms, answer("old", 1, 0), "reply a ok wait=0s service=2ms; send old #4 a+a"},
		},
	} {
		t.Run(name, func(t *testing.T) { run(t, NewCore(CoreConfig{Function: "f.ns", Revision: 1}), steps) })
	}
}

// TestSuspectsDoNotWaitForBatches checks that a batch before a suspect does not wait to fill. A
// suspect itself never waits for other tasks.
func TestSuspectsDoNotWaitForBatches(t *testing.T) {
	run(t, NewCore(CoreConfig{Function: "f.ns"}), []step{
		{0, Deployed{BatchWait: 9 * ms}, ""},
		{0, ReplicaUp{Name: "r1", Slots: 1, MaxBatch: 4}, ""},
		{0, ReplicaUp{Name: "r2", Slots: 1, MaxBatch: 4}, ""},
		{0, submit("a", 0), "wake 9ms"},
		{1 * ms, again("x", 0), "send r1 #1 a; send r2 #2 x"},
	})
}

// TestRevisionsDoNotWaitForEachOthersBatches checks that a batch that waits to fill does not keep
// tasks of another revision from their replica.
func TestRevisionsDoNotWaitForEachOthersBatches(t *testing.T) {
	run(t, NewCore(CoreConfig{Function: "f.ns", Revision: 2}), []step{
		{0, Deployed{Revision: 2, BatchWait: 9 * ms}, ""},
		{0, ReplicaUp{Name: "old", Slots: 1, MaxBatch: 4, Revision: 1}, ""},
		{0, ReplicaUp{Name: "new", Slots: 1, MaxBatch: 2, Revision: 2}, ""},
		{0, together("a", 1, 1), "wake 9ms"},
		{1 * ms, together("b", 1, 2), ""},
		{2 * ms, together("b", 2, 2), "send new #1 b+b"},
		{9 * ms, Tick{}, "send old #2 a"},
	})
}

// TestDeathsUnderLargeBatches has a poison among 64 calls, in both slots of a replica that takes
// batches of 32. The poison ends two replicas. Every other call is answered once, after at most one
// attempt more.
func TestDeathsUnderLargeBatches(t *testing.T) {
	for poison := range 64 {
		c := NewCore(CoreConfig{Function: "f.ns"})
		var (
			now     time.Duration
			queue   []Event
			ends    int
			answers = map[string]int{}
		)
		for i := range 64 {
			queue = append(queue, submit(fmt.Sprint(i), 0))
		}
		up := func() Event {
			return ReplicaUp{Name: fmt.Sprint("r", ends), Slots: 2, MaxBatch: 32}
		}
		for queue = append(queue, up()); len(queue) > 0; {
			now += ms
			ev := queue[0]
			queue = queue[1:]
			for _, e := range c.Step(at(now), ev) {
				switch e := e.(type) {
				case Send:
					if slices.ContainsFunc(e.Tasks, func(t *task.Task) bool { return t.Request == fmt.Sprint(poison) }) {
						queue = append(queue, ReplicaDown{Name: e.Replica, End: task.EndItself})
						ends++
						queue = append(queue, up())
						continue
					}
					for i := range e.Tasks {
						queue = append(queue, answer(e.Replica, e.Batch, i))
					}
				case Reply:
					r := e.Reply
					again := r.Code == task.ReplicaLost && r.Blame == task.BlameCompany
					if again && r.Attempt < 2 {
						next := newTask(r.Request, 0)
						next.Attempt, next.Alone = 2, true
						queue = append(queue, Submit{next})
						continue
					}
					if bad := r.Request == fmt.Sprint(poison); bad != (r.Code == task.ReplicaLost) || bad && r.Blame != task.BlameAlone {
						t.Fatalf("the poison is %d: reply %+v", poison, r)
					}
					answers[r.Request]++
				}
			}
		}
		if len(answers) != 64 || ends != 2 {
			t.Fatalf("the poison is %d: %d calls answered, %d replicas ended, want 64 and 2", poison, len(answers), ends)
		}
		for call, n := range answers {
			if n != 1 {
				t.Fatalf("call %s was answered %d times", call, n)
			}
		}
	}
}

// TestBatchesFitAFrame checks that the inputs of a batch fit into one frame, and that a batch that
// is full in this way does not wait for more calls.
func TestBatchesFitAFrame(t *testing.T) {
	c := NewCore(CoreConfig{Function: "f.ns"})
	c.Step(epoch, Deployed{Batch: 8, BatchWait: time.Second})
	big := func(name string, bytes int64) Submit {
		s := submit(name, 0)
		s.Task.Input = tensor.Input{{Items: tensor.Activation{{Ref: &tensor.Ref{Size: bytes}}}}}
		return s
	}
	for i, bytes := range []int64{wire.MaxFrame, 20 << 20, 12 << 20, 1, 5} {
		c.Step(epoch, big(fmt.Sprint(i), bytes))
	}
	var got []string
	for i := range 4 {
		for _, e := range c.Step(at(ms), ReplicaUp{Name: fmt.Sprint("r", i), Slots: 1, MaxBatch: 8}) {
			got = append(got, show(e))
		}
	}
	if want := []string{"send r0 #1 0", "send r1 #2 1+2", "wake 1s"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}
