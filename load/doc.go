// Package load sends requests at the instants that package arrivals gives, whatever the answers do, and says what came of them.
//
// The loop is open: a request's instant does not move because an earlier one has no answer yet, and its latency counts from
// that instant. A server that stalls for a second is so seen by every request of that second, not by one (coordinated
// omission is excluded, not corrected). The time from the actual sending is reported beside it, as is how late the generator
// itself was: one that lags measures itself. What the bound on requests in flight keeps from being sent is counted as not
// sent; nothing is delayed silently.
//
// A [Scenario] is what users write, in YAML or flags; [Scenario.Config] reads its files and gives a [Config]; [Run] runs it and
// returns a [Result], whose JSON form docs/load.md describes. Package report draws one.
package load
