package flow

import (
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// prepare moves the large items of a request's input to the store. Before that, it outlines the
// items if the entry stage measures lengths.
func (c *Coordinator) prepare(r task.Request, g pipeline.Pipeline) (start Start, err error) {
	start = Start{Request: r, Graph: g}
	if g.Stages[0].Length != "" && !r.Direct {
		if start.Outlines, err = tensor.Outlines(c.cfg.Store, r.Input); err != nil {
			return start, err
		}
	}
	start.Request.Input, err = tensor.Externalise(c.cfg.Store, r.ID, r.Input)
	return start, err
}

// outlined returns the event for a reply with references. It reads their outlines if the core needs
// them, without the lock. If that fails, the reply becomes a failure.
func (c *Coordinator) outlined(s *shard, r *task.Reply) Event {
	s.mu.Lock()
	needed := s.core.measures(r)
	s.mu.Unlock()
	if !needed {
		return Replied{r}
	}
	outlines, err := tensor.Outlines(c.cfg.Store, r.Output)
	if err != nil {
		failed := *r
		failed.Code, failed.Message, failed.Output = task.Unavailable, "the length of its output: "+err.Error(), nil
		return Replied{&failed}
	}
	return Outlined{r, outlines}
}
