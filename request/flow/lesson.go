package flow

import (
	"cmp"

	"github.com/stagecoach-serving/stagecoach/demand"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// Lesson turns ended requests into what a [demand.Learner] learns from them. It uses its memory
// again, so each result is valid until the next call. The zero value is ready.
type Lesson struct {
	ended demand.Ended
}

// Of returns what is learned from a request for app, a pipeline.Key in text. complete means that
// the request succeeded. Without the application's graph, only the times of calls are learned.
func (l *Lesson) Of(app string, graph *pipeline.Pipeline, timings []task.Timing, complete bool) *demand.Ended {
	l.ended = demand.Ended{App: app, Calls: l.ended.Calls[:0], Edges: l.ended.Edges[:0], Complete: complete}
	for i := range timings {
		if t := &timings[i]; t.Code == task.OK {
			l.ended.Calls = append(l.ended.Calls, demand.Call{
				Stage: t.Stage, Function: cmp.Or(t.Variant, t.Function), Batch: t.BatchSize, Work: t.Service,
				Given: t.Given, Returned: t.Returned, Length: t.Length,
			})
		}
	}
	if complete && graph != nil {
		for i := range graph.Stages { // stages are large: none is copied
			for _, e := range graph.Stages[i].Next {
				l.ended.Edges = append(l.ended.Edges, demand.Edge{From: graph.Stages[i].Name, To: e.To})
			}
		}
	}
	return &l.ended
}
