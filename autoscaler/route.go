package autoscaler

import (
	"cmp"
	"slices"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// Best is a plan.Router that sends each task to the most accurate variant that takes its length:
//
//   - Of equally accurate variants, those with the smallest max-length get the task. They are meant
//     for short inputs.
//   - Of these, each gets a part in proportion to its capacity: replicas times slots, divided by
//     the service time. If none has a replica, all get equal parts.
//   - Tasks whose lane is full go to the next variant in this order, and so do tasks whose lane has
//     no replica.
//
// All sources of tasks have the same row, and lengths between two variants' max-lengths one level.
type Best struct{}

// Route implements plan.Router.
func (Best) Route(s plan.Snapshot, d plan.Domain, wants []plan.Want) ([]plan.Table, error) {
	return routeAlike(&s, d, func(lanes []*plan.Function) plan.Level {
		slices.SortStableFunc(lanes, better)
		n := 1
		for n < len(lanes) && better(lanes[0], lanes[n]) == 0 {
			n++
		}
		l := plan.Level{Shares: byCapacity(lanes[:n], wants)}
		for i, f := range lanes {
			if n > 1 || i > 0 {
				l.Backups = append(l.Backups, f.Name)
			}
		}
		if n < len(lanes) {
			l.Overflow = lanes[n].Name
		}
		return l
	}), nil
}

// better compares variants by accuracy, then by max-length: the better one comes first.
func better(a, b *plan.Function) int {
	return cmp.Or(cmp.Compare(b.Accurate(), a.Accurate()), cmp.Compare(reach(a), reach(b)))
}

// reach returns the longest input that a variant takes.
func reach(f *plan.Function) int {
	if f.MaxLength <= 0 {
		return longestInput
	}
	return f.MaxLength
}

const longestInput = int(^uint(0) >> 1)

// byCapacity returns the parts of lanes in proportion to their capacities.
func byCapacity(lanes []*plan.Function, wants []plan.Want) []plan.Share {
	known, sum := 0, 0.0
	for _, f := range lanes {
		if f.Service.Known && f.Service.Mean > 0 {
			known, sum = known+1, sum+f.Service.Mean.Seconds()
		}
	}
	parts, total := make([]float64, len(lanes)), 0.0
	for i, f := range lanes {
		service := 1.0
		switch {
		case f.Service.Known && f.Service.Mean > 0:
			service = f.Service.Mean.Seconds()
		case known > 0:
			service = sum / float64(known)
		}
		if k, ok := slices.BinarySearchFunc(wants, f.Name, func(w plan.Want, name string) int { return cmp.Compare(w.Function, name) }); ok {
			parts[i] = float64(len(wants[k].Slots)*min(max(f.Slots, 1), mostServers)) / service
		}
		total += parts[i]
	}
	if !(total > 0) {
		for i := range parts {
			parts[i] = 1
		}
	}
	return sharesOf(lanes, parts)
}

// sharesOf returns shares in proportion to parts, of which at least one is above 0, sorted by lane.
// Parts that are too small to matter are left out.
func sharesOf(lanes []*plan.Function, parts []float64) []plan.Share {
	const least = 1e-3
	total := 0.0
	for _, p := range parts {
		total += p
	}
	var out []plan.Share
	kept := 0.0
	for i, f := range lanes {
		if p := parts[i] / total; p >= least/float64(len(lanes)) {
			out = append(out, plan.Share{Lane: f.Name, Part: p})
			kept += p
		}
	}
	for i := range out {
		out[i].Part /= kept
	}
	slices.SortFunc(out, func(a, b plan.Share) int { return cmp.Compare(a.Lane, b.Lane) })
	return out
}

// Even is a plan.Router that sends equal parts of a stage's tasks to all variants that take their
// length. Tasks whose lane has no replica go to the others, the most accurate one first.
type Even struct{}

// Route implements plan.Router.
func (Even) Route(s plan.Snapshot, d plan.Domain, _ []plan.Want) ([]plan.Table, error) {
	return routeAlike(&s, d, func(lanes []*plan.Function) plan.Level {
		slices.SortStableFunc(lanes, better)
		parts := make([]float64, len(lanes))
		var l plan.Level
		for i, f := range lanes {
			parts[i] = 1
			if len(lanes) > 1 {
				l.Backups = append(l.Backups, f.Name)
			}
		}
		l.Shares = sharesOf(lanes, parts)
		return l
	}), nil
}

// routeAlike returns tables with the same row for all sources. level returns the level of the lanes
// that take some length; it may sort them.
func routeAlike(s *plan.Snapshot, d plan.Domain, level func([]*plan.Function) plan.Level) []plan.Table {
	all := s.LanesIn(d)
	if len(all) == 0 {
		return nil
	}
	steps := s.Steps(d)
	var out []plan.Table
	for _, l := range all {
		lanes := make([]*plan.Function, len(l.Functions))
		for i, name := range l.Functions {
			lanes[i], _ = s.Function(name)
		}
		row := levels(lanes, func(_ int, fit []*plan.Function) plan.Level { return level(fit) })
		rows := map[string]plan.Row{}
		for _, from := range plan.Sources(steps, all, l.Stage) {
			rows[from] = row
		}
		out = append(out, plan.NewTable(l.Stage, s.Rev, rows))
	}
	return out
}

// levels returns a row with one level per length class of the lanes. Two classes with the same
// lanes to choose from would be one, but each class has a lane that longer inputs do not fit.
func levels(lanes []*plan.Function, level func(length int, fit []*plan.Function) plan.Level) plan.Row {
	var classes []int
	for _, f := range lanes {
		classes = append(classes, max(f.MaxLength, 0))
	}
	// 0, any length, comes last.
	slices.SortFunc(classes, func(a, b int) int { return cmp.Compare(uint(a)-1, uint(b)-1) })
	var row plan.Row
	for _, length := range slices.Compact(classes) {
		var fit []*plan.Function
		for _, f := range lanes {
			if f.Takes(length) {
				fit = append(fit, f)
			}
		}
		l := level(length, fit)
		l.MaxLength = length
		row.Levels = append(row.Levels, l)
	}
	return row
}
