package study

import (
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/stagecoach-serving/stagecoach/sim"
)

// WriteMarkdown writes the result as a report in Markdown. It begins with the question, ours
// against the strongest opponents, what was expected, the goals, the claims, and all settings
// together. Ours against each contender follows, and ours against the best baseline per group of
// settings. Then come each setting, the configurations, ours without each of its parts, and the
// starts of replicas.
func (r *Result) WriteMarkdown(w io.Writer) error {
	var b strings.Builder
	r.intro(&b)
	headlines(r, &b)
	expectations(r, &b)
	r.goals(&b)
	r.claims(&b)
	r.together(&b)
	r.pairs(&b)
	r.groups(&b)
	r.each(&b)
	r.configurations(&b)
	r.parts(&b)
	r.starts(&b)
	if r.More != nil {
		b.WriteString("\n")
		if err := r.More.WriteMarkdown(&b); err != nil {
			return err
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func (r *Result) intro(b *strings.Builder) {
	fmt.Fprintf(b, "# %s\n\n", clean(r.Title))
	if r.About != "" {
		fmt.Fprintf(b, "%s\n\n", r.About)
	}
	fmt.Fprintf(b, "%d settings, %d contenders, seeds %d to %d; ± and ranges are 95 %% confidence intervals over seeds. T is a request's latency without any wait; "+
		"\"in time\" is within %g T. Latencies are of all requests: a failed one has taken its timeout. ", len(r.Settings), len(r.Contenders), r.Seeds.First, r.Seeds.First+uint64(r.Seeds.N)-1, r.Objective)
	fmt.Fprintf(b, "Each contender's configuration is the best of %d or fewer on other loads, under a budget of %g GPUs on average%s.\n", r.Tuned.Candidates, r.Budget, coresOf(r))
	marks := ""
	for i := range r.Outcomes {
		marks += r.mark(&r.Outcomes[i])
	}
	for _, m := range []struct{ sign, text string }{
		{"†", "more than 0.1 % of the requests failed"},
		{"‡", "not tuned: with its defaults"},
		{"§", fmt.Sprintf("over the budget: more than %s GPUs on average", sim.Trim(overBudget*r.Budget, 4))},
	} {
		if strings.Contains(marks, m.sign) {
			fmt.Fprintf(b, "\n%s %s.\n", m.sign, m.text)
		}
	}
	for _, l := range r.LeftOut {
		fmt.Fprintf(b, "\nLeft out: %s: %s\n", clean(l.Setting), clean(l.Why))
	}
}

// coresOf returns a text on the cores per replica, after the budget of GPUs.
func coresOf(r *Result) string {
	if r.Cores == 0 {
		return ""
	}
	return fmt.Sprintf(" and %d cores per replica; contenders that declare fewer are there for the claims only, and are not of equal means", r.Cores)
}

func (r *Result) claims(b *strings.Builder) {
	t := table{{"id", "claim", "paper", "here", "verdict", "why", "circumstances"}}
	var rest []string
	for _, c := range r.Claims {
		if c.Ours == "" {
			rest = append(rest, c.ID)
			continue
		}
		t.row(c.ID, c.What, c.Paper, c.Ours, string(c.Verdict), c.Why, c.With)
	}
	if len(r.Claims) > 0 {
		b.WriteString("\n## Claims\n")
		t.write(b)
	}
	if len(rest) > 0 {
		fmt.Fprintf(b, "\nNot evaluated, for want of settings or contenders: %s.\n", strings.Join(rest, ", "))
	}
}

// mark returns the marks of an outcome, such as that it is untuned.
func (r *Result) mark(o *Outcome) string {
	s := ""
	for _, m := range []struct {
		is   bool
		sign string
	}{{o.Fails(), " †"}, {o.Untuned, " ‡"}, {r.OverBudget(o), " §"}} {
		if m.is {
			s += m.sign
		}
	}
	return s
}

// of returns a contender's outcomes with their settings.
func (r *Result) of(contender string) (all []*Outcome, settings []SettingInfo) {
	for _, s := range r.Settings {
		if o := r.Outcome(s.Name, contender); o != nil {
			all, settings = append(all, o), append(settings, s)
		}
	}
	return all, settings
}

func (r *Result) together(b *strings.Builder) {
	ours, _ := r.of(r.Ours)
	b.WriteString("\n## All settings together\n\nOf contenders that were on all of them. Latencies are geometric means over settings, in T; the rest are arithmetic means.\n")
	heading := []string{"contender", "settings", "latency/T", "p99/T"}
	for _, m := range r.Multiples {
		heading = append(heading, fmt.Sprintf("in %g T", m))
	}
	t := table{append(heading, "goodput/s", "GPUs", "cores", "failed")}
	for _, c := range r.Contenders {
		all, settings := r.of(c.Name)
		if len(all) == 0 || len(ours) > 0 && (len(all) != len(ours) || len(all) != len(r.shared(c.Name, r.Ours))) {
			continue
		}
		mean := func(figure func(i int) float64) float64 {
			sum := 0.0
			for i := range all {
				sum += figure(i) / float64(len(all))
			}
			return sum
		}
		logs := func(figure func(o *Outcome) float64) string {
			return sim.Trim(math.Exp(mean(func(i int) float64 { return math.Log(max(figure(all[i]), tiny) / settings[i].Service) })), 3)
		}
		name := c.Title
		if i := slices.IndexFunc(all, (*Outcome).Fails); i >= 0 {
			name += " †"
		}
		row := []string{name, fmt.Sprint(len(all)), logs(func(o *Outcome) float64 { return o.Mean.Mean }), logs(func(o *Outcome) float64 { return o.P99.Mean })}
		for k := range r.Multiples {
			row = append(row, percent(mean(func(i int) float64 { return all[i].InTime[k].Mean })))
		}
		t.row(append(row, sim.Trim(mean(func(i int) float64 { return all[i].Goodput.Mean }), 3), sim.Trim(mean(func(i int) float64 { return all[i].GPUs.Mean }), 3),
			sim.Trim(mean(func(i int) float64 { return all[i].CoreSeconds.Mean / settings[i].Seconds }), 3),
			percent(mean(func(i int) float64 { return all[i].Failed.Mean })))...)
	}
	t.write(b)
}

// shared returns the settings on which both contenders were evaluated.
func (r *Result) shared(a, b string) []string {
	var out []string
	for _, s := range r.Settings {
		if r.Outcome(s.Name, a) != nil && r.Outcome(s.Name, b) != nil {
			out = append(out, s.Name)
		}
	}
	return out
}

func percent(part float64) string { return sim.Trim(100*part, 3) + " %" }

var pairHeading = []string{"mean latency", "p99", "goodput", "in time", "GPU-seconds"}

func (c *Comparison) row() []string {
	return []string{c.Mean.Change(), c.P99.Change(), c.Goodput.String() + " times", c.InTime.Points(), c.GPUSeconds.Change()}
}

// pairs compares ours with each contender, on all settings that both have.
func (r *Result) pairs(b *strings.Builder) {
	t := table{append([]string{"against", "settings"}, pairHeading...)}
	for _, c := range append([]ContendInfo{{Name: BestBaseline}}, r.Contenders...) {
		if p, ok := r.Compare(r.Ours, c.Name); ok && c.Name != r.Ours && c.Like == "" {
			t.row(append([]string{r.title(c.Name), fmt.Sprint(len(p.Settings))}, p.row()...)...)
		}
	}
	if len(t) < 2 {
		return
	}
	fmt.Fprintf(b, "\n## %s against each, in pairs\n", clean(r.title(r.Ours)))
	t.write(b)
	fmt.Fprintf(b, "\nThe best baseline is chosen setting by setting, by its mean latency in the comparison itself, of those with at most %s GPUs, or no more than ours has there.\n", sim.Trim(overBudget*r.Budget, 4))
}

func (r *Result) title(name string) string {
	for _, c := range r.Contenders {
		if c.Name == name {
			return c.Title
		}
	}
	return name
}

// groups compares ours with the best baseline, group by group.
func (r *Result) groups(b *strings.Builder) {
	t := table{append([]string{"group", "best baseline", "settings"}, pairHeading...)}
	for _, group := range r.groupNames() {
		var settings []string
		best := map[string]int{}
		for _, s := range r.Settings {
			if s.Group == group {
				settings = append(settings, s.Name)
				if name := r.BestBaseline(s.Name); name != "" {
					best[name]++
				}
			}
		}
		p, ok := r.Compare(r.Ours, BestBaseline, settings...)
		if !ok {
			continue
		}
		t.row(append([]string{group, strings.Join(slices.Sorted(maps.Keys(best)), ", "), fmt.Sprint(len(p.Settings))}, p.row()...)...)
	}
	if len(t) > 1 {
		fmt.Fprintf(b, "\n## %s against the best baseline, by group\n", clean(r.title(r.Ours)))
		t.write(b)
	}
}

func (r *Result) groupNames() []string {
	var out []string
	for _, s := range r.Settings {
		if !slices.Contains(out, s.Group) {
			out = append(out, s.Group)
		}
	}
	return out
}

// each lists all outcomes, with one table per group.
func (r *Result) each(b *strings.Builder) {
	for _, group := range r.groupNames() {
		fmt.Fprintf(b, "\n## %s\n", clean(group))
		heading := []string{"setting", "contender", "requests", "mean ms", "mean/T", "p50/T", "p75/T", "p99/T"}
		for _, m := range r.Multiples {
			heading = append(heading, fmt.Sprintf("in %g T, %%", m))
		}
		t := table{append(heading, "goodput/s", "waiting", "GPUs", "core-seconds", "failed, %")}
		for _, s := range r.Settings {
			if s.Group != group {
				continue
			}
			for _, c := range r.Contenders {
				if o := r.Outcome(s.Name, c.Name); o != nil {
					t.row(o.row(s, c.Title+r.mark(o))...)
				}
			}
		}
		t.write(b)
	}
}

func (o *Outcome) row(s SettingInfo, title string) []string {
	in := func(x Sample) string { return x.with(1 / s.Service) }
	row := []string{s.Name, title, o.Requests.with(1), o.Mean.with(1000), in(o.Mean), in(o.P50), in(o.P75), in(o.P99)}
	for _, x := range o.InTime {
		row = append(row, x.with(100))
	}
	waiting := 0.0
	for _, st := range o.Stages {
		waiting += st.Queue.Mean
	}
	return append(row, o.Goodput.with(1), sim.Trim(waiting, 3), o.GPUs.with(1), o.CoreSeconds.with(1), o.Failed.with(100))
}

// starts lists the starts of contenders, over all settings.
func (r *Result) starts(b *strings.Builder) {
	t := table{{"contender", "path", "starts a run", "mean s"}}
	for _, c := range r.Contenders {
		all, _ := r.of(c.Name)
		sums := map[string]Start{}
		for _, o := range all {
			for _, st := range o.Stages {
				for _, x := range st.Starts {
					name := x.Path
					if x.Key {
						name += ", of key stages"
					}
					s := sums[name]
					sums[name] = Start{N: s.N + x.N, Mean: s.Mean + float64(x.N)*x.Mean}
				}
			}
		}
		for _, name := range slices.Sorted(maps.Keys(sums)) {
			s := sums[name]
			t.row(c.Title, name, sim.Trim(float64(s.N)/float64(len(all)*r.Seeds.N), 3), sim.Trim(s.Mean/float64(s.N), 3))
		}
	}
	if len(t) > 1 {
		b.WriteString("\n## Starts of replicas\n")
		t.write(b)
	}
}

// configurations lists the chosen configuration, and the number of those that were tried.
func (r *Result) configurations(b *strings.Builder) {
	t := table{{"group", "contender", "of", "chosen", "GPUs", "latency/T", "in time", "failed"}}
	for _, c := range r.Tuned.Choices {
		p := c.Points[c.Chosen]
		var knobs []string
		for i, k := range c.Knobs {
			knobs = append(knobs, fmt.Sprintf("%s %s", k, sim.Trim(p.Knobs[i], 4)))
		}
		t.row(c.Group, r.title(c.Contender), fmt.Sprint(len(c.Points)), strings.Join(knobs, ", "), sim.Trim(p.GPUs, 3), sim.Trim(math.Exp(p.Score), 3), percent(p.InTime), percent(p.Failed))
	}
	if len(t) > 1 {
		fmt.Fprintf(b, "\n## Chosen configurations\n\nOn the loads for tuning, seeds %d to %d. All that was tried is in the JSON, under tuned.\n", r.Tuned.Seeds.First, r.Tuned.Seeds.First+uint64(r.Tuned.Seeds.N)-1)
		t.write(b)
	}
}
