package running

import (
	"time"

	"github.com/stagecoach-serving/stagecoach/control/cluster"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// ReplicaSeconds returns the replica-seconds between two instants. A replica counts from its order
// until it has stopped, because replicas that start or drain occupy the machine, too.
func ReplicaSeconds(events []schema.Event, from, to time.Time) float64 {
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

// FirstAnswer returns the time of the first answer from a replica that was ordered between two
// instants. It returns the zero time if there is no such answer.
func FirstAnswer(events []schema.Event, from, to time.Time) (at time.Time) {
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
