package sim

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
	"github.com/stagecoach-serving/stagecoach/bench/load/arrivals"
	"github.com/stagecoach-serving/stagecoach/keysmanager/cache"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Model is a checked scenario with its traces. Its runs share it and do not change it.
type Model struct {
	scenario  Scenario
	duration  time.Duration
	policies  []policy.Set
	pipelines []pipe
	functions []declared // of the scenario, in its order
	stages    []stage    // the functions, sorted by key
	nodes     []plan.Node
	snapshot  []plan.Pipeline
	// some function declares an accuracy below 1
	inaccurate bool
}

// pipe is a pipeline of the model.
type pipe struct {
	spec    Pipeline
	key     string
	graph   pipeline.Pipeline
	stages  []int // stages of the graph, in its order, as indices into the model's
	input   tensor.Activation
	source  func(seed uint64) (arrivals.Source, error)
	about   string   // description of its arrivals
	lengths *lengths // of its items; nil: unknown
}

// declared is a function of the scenario: a stage's own, or a variant.
type declared struct {
	Stage
	path string // such as stages[1].variants[0]
}

// stage is a function of the model.
type stage struct {
	spec    Stage
	key     string
	own     int   // the stage that it serves, as an index into the model's
	lanes   []int // of a stage's own function: all functions that can serve the stage, sorted
	service *service
	output  tensor.Activation // of each answer, unless outputs is set
	outputs *lengths          // numbers of items per answer; nil: they are constant
}

// namespace is the namespace of simulated functions.
const namespace = "sim"

// Opener opens a file that a scenario names.
type Opener func(name string) (io.ReadCloser, error)

// The bounds of a scenario.
const (
	maxDuration = 400 * 24 * time.Hour
	maxSeeds    = 1000
	maxNodes    = 10_000
	maxDevices  = 1 << 16
	maxItems    = 10_000
	maxReplicas = 100_000
	maxWeight   = 1000
	maxService  = 24 * time.Hour
	maxCV       = 30
	minTick     = 10 * time.Millisecond
)

// Model fills in the defaults of a scenario, checks it, and opens the files that it names. open may
// be nil if it names no files. Errors name the path of the wrong field.
func (s Scenario) Model(open Opener) (*Model, error) {
	s.complete()
	m := &Model{scenario: s, duration: s.Duration, functions: s.functions()}
	var errs problems
	m.checkRun(&errs)
	m.addPolicies(&errs)
	m.addNodes(&errs)
	m.readProfiles(open, &errs)
	m.addStages(&errs)
	m.addPipelines(&errs)
	if len(errs) == 0 {
		m.connect(&errs)
	}
	for i := range m.pipelines {
		m.addArrivals(i, open, &errs)
		m.addLengths(i, open, &errs)
	}
	if m.duration == 0 {
		m.duration = defaultDuration
	}
	if m.duration > maxDuration {
		errs.add("duration", "%v, want at most %v", m.duration, maxDuration)
	}
	if s.Warmup >= m.duration {
		errs.add("warmup", "%v, want less than the duration, which is %v", s.Warmup, m.duration)
	}
	return m, errors.Join(errs...)
}

// problems is a list of errors with the paths of fields.
type problems []error

func (p *problems) add(path, format string, args ...any) {
	*p = append(*p, fmt.Errorf("%s: %s", path, fmt.Sprintf(format, args...)))
}

// within records a problem unless low <= v <= high.
func within[T int | int64 | float64 | time.Duration | Bytes | Milli](p *problems, path string, v, low, high T) {
	if v >= low && v <= high { // false for NaN
		return
	}
	p.add(path, "%v, want %v to %v", v, low, high)
}

func (m *Model) checkRun(p *problems) {
	s := &m.scenario
	within(p, "seeds", s.Seeds, 1, maxSeeds)
	within(p, "tick", s.Tick, minTick, time.Hour)
	within(p, "hop", *s.Hop, 0, time.Minute)
	within(p, "budget", s.Budget, 0, maxReplicas)
}

func (m *Model) addPolicies(p *problems) {
	names := map[string]bool{}
	for i, spec := range m.scenario.Policies {
		path := fmt.Sprintf("policies[%d]", i)
		set, err := spec.choose()
		var price *policy.PriceError
		switch {
		case errors.As(err, &price):
			p.add(path+".price", "%v, want %s", price.Price, price.Want())
		case err != nil:
			p.add(path, "%v", err)
		}
		m.checkReplicas(&spec, path, p)
		if spec.Make != nil && spec.Names != (policy.Names{}) {
			p.add(path, "names beside Make, want one of them")
		}
		if names[spec.Name] {
			p.add(path+".name", "%q twice, want a name of its own", spec.Name)
		}
		names[spec.Name] = true
		m.policies = append(m.policies, set)
	}
}

