package study

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
)

// TunedSchema is the version of the JSON of Tuned.
const TunedSchema = "stagecoach-tuned/1"

// Tuned are the configurations that were tried, and those that were chosen.
type Tuned struct {
	Schema     string   `json:"schema"`
	Study      string   `json:"study"`
	Budget     float64  `json:"budget_gpus"`
	Candidates int      `json:"candidates"` // of each contender, at most
	Seeds      Seeds    `json:"seeds"`
	Choices    []Choice `json:"choices"` // by group, then contender, in the order of the study
}

// Choice is a contender's in one group of settings.
type Choice struct {
	Group     string   `json:"group"`
	Contender string   `json:"contender"`
	Settings  []string `json:"settings"` // that it was tuned on
	Knobs     []string `json:"knobs"`
	Chosen    int      `json:"chosen"` // index into Points
	Points    []Point  `json:"points"` // all that was tried; the first one is the default
}

// Point is a configuration that was tried: the means over its runs.
type Point struct {
	Knobs  []float64 `json:"knobs"`
	GPUs   float64   `json:"gpus"`    // on average over time
	Score  float64   `json:"score"`   // ln(latency/T), where a failed request has taken its timeout; less is better
	InTime float64   `json:"in_time"` // part of the requests, within the objective
	Failed float64   `json:"failed"`  // part of the requests
}

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

// ReadTuned reads the JSON of Tuned, of the study of that name.
func ReadTuned(r io.Reader, study string) (Tuned, error) {
	var t Tuned
	d := json.NewDecoder(r)
	d.DisallowUnknownFields()
	if err := d.Decode(&t); err != nil {
		return t, fmt.Errorf("tuned: %w", err)
	}
	if t.Schema != TunedSchema || t.Study != study {
		return t, fmt.Errorf("tuned: schema %q of study %q, want %q of %q", t.Schema, t.Study, TunedSchema, study)
	}
	for _, c := range t.Choices {
		if c.Chosen < 0 || c.Chosen >= len(c.Points) || len(c.Points[c.Chosen].Knobs) != len(c.Knobs) {
			return t, fmt.Errorf("tuned: %s in %s: point %d of %d, want one with %d knobs", c.Contender, c.Group, c.Chosen, len(c.Points), len(c.Knobs))
		}
	}
	return t, nil
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
