package recorded

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/bench/load/arrivals"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/sim"
)

// Options say what to make of a record.
type Options struct {
	// Pipeline is the only pipeline to simulate, with those that share stages with it; empty: all.
	Pipeline string
	// Policies are those to simulate, as --policy has them; empty: [DefaultPolicies].
	Policies []string
	// Trace is the name of the file of arrivals in the scenario.
	Trace string
}

// Run is a recorded run as a scenario.
type Run struct {
	Scenario sim.Scenario
	Arrivals []Arrival // in order
	Outcome  Outcome   // what really happened
	Notes    []string  // what the record does not say, and what is assumed in its place
}

// timeout of requests. The record does not have it; this is the default of `stagecoach up`.
const timeout = time.Minute

// Read reads a record. An error names the line, and says what to do.
func Read(r io.Reader, o Options) (*Run, error) {
	h, err := read(r)
	if err != nil {
		return nil, err
	}
	c := &conversion{history: h, run: &Run{}, options: o, stages: map[string]bool{}}
	c.begin, c.end = h.span()
	if err := c.choose(); err != nil {
		return nil, err
	}
	c.name()
	if err := c.addPipelines(); err != nil {
		return nil, err
	}
	c.addStages()
	if err := c.addNodes(); err != nil {
		return nil, err
	}
	c.outcome()
	if err := c.addPolicies(); err != nil {
		return nil, err
	}
	s := &c.run.Scenario
	s.Name = fmt.Sprintf("recorded from %s for %v", c.begin.UTC().Format(time.DateTime), c.end.Sub(c.begin).Round(time.Second))
	s.Duration, s.Budget = c.end.Sub(c.begin).Round(time.Millisecond), h.budget
	c.noteCounts()
	return c.run, nil
}

// conversion makes a Run of a history.
type conversion struct {
	*history
	run        *Run
	options    Options
	begin, end time.Time
	chosen     []plan.Pipeline // pipelines and single functions with load, sorted
	stages     map[string]bool // keys of their stages, and of the variants
	short      bool            // names go without their namespace
}

func (c *conversion) note(format string, args ...any) {
	c.run.Notes = append(c.run.Notes, fmt.Sprintf(format, args...))
}

// choose chooses the pipelines that are simulated.
func (c *conversion) choose() error {
	known := c.candidates()
	want := ""
	if c.options.Pipeline != "" {
		i := slices.IndexFunc(known, func(p plan.Pipeline) bool { return c.called(p.Name, c.options.Pipeline) })
		if i < 0 {
			return fmt.Errorf("no pipeline %q in the record, want one of: %s", c.options.Pipeline, listed(known))
		}
		want = known[i].Name
	}
	for _, p := range known {
		if i := slices.IndexFunc(p.Stages, func(name string) bool { return c.functions[name] == nil }); i >= 0 {
			c.note("%s is left out: its stage %s was never deployed.", p.Name, p.Stages[i])
			continue
		}
		c.chosen = append(c.chosen, p)
	}
	slices.SortFunc(c.chosen, func(a, b plan.Pipeline) int { return cmp.Compare(a.Name, b.Name) })
	if want != "" {
		c.chosen = connected(c.chosen, want)
	}
	for _, p := range c.chosen {
		for _, name := range p.Stages {
			c.stages[name] = true
		}
	}
	for _, name := range names(c.functions) {
		if c.stages[c.functions[name].VariantOf] {
			c.stages[name] = true
		}
	}
	return nil
}

// called reports whether a key has this name, with or without its namespace.
func (c *conversion) called(key, name string) bool {
	return key == name || pipeline.ParseKey(key).Name == name
}

// candidates returns the pipelines of the record, and each function that gets requests under its
// own name as a pipeline of one stage.
func (c *conversion) candidates() []plan.Pipeline {
	var out []plan.Pipeline
	member := map[string]bool{}
	for _, name := range names(c.pipelines) {
		out = append(out, c.pipelines[name])
		for _, stage := range c.pipelines[name].Stages {
			member[stage] = true
		}
	}
	for _, name := range names(c.functions) {
		f := c.functions[name]
		if _, taken := c.pipelines[name]; taken {
			continue
		}
		alone := !member[name] && f.VariantOf == "" && f.Demand.Known
		if alone || c.apps[name] != nil {
			out = append(out, plan.Pipeline{Name: name, Stages: []string{name}, SLO: f.Objective, Chosen: f.Chosen})
		}
	}
	return out
}

func listed(all []plan.Pipeline) string {
	out := make([]string, len(all))
	for i, p := range all {
		out[i] = pipeline.ParseKey(p.Name).Short()
	}
	return strings.Join(out, ", ")
}

// connected returns the pipelines that share stages with the named one, directly or through others.
func connected(all []plan.Pipeline, name string) (out []plan.Pipeline) {
	stages := map[string]bool{}
	taken := map[string]bool{name: true}
	for grown := true; grown; {
		grown = false
		for _, p := range all {
			if taken[p.Name] || slices.ContainsFunc(p.Stages, func(s string) bool { return stages[s] }) {
				taken[p.Name] = true
				for _, s := range p.Stages {
					grown = grown || !stages[s]
					stages[s] = true
				}
			}
		}
	}
	for _, p := range all {
		if taken[p.Name] {
			out = append(out, p)
		}
	}
	return out
}

