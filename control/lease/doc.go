// Package lease makes at most one process hold a name at a time, such as the control of a cluster
// or the line of a function. Leases are records in a store that replaces a value only if it has the
// expected revision; queue.KV is one.
//
// [Core] is one process's view of one lease: a state machine without clock, goroutines and I/O.
// [Keeper] runs Cores over a [Store].
//
// # Guarantees
//
//   - No two processes believe at the same time that they hold a lease. This needs no agreement
//     between wall clocks. It needs clocks whose rates differ by less than [Skew].
//   - Each holding has an epoch that is higher than all earlier epochs of the lease. A holder that
//     was slow, and takes the lease back before anyone else, gets a new epoch too.
//   - What a holder orders carries its epoch. A receiver that has seen a higher epoch refuses the
//     order, so that an order which was under way for long does no harm.
//
// # How it works
//
// A holder writes its record once per [Beat]. A write counts from the moment when it was sent, and
// lets the holder act for [TTL] less the skew. Every other process waits until it has seen no new
// revision for TTL, by its own clock, and then replaces the record. It cannot have seen a revision
// before the holder has sent it, so the holder has stopped by then. If the holder has written
// meanwhile, the replacement fails, because its revision is not the expected one.
package lease
