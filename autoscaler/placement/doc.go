// Package placement assigns replicas to nodes. [Dispersed], [Spread] and [FirstFit] are placers,
// and [KeyStages] is a warmer.
//
// Placers keep running replicas. They give new replicas to nodes with free memory and, if needed,
// free devices. They release the newest replicas first. If a replica does not fit, they report the
// shortage, and never change the allocation. Their results depend only on their arguments.
package placement
