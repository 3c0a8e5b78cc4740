// Package autoscaler sizes functions: how many replicas each needs for the load it has.
//
// [Sizer] is the default plan.Allocator. It is a function of its arguments: a plan.Snapshot and
// what it remembered go in; a count for each function comes out, with one line for the operator
// that says what asked for it. It sees a domain as a network of queues, in which each function has
// as many servers as its replicas have slots. It finds the fewest replicas with which the mean
// waits on every path of every pipeline fit what the objectives leave to wait. [Quart], the
// corrector, sees the same queues and goes by how long tasks do wait. [Gain] shares what a cluster
// has not enough of.
//
// # One model per decision
//
// Each question has one model (docs/autoscaler.md has the table with sources, and what was left
// out):
//
//	how long tasks wait by chance            M/M/c by Erlang's C, Allen-Cunneen   queue.go, mmc.go
//	how long they wait for bursts on a path  Kingman, once per path               burst.go
//	how many replicas a pipeline needs       marginal gain (Fox) on these two     allocate.go
//	how many replicas drain a line           fluid                                sizer.go
//	what rate comes downstream               learned ratio of measured rates      ahead.go
//	what to start behind an overload         that rate, fluid, then these waits   ahead.go
//	how bursty arrivals are                  as measured (persistence)            smooth.go
//	when a count falls                       hold, and panic after a burst        sizer.go
//	what the model has missed                PID on measured waits                pid.go
//	what is left over at a stage             sojourn of one stage, Eq. 7          smooth.go
//	what CPU is worth                        regression on 1/quota                compensate.go
//	who gets a budget                        marginal gain; fluid where behind    share.go
//	which stages are key                     raises that fade                     keys.go
//
// Queues are as the textbooks have them: Kleinrock, Queueing Systems I (1975), ch. 3;
// Harchol-Balter, Performance Modeling and Design of Computer Systems (2013), ch. 14. QUART
// (ICDCS'24) uses the same model in its Eq. 1. As printed that formula, P0·λ/(rμ(μ−λ/r)) + 1/μ, has
// the probability of an empty system in the place of the probability of waiting: for 38 requests/s
// on 8 servers of 5/s it gives 0.201 s, where the queue's sojourn, C(c)/(cμ−λ) + 1/μ, is 0.622 s.
// With C(c) read for P0 the wait is too long by a factor of λ/μ: 3.41 s. The paper says neither
// what bursts do to the wait nor what it is past saturation.
package autoscaler
