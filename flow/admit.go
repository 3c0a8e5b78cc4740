package flow

import (
	"fmt"
	"math"
	"net/http"
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/task"
)

// admit predicts when a request would be done and refuses it when that is too late, or when a line is full: before it has
// cost anything. It is optimistic on purpose: capacity is what a stage may be scaled to, because a burst that the autoscaler
// will absorb must come in, and what is unknown costs nothing. Nil: the request may begin.
func admit(now time.Time, req *task.Request, g *pipeline.Pipeline, loads []task.Load) *task.Error {
	if !req.Deadline.IsZero() && !now.Before(req.Deadline) {
		return &task.Error{Status: http.StatusGatewayTimeout, Internal: true, Cause: "the deadline had passed when the request arrived"}
	}
	done := make([]time.Duration, len(g.Stages)) // when each stage would be done, from now
	total, worst, worstWait := time.Duration(0), 0, time.Duration(-1)
	for i := range g.Stages {
		l := &loads[i]
		wait := predictedWait(l)
		if l.Limit > 0 && l.Waiting >= l.Limit {
			return refuse(g.Stages[i].Name, wait, fmt.Sprintf("%d requests wait, which is its limit (annotation %squeue-limit)", l.Waiting, pipeline.Prefix))
		}
		if wait > worstWait {
			worst, worstWait = i, wait
		}
		var begin time.Duration
		for _, prev := range g.Stages[i].Prev {
			for k := range i {
				if g.Stages[k].Name == prev {
					begin = max(begin, done[k])
				}
			}
		}
		done[i] = begin + wait + l.Service
		total = max(total, done[i])
	}
	if req.Deadline.IsZero() || total <= req.Deadline.Sub(now) {
		return nil
	}
	left := req.Deadline.Sub(now)
	return refuse(g.Stages[worst].Name, total-left, fmt.Sprintf("the request would be done in %v and its deadline is in %v; X-Timeout asks for more time",
		total.Round(time.Millisecond), left.Round(time.Millisecond)))
}

// predictedWait is how long a new task would wait in a line at the largest capacity the function may have.
func predictedWait(l *task.Load) time.Duration {
	servers := max(l.Servers, l.Max)
	ahead := l.Waiting + l.Running
	var wait time.Duration
	if servers > 0 && ahead >= servers {
		wait = time.Duration(float64(l.Service) * float64(ahead-servers+1) / float64(servers))
	}
	if l.Servers == 0 {
		wait = max(wait, l.Start)
	}
	return wait
}

func refuse(stage string, after time.Duration, cause string) *task.Error {
	seconds := math.Ceil(max(after, time.Second).Seconds())
	return &task.Error{Status: http.StatusTooManyRequests, Stage: stage, Cause: cause, RetryAfter: time.Duration(seconds) * time.Second}
}
