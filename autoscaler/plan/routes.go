package plan

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Ranks are the orders that lines can have. [Want.Rank] is one of them, or empty.
var Ranks = []string{"fair", "fifo", "least-slack"}

// RouteFaults returns the faults, joined, of the routing tables of a domain, and of the chains that
// they exclude:
//
//   - Each stage of the domain with several lanes has one table, and no other stage has any.
//   - Tables are sorted by stage, and sound: see [Table].
//   - Chains have at least two lanes, along steps of the domain's pipelines.
//   - No task can be routed along a chain.
func (s *Snapshot) RouteFaults(d Domain, tables []Table, excluded []Chain) error {
	return s.routeFaults(s.LanesIn(d), d.Pipelines, tables, excluded)
}

// routeFaults works like RouteFaults. lanes are those of the domain's stages.
func (s *Snapshot) routeFaults(lanes []Lanes, pipelines []string, tables []Table, excluded []Chain) error {
	var errs []error
	add := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	for i := range tables {
		if i > 0 && tables[i-1].Stage >= tables[i].Stage {
			add("table of stage %q after %q, want each once, sorted", tables[i].Stage, tables[i-1].Stage)
		}
	}
	for _, l := range lanes {
		if !slices.ContainsFunc(tables, func(t Table) bool { return t.Stage == l.Stage }) {
			add("stage %q: no table, want one for its lanes %s", l.Stage, strings.Join(l.Functions, ", "))
		}
	}
	for i := range tables {
		t := &tables[i]
		k, ok := slices.BinarySearchFunc(lanes, t.Stage, func(l Lanes, stage string) int { return cmp.Compare(l.Stage, stage) })
		if !ok {
			add("table of stage %q: want none, as the stage does not have several lanes", t.Stage)
			continue
		}
		errs = append(errs, t.faults(lanes[k].Functions)...)
	}
	if len(errs) == 0 && len(excluded) > 0 {
		d := Domain{Pipelines: pipelines}
		w := walk{lanes: lanes, steps: s.Steps(d), tables: tables}
		w.reach(s.Entries(d))
		for _, c := range excluded {
			if err := w.fault(c); err != nil {
				errs = append(errs, err)
			}
		}
	}
	return errors.Join(errs...)
}

// walk finds where tables can route requests.
type walk struct {
	lanes   []Lanes
	steps   []Step
	tables  []Table
	reached map[string]bool // lanes that a request can come to
}

// table returns the table of a stage, or nil.
func (w *walk) table(stage string) *Table {
	i, ok := slices.BinarySearchFunc(w.tables, stage, func(t Table, stage string) int { return cmp.Compare(t.Stage, stage) })
	if !ok {
		return nil
	}
	return &w.tables[i]
}

// next returns the lanes of a stage that may get the answers of a source.
func (w *walk) next(from, stage string) []string {
	if t := w.table(stage); t != nil {
		return t.Row(from).Lanes()
	}
	return lanesOf(w.lanes, stage)
}

// reach fills in w.reached. Requests enter at the given stages.
func (w *walk) reach(entries []string) {
	w.reached = map[string]bool{}
	var todo []string
	visit := func(lanes []string) {
		for _, l := range lanes {
			if !w.reached[l] {
				w.reached[l] = true
				todo = append(todo, l)
			}
		}
	}
	for _, stage := range entries {
		visit(w.next(FromClient, stage))
	}
	for len(todo) > 0 {
		lane := todo[0]
		todo = todo[1:]
		for _, st := range w.steps {
			if slices.Contains(lanesOf(w.lanes, st.From), lane) {
				visit(w.next(st.source(lane), st.To))
			}
		}
	}
}

// source returns the source of tasks that a lane's answers make at the step's end.
func (st Step) source(lane string) string {
	if st.Join {
		return FromJoin
	}
	return lane
}

// fault returns what is wrong with an excluded chain.
func (w *walk) fault(c Chain) error {
	text := strings.Join(c, " > ")
	if len(c) < 2 {
		return fmt.Errorf("excluded chain %q: want at least two lanes", text)
	}
	routed := w.reached[c[0]]
	for i := 1; i < len(c); i++ {
		step, follows := false, false
		for _, st := range w.steps {
			if !slices.Contains(lanesOf(w.lanes, st.From), c[i-1]) || !slices.Contains(lanesOf(w.lanes, st.To), c[i]) {
				continue
			}
			step = true
			follows = follows || slices.Contains(w.next(st.source(c[i-1]), st.To), c[i])
		}
		if !step {
			return fmt.Errorf("excluded chain %q: no step of a pipeline leads from %q to %q", text, c[i-1], c[i])
		}
		routed = routed && follows
	}
	if routed {
		return fmt.Errorf("excluded chain %q: the tables route requests along it", text)
	}
	return nil
}
