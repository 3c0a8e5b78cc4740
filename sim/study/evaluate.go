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
	var untuned []bool
	for i := range s.Settings {
		x := &s.Settings[i]
		for k := range s.Contenders {
			c := &s.Contenders[k]
			if !c.in(*x) {
				continue
			}
			knobs, ok := tuned.Knobs(*c, x.Group)
			if !ok {
				knobs = c.Defaults
			}
			cells = append(cells, &cell{setting: x, contender: c, knobs: knobs})
			untuned = append(untuned, !ok && len(c.Space) > 0)
		}
	}
	runs, err := s.simulate(ctx, "evaluate", cells, s.Test, open, report)
	if err != nil {
		return nil, err
	}
	for _, x := range s.Settings {
		info := SettingInfo{Name: x.Name, Model: x.Model, Group: x.Group, Service: x.Service.Seconds(), Budget: x.Budget}
		for i, c := range cells {
			if c.setting.Name == x.Name {
				info.Seconds = runs[i][0].seconds
				out.Outcomes = append(out.Outcomes, s.outcome(c, untuned[i], runs[i]))
			}
		}
		out.Settings = append(out.Settings, info)
	}
	out.Reached = out.reach()
	if s.Judge != nil {
		out.Claims = s.Judge(out)
	}
	return out, nil
}

// outcome summarizes the runs of a contender on a setting.
func (s *Study) outcome(c *cell, untuned bool, runs []run) Outcome {
	of := func(figure func(r *run) float64) Sample {
		values := make([]float64, len(runs))
		for i := range runs {
			values[i] = figure(&runs[i])
		}
		return sample(values)
	}
	out := Outcome{
		Setting: c.setting.Name, Contender: c.contender.Name, Knobs: c.knobs, Untuned: untuned,
		Requests: of(func(r *run) float64 { return r.requests }), Failed: of(func(r *run) float64 { return r.failed }),
		Mean: of(func(r *run) float64 { return r.mean }), Answered: of(func(r *run) float64 { return r.answered }), P50: of(func(r *run) float64 { return r.p50 }),
		P75: of(func(r *run) float64 { return r.p75 }), P99: of(func(r *run) float64 { return r.p99 }),
		GPUs: of((*run).gpus), GPUSeconds: of(func(r *run) float64 { return r.gpuSeconds }),
		CoreSeconds: of(func(r *run) float64 { return r.coreSeconds }),
	}
	for i, x := range s.Multiples {
		in := of(func(r *run) float64 { return r.inTime[i] })
		out.InTime = append(out.InTime, in)
		if x == s.Objective {
			out.Goodput = of(func(r *run) float64 { return r.inTime[i] * r.requests / r.seconds })
		}
	}
	if c.contender.Name == s.Ours || c.contender.Like != "" {
		for i := range runs {
			out.Decisions = append(out.Decisions, runs[i].decisions)
		}
	}
	for i, st := range runs[0].stages {
		from := func(figure func(f *sim.StageFigures) float64) Sample {
			return of(func(r *run) float64 { return figure(&r.stages[i]) })
		}
		out.Stages = append(out.Stages, StageOutcome{
			Name:  st.Name,
			Queue: from(func(f *sim.StageFigures) float64 { return f.Queue }), Wait: from(func(f *sim.StageFigures) float64 { return f.Wait }),
			CV: from(func(f *sim.StageFigures) float64 { return f.CV }), Starts: starts(runs, i),
		})
	}
	return out
}

// starts sums up the starts of a stage.
func starts(runs []run, stage int) []Start {
	var out []Start
	for _, r := range runs {
		for _, f := range r.stages[stage].Starts {
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
