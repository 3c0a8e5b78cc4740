package admin

import (
	"cmp"
	"slices"
	"strings"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// explainTable returns the routing table of a stage, or nil if it has none.
func explainTable(tables []plan.Table, stage string, lengths []plan.LengthShare) *schema.ExplainedTable {
	i, ok := slices.BinarySearchFunc(tables, stage, func(t plan.Table, stage string) int { return cmp.Compare(t.Stage, stage) })
	if !ok {
		return nil
	}
	t := &tables[i]
	out := &schema.ExplainedTable{Version: t.Version, Rows: make([]schema.ExplainedRow, len(t.Rows))}
	for _, src := range t.Sources {
		out.Rows[src.Row].From = append(out.Rows[src.Row].From, sourceName(src.From))
	}
	for i := range t.Rows {
		for k, l := range t.Rows[i].Levels {
			level := schema.ExplainedLevel{MaxLength: l.MaxLength, Shares: []schema.ExplainedShare{}}
			if len(lengths) > 0 {
				part := t.Rows[i].ShareOf(k, lengths)
				level.Part = &part
			}
			for _, s := range l.Shares {
				level.Shares = append(level.Shares, schema.ExplainedShare{Lane: pipeline.ParseKey(s.Lane).Name, Part: s.Part})
			}
			for _, b := range l.Backups {
				level.Backups = append(level.Backups, pipeline.ParseKey(b).Name)
			}
			if l.Overflow != "" {
				level.Overflow = pipeline.ParseKey(l.Overflow).Name
			}
			out.Rows[i].Levels = append(out.Rows[i].Levels, level)
		}
	}
	return out
}

// sourceName returns the name of a source of tasks.
func sourceName(from string) string {
	switch from {
	case plan.FromClient:
		return "client"
	case plan.FromJoin:
		return "join"
	}
	return pipeline.ParseKey(from).Name
}

// excludedTold is how many excluded chains get a note.
const excludedTold = 5

// rule sets the policies in force in the pipeline's domain, and adds notes about policies that are
// not followed and about chains of variants that are excluded.
func (x *draft) rule(p pipeline.Pipeline, s *plan.Snapshot, last *plan.Plan) {
	here := map[string]bool{} // functions of the pipeline
	for _, st := range p.Stages {
		here[st.Key().String()] = true
		for _, v := range st.Variants {
			here[v.Key().String()] = true
		}
	}
	x.Policies = x.Policies.In(plan.Chosen{})
	if len(last.Ruled) > 0 {
		for _, d := range plan.Domains(*s) {
			i, ok := slices.BinarySearchFunc(last.Ruled, d.Functions[0], func(r plan.Ruled, first string) int { return cmp.Compare(r.Domain, first) })
			if !ok || !slices.ContainsFunc(d.Functions, func(f string) bool { return here[f] }) {
				continue
			}
			r := last.Ruled[i]
			x.Policies = x.Policies.In(r.Chosen)
			for _, c := range r.Conflicts {
				x.add("the entry stages that share functions ask for %s %s; %s stays in force", c.Level, strings.Join(c.Asked, " and "), c.Kept)
			}
		}
	}
	told := 0
	for _, c := range last.Excluded {
		if !slices.ContainsFunc(c, func(lane string) bool { return here[lane] }) {
			continue
		}
		if told++; told > excludedTold {
			continue
		}
		var names []string
		for _, lane := range c {
			names = append(names, pipeline.ParseKey(lane).Name)
		}
		x.add("too slow together, so no request takes this way: %s", strings.Join(names, " > "))
	}
	if told > excludedTold {
		x.add("%d more ways are too slow", told-excludedTold)
	}
}
