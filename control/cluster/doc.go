// Package cluster carries out plans on nodes that this process can reach, and observes the result.
//
// [Local] implements the observer and the applier of package control. It gets the functions' specs
// from [Functions] and their load from [Lines]. It starts and stops processes with [Node], and
// gives the replicas in them work with [Replicas]. One goroutine per replica takes the replica
// through its states:
//
//	ordered ─▶ starting ─Start, Attach─▶ ready ─not wanted─▶ draining ─Drain─▶ Stop ─▶ gone
//	              └──── failed ─▶ Stop     └── lost ─▶ Stop ─▶ gone
//
// Apply only orders and releases replicas. It waits for nothing, may be called with the same plan
// twice, and ignores functions that have changed since the plan's snapshot. Failed starts are
// retried with growing pauses ([Backoff]). While all starts fail, waiting tasks are answered with
// the cause instead of waiting until their deadlines.
package cluster
