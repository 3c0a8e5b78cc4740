package study

import (
	"encoding/json"
	"fmt"
	"io"
	"reflect"
	"slices"
)

// TunedSchema is the version of the JSON of Tuned.
const TunedSchema = "stagecoach-tuned/1"

// Tuned has the configurations that were tried, and those that were chosen.
type Tuned struct {
	Schema     string   `json:"schema"`
	Study      string   `json:"study"`
	Budget     float64  `json:"budget_gpus"`
	Candidates int      `json:"candidates"` // largest number per contender
	Seeds      Seeds    `json:"seeds"`
	Choices    []Choice `json:"choices"` // by group, then contender, in the study's order
}

// Choice is a contender's choice for one group of settings.
type Choice struct {
	Group     string   `json:"group"`
	Contender string   `json:"contender"`
	Settings  []string `json:"settings"` // on which it was tuned
	Knobs     []string `json:"knobs"`
	Chosen    int      `json:"chosen"` // index into Points
	Points    []Point  `json:"points"` // all that were tried; the first is the default
}

// Point is a configuration that was tried, with the means over its runs.
type Point struct {
	Knobs []float64 `json:"knobs"`
	GPUs  float64   `json:"gpus"` // on average over time
	// ln(latency/T), where a failed request counts with its timeout; less is better
	Score  float64 `json:"score"`
	InTime float64 `json:"in_time"` // share of requests within the objective
	Failed float64 `json:"failed"`  // share of requests
}

// Knobs returns the chosen configuration of a contender in a group. It returns false if there is no
// choice, or a choice for other knobs.
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

// ReadTuned reads the JSON of Tuned. It returns an error if it is not of the study with this name.
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

// Merge returns t with the choices of newer, which replace t's choices for the same contender and
// group. It returns an error if the two were not made in the same way.
func (t *Tuned) Merge(newer Tuned) (Tuned, error) {
	a, b := *t, newer
	a.Choices, b.Choices = nil, nil
	if !reflect.DeepEqual(a, b) {
		return Tuned{}, fmt.Errorf("tuned: made with %+v, want as before, with %+v, or all of it anew", b, a)
	}
	a.Choices = slices.Clone(t.Choices)
	for _, c := range newer.Choices {
		i := slices.IndexFunc(a.Choices, func(x Choice) bool { return x.Group == c.Group && x.Contender == c.Contender })
		if i < 0 {
			i, a.Choices = len(a.Choices), append(a.Choices, c)
		}
		a.Choices[i] = c
	}
	return a, nil
}
