// Package load sends requests at the instants that package arrivals computes, and reports what
// happened.
//
// The loop is open: each request has an instant at which it is due, even if earlier requests have
// no answer yet. Its latency counts from that instant. So if a server stalls for a second, every
// request of that second is slow in the report, not only one. Results are free of coordinated
// omission, and need no correction.
//
// The report also has the latency from the actual sending, and the generator's own lag, because a
// generator that lags measures itself. If too many requests are in flight, a due request is not
// sent, and is counted as not sent. No request is delayed silently.
//
// A [Scenario] is what users write, in YAML or flags. [Scenario.Config] reads the files that it
// names and returns a [Config]. [Run] runs the Config and returns a [Result]. docs/load.md
// describes the JSON form of a Result, and package report draws it.
package load
