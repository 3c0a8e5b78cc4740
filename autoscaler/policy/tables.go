package policy

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

const (
	// steadyPart is how much a lane's part may differ from the table in force before the table
	// changes. Measured capacities swing by chance, and dispatchers get each new table.
	steadyPart = 0.05
	// tightFor is how long a mixer's budget remembers that there was no room for a replica.
	tightFor = 10 * time.Second
)

// tight is a function for which the placer found less room than a mixer wanted.
type tight struct {
	Function string
	Placed   int // replicas
	At       time.Time
}

// settled returns the tables with their versions. A table that routes almost as the old one does is
// the old one.
func settled(tables, old []plan.Table, rev uint64) []plan.Table {
	out := make([]plan.Table, len(tables))
	for i, t := range tables {
		out[i] = t
		out[i].Version = rev
		if k := slices.IndexFunc(old, func(o plan.Table) bool { return o.Stage == t.Stage }); k >= 0 && near(old[k], t) {
			out[i] = old[k]
		}
	}
	return out
}

// near reports whether two tables have the same rows, with almost the same parts.
func near(a, b plan.Table) bool {
	if a.Equal(b) {
		return true
	}
	return slices.Equal(a.Sources, b.Sources) && slices.EqualFunc(a.Rows, b.Rows, func(x, y plan.Row) bool {
		return slices.EqualFunc(x.Levels, y.Levels, func(x, y plan.Level) bool {
			return x.MaxLength == y.MaxLength && x.Overflow == y.Overflow && slices.Equal(x.Backups, y.Backups) &&
				slices.EqualFunc(x.Shares, y.Shares, func(x, y plan.Share) bool {
					return x.Lane == y.Lane && math.Abs(x.Part-y.Part) <= steadyPart
				})
		})
	})
}

// moved returns a mixer's tables after placement. A lane's part falls by the share of its replicas
// that have no place. The other lanes of the level get what is left, in proportion to their parts.
// If no lane of a level has a place, its first backup with a place gets all tasks. If there is
// none, the level stays as it is, and its tasks wait.
func moved(tables []plan.Table, lines plan.Alloc, placed func(function string) int) []plan.Table {
	has := map[string]float64{} // part of the replicas that have a place, of lanes without all
	none := map[string]bool{}   // lanes without any replica
	for _, l := range lines {
		n := placed(l.Function)
		none[l.Function] = n == 0
		if n < l.Count {
			has[l.Function] = float64(n) / float64(l.Count)
		}
	}
	if len(has) == 0 {
		return tables
	}
	out := make([]plan.Table, len(tables))
	for i, t := range tables {
		rows := map[string]plan.Row{}
		for _, src := range t.Sources {
			var row plan.Row
			for _, l := range t.Rows[src.Row].Levels {
				row.Levels = append(row.Levels, movedLevel(l, has, none))
			}
			rows[src.From] = row
		}
		out[i] = plan.NewTable(t.Stage, t.Version, rows)
	}
	return out
}

func movedLevel(l plan.Level, has map[string]float64, none map[string]bool) plan.Level {
	var shares []plan.Share
	sum := 0.0
	for _, s := range l.Shares {
		if part, short := has[s.Lane]; short {
			s.Part *= part
		}
		if s.Part > 0 {
			shares = append(shares, s)
			sum += s.Part
		}
	}
	if len(shares) == 0 {
		if i := slices.IndexFunc(l.Backups, func(lane string) bool { return !none[lane] }); i >= 0 {
			l.Shares = []plan.Share{{Lane: l.Backups[i], Part: 1}}
		}
		return l
	}
	for i := range shares {
		shares[i].Part /= sum
	}
	l.Shares = shares
	return l
}

// tightened returns what a mixer's domain remembers of a shortage of room, sorted.
func tightened(before []tight, lines plan.Alloc, placed func(function string) int, now time.Time) []tight {
	var out []tight
	for _, l := range lines {
		if n := placed(l.Function); n < l.Count {
			out = append(out, tight{l.Function, n, now})
		}
	}
	for _, t := range before {
		if t.holds(now) && !slices.ContainsFunc(out, func(x tight) bool { return x.Function == t.Function }) {
			out = append(out, t)
		}
	}
	slices.SortFunc(out, func(a, b tight) int { return cmp.Compare(a.Function, b.Function) })
	return out
}

// holds reports whether t still bounds a budget. If t is in the future, the clock was set back.
func (t tight) holds(now time.Time) bool {
	age := now.Sub(t.At)
	return 0 <= age && age < tightFor
}

// expecting returns the snapshot with the demand that lanes must be sized for: at least the part of
// their stage's demand that the tables in force send to them. Otherwise a lane that begins to get
// tasks would have no replicas for them. It returns s itself if no stage has several lanes.
func expecting(s plan.Snapshot, lanes []plan.Lanes, m Memory) plan.Snapshot {
	copied := false
	for _, l := range lanes {
		p := m[l.Functions[0]]
		if p == nil {
			continue
		}
		k := slices.IndexFunc(p.tables, func(t plan.Table) bool { return t.Stage == l.Stage })
		if k < 0 {
			continue
		}
		for _, name := range l.Functions {
			f, _ := s.Function(name)
			part := meanPart(&p.tables[k], name, f.Lengths)
			if part == 0 || !f.Stage.Known || !(f.Stage.Rate > 0) {
				continue
			}
			if f.Demand.Known && f.Demand.Rate > 0 && len(f.Lengths) == 0 && byLength(&p.tables[k]) {
				continue // its own demand knows how many tasks have lengths of its levels
			}
			if !copied {
				s.Functions, copied = slices.Clone(s.Functions), true
				f, _ = s.Function(name)
			}
			f.Demand = expected(f.Demand, f.Stage, part)
		}
	}
	return s
}

// expected returns a lane's demand if it gets this part of its stage's demand.
func expected(own, stage plan.Demand, part float64) plan.Demand {
	if !own.Known || !(own.Rate > 0) {
		own.CV = stage.CV
	}
	own.Known = true
	if rate := part * stage.Rate; !(own.Rate >= rate) {
		own.Rate = rate
	}
	if stage.Last.After(own.Last) {
		own.Last = stage.Last
	}
	return own
}

// byLength reports whether a table's lanes depend on the lengths of tasks.
func byLength(t *plan.Table) bool {
	return slices.ContainsFunc(t.Rows, func(r plan.Row) bool { return len(r.Levels) > 1 })
}

// meanPart returns the mean part of a lane over the levels of a table's rows. How many tasks belong
// to which row is not known, so each row counts the same. A level counts with the share of the
// lengths that it has. If the shares are unknown, all levels count the same.
func meanPart(t *plan.Table, lane string, lengths []plan.LengthShare) float64 {
	sum, n := 0.0, 0.0
	for _, r := range t.Rows {
		for k := range r.Levels {
			weight := 1.0
			if len(lengths) > 0 {
				weight = r.ShareOf(k, lengths)
			}
			n += weight
			for _, s := range r.Levels[k].Shares {
				if s.Lane == lane {
					sum += weight * s.Part
				}
			}
		}
	}
	if n == 0 {
		return 0
	}
	return sum / n
}
