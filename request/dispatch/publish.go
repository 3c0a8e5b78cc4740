package dispatch

import (
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// Publish makes the lines follow the routing tables and ranks of a plan. It ignores functions that
// this process does not own.
func (s *Shell) Publish(p *plan.Plan) {
	tables := make(map[string]*plan.Table, len(p.Tables))
	for i := range p.Tables {
		tables[p.Tables[i].Stage] = &p.Tables[i]
	}
	for i := range p.Wants {
		w := &p.Wants[i]
		if f := s.function(pipeline.ParseKey(w.Function)); f != nil {
			f.step(Routed{Table: tables[w.Function], Rank: w.Rank})
		}
	}
}
