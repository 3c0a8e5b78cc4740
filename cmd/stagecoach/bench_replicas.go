package main

import (
	"time"

	"github.com/stagecoach-serving/stagecoach/control/cluster"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// replicaSeconds is for how long there were replicas between two instants, from their orders until they had stopped: those that start
// and those that drain occupy the machine, too.
func replicaSeconds(events []schema.Event, from, to time.Time) float64 {
	begun, sum := map[string]time.Time{}, 0.0
	add := func(since, until time.Time) {
		if since.Before(from) {
			since = from
		}
		if until.After(to) {
			until = to
		}
		sum += max(until.Sub(since).Seconds(), 0)
	}
	for _, e := range events {
		switch cluster.Kind(e.Kind) {
		case cluster.Ordered:
			begun[e.Replica] = e.At
		case cluster.Stopped, cluster.Failed, cluster.Lost:
			add(begun[e.Replica], e.At) // of none that is known: from the beginning
			delete(begun, e.Replica)
		}
	}
	for _, since := range begun {
		add(since, to)
	}
	return sum
}

// firstAnswer is when the first replica answered that was ordered between two instants; zero: none did.
func firstAnswer(events []schema.Event, from, to time.Time) (at time.Time) {
	ordered := map[string]bool{}
	for _, e := range events {
		switch {
		case e.Kind == string(cluster.Ordered) && e.At.After(from) && e.At.Before(to):
			ordered[e.Replica] = true
		case e.Kind == string(cluster.Answered) && ordered[e.Replica] && at.IsZero():
			at = e.At
		}
	}
	return at
}
