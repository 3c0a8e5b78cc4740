package cluster

import (
	"testing"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// TestAStuckReplicaIsReplaced checks that a stuck replica is drained with the cause, that the next
// plan starts another one, and that its end does not count as a failed start.
func TestAStuckReplicaIsReplaced(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		const cause = "call c1 ran 2s beyond exec_timeout=1s and did not end"
		key := pipeline.ParseKey("f.ns")
		w.want(1)
		w.expect("at first", w.states(), "f-00001 ready")
		l.Stuck("f-00001", cause)
		l.Stuck("f-00001", "again, by another call")
		l.Stuck("f-00099", "nobody")
		w.want(1)
		w.expect("replaced", w.states(), "f-00002 ready")
		kinds := map[Kind]int{}
		for _, e := range l.Events(key) {
			kinds[e.Kind]++
			if (e.Kind == Stuck || e.Kind == Draining || e.Kind == Stopped) && (e.Cause != cause || e.Replica != "f-00001") {
				t.Errorf("event %+v, want the cause", e)
			}
		}
		if kinds[Stuck] != 1 || kinds[Draining] != 1 || kinds[Stopped] != 1 || kinds[Lost]+kinds[Failed] != 0 {
			t.Errorf("events %v, want that it was stuck, drained and stopped", kinds)
		}
		if e, ok := l.LastFailure(key); !ok || e.Kind != Stuck || e.Cause != cause {
			t.Errorf("last failure %+v, want the stuck replica", e)
		}
		l.Lost("f-00002", task.Death{Cause: "exit status 1", End: task.EndItself, Busy: true})
		w.want(1)
		if e, _ := l.LastFailure(key); e.Kind != Lost || e.Replica != "f-00002" {
			t.Errorf("last failure %+v, want the lost replica", e)
		}
		if n, _, _ := l.Failure(key); n != 0 {
			t.Errorf("%d failed starts, want none", n)
		}
	})
}
