// Package load sends requests at the instants that package arrivals computes, and reports what
// happened.
//
// The loop is open. A request's instant does not move if an earlier request has no answer yet, and
// its latency counts from that instant. So a server that stalls for a second is seen by every
// request of that second, not by one. Coordinated omission cannot happen and need not be corrected.
// The latency from the actual sending and the generator's own lag are reported too, because a
// generator that lags measures itself. If too many requests are in flight, a due request is not
// sent, and is counted as not sent. Nothing is delayed silently.
//
// A [Scenario] is what users write, in YAML or flags. [Scenario.Config] reads its files and returns
// a [Config]. [Run] runs it and returns a [Result]; docs/load.md describes its JSON form. Package
// report draws one.
package load