func (m *Model) addNodes(p *problems) {
	if len(m.scenario.Nodes) == 0 {
		p.add("nodes", "none, want one or more with memory, cpu and gpus")
	}
	total, devices, names := 0, 0, map[string]bool{}
	for i, n := range m.scenario.Nodes {
		path := fmt.Sprintf("nodes[%d]", i)
		within(p, path+".count", n.Count, 1, maxNodes)
		within(p, path+".gpus", n.GPUs, 0, 64)
		if n.Memory <= 0 {
			p.add(path+".memory", "%d, want some, such as 64Gi", n.Memory)
		}
		if n.CPU <= 0 {
			p.add(path+".cpu", "%d, want some, such as 16", n.CPU)
		}
		if n.GPUs > 0 && n.GPUMemory <= 0 {
			p.add(path+".gpuMemory", "%d, want some, such as 24Gi", n.GPUMemory)
		}
		if names[n.Name] {
			p.add(path+".name", "%q twice, want a name of its own", n.Name)
		}
		names[n.Name] = true
		if devices += n.Count * n.GPUs; devices > maxDevices {
			p.add(path+".gpus", "%d in all, want at most %d", devices, maxDevices)
		}
		if total += n.Count; total > maxNodes || len(*p) > 0 {
			continue
		}
		for k := range n.Count {
			node := plan.Node{Name: n.Name, Memory: int64(n.Memory), Threshold: int64(float64(n.Memory) * cache.Threshold), CPUMilli: int(n.CPU)}
			if n.Count > 1 {
				node.Name = fmt.Sprintf("%s-%d", n.Name, k+1)
			}
			for g := range n.GPUs {
				node.Devices = append(node.Devices, plan.Device{ID: fmt.Sprintf("gpu%d", g), Memory: int64(n.GPUMemory)})
			}
			m.nodes = append(m.nodes, node)
		}
	}
	if total > maxNodes {
		p.add("nodes", "%d in all, want at most %d", total, maxNodes)
	}
	slices.SortFunc(m.nodes, func(a, b plan.Node) int { return compare(a.Name, b.Name) })
	for i := 1; i < len(m.nodes); i++ {
		if m.nodes[i].Name == m.nodes[i-1].Name {
			p.add("nodes", "%q twice, want names that stay apart when they are numbered", m.nodes[i].Name)
		}
	}
}

// functions returns the functions of the stages, each stage's own before its variants.
func (s *Scenario) functions() (all []declared) {
	for i, st := range s.Stages {
		path := fmt.Sprintf("stages[%d]", i)
		all = append(all, declared{st, path})
		for k := range st.Variants {
			v := Stage{Variant: st.Variants[k], variantOf: st.Name}
			v.complete()
			all = append(all, declared{v, fmt.Sprintf("%s.variants[%d]", path, k)})
		}
	}
	return all
}

func (m *Model) addStages(p *problems) {
	if len(m.scenario.Stages) == 0 {
		p.add("stages", "none, want one or more")
	}
	for i := range m.functions {
		spec, path := m.functions[i].Stage, m.functions[i].path
		if spec.Name == "" || len(spec.Name) > 200 {
			p.add(path+".name", "%.20q, want a name", spec.Name)
		}
		before := len(*p)
		spec.check(path, p)
		st := stage{spec: spec, key: keyOf(spec.Name)}
		if len(*p) == before {
			st.outputs = spec.Outputs.read(path+".outputs", 0, maxItems, nil, p)
			st.output = make(tensor.Activation, spec.Items)
			st.service = newService(spec.Variant)
		}
		m.stages = append(m.stages, st)
	}
	slices.SortFunc(m.stages, func(a, b stage) int { return compare(a.key, b.key) })
	for i := 1; i < len(m.stages); i++ {
		if m.stages[i].key == m.stages[i-1].key {
			p.add("stages", "%q twice, want a name of its own", m.stages[i].spec.Name)
		}
	}
	for i := range m.stages {
		st := &m.stages[i]
		if st.own = i; st.spec.variantOf != "" {
			st.own = m.index(keyOf(st.spec.variantOf))
		}
		m.stages[st.own].lanes = append(m.stages[st.own].lanes, i)
		m.inaccurate = m.inaccurate || st.spec.Accuracy < 1
	}
}

func keyOf(name string) string { return pipeline.Key{Name: name, Namespace: namespace}.String() }