// name decides whether names go without their namespace.
func (c *conversion) name() {
	first := ""
	c.short = true
	check := func(key string) {
		namespace := pipeline.ParseKey(key).Namespace
		first = cmp.Or(first, namespace)
		c.short = c.short && namespace == first
	}
	for _, p := range c.chosen {
		check(p.Name)
	}
	for key := range c.stages {
		check(key)
	}
}

// named returns the name of a function or pipeline in the scenario.
func (c *conversion) named(key string) string {
	if c.short {
		return pipeline.ParseKey(key).Name
	}
	return key
}

// addPipelines adds the pipelines that have requests, with their arrivals.
func (c *conversion) addPipelines() error {
	entries := c.entries()
	holes, _ := c.missing()
	var loaded []plan.Pipeline
	for i, p := range c.chosen {
		name := c.named(p.Name)
		entry := c.functions[p.Stages[0]]
		if n := entries[p.Stages[0]]; n > 1 && len(holes) > 0 {
			c.note("%s begins with %s as other pipelines do: where requests were not counted, each gets an equal part of its rate.", name, c.named(entry.Name))
		}
		share := 0.0
		if n := entries[p.Stages[0]]; n > 0 && !c.direct(p) {
			share = 1 / float64(n)
		}
		at, err := c.arrivals(c.apps[p.Name], entry, share, uint64(i+1))
		if err != nil {
			return err
		}
		if len(at) == 0 {
			c.note("%s is left out: no request came.", name)
			continue
		}
		for _, t := range at {
			c.run.Arrivals = append(c.run.Arrivals, Arrival{max(t.Sub(c.begin), 0), name})
		}
		loaded = append(loaded, p)
		if p.Chosen.Allocator != "" {
			c.note("%s asks for the allocator %s, which wins over other policies: remove it from the scenario to compare allocators.", name, p.Chosen.Allocator)
		}
		c.run.Scenario.Pipelines = append(c.run.Scenario.Pipelines, sim.Pipeline{
			Name: name, SLO: p.SLO, Timeout: timeout, Allocator: p.Chosen.Allocator, Rank: p.Chosen.Rank, Route: p.Chosen.Route,
			Arrivals: sim.Arrivals{Trace: sim.Trace{File: c.options.Trace, Format: arrivals.Instants, Column: name}},
		})
	}
	if c.chosen = loaded; len(loaded) == 0 {
		return fmt.Errorf("no request in %d lines: record a time with load, and check --pipeline", len(c.moments))
	}
	slices.SortStableFunc(c.run.Arrivals, func(a, b Arrival) int { return cmp.Compare(a.At, b.At) })
	return nil
}

// direct reports whether p stands for requests that were sent directly to a stage of a pipeline.
func (c *conversion) direct(p plan.Pipeline) bool {
	_, whole := c.pipelines[p.Name]
	return !whole && slices.ContainsFunc(c.chosen, func(q plan.Pipeline) bool { return q.Name != p.Name && slices.Contains(q.Stages, p.Stages[0]) })
}

// entries returns how many pipelines begin with each function.
func (c *conversion) entries() map[string]int {
	out := map[string]int{}
	for _, p := range c.chosen {
		if !c.direct(p) {
			out[p.Stages[0]]++
		}
	}
	return out
}

// noteCounts says where the arrivals come from.
func (c *conversion) noteCounts() {
	holes, _ := c.missing()
	var sum time.Duration
	for _, s := range holes {
		sum += s.to.Sub(s.from)
	}
	switch {
	case c.estimated == len(c.moments):
		c.note("The arrivals are made from measured rates, because an older version of Stagecoach has recorded: it counted no requests.")
	case sum > 0:
		c.note("The arrivals of %v of %v are made from measured rates, because lines are missing, or of an older version.",
			sum.Round(time.Millisecond), c.end.Sub(c.begin).Round(time.Millisecond))
	}
	if n := len(c.policies); n > 1 {
		c.note("The policies were changed during the record; %q are the latest ones.", recordedName)
	}
}

// addNodes adds the nodes.
func (c *conversion) addNodes() error {
	for _, name := range names(c.nodes) {
		n := c.nodes[name]
		if n.Memory <= 0 || n.CPUMilli <= 0 {
			c.note("Node %s is left out: the record does not say its memory and its cores.", name)
			continue
		}
		node := sim.Node{Name: name, Count: 1, Memory: sim.Bytes(n.Memory), CPU: sim.Milli(n.CPUMilli), GPUs: len(n.Devices)}
		for _, d := range n.Devices {
			if node.GPUMemory == 0 || sim.Bytes(d.Memory) < node.GPUMemory {
				node.GPUMemory = sim.Bytes(d.Memory)
			}
		}
		if slices.ContainsFunc(n.Devices, func(d plan.Device) bool { return sim.Bytes(d.Memory) != node.GPUMemory }) {
			c.note("The devices of node %s have different memories: all of them count as the smallest.", name)
		}
		c.run.Scenario.Nodes = append(c.run.Scenario.Nodes, node)
	}
	if len(c.run.Scenario.Nodes) == 0 {
		return fmt.Errorf("no node in %d lines, want nodes with memory and cores", len(c.moments))
	}
	return nil
}

func seconds(s float64) time.Duration {
	return time.Duration(math.Round(s*1e6)) * time.Microsecond
}
