package recorded

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
	"github.com/stagecoach-serving/stagecoach/sim"
)

// Names of policies that are made from the record.
const (
	recordedName = "recorded" // the policies of the record
	staticName   = "static"   // each stage's mean number of replicas in the record
	quartName    = "quart"    // the defaults of `stagecoach up`
)

// DefaultPolicies are simulated if none are chosen. If the recorded policies are the defaults,
// "quart" is left out.
func DefaultPolicies() []string { return []string{recordedName, staticName, quartName} }

// parsePolicy returns the policies that a text names:
//
//   - "recorded", "static" or "quart"
//   - the name of an allocator, which no corrector follows
//   - LEVEL=NAME,…, such as allocator=uniform,rank=fair; the other levels have their defaults
func (c *conversion) parsePolicy(text string) (sim.Policy, error) {
	allocators, _ := policy.Known()
	p := sim.Policy{Name: text}
	switch {
	case text == recordedName:
		p.Names = c.policies[len(c.policies)-1]
	case text == staticName:
		p.Replicas = c.static()
	case text == quartName: // the defaults of all levels
	case slices.Contains(allocators, text):
		p.Names = policy.Names{Allocator: text, Corrector: "none"}
	case strings.Contains(text, "="):
		if err := levels(&p.Names, text); err != nil {
			return p, err
		}
	default:
		return p, fmt.Errorf("policy %q, want recorded, static, quart, LEVEL=NAME,…, or an allocator: %s", text, strings.Join(allocators, ", "))
	}
	if _, err := p.Choose(); err != nil {
		return p, err
	}
	return p, nil
}

// levels sets the policies of the levels that a text such as allocator=uniform,rank=fair names, and
// the price of one such as price=0.5.
func levels(names *policy.Names, text string) error {
	of := map[string]*string{
		"allocator": &names.Allocator, "corrector": &names.Corrector, "sharer": &names.Sharer, "placer": &names.Placer,
		"warmer": &names.Warmer, "rank": &names.Rank, "route": &names.Route,
	}
	for part := range strings.SplitSeq(text, ",") {
		level, name, _ := strings.Cut(part, "=")
		if level == "price" {
			var err error
			if names.Price, err = strconv.ParseFloat(name, 64); err != nil {
				return fmt.Errorf("policy %q: price %q, want a number", text, name)
			}
			continue
		}
		if of[level] == nil {
			return fmt.Errorf("policy %q: no level %q, want allocator, corrector, sharer, placer, warmer, rank, route or price", text, level)
		}
		*of[level] = name
	}
	return nil
}

// static returns the mean number of replicas of each stage and variant, rounded. A stage has at
// least one, because its requests could not be answered otherwise.
func (c *conversion) static() (out []sim.Replicas) {
	for _, key := range c.keys() {
		f := c.functions[key]
		count := int(math.Round(c.replicaSeconds(f) / max(c.running(), 1e-9)))
		if f.VariantOf == "" {
			count = max(count, 1)
		}
		out = append(out, sim.Replicas{Stage: c.named(key), Count: count})
	}
	return out
}

// keys returns the functions of the scenario, sorted.
func (c *conversion) keys() (out []string) {
	for _, key := range names(c.functions) {
		if c.stages[key] && c.simulated(c.named(key)) {
			out = append(out, key)
		}
	}
	return out
}

// simulated reports whether the scenario has a function.
func (c *conversion) simulated(name string) bool {
	return slices.ContainsFunc(c.run.Scenario.Stages, func(s sim.Stage) bool {
		return s.Name == name || slices.ContainsFunc(s.Variants, func(v sim.Variant) bool { return v.Name == name })
	})
}

// addPolicies adds the policies to compare.
func (c *conversion) addPolicies() error {
	want := c.options.Policies
	if len(want) == 0 {
		want = DefaultPolicies()
		if defaults, err := (policy.Names{}).Choose(); err == nil && c.policies[len(c.policies)-1] == defaults.Names() {
			want = want[:2]
		}
	}
	for _, text := range want {
		p, err := c.parsePolicy(text)
		if err != nil {
			return err
		}
		c.run.Scenario.Policies = append(c.run.Scenario.Policies, p)
	}
	return nil
}
