// Package placement assigns replicas to nodes. [Dispersed], [Spread] and [FirstFit] are placers,
// and [KeyStages] is a warmer.
//
// Placers keep running replicas. They give new replicas to nodes with free memory and, if needed,
// free devices. They release the newest replicas first. If something does not fit, they report that
// and never trade it for something else. All are functions of their arguments.
package placement
