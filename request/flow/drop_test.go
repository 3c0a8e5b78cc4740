package flow

import (
	"net/http"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/stagecoach-serving/stagecoach/request/task"
)

// drop answers a task as a dispatcher does whose policy drops it.
func (w *world) drop(t *task.Task, reason task.DropReason) {
	w.t.Helper()
	w.step(Replied{&task.Reply{Key: t.Key, Code: task.Dropped, Reason: reason, Message: "it is due in 1 ms"}})
}

func TestDroppedTaskEndsItsRequest(t *testing.T) {
	for name, c := range map[string]struct {
		graph  string
		play   func(w *world)
		reason task.DropReason
		status int
		stage  string
	}{
		"at the entry":                      {"a>b;b", func(w *world) { w.drop(w.take("a"), task.DropLate) }, task.DropLate, 503, "a"},
		"later":                             {"a>b;b", func(w *world) { w.ok(w.take("a"), "x"); w.drop(w.take("b"), task.DropLength) }, task.DropLength, 503, "b"},
		"nothing of what may run once":      {"a?", func(w *world) { w.drop(w.take("a"), task.DropNoLane) }, task.DropNoLane, 503, "a"},
		"after what may run once":           {"a?>b;b", func(w *world) { w.ok(w.take("a"), "x"); w.drop(w.take("b"), task.DropLate) }, task.DropLate, 502, "b"},
		"beside what may run once":          {"a>b,c;b;c?", func(w *world) { w.ok(w.take("a"), "x"); w.drop(w.take("b"), task.DropLate) }, task.DropLate, 502, "b"},
		"a second attempt of an each":       {"a*>b;b", func(w *world) { w.lost(w.take("a")); w.drop(w.take("a"), task.DropLate) }, task.DropLate, 503, "a"},
		"a reason that a later version has": {"a", func(w *world) { w.drop(w.take("a"), "on\r\na whim") }, task.DropOther, 503, "a"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.start(graph(t, c.graph), "x", "y", "z")
			c.play(w)
			w.failed(c.status, c.stage, "dropped ("+string(c.reason)+"): it is due in 1 ms")
			e := w.end.Error
			if e.Dropped != c.reason || (e.RetryAfter > 0) != (c.status == http.StatusServiceUnavailable) || !e.Internal {
				t.Errorf("%+v, want the reason, Retry-After with 503 alone, and the platform's fault", e)
			}
			if len(w.cancel) != len(w.tasks) || w.core.Requests() != 0 {
				t.Errorf("%d tasks canceled, %d were out", len(w.cancel), len(w.tasks))
			}
			if last := e.Stages[len(e.Stages)-1-len(w.tasks)]; last.Code != task.Dropped {
				t.Errorf("timings %+v, want the drop before the canceled calls", e.Stages)
			}
		})
	}
}

// TestDroppedRequestsAreCounted checks that the coordinator sends a dropped task once, and counts
// requests by the reason.
func TestDroppedRequestsAreCounted(t *testing.T) {
	sent := make(chan string, 10)
	r := newRig(t, graph(t, "a"), nil, func(k *task.Task) *task.Reply {
		sent <- k.Stage
		return &task.Reply{Code: task.Dropped, Reason: task.DropReason(k.Input[0].Items[0].Bytes), Message: "why"}
	})
	defer r.close()
	for _, reason := range []string{"late", "late", "length", "colour"} {
		if _, e := r.Invoke(t.Context(), request("1", reason)); e == nil || e.Status != http.StatusServiceUnavailable || e.RetryAfter != time.Second {
			t.Errorf("%s: %+v, want 503 and Retry-After", reason, e)
		}
	}
	if len(sent) != 4 {
		t.Errorf("%d tasks sent for 4 requests", len(sent))
	}
	for reason, want := range map[string]float64{"late": 2, "length": 1, "other": 1, "no-lane": 0} {
		if got := testutil.ToFloat64(r.dropped.WithLabelValues(reason)); got != want {
			t.Errorf("%s: counted %v, want %v", reason, got, want)
		}
	}
}
