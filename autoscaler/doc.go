// Package autoscaler sizes functions: how many replicas each needs for the load it has.
//
// [Sizer] is the default plan.Allocator. It is a function of its arguments: a plan.Snapshot and what it remembered go in,
// a count for each function comes out, with one line for the operator that says which term asked for it. It sees a domain as a
// network of queues, each function one with as many servers as its replicas have slots, and finds the fewest replicas with which the mean
// waits on every path of every pipeline fit what the objectives leave to wait. Below it lies the queue: [Sojourn], [Servers].
// [Quart], the corrector, sees the same queues and goes by what tasks do wait; [Gain] shares what a cluster has not enough of.
//
// Queues are as the textbooks have them: Kleinrock, Queueing Systems I (1975), ch. 3; Harchol-Balter, Performance Modeling
// and Design of Computer Systems (2013), ch. 14. QUART (ICDCS'24) uses the same model in its Eq. 1, but as printed that
// formula, P0·λ/(rμ(μ−λ/r)) + 1/μ, puts the probability of an empty system where the probability of waiting belongs: for 38 requests/s
// on 8 servers of 5/s it gives 0.201 s, where the queue's sojourn, C(c)/(cμ−λ) + 1/μ, is 0.622 s. With C(c) read for P0 the wait is too
// long by a factor of λ/μ: 3.41 s. The paper says neither what bursts do to it, nor what it is past saturation.
package autoscaler
