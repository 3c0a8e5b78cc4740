package study

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/stagecoach-serving/stagecoach/sim"
)

// Strongest stands, in comparisons, for the strongest opponent of a setting's group: of the
// contenders with equal means, the one with the least mean latency over the group. Equal means are
// as many cores per replica as ours may use, and at most 1.05 times the budget of GPUs, or no more
// GPUs than ours. Means are over the settings on which ours was evaluated. The choice is made with
// the results known, so it favours the opponent. Ours, its parts and oracles are no opponents.
const Strongest = "strongest"

// strongest returns the contender that [Strongest] stands for in a group, or "" if there is none.
func strongest(r *Result, group string) string {
	best, least := "", math.Inf(1)
	for _, c := range r.Contenders {
		if c.Ours || c.Oracle || c.Like != "" || c.Cores != r.Cores {
			continue
		}
		if latency, ok := within(r, c.Name, group); ok && latency < least {
			best, least = c.Name, latency
		}
	}
	return best
}

// within returns the mean of the logarithms of a contender's latency in a group. It returns false
// if the contender was not evaluated on all settings of ours, or used too many GPUs.
func within(r *Result, contender, group string) (latency float64, ok bool) {
	gpus, own, budget, n := 0.0, 0.0, 0.0, 0.0
	for _, s := range r.Settings {
		ours := r.Outcome(s.Name, r.Ours)
		if s.Group != group || ours == nil {
			continue
		}
		o := r.Outcome(s.Name, contender)
		if o == nil {
			return 0, false
		}
		latency += math.Log(max(o.Mean.Mean, tiny) / s.Service)
		gpus, own, budget, n = gpus+o.GPUs.Mean, own+ours.GPUs.Mean, budget+cmp.Or(s.Budget, r.Budget), n+1
	}
	return latency / n, n > 0 && (gpus <= overBudget*budget || gpus <= own)
}

// tunedModel reports whether contenders were tuned on a model.
func tunedModel(r *Result, model string) bool {
	return slices.ContainsFunc(r.Settings, func(s SettingInfo) bool { return s.Model == model && s.Train })
}

// headlines compares ours with the strongest opponent of each group, and says where ours is slower.
// Settings of models that no contender was tuned on have rows of their own.
func headlines(r *Result, b *strings.Builder) {
	t := table{append([]string{"group", "models", "strongest opponent", "settings"}, pairHeading...)}
	var slower, perhaps []string
	for _, group := range r.groupNames() {
		who := strongest(r, group)
		if who == "" {
			continue
		}
		rows := modelRows(r, func(s SettingInfo) bool { return s.Group == group })
		for _, row := range rows {
			c, ok := r.Compare(r.Ours, who, row.settings...)
			if !ok {
				continue
			}
			t.row(append([]string{group + overMark(r, row.settings), row.models, r.title(who), fmt.Sprint(len(c.Settings))}, c.row()...)...)
			if row.part {
				continue
			}
			text := fmt.Sprintf("%s (%s)", clean(group), c.Mean.Change())
			switch {
			case c.Mean.N > 1 && c.Mean.Low > 1:
				slower = append(slower, text)
			case c.Mean.Value > 1:
				perhaps = append(perhaps, text)
			}
		}
	}
	if len(t) < 2 {
		return
	}
	for _, row := range modelRows(r, func(s SettingInfo) bool { return strongest(r, s.Group) != "" }) {
		if c, ok := r.Compare(r.Ours, Strongest, row.settings...); ok {
			t.row(append([]string{"all groups", row.models, "of each group", fmt.Sprint(len(c.Settings))}, c.row()...)...)
		}
	}
	fmt.Fprintf(b, "\n## %s against the strongest opponent\n\nThe strongest opponent of a group has the least mean latency over the group, of those with equal means: %sat most %s times the budget of GPUs, or no more than ours took. It is chosen with the results known, which favours it.\n",
		clean(r.title(r.Ours)), equalCores(r), sim.Trim(overBudget, 4))
	t.write(b)
	for _, x := range []struct {
		what string
		in   []string
	}{{"is slower, beyond chance", slower}, {"may be slower, within chance", perhaps}} {
		if len(x.in) > 0 {
			fmt.Fprintf(b, "\n%s %s: %s.\n", clean(r.title(r.Ours)), x.what, strings.Join(x.in, ", "))
		}
	}
	borrowed(r, b)
}

// overMark returns the mark of groups in which ours was over the budget.
func overMark(r *Result, settings []string) string {
	for _, s := range settings {
		if r.OverBudget(r.Outcome(s, r.Ours)) {
			return " §"
		}
	}
	return ""
}

func equalCores(r *Result) string {
	if r.Cores == 0 {
		return ""
	}
	return fmt.Sprintf("%d cores per replica, and ", r.Cores)
}

// modelRow is a part of a comparison by whether contenders were tuned on its models.
type modelRow struct {
	models   string
	settings []string
	part     bool // not all
}

// modelRows returns the settings that match: all, and if there are both kinds, those of models that
// contenders were tuned on and those of models that they were not.
func modelRows(r *Result, match func(SettingInfo) bool) []modelRow {
	rows := []modelRow{{models: "all"}, {models: "tuned on", part: true}, {models: "not tuned on", part: true}}
	for _, s := range r.Settings {
		if !match(s) || r.Outcome(s.Name, r.Ours) == nil {
			continue
		}
		kind := 1
		if !tunedModel(r, s.Model) {
			kind = 2
		}
		rows[0].settings, rows[kind].settings = append(rows[0].settings, s.Name), append(rows[kind].settings, s.Name)
	}
	switch {
	case len(rows[0].settings) == 0:
		return nil
	case len(rows[1].settings) == 0:
		rows[0].models = rows[2].models
		return rows[:1]
	case len(rows[2].settings) == 0:
		rows[0].models = rows[1].models
		return rows[:1]
	}
	return rows
}

// borrowed says which groups use configurations that were tuned for another group.
func borrowed(r *Result, b *strings.Builder) {
	var out []string
	for _, s := range r.Settings {
		from, of, n := "", 0, 0
		for i := range r.Outcomes {
			if o := &r.Outcomes[i]; o.Setting == s.Name && len(o.Knobs) > 0 {
				if of++; o.TunedAs != "" {
					from, n = o.TunedAs, n+1
				}
			}
		}
		if n == 0 {
			continue
		}
		text := fmt.Sprintf("%s from %s", clean(s.Group), clean(from))
		if n < of {
			text += fmt.Sprintf(" (%d of %d contenders)", n, of)
		}
		if !slices.Contains(out, text) {
			out = append(out, text)
		}
	}
	if len(out) > 0 {
		fmt.Fprintf(b, "\nConfigurations that were tuned for another group: %s.\n", strings.Join(out, "; "))
	}
}
