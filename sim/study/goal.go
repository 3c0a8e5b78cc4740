package study

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
)

// Goals are figures that a design should reach against the strongest opponents: on each setting, on
// each group, and on all together. 0 means no goal.
type Goals struct {
	Latency   float64  `json:"latency"`              // largest mean latency, per the opponent's
	LatencyIn []string `json:"latency_in,omitempty"` // the groups for Latency; empty: all
	Steady    float64  `json:"steady,omitempty"`     // as Latency, where load is steady
	SteadyIn  []string `json:"steady_in,omitempty"`  // the groups for Steady
	Goodput   float64  `json:"goodput,omitempty"`    // smallest goodput, per the opponent's
	GoodputIn string   `json:"goodput_in,omitempty"` // the group of settings for Goodput
	// Attained is the smallest share of requests in time, per that of [MostInTime].
	Attained float64 `json:"attained"`
}

// Reached says whether a goal was reached.
type Reached string

// The values of Reached, by the 95 % interval of the figure:
//
//   - Met: the whole interval is within the goal.
//   - Open: a part of the interval is within the goal, or there is one seed and no interval.
//   - Missed: no part of the interval is within the goal.
//   - Dearer: the goal was met, but ours certainly took more GPU-seconds than the opponent.
const (
	Met    Reached = "met"
	Open   Reached = "open"
	Missed Reached = "missed"
	Dearer Reached = "met for more GPU-seconds"
)

// most says whether a figure is at most goal.
func (i Interval) most(goal float64) Reached {
	switch {
	case i.N < 2:
		return Open
	case i.High <= goal:
		return Met
	case i.Low <= goal:
		return Open
	}
	return Missed
}

// least says whether a figure is at least goal.
func (i Interval) least(goal float64) Reached {
	switch {
	case i.N < 2:
		return Open
	case i.Low >= goal:
		return Met
	case i.High >= goal:
		return Open
	}
	return Missed
}

// GoalResult is the result for one goal on one setting, or on several together.
type GoalResult struct {
	Goal string `json:"goal"`
	On   string `json:"on"` // a setting, or the name of several
	To   string `json:"to"` // the contender that ours is compared with
	N    int    `json:"settings"`
	Interval
	Reached Reached `json:"reached"`
}

// The names of goals.
const (
	goalLatency  = "mean latency"
	goalSteady   = "mean latency on steady load"
	goalGoodput  = "goodput"
	goalGPUs     = "GPU-seconds"
	goalAttained = "in time, of the most"
)

// goalNames returns the names of goals with a result, in the order of tables.
func (r *Result) goalNames() []string {
	return slices.DeleteFunc([]string{goalLatency, goalSteady, goalGoodput, goalGPUs, goalAttained}, func(name string) bool {
		return !slices.ContainsFunc(r.Reached, func(x GoalResult) bool { return x.Goal == name })
	})
}

// reach returns the results of the goals on all settings together, on each group, and on each
// setting.
func (r *Result) reach() []GoalResult {
	if reflect.DeepEqual(r.Goals, Goals{}) {
		return nil
	}
	out := r.reached("all settings", func(SettingInfo) bool { return true })
	for _, g := range r.groupNames() {
		out = append(out, r.reached(g, func(s SettingInfo) bool { return s.Group == g })...)
	}
	for _, x := range r.Settings {
		out = append(out, r.reached(x.Name, func(s SettingInfo) bool { return s.Name == x.Name })...)
	}
	return out
}

// reached returns the results of the goals on some settings together.
func (r *Result) reached(on string, in func(SettingInfo) bool) []GoalResult {
	var all, changing, steady, bursty []string
	for _, s := range r.Settings {
		if !in(s) || strongest(r, s.Group) == "" {
			continue
		}
		all = append(all, s.Name)
		if len(r.Goals.LatencyIn) == 0 || slices.Contains(r.Goals.LatencyIn, s.Group) {
			changing = append(changing, s.Name)
		}
		if slices.Contains(r.Goals.SteadyIn, s.Group) {
			steady = append(steady, s.Name)
		}
		if s.Group == r.Goals.GoodputIn {
			bursty = append(bursty, s.Name)
		}
	}
	var out []GoalResult
	add := func(goal, to string, settings []string, of func(Comparison) (Interval, Reached)) {
		if len(settings) == 0 {
			return
		}
		if c, ok := r.Compare(r.Ours, to, settings...); ok {
			i, reached := of(c)
			if to == Strongest && reached == Met && c.GPUSeconds.most(1) == Missed {
				reached = Dearer
			}
			out = append(out, GoalResult{goal, on, to, len(c.Settings), i, reached})
		}
	}
	g := r.Goals
	if g.Latency > 0 {
		add(goalLatency, Strongest, changing, func(c Comparison) (Interval, Reached) { return c.Mean, c.Mean.most(g.Latency) })
	}
	if g.Steady > 0 {
		add(goalSteady, Strongest, steady, func(c Comparison) (Interval, Reached) { return c.Mean, c.Mean.most(g.Steady) })
	}
	if g.Goodput > 0 {
		add(goalGoodput, Strongest, bursty, func(c Comparison) (Interval, Reached) { return c.Goodput, c.Goodput.least(g.Goodput) })
	}
	add(goalGPUs, Strongest, all, func(c Comparison) (Interval, Reached) { return c.GPUSeconds, c.GPUSeconds.most(1) })
	if g.Attained > 0 { // goodputs of equal requests are proportional to the shares in time
		add(goalAttained, MostInTime, all, func(c Comparison) (Interval, Reached) { return c.Goodput, c.Goodput.least(g.Attained) })
	}
	return out
}

