package sim

import (
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/demand"
	"github.com/stagecoach-serving/stagecoach/request/flow"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// learning is the demand that ended requests teach, as package learn of the product has it.
type learning struct {
	learner *demand.Learner
	lesson  flow.Lesson
	summary flow.Summary
}

// add learns from a request that has ended.
func (l *learning) add(now time.Time, p *pipe, e *flow.Finish) {
	var timings []task.Timing
	if e.Error != nil {
		timings = e.Error.Stages
	} else {
		timings = e.Response.Stages
	}
	if len(timings) > 0 {
		l.learner.Add(now, l.lesson.Of(p.key, &p.graph, timings, e.Error == nil))
	}
}

// fill sets Learned of the functions of a snapshot.
func (l *learning) fill(s *plan.Snapshot) {
	if l.summary.Old(s.At) {
		l.summary.Make(l.learner, s.At)
	}
	l.summary.Fill(s)
}
