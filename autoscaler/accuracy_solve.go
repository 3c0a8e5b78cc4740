package autoscaler

import (
	"errors"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/accuracy"
)

// AccuracyFailure is planning that has failed. It is not tried again for planEvery.
type AccuracyFailure struct {
	Since time.Time // of the first failure since the last plan
	At    time.Time // of the latest one
	For   string    // what a plan was wanted for, but the demand
	Text  string
}

// try plans, unless that has failed a short time ago. After a failure, the plan in force and the
// demand are remembered.
func (z Accuracy) try(e *exactMix, had *AccuracyPlan, why string) (*AccuracyPlan, error) {
	now, failed := e.s.At, AccuracyFailure{Since: e.s.At, At: e.s.At, For: e.signature()}
	if was := e.was.Failed; was != nil && was.For == failed.For && !was.At.After(now) {
		if now.Sub(was.At) < planEvery {
			return nil, z.fail(e, had, *was)
		}
		failed.Since = was.Since
	}
	p, err := z.plan(e, had, why)
	if err != nil {
		failed.Text = strings.TrimPrefix(err.Error(), "accuracy: ")
		return nil, z.fail(e, had, failed)
	}
	return p, nil
}

// fail remembers a failure, and returns it as an error.
func (Accuracy) fail(e *exactMix, had *AccuracyPlan, failed AccuracyFailure) error {
	e.next.Failed, e.next.Plan, e.next.Cheaper = &failed, had, e.was.Cheaper
	return errors.New(failed.Text)
}

// follows reports whether a plan stays in force although planning has failed: for planEvery, as far
// as the budget allows.
func (Accuracy) follows(e *exactMix, p *AccuracyPlan) bool {
	return p != nil && p.For == e.next.Failed.For && e.s.At.Sub(e.next.Failed.Since) < planEvery &&
		e.b.Exceeded(e.functions, e.targets(p)) == ""
}

// mostRounds bounds how often a problem is solved again. The rate of a replica depends on how many
// there are, so each round uses the rates for the plan before. A few replicas can be used less than
// many.
const mostRounds = 3

// solve returns the best plan for a problem. With predicted waits, it sets the rates of batches.
func (z Accuracy) solve(e *exactMix, p *accuracy.Problem) (*accuracy.Solution, error) {
	if !z.waits {
		return e.left.spend(p, 1)
	}
	s, err := e.left.spend(p, mostRounds+1)
	for round := range mostRounds {
		if err != nil || !e.use(p, s) {
			break
		}
		s, err = e.left.spend(p, mostRounds-round)
	}
	return s, err
}

// goals is the number of objectives of a problem.
const goals = len(accuracy.Solution{}.Gaps)

// work is operations of searches that are left.
type work float64

// spend solves a problem with an equal part of the work that is left for so many problems.
func (w *work) spend(p *accuracy.Problem, problems int) (*accuracy.Solution, error) {
	p.Work = max(float64(*w)/float64(problems*goals), 1)
	s, err := p.Solve()
	if s != nil {
		*w -= work(s.Work)
	}
	return s, err
}
