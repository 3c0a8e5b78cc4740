// Package sim replays days of load in seconds: a discrete-event simulator that runs the code of
// production over virtual time.
//
// The code that decides is that of production:
//
//   - [policy.Set.Decide] on a snapshot of the virtual cluster;
//   - the cores of packages flow and dispatch, which walk requests through graphs, keep the lines,
//     batch, retry, expire and drain;
//   - the core of package cache, which says what parameters each node keeps.
//
// The rest is modelled: when requests arrive (package load/arrivals), how long a batch keeps its
// slot ([Service]), how long a start takes on which path ([Start]), and replicas that die.
//
//	s, err := sim.Parse(file)               // strict; errors name the field's path
//	m, err := s.Model(open)                 // reads traces, checks the graph
//	result, err := m.Run(ctx, nil)          // every policy on every seed
//	err = result.WriteMarkdown(os.Stdout)
//
// # Events
//
// Virtual time is a heap of events, ordered by time and, within one instant, by the order in which
// they were scheduled. An event is one pop of that heap:
//
//   - a request arrives, a task reaches its line, a reply reaches its coordinator;
//   - a replica ends a batch, is ready, or dies;
//   - parameters are loaded;
//   - a line or a coordinator asked to be woken;
//   - control ticks, or a sample is taken.
//
// Each handler steps a core once for each call that the event is about.
//
// # Chance
//
// A run is a function of its scenario and seed: nothing depends on the wall clock, on goroutines or
// on the order of maps. How long a call takes is drawn from its request's number. So policies that
// are compared on a seed have the same arrivals and the same work, and the differences between them
// are those of the policies (common random numbers; Law 2015, §11.2).
package sim
