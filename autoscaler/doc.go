// Package autoscaler sizes functions: it decides how many replicas each function needs for its
// load.
//
// [Sizer] is the default plan.Allocator. Its arguments are a plan.Snapshot and its memory. It
// returns a count for each function, and one line for the operator that gives the reason. It models
// a domain as a network of queues: each function is a queue with as many servers as its replicas
// have slots. A pipeline's objective, less its service time, is the time that its tasks may wait.
// Sizer finds the fewest replicas that keep the mean waits on every path within a part of that
// time. [Quart], the corrector, uses the same queues, and corrects counts by the measured waits.
// [Gain] shares the cluster if it has less than all functions ask for.
//
// # One model per decision
//
// Each question has one model. The table in docs/autoscaler.md has the sources, and what was left
// out:
//
//	how long tasks wait by chance            M/M/c by Erlang's C, Allen-Cunneen   queue.go, mmc.go
//	how long they wait for bursts on a path  Kingman, once per path               burst.go
//	how many replicas a pipeline needs       marginal gain (Fox) on these two     allocate.go
//	how many more are worth their price      GI/M/c at each stage                 price.go
//	how many replicas drain a line           fluid                                sizer.go
//	what rate comes downstream               learned ratio of measured rates      ahead.go
//	what to start behind an overload         that rate, fluid, then these waits   ahead.go
//	how bursty arrivals are                  as measured (persistence)            smooth.go
//	when a count falls                       hold, and panic after a burst        sizer.go
//	what the model has missed                PID on measured waits                pid.go
//	which replicas a stage can spare         sojourn of one stage, Eq. 7          smooth.go
//	what CPU is worth                        regression on 1/quota                compensate.go
//	who gets a budget                        marginal gain; fluid where behind    share.go
//	which stages are key                     raises that fade                     keys.go
//
// The queues are those of the textbooks: Kleinrock, Queueing Systems I (1975), ch. 3;
// Harchol-Balter, Performance Modeling and Design of Computer Systems (2013), ch. 14.
//
// QUART (ICDCS'24) uses the same model in its Eq. 1, but the printed formula, P0·λ/(rμ(μ−λ/r)) +
// 1/μ, is wrong. It has P0, the probability of an empty system, instead of C(c), the probability of
// waiting. For 38 requests/s on 8 servers of 5/s, it gives 0.201 s. The correct sojourn,
// C(c)/(cμ−λ) + 1/μ, is 0.622 s. With C(c) in place of P0, the printed formula gives 3.41 s,
// because its wait is then too long by a factor of λ/μ. The paper gives no wait for bursts or past
// saturation.
package autoscaler
