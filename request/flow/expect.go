package flow

import "github.com/stagecoach-serving/stagecoach/request/task"

// expect announces a new request to the functions of its later stages that have no replica, so that
// their replicas start while the first stages work.
func (c *Core) expect(w *walk, loads []task.Load) {
	for i := range loads {
		if loads[i].Servers == 0 && !w.stages[i].started {
			c.out = append(c.out, Expect{w.functions[i]})
		}
	}
}

// Expected adds to counts, per function, the number of stages that requests have not started yet.
// Edges have no conditions, so a successful request starts all stages of its graph. But a stage
// with one call per item makes no call if there are no items.
func (c *Core) Expected(counts map[string]int) {
	for _, w := range c.walks {
		for i := range w.stages {
			if !w.stages[i].started {
				counts[w.functions[i]]++
			}
		}
	}
}

// Expected returns, per function, how many requests in flight have not reached it yet. Functions
// without such requests are absent. The cost grows with the number of requests in flight.
func (c *Coordinator) Expected() map[string]int {
	counts := map[string]int{}
	for _, s := range c.shards {
		s.mu.Lock()
		s.core.Expected(counts)
		s.mu.Unlock()
	}
	return counts
}
