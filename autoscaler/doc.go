// Package autoscaler sizes functions: how many replicas each needs for the load it has.
//
// [Sizer] is the default plan.Allocator. It is a function of its arguments: a plan.Snapshot and what it remembered go in,
// a count for each function comes out, with one line for the operator that says which term asked for it. Below it lies
// the M/M/c queue ([Servers]).
//
// Queues are as the textbooks have them: Kleinrock, Queueing Systems I (1975), ch. 3; Harchol-Balter, Performance Modeling
// and Design of Computer Systems (2013), ch. 14. QUART (ICDCS'24) uses the same model in its Eq. 1, but as printed that
// formula puts the probability of an empty system where the probability of waiting belongs: for 38 requests/s on 8 servers
// of 5/s it gives 0.201 s, where the queue's sojourn is 0.622 s.
package autoscaler
