package study

import (
	"cmp"
	"context"
	"slices"

	"github.com/stagecoach-serving/stagecoach/sim"
)

// Evaluate runs every contender on the loads of the comparison, with its configuration in tuned. If
// tuned has no configuration for a contender, the contender runs with its defaults, and its outcome
// is marked. report and ctx are as for [Study.Tune].
func (s *Study) Evaluate(ctx context.Context, tuned Tuned, open sim.Opener, report func(Progress)) (*Result, error) {
	out := &Result{
		Schema: Schema, Study: s.Name, Title: s.Title, About: s.About, Goals: s.Goals, Ours: s.Ours, Budget: s.Budget, Cores: s.Cores, Seeds: s.Test,
		Multiples: s.Multiples, Objective: s.Objective, LeftOut: s.LeftOut, Tuned: tuned,
	}
	for _, c := range s.Contenders {
		out.Contenders = append(out.Contenders, ContendInfo{c.Name, c.Title, c.Source, c.Like, c.Oracle, c.Ours, c.Cores})
	}
	var cells []*cell
	var how []Outcome // how each was tuned
	for i := range s.Settings {
		x := &s.Settings[i]
		for k := range s.Contenders {
			c := &s.Contenders[k]
			if !c.in(*x) {
				continue
			}
			o := configured(&tuned, x, c)
			cells = append(cells, &cell{setting: x, contender: c, knobs: o.Knobs})
			how = append(how, o)
		}
	}
	runs, err := s.simulate(ctx, "evaluate", cells, s.Test, open, report)
	if err != nil {
		return nil, err
	}
	for _, x := range s.Settings {
		info := SettingInfo{Name: x.Name, Model: x.Model, Group: x.Group, Service: x.Service.Seconds(), Budget: x.Budget, Train: x.Train}
		for i, c := range cells {
			if c.setting.Name == x.Name {
				info.Seconds = runs[i][0].Seconds
				out.Outcomes = append(out.Outcomes, s.outcome(c, how[i], runs[i]))
			}
		}
		out.Settings = append(out.Settings, info)
	}
	if out.More, err = s.more(ctx, tuned, open, report); err != nil {
		return nil, err
	}
	out.Tuned.Choices = used(out, tuned.Choices)
	out.Reached = out.reach()
	out.Expected = expected(out, s.Expected)
	if s.Judge != nil {
		out.Claims = s.Judge(out)
	}
	return out, nil
}

// used returns the choices for the groups and the contenders of a result and of its further
// settings.
func used(r *Result, all []Choice) []Choice {
	groups, contenders := map[string]bool{}, map[string]bool{}
	for x := r; x != nil; x = x.More {
		for _, s := range x.Settings {
			groups[s.Group] = true
		}
		for _, o := range x.Outcomes {
			groups[o.TunedAs], contenders[o.Contender] = true, true
		}
	}
	var out []Choice
	for _, c := range all {
		if groups[c.Group] && contenders[c.Contender] {
			out = append(out, c)
		}
	}
	return out
}

// more evaluates s.More, if there is any.
func (s *Study) more(ctx context.Context, tuned Tuned, open sim.Opener, report func(Progress)) (*Result, error) {
	if s.More == nil {
		return nil, nil
	}
	out, err := s.More.Evaluate(ctx, tuned, open, report)
	if err == nil {
		out.Tuned.Choices = nil // the study's result has them
	}
	return out, err
}

// configured returns an outcome with nothing but a contender's configuration on a setting.
func configured(tuned *Tuned, x *Setting, c *Contender) Outcome {
	o := Outcome{Setting: x.Name, Contender: c.Name}
	var ok bool
	if o.Knobs, ok = tuned.Knobs(*c, x.Group); ok {
		return o
	}
	if o.Knobs, ok = tuned.Knobs(*c, x.TunedAs); ok {
		o.TunedAs = x.TunedAs
		return o
	}
	o.Knobs, o.Untuned = c.Defaults, len(c.Space) > 0
	return o
}

// outcome summarizes the runs of a contender on a setting. out says how it was configured.
func (s *Study) outcome(c *cell, out Outcome, runs []run) Outcome {
	of := func(figure func(r *run) float64) Sample {
		values := make([]float64, len(runs))
		for i := range runs {
			values[i] = figure(&runs[i])
		}
		return sample(values)
	}
	for figure, sample := range map[*Sample]func(r *run) float64{
		&out.Requests: func(r *run) float64 { return r.Requests }, &out.Failed: func(r *run) float64 { return r.Failed },
		&out.Mean: func(r *run) float64 { return r.Mean }, &out.Answered: func(r *run) float64 { return r.Answered },
		&out.P50: func(r *run) float64 { return r.P50 }, &out.P75: func(r *run) float64 { return r.P75 }, &out.P99: func(r *run) float64 { return r.P99 },
		&out.GPUs: (*run).gpus, &out.GPUSeconds: func(r *run) float64 { return r.GPUSeconds }, &out.CoreSeconds: func(r *run) float64 { return r.CoreSeconds },
	} {
		*figure = of(sample)
	}
	for i, x := range s.Multiples {
		in := of(func(r *run) float64 { return r.InTime[i] })
		out.InTime = append(out.InTime, in)
		if x == s.Objective {
			out.Goodput = of(func(r *run) float64 { return r.InTime[i] * r.Requests / r.Seconds })
		}
	}
	if c.contender.Name == s.Ours || c.contender.Like != "" {
		for i := range runs {
			out.Decisions = append(out.Decisions, runs[i].Decisions)
		}
	}
	for i, st := range runs[0].Stages {
		from := func(figure func(f *stageRun) float64) Sample {
			return of(func(r *run) float64 { return figure(&r.Stages[i]) })
		}
		out.Stages = append(out.Stages, StageOutcome{
			Name:  st.Name,
			Queue: from(func(f *stageRun) float64 { return f.Queue }), Wait: from(func(f *stageRun) float64 { return f.Wait }),
			CV: from(func(f *stageRun) float64 { return f.CV }), Starts: starts(runs, i),
		})
	}
	return out
}

// starts sums up the starts of a stage.
func starts(runs []run, stage int) []Start {
	var out []Start
	for _, r := range runs {
		for _, f := range r.Stages[stage].Starts {
			i := slices.IndexFunc(out, func(s Start) bool { return s.Path == f.Path && s.Key == f.Key })
			if i < 0 {
				i, out = len(out), append(out, Start{Path: f.Path, Key: f.Key})
			}
			out[i].N += f.N
			out[i].Mean += float64(f.N) * f.Mean // a sum here; divided below
		}
	}
	for i := range out {
		out[i].Mean = sim.Round(out[i].Mean / float64(out[i].N))
	}
	slices.SortFunc(out, func(a, b Start) int {
		if a.Key != b.Key {
			return map[bool]int{true: 1, false: -1}[a.Key]
		}
		return cmp.Compare(a.Path, b.Path)
	})
	return out
}
