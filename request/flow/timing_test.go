package flow

import (
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// TestTimingsHaveItemsAndVariant: what a call was given and returned, and the function that ran it.
func TestTimingsHaveItemsAndVariant(t *testing.T) {
	g := pipeline.Pipeline{Name: "f", Namespace: "ns", Entry: "f", Stages: []pipeline.Stage{{Function: pipeline.Function{Name: "f", Namespace: "ns"}}}}
	c, now := NewCore(), time.Unix(1000, 0)
	var sent *task.Task
	for _, e := range c.Step(now, Start{Request: task.Request{ID: "r", Target: "f.ns", Input: make(tensor.Activation, 3)}, Graph: g, Loads: make([]task.Load, 1)}) {
		if s, ok := e.(Submit); ok {
			sent = s.Task
		}
	}
	for _, e := range c.Step(now, Replied{&task.Reply{Key: sent.Key, Variant: "f-small.ns", Output: make(tensor.Activation, 5)}}) {
		if f, ok := e.(Finish); ok {
			if got := f.Response.Stages[0]; got.Given != 3 || got.Returned != 5 || got.Variant != "f-small.ns" {
				t.Errorf("%+v, want 3 items given, 5 returned, by f-small.ns", got)
			}
			return
		}
	}
	t.Error("the request has not ended")
}

// TestEachAttemptIsReported loses the first replica of a request, then fails it while a call is
// outstanding. Each attempt must be reported with its times and its own trace context.
func TestEachAttemptIsReported(t *testing.T) {
	const trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	g := pipeline.Pipeline{Name: "f", Namespace: "ns", Entry: "f", Stages: []pipeline.Stage{{Function: pipeline.Function{Name: "f", Namespace: "ns", Each: true, Idempotent: true}}}}
	items := tensor.Activation{{Bytes: []byte("x")}, {Bytes: []byte("y")}}
	c, t0 := NewCore(), time.Unix(1000, 0)
	at := func(ms int) time.Time { return t0.Add(time.Duration(ms) * time.Millisecond) }
	parents := map[string]bool{}
	submits := func(effects []Effect) (out []*task.Task) {
		for _, e := range effects {
			if s, ok := e.(Submit); ok {
				if s.Task.Traceparent != task.CallParent(trace, s.Task.Task, s.Task.Attempt) || parents[s.Task.Traceparent] {
					t.Errorf("task %d attempt %d has the trace context %s, want one of its own below %s", s.Task.Task, s.Task.Attempt, s.Task.Traceparent, trace)
				}
				parents[s.Task.Traceparent] = true
				out = append(out, s.Task)
			}
		}
		return out
	}
	first := submits(c.Step(at(0), Start{
		Request: task.Request{ID: "r", Target: "f.ns", Traceparent: trace, Traced: true, Input: items}, Graph: g, Loads: make([]task.Load, 1),
	}))
	again := submits(c.Step(at(10), Replied{&task.Reply{Key: first[0].Key, Code: task.ReplicaLost, Replica: "a", Message: "killed"}}))
	if len(first) != 2 || len(again) != 1 {
		t.Fatalf("%d tasks, then %d, want 2 and 1", len(first), len(again))
	}
	end := c.Step(at(30), Replied{&task.Reply{Key: again[0].Key, Code: task.Failed, Replica: "b", Variant: "small.ns", Message: "no", Wait: 2, Service: 3, Batch: 7, BatchSize: 4}})
	got := end[len(end)-1].(Finish).Error.Stages
	want := []task.Timing{
		{Stage: "f", Function: "f.ns", Task: 1, Attempt: 1, Code: task.ReplicaLost, Replica: "a", Message: "killed", Given: 1, Start: at(0), End: at(10)},
		{Stage: "f", Function: "f.ns", Task: 1, Attempt: 2, Code: task.Failed, Replica: "b", Variant: "small.ns", Message: "no", Given: 1, Start: at(10), End: at(30), Wait: 2, Service: 3, Batch: 7, BatchSize: 4},
		{Stage: "f", Function: "f.ns", Task: 2, Attempt: 1, Code: task.Canceled, Message: "nobody waits for it any more", Given: 1, Start: at(0), End: at(30)},
	}
	if len(got) != len(want) {
		t.Fatalf("timings %+v, want %+v", got, want)
	}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("timing %d: %+v, want %+v", i, got[i], want[i])
		}
	}
}
