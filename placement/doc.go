// Package placement gives replicas a place: [Dispersed], [Spread] and [FirstFit] are placers, [KeyStages] is a warmer.
//
// Placers keep what runs, give new replicas to nodes with free memory and, if they need some, free devices, and let the
// newest go first. What does not fit is reported, never traded for something else. All are functions of their arguments.
package placement
