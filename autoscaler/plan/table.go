package plan

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
)

// Table says to which lanes the tasks of a stage go. Only stages with several lanes have one. A
// lane has the name of its function, the stage's own or a variant's, as pipeline.Key in text.
type Table struct {
	Stage   string
	Version uint64 // Rev of the plan with which its contents last changed
	// Rows without equals. Sources say which of them holds for a task.
	Rows    []Row
	Sources []Source // sorted by From; the source FromClient is always there
}

// Source is where tasks come from, and the row that holds for them.
type Source struct {
	// From is the function that produced the task's input, as pipeline.Key in text, or FromClient or
	// FromJoin.
	From string
	Row  int // index into Rows
}

// Sources that are not functions.
const (
	FromClient = ""  // the request enters the pipeline here
	FromJoin   = "*" // the input has parts from several stages
)

// Row has the lanes of tasks, by the tasks' length.
type Row struct {
	Levels []Level // by MaxLength, ascending; 0, which is last, means any length
}

// ShareOf returns the share of a stage's tasks whose lengths belong to a level. The last level also
// has those that are longer than all its lanes take, and those of unknown length.
func (r *Row) ShareOf(level int, lengths []LengthShare) float64 {
	sum := 0.0
	for _, l := range lengths {
		if r.LevelOf(l.MaxLength) == level {
			sum += l.Share
		}
	}
	return sum
}

// LevelOf returns the index of the level for tasks up to a length; 0: any length.
func (r *Row) LevelOf(length int) int {
	for k := range r.Levels {
		if m := r.Levels[k].MaxLength; m == 0 || length > 0 && length <= m {
			return k
		}
	}
	return len(r.Levels) - 1
}

// Level has the lanes for tasks up to a length.
type Level struct {
	MaxLength int     // in the unit of the stages' max-length; 0: any
	Shares    []Share // sorted by lane; the parts are above 0, and their sum is 1
	// Backups are the lanes, the best first, for tasks whose lane has no replica and gets none soon.
	Backups []string `json:",omitempty"`
	// Overflow is the lane for tasks whose own lane is full; empty: they wait in their lane.
	Overflow string `json:",omitempty"`
}

// Share is the part of a level's tasks that a lane gets.
type Share struct {
	Lane string
	Part float64
}

// Chain is a path of lanes along a pipeline's edges, which together are too slow or otherwise
// excluded. The tables of a plan must not route a request along it.
type Chain []string

// Row returns the row for tasks whose input a source produced. For an unknown source it is the row
// of FromClient.
func (t *Table) Row(from string) *Row {
	if i, ok := slices.BinarySearchFunc(t.Sources, from, func(s Source, from string) int { return cmp.Compare(s.From, from) }); ok {
		return &t.Rows[t.Sources[i].Row]
	}
	return &t.Rows[t.Sources[0].Row] // FromClient sorts before all others
}

// Level returns the level for a length; 0 means an unknown length, which may be any. ok is false if
// the length is above those of all levels.
func (r *Row) Level(length int) (l *Level, ok bool) {
	if length == 0 && len(r.Levels) > 0 {
		return &r.Levels[len(r.Levels)-1], true
	}
	for i := range r.Levels {
		if m := r.Levels[i].MaxLength; m == 0 || length <= m {
			return &r.Levels[i], true
		}
	}
	return nil, false
}

// Lanes returns every lane that the row may choose, sorted.
func (r *Row) Lanes() []string {
	var all []string
	for _, l := range r.Levels {
		for _, s := range l.Shares {
			all = append(all, s.Lane)
		}
		all = append(all, l.Backups...)
		if l.Overflow != "" {
			all = append(all, l.Overflow)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// NewTable returns the table of a stage. rows has one row per source, and has to have FromClient.
// Equal rows are stored once.
func NewTable(stage string, version uint64, rows map[string]Row) Table {
	t := Table{Stage: stage, Version: version}
	for _, from := range slices.Sorted(maps.Keys(rows)) {
		row := rows[from]
		at := slices.IndexFunc(t.Rows, row.equal)
		if at < 0 {
			at = len(t.Rows)
			t.Rows = append(t.Rows, row)
		}
		t.Sources = append(t.Sources, Source{From: from, Row: at})
	}
	return t
}

func (r Row) equal(other Row) bool {
	return slices.EqualFunc(r.Levels, other.Levels, func(a, b Level) bool {
		return a.MaxLength == b.MaxLength && slices.Equal(a.Shares, b.Shares) && slices.Equal(a.Backups, b.Backups) && a.Overflow == b.Overflow
	})
}

// Equal reports whether two tables route alike, whatever their versions.
func (t Table) Equal(other Table) bool {
	return t.Stage == other.Stage && slices.Equal(t.Sources, other.Sources) && slices.EqualFunc(t.Rows, other.Rows, Row.equal)
}

// faults returns what is wrong with a table whose stage has these lanes.
func (t *Table) faults(lanes []string) (faults []error) {
	add := func(format string, args ...any) {
		faults = append(faults, fmt.Errorf("table of stage %q: "+format, append([]any{t.Stage}, args...)...))
	}
	if len(t.Sources) == 0 || t.Sources[0].From != FromClient {
		add("no row for requests that enter here, want one")
	}
	for i, s := range t.Sources {
		if i > 0 && t.Sources[i-1].From >= s.From {
			add("source %q after %q, want each once, sorted", s.From, t.Sources[i-1].From)
		}
		if s.Row < 0 || s.Row >= len(t.Rows) {
			add("source %q has row %d, want one of %d", s.From, s.Row, len(t.Rows))
		}
	}
	for i := range t.Rows {
		r := &t.Rows[i]
		if len(r.Levels) == 0 {
			add("row %d has no level, want at least one", i)
		}
		for k, l := range r.Levels {
			if k > 0 && r.Levels[k-1].MaxLength >= l.MaxLength && l.MaxLength != 0 || l.MaxLength == 0 && k != len(r.Levels)-1 || l.MaxLength < 0 {
				add("row %d, level %d: max-length %d, want them ascending, and 0 last", i, k, l.MaxLength)
			}
			sum := 0.0
			for j, s := range l.Shares {
				if !(s.Part > 0) || j > 0 && l.Shares[j-1].Lane >= s.Lane {
					add("row %d, level %d: share %v of %q, want parts above 0, sorted by lane", i, k, s.Part, s.Lane)
				}
				sum += s.Part
			}
			if math.Abs(sum-1) > 1e-9 {
				add("row %d, level %d: the shares' sum is %v, want 1", i, k, sum)
			}
		}
		for _, lane := range r.Lanes() {
			if !slices.Contains(lanes, lane) {
				add("row %d: lane %q, want one of %s", i, lane, strings.Join(lanes, ", "))
			}
		}
	}
	return faults
}
