package study

import (
	"context"
	"fmt"
	"math"
	"slices"

	"github.com/stagecoach-serving/stagecoach/sim"
)

// Tune tries the candidates of every contender on the training loads of each group of settings, and chooses one of them a group: see
// [Choose]. Report, if it is not nil, is called after each run, one call at a time. Ctx ends it early, with its error.
func (s *Study) Tune(ctx context.Context, open sim.Opener, report func(Progress)) (Tuned, error) {
	out := Tuned{Schema: TunedSchema, Study: s.Name, Budget: s.Budget, Candidates: s.Candidates, Seeds: s.Train}
	var cells []*cell
	for _, group := range s.groups() {
		for i := range s.Contenders {
			c := &s.Contenders[i]
			choice := Choice{Group: group, Contender: c.Name, Knobs: knobNames(c.Space)}
			settings := s.training(group, c)
			if c.Like != "" || len(settings) == 0 {
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
		c.Chosen = Choose(c.Points, s.Budget)
	}
	return out, nil
}

// measure fills in what came of a point.
func (s *Study) measure(p *Point, cells []*cell, runs [][]run) {
	objective := slices.Index(s.Multiples, s.Objective)
	n := float64(len(runs) * s.Train.N)
	for i, of := range runs {
		for _, r := range of {
			p.GPUs += r.gpus() / n
			p.Score += math.Log(r.charged/cells[i].setting.Service.Seconds()) / n
			p.InTime += r.inTime[objective] / n
			p.Failed += r.failed / n
		}
	}
	p.GPUs, p.Score, p.InTime, p.Failed = sim.Round(p.GPUs), sim.Round(p.Score), sim.Round(p.InTime), sim.Round(p.Failed)
}

// Choose returns the index of the point with the least score among those that have at most budget GPUs on average; if none has, of the one
// with the fewest GPUs. The first of equals is chosen. There is at least one.
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

// groups are those of the settings, in the order of the study.
func (s *Study) groups() []string {
	var out []string
	for _, x := range s.Settings {
		if !slices.Contains(out, x.Group) {
			out = append(out, x.Group)
		}
	}
	return out
}

// training are the settings of a group that a contender is tuned on.
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

// Knobs returns what was chosen for a contender in a group; false if nothing was, or for other knobs than it has.
func (t *Tuned) Knobs(c Contender, group string) ([]float64, bool) {
	name := c.Name
	if c.Like != "" {
		name = c.Like
	}
	i := slices.IndexFunc(t.Choices, func(x Choice) bool { return x.Group == group && x.Contender == name })
	if i < 0 || !slices.Equal(t.Choices[i].Knobs, knobNames(c.Space)) {
		return nil, false
	}
	return t.Choices[i].Points[t.Choices[i].Chosen].Knobs, true
}

// Check says what is wrong with what was read from a file.
func (t *Tuned) Check(study string) error {
	if t.Schema != TunedSchema || t.Study != study {
		return fmt.Errorf("tuned: schema %q of study %q, want %q of %q", t.Schema, t.Study, TunedSchema, study)
	}
	for _, c := range t.Choices {
		if c.Chosen < 0 || c.Chosen >= len(c.Points) || len(c.Points[c.Chosen].Knobs) != len(c.Knobs) {
			return fmt.Errorf("tuned: %s in %s: point %d of %d, want one with %d knobs", c.Contender, c.Group, c.Chosen, len(c.Points), len(c.Knobs))
		}
	}
	return nil
}

// Merge returns t with the choices of newer in place of its own. Both are of the same study; newer may be of a part of its settings and
// contenders. Choices of what the study does not have any more are dropped.
func (t *Tuned) Merge(newer Tuned, s *Study) Tuned {
	out := newer
	out.Choices = nil
	for _, group := range s.groups() {
		for _, c := range s.Contenders {
			for _, from := range []*Tuned{&newer, t} {
				i := slices.IndexFunc(from.Choices, func(x Choice) bool { return x.Group == group && x.Contender == c.Name })
				if i >= 0 {
					out.Choices = append(out.Choices, from.Choices[i])
					break
				}
			}
		}
	}
	return out
}
