package flow

import (
	"slices"
	"strings"

	"github.com/stagecoach-serving/stagecoach/request/task"
)

// Progress is the progress of a request in a stage that has started and is not done.
type Progress struct {
	Stage   string
	Calls   int // calls of the stage in this request
	Done    int // calls that are done
	Attempt int // highest attempt of the calls that are not done, from 1
	// Functions whose replicas have answered calls of the stage, as pipeline.Key in text, sorted.
	Variants []string
}

// Where returns the stages that a request is in, in the graph's order. id is the request's id, as
// given to Invoke. If several runs with this id are in flight, Where returns the stages of one run;
// if there is none, it returns nil. It scans all requests in flight, so the data path must not call
// it.
func (c *Coordinator) Where(id string) []Progress {
	for _, s := range c.shards {
		s.mu.Lock()
		all := s.core.where(id + "~")
		s.mu.Unlock()
		if all != nil {
			return all
		}
	}
	return nil
}

// where is [Coordinator.Where] for the run whose id begins with prefix.
func (c *Core) where(prefix string) []Progress {
	for id, w := range c.walks {
		if strings.HasPrefix(id, prefix) {
			return w.progress()
		}
	}
	return nil
}

func (w *walk) progress() []Progress {
	out := []Progress{}
	for i := range w.stages {
		s := &w.stages[i]
		if !s.started || s.passed {
			continue
		}
		p := Progress{Stage: w.graph.Stages[i].Name, Calls: len(s.inputs), Done: s.done}
		for k := range w.calls {
			if call := &w.calls[k]; call.stage == i && !call.done {
				p.Attempt = max(p.Attempt, int(call.attempt))
			}
		}
		for k := range w.timings {
			if t := &w.timings[k]; t.Stage == p.Stage && t.Code == task.OK && t.Variant != "" {
				p.Variants = append(p.Variants, t.Variant)
			}
		}
		slices.Sort(p.Variants)
		p.Variants = slices.Compact(p.Variants)
		out = append(out, p)
	}
	return out
}