// goals writes the results of the goals, and a table that compares ours, the best baseline and the
// oracle.
func (r *Result) goals(b *strings.Builder) {
	if len(r.Reached) == 0 {
		return
	}
	g := r.Goals
	fmt.Fprintf(b, "\n## Goals\n\nAgainst the strongest opponent of each group: %.0f %% less mean latency", 100*(1-g.Latency))
	if len(g.LatencyIn) > 0 {
		fmt.Fprintf(b, " on %s", clean(strings.Join(g.LatencyIn, ", ")))
	}
	if g.Steady > 0 {
		fmt.Fprintf(b, ", at most %.0f %% more on %s", 100*(g.Steady-1), clean(strings.Join(g.SteadyIn, ", ")))
	}
	if g.Goodput > 0 {
		fmt.Fprintf(b, ", %g times the goodput on %s", g.Goodput, clean(g.GoodputIn))
	}
	b.WriteString(", with no more GPU-seconds")
	if g.Attained > 0 {
		fmt.Fprintf(b, "; and %g of what the oracle has in time, or a baseline where that has more", g.Attained)
	}
	fmt.Fprintf(b, ". Met: the whole interval keeps to the goal; open: a part of it does; missed: none of it; met for more GPU-seconds: it took more of them.\n")
	names := r.goalNames()
	t := table{append([]string{"on"}, names...)}
	var rows []string
	cells := map[string]string{}
	counts := map[string]map[Reached]int{}
	for _, x := range r.Reached {
		if len(rows) == 0 || rows[len(rows)-1] != x.On {
			rows = append(rows, x.On)
		}
		cells[x.On+"\n"+x.Goal] = r.reachedText(x)
		if slices.ContainsFunc(r.Settings, func(s SettingInfo) bool { return s.Name == x.On }) {
			if counts[x.Goal] == nil {
				counts[x.Goal] = map[Reached]int{}
			}
			counts[x.Goal][x.Reached]++
		}
	}
	for _, on := range rows {
		row := []string{on}
		for _, n := range names {
			row = append(row, cells[on+"\n"+n])
		}
		t.row(row...)
	}
	row := []string{"settings: met, met for more, open, missed"}
	for _, n := range names {
		row = append(row, fmt.Sprintf("%d, %d, %d, %d", counts[n][Met], counts[n][Dearer], counts[n][Open], counts[n][Missed]))
	}
	t.row(row...)
	t.write(b)
	r.sides(b)
}

func (r *Result) reachedText(x GoalResult) string {
	if x.Goal == goalLatency || x.Goal == goalSteady || x.Goal == goalGPUs {
		return string(x.Reached) + ": " + x.Change()
	}
	return string(x.Reached) + ": " + x.String() + " times"
}

// sides writes, for each setting, a row for ours, a row for the best baseline and a row for each
// oracle. All rows but the first have the ratio of ours to the contender of the row.
func (r *Result) sides(b *strings.Builder) {
	fmt.Fprintf(b, "\n### %s, the best baseline and the oracle, by setting\n\nRatios are ours over the row's, in pairs of runs; goodput is within %g T.\n", clean(r.title(r.Ours)), r.Objective)
	t := table{{"setting", "contender", "mean/T", fmt.Sprintf("in %g T, %%", r.Objective), "goodput/s", "GPUs", "core-seconds", "failed, %", "mean, ratio", "goodput, ratio", "GPU-seconds, ratio"}}
	for _, s := range r.Settings {
		who := []string{r.Ours, BestBaseline}
		for _, c := range r.Contenders {
			if c.Oracle {
				who = append(who, c.Name)
			}
		}
		for _, name := range who {
			o := r.Outcome(s.Name, name)
			if o == nil || r.Outcome(s.Name, r.Ours) == nil {
				continue
			}
			title := r.title(o.Contender) + r.mark(o)
			if name == BestBaseline {
				title = "best: " + title
			}
			row := []string{s.Name, title, o.Mean.with(1 / s.Service), o.InTime[r.objective()].with(100), o.Goodput.with(1), o.GPUs.with(1), o.CoreSeconds.with(1), o.Failed.with(100)}
			if c, ok := r.Compare(r.Ours, name, s.Name); ok && name != r.Ours {
				row = append(row, c.Mean.String(), c.Goodput.String(), c.GPUSeconds.String())
			} else {
				row = append(row, "", "", "")
			}
			t.row(row...)
		}
	}
	t.write(b)
}
