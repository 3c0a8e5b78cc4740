// Package sim replays days of load in seconds. It is a discrete-event simulator that runs the
// production code over virtual time.
//
// Everything that decides is production code:
//
//   - [policy.Set.Decide] decides on a snapshot of the virtual cluster.
//   - The Step cores of packages flow and dispatch walk requests through graphs, hold each stage's
//     line of waiting tasks, batch, retry, expire and drain.
//   - The core of package cache decides which parameters each node keeps.
//
// The simulator models the rest:
//
//   - when requests arrive (package arrivals)
//   - how long a batch keeps its slot ([Service])
//   - how long a start takes, by path and by the parameters that a node keeps warm ([Start])
//   - replicas that die
//
// This code simulates a scenario:
//
//	s, err := sim.Parse(file)               // strict; errors name the field's path
//	m, err := s.Model(open)                 // reads traces, checks the graph
//	result, err := m.Run(ctx, nil)          // every policy on every seed
//	err = result.WriteMarkdown(os.Stdout)
//
// # Events
//
// A run takes events from a heap and handles them one by one. Events are ordered by virtual time.
// Events at the same instant keep the order in which they were scheduled. The events are:
//
//   - A request arrives, a task reaches its line, or a reply reaches its coordinator.
//   - A replica is ready, ends a batch, or dies, or parameters are loaded.
//   - A line or a coordinator wakes, control ticks, or a sample is taken.
//
// Most events step a core once. The end of a batch steps a core once for each call of the batch.
//
// # Chance
//
// A run is a function of its scenario and seed. It does not depend on the wall clock, on goroutines
// or on the order of maps. A call's service time depends on its request and stage, not on earlier
// draws. So on equal seeds, all policies get the same arrivals and the same work, and any
// difference comes from the policies (common random numbers; Law 2015, §11.2).
package sim
