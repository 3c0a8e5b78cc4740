// Package sim replays days of load in seconds. It is a discrete-event simulator that runs the
// production code over virtual time.
//
// The code that decides is the production code: [policy.Set.Decide] on a snapshot of the virtual
// cluster, and the Step cores of packages flow and dispatch. The cores walk requests through
// graphs, keep the lines, batch, retry, expire and drain. The simulator models the rest:
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
// Virtual time is a heap of events. They are ordered by time and, within one instant, by the order
// in which they were scheduled. An event is one pop of that heap:
//
//   - A request arrives, a task reaches its line, or a reply reaches its coordinator.
//   - A replica is ready, ends a batch, or dies, or parameters are loaded.
//   - A line or a coordinator wakes, control ticks, or a sample is taken.
//
// The handler steps a core once per call of the event.
//
// # Chance
//
// A run is a function of its scenario and seed. It does not depend on the wall clock, on goroutines
// or on the order of maps. A call's service time is drawn from its request's number. So policies
// that are compared on a seed have the same arrivals and the same work, and only the policies make
// them differ (common random numbers; Law 2015, §11.2).
package sim
