package flow

import (
	"fmt"
	"math"
	"net/http"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// admit predicts when a request would be done. It returns an error if that is after the request's
// deadline, or if the line of one of its stages is full. Then the request has cost nothing. If the
// error is nil, the request is admitted.
//
// The prediction is optimistic on purpose. It assumes that each stage runs at the largest scale
// that it may have, because the autoscaler can absorb a burst. Unknown service times count as zero.
// Only the deadline matters: a pipeline's SLO is a target for policies.
func admit(now time.Time, req *task.Request, g *pipeline.Pipeline, loads []task.Load) *task.Error {
	if !req.Deadline.IsZero() && !now.Before(req.Deadline) {
		return &task.Error{Status: http.StatusGatewayTimeout, Internal: true, Cause: "the deadline had passed when the request arrived"}
	}
	var few [16]time.Duration
	// done[i] is when stage i would be done, from now.
	done := append(few[:0], make([]time.Duration, len(g.Stages))...)
	total, worst, worstWait := time.Duration(0), 0, time.Duration(-1)
	for i := range g.Stages {
		l := &loads[i]
		queue, start := queueWait(l), time.Duration(0)
		if l.Servers == 0 {
			start = l.Start
		}
		wait := max(queue, start)
		if l.Limit > 0 && l.Waiting >= l.Limit {
			return refuse(g.Stages[i].Name, wait, fmt.Sprintf("%d requests wait, which is its limit (annotation %squeue-limit)", l.Waiting, pipeline.Prefix))
		}
		if wait > worstWait {
			worst, worstWait = i, wait
		}
		// A stage without a replica starts one now, whenever its task arrives: see Core.expect.
		done[i] = saturated(max(begin(g, i, done)+queue, start) + l.Service)
		if len(g.Stages[i].Next) == 0 { // a branch that no sink waits for delays nothing
			total = max(total, done[i])
		}
	}
	if req.Deadline.IsZero() || total <= req.Deadline.Sub(now) {
		return nil
	}
	left := req.Deadline.Sub(now)
	return refuse(g.Stages[worst].Name, total-left, fmt.Sprintf("the request would be done in %v and its deadline is in %v; X-Timeout asks for more time",
		total.Round(time.Millisecond), left.Round(time.Millisecond)))
}

// begin returns when stage i would have its input: when enough of its predecessors are done.
// done[k] is when stage k would be done. All times are from now.
func begin(g *pipeline.Pipeline, i int, done []time.Duration) time.Duration {
	s := &g.Stages[i]
	var few [16]time.Duration
	ends := few[:0]
	for k := range i {
		if slices.Contains(s.Prev, g.Stages[k].Name) {
			ends = append(ends, done[k])
		}
	}
	if len(ends) == 0 {
		return 0
	}
	slices.Sort(ends)
	return ends[needed(s)-1]
}

// needed returns how many parts a stage waits for. The entry waits for the request's input.
func needed(s *pipeline.Stage) int {
	if s.Join > 0 && s.Join < len(s.Prev) {
		return s.Join
	}
	return max(1, len(s.Prev))
}

// saturated bounds a prediction, so that the sum over a graph does not overflow.
func saturated(d time.Duration) time.Duration { return min(d, forever) }

const forever = 10 * 365 * 24 * time.Hour

// queueWait returns how long a new task would wait if the function ran at its largest allowed
// capacity.
func queueWait(l *task.Load) time.Duration {
	servers := max(l.Servers, l.Max)
	ahead := l.Waiting + l.Running
	if servers == 0 || ahead < servers {
		return 0
	}
	return time.Duration(min(float64(l.Service)*float64(ahead-servers+1)/float64(servers), float64(forever)))
}

func refuse(stage string, after time.Duration, cause string) *task.Error {
	seconds := math.Ceil(max(after, time.Second).Seconds())
	return &task.Error{Status: http.StatusTooManyRequests, Stage: stage, Cause: cause, RetryAfter: time.Duration(seconds) * time.Second}
}