// index returns the index of a function that the model has.
func (m *Model) index(key string) int {
	i, _ := slices.BinarySearchFunc(m.stages, key, func(s stage, k string) int { return compare(s.key, k) })
	return i
}

func (s *Stage) check(path string, p *problems) {
	s.Service.check(path+".service", p)
	if kinds := s.Outputs.kinds(); len(kinds) == 0 {
		within(p, path+".items", s.Items, 1, maxItems)
	} else if s.Items != 0 {
		p.add(path+".items", "%d beside outputs, want one of both", s.Items)
	}
	within(p, path+".batch", s.Batch, 1, 1024)
	within(p, path+".batchWait", s.BatchWait, 0, pipeline.MostBatchWait)
	if s.AutoBatch && len(s.Service.Profile) == 0 {
		p.add(path+".autoBatch", "true without a profile, want service.profile, from which it is chosen")
	}
	within(p, path+".slots", s.Slots, 1, 1024)
	within(p, path+".queueLimit", s.QueueLimit, 1, 1<<30)
	within(p, path+".join", s.Join, 0, 1000)
	within(p, path+".min", s.Min, 0, maxReplicas)
	within(p, path+".max", s.Max, max(s.Min, 1), maxReplicas)
	if s.Min == 0 && !s.Zero {
		p.add(path+".min", "0, want at least 1, or zero: true beside it")
	}
	within(p, path+".zeroAge", s.ZeroAge, time.Millisecond, maxDuration)
	within(p, path+".gpu", s.GPU, 0, 64)
	if !(s.Accuracy > 0 && s.Accuracy <= 1) {
		p.add(path+".accuracy", "%g, want above 0 and at most 1", s.Accuracy)
	}
	within(p, path+".maxLength", s.MaxLength, 0, maxLength)
	if s.CPULimit > 0 && s.CPULimit < plan.LeastCPU {
		p.add(path+".cpuLimit", "%dm, want none, or at least %dm", s.CPULimit, plan.LeastCPU)
	}
	if s.DiesEvery != 0 {
		within(p, path+".diesEvery", s.DiesEvery, time.Second, maxDuration)
	}
	within(p, path+".start.cold", s.Start.Cold, 0, time.Hour)
	within(p, path+".start.fork", s.Start.Fork, 0, s.Start.Cold)
	within(p, path+".start.parked", s.Start.Parked, 0, s.Start.Fork)
	if s.Start.Fork < s.Start.Cold && s.Parameters == 0 {
		p.add(path+".parameters", "none, want their size: a start by fork needs a zygote that holds them")
	}
	if s.Start.Parked > 0 && s.GPU == 0 {
		p.add(path+".start.parked", "%v, want none: children are parked on devices, and gpu is 0", s.Start.Parked)
	}
}

func (m *Model) addPipelines(p *problems) {
	if len(m.scenario.Pipelines) == 0 {
		p.add("pipelines", "none, want one or more")
	}
	names := map[string]bool{}
	for i, spec := range m.scenario.Pipelines {
		path := fmt.Sprintf("pipelines[%d]", i)
		if spec.Name == "" || len(spec.Name) > 200 || names[spec.Name] {
			p.add(path+".name", "%.20q, want a name of its own", spec.Name)
		}
		names[spec.Name] = true
		within(p, path+".slo", spec.SLO, 0, maxDuration)
		within(p, path+".timeout", spec.Timeout, time.Millisecond, maxDuration)
		within(p, path+".items", spec.Items, 1, maxItems)
		within(p, path+".weight", spec.Weight, 1, maxWeight)
		spec.checkPolicies(path, p)
		m.pipelines = append(m.pipelines, pipe{
			spec: spec, key: keyOf(spec.Name), input: make(tensor.Activation, min(max(spec.Items, 1), maxItems)),
		})
	}
	for i, st := range m.scenario.Stages {
		for k, name := range st.Pipelines {
			if !names[name] {
				p.add(fmt.Sprintf("stages[%d].pipelines[%d]", i, k), "%q, want one of the scenario's pipelines", name)
			}
		}
	}
}

// checkPolicies checks the names of the policies that a pipeline asks for.
func (x *Pipeline) checkPolicies(path string, p *problems) {
	allocators, routes := policy.Known()
	for _, is := range []struct {
		field, name string
		known       []string
	}{{"allocator", x.Allocator, allocators}, {"rank", x.Rank, plan.Ranks}, {"route", x.Route, routes}} {
		if is.name != "" && !slices.Contains(is.known, is.name) {
			p.add(path+"."+is.field, "%q, want one of %s", is.name, strings.Join(is.known, ", "))
		}
	}
}
