package dispatch

import (
	"slices"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// Publish makes the lines follow the routing tables, ranks and batches of a plan. The lines of a
// stage change in one step. Publish ignores functions that this process does not own. It does not
// keep p.
func (s *Shell) Publish(p *plan.Plan) {
	tables := make(map[string]*plan.Table, len(p.Tables))
	for i := range p.Tables {
		tables[p.Tables[i].Stage] = &p.Tables[i]
	}
	wants := make(map[string]*plan.Want, len(p.Wants))
	for i := range p.Wants {
		wants[p.Wants[i].Function] = &p.Wants[i]
	}
	for _, f := range *s.functions.Load() {
		if w := wants[f.lane]; w != nil {
			f.batched(w.Batch)
		}
		o := f.lock()
		ev, known := Routed{Table: tables[f.lane]}, tables[f.lane] != nil
		for _, g := range slices.Backward(o.functions) { // the stage's own function is the first
			if w := wants[g.lane]; w != nil {
				ev.Rank, known = w.Rank, true
			}
		}
		if f.name != o.stage || !known {
			o.mu.Unlock()
			continue
		}
		var space [4]*link
		o.advance(ev, space[:0], false)
	}
}

// batched sets the largest batch of the function's lane; 0: it stays.
func (f *function) batched(most int) {
	o := f.lock()
	if l := o.core.Lane(f.lane); l == nil || most <= 0 || l.batching.planned == most {
		o.mu.Unlock()
		return
	}
	o.change(Batched{Lane: f.lane, Most: most})
}

// cloneTable returns a copy that shares nothing with t.
func cloneTable(t *plan.Table) *plan.Table {
	if t == nil {
		return nil
	}
	c := *t
	c.Sources, c.Rows = slices.Clone(t.Sources), slices.Clone(t.Rows)
	for i := range c.Rows {
		levels := slices.Clone(c.Rows[i].Levels)
		for k := range levels {
			levels[k].Shares, levels[k].Backups = slices.Clone(levels[k].Shares), slices.Clone(levels[k].Backups)
		}
		c.Rows[i].Levels = levels
	}
	return &c
}
