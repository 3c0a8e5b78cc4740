package study

import (
	"cmp"
	"context"
	"math"
	"slices"

	"github.com/stagecoach-serving/stagecoach/sim"
)

// Tune runs the candidates of every contender on the training loads of each group of settings. For
// each contender and group, it chooses one candidate: see [Choose]. If report is not nil, Tune
// calls it after each run, one call at a time. If ctx ends, Tune returns the context's error early.
func (s *Study) Tune(ctx context.Context, open sim.Opener, report func(Progress)) (Tuned, error) {
	out := s.Nothing()
	var cells []*cell
	for _, group := range s.groups() {
		for i := range s.Contenders {
			c := &s.Contenders[i]
			choice := Choice{Group: group, Contender: c.Name, Knobs: knobNames(c.Space)}
			settings := s.training(group, c)
			if c.Like != "" || len(c.Space) == 0 || len(settings) == 0 {
				continue
			}
			for _, x := range settings {
				choice.Settings = append(choice.Settings, x.Name)
			}
			for _, knobs := range c.Candidates(s.Candidates) {
				choice.Points = append(choice.Points, Point{Knobs: knobs})
				for _, x := range settings {
					cells = append(cells, &cell{setting: x, contender: c, knobs: knobs, train: true})
				}
			}
			out.Choices = append(out.Choices, choice)
		}
	}
	runs, err := s.simulate(ctx, "tune", cells, s.Train, open, report)
	if err != nil {
		return Tuned{}, err
	}
	for i := range out.Choices {
		c := &out.Choices[i]
		for k := range c.Points {
			n := len(c.Settings)
			s.measure(&c.Points[k], cells[:n], runs[:n])
			cells, runs = cells[n:], runs[n:]
		}
		i := slices.IndexFunc(s.Settings, func(x Setting) bool { return x.Group == c.Group })
		c.Chosen = Choose(c.Points, cmp.Or(s.Settings[i].Budget, s.Budget))
	}
	if s.More == nil {
		return out, nil
	}
	more, err := s.More.Tune(ctx, open, report)
	if err != nil {
		return Tuned{}, err
	}
	return out.Merge(more)
}

// Nothing returns a Tuned of the study without choices.
func (s *Study) Nothing() Tuned {
	return Tuned{Schema: TunedSchema, Study: s.Name, Budget: s.Budget, Candidates: s.Candidates, Seeds: s.Train}
}

// measure sets the results of a point.
func (s *Study) measure(p *Point, cells []*cell, runs [][]run) {
	objective := slices.Index(s.Multiples, s.Objective)
	n := float64(len(runs) * s.Train.N)
	for i, of := range runs {
		for _, r := range of {
			p.GPUs += r.gpus() / n
			p.Score += math.Log(r.Mean/cells[i].setting.Service.Seconds()) / n
			p.InTime += r.InTime[objective] / n
			p.Failed += r.Failed / n
		}
	}
	p.GPUs, p.Score, p.InTime, p.Failed = sim.Round(p.GPUs), sim.Round(p.Score), sim.Round(p.InTime), sim.Round(p.Failed)
}

// Choose returns the index of the best point: of all points that use on average no more GPUs than
// the budget, the one with the smallest score. If there is no such point, Choose returns the index
// of the point with the fewest GPUs. Of equal points, the first wins. points must not be empty.
func Choose(points []Point, budget float64) int {
	best := 0
	for i, p := range points {
		b := points[best]
		switch fits := b.GPUs <= budget; {
		case p.GPUs <= budget && (!fits || p.Score < b.Score), !fits && p.GPUs < b.GPUs:
			best = i
		}
	}
	return best
}

// groups returns the groups of the settings, in the study's order.
func (s *Study) groups() []string {
	var out []string
	for _, x := range s.Settings {
		if !slices.Contains(out, x.Group) {
			out = append(out, x.Group)
		}
	}
	return out
}

// training returns the settings of a group on which a contender is tuned.
func (s *Study) training(group string, c *Contender) []*Setting {
	var out []*Setting
	for i := range s.Settings {
		if x := &s.Settings[i]; x.Group == group && x.Train && c.in(*x) {
			out = append(out, x)
		}
	}
	return out
}

func (c *Contender) in(x Setting) bool { return c.In == nil || c.In(x) }
