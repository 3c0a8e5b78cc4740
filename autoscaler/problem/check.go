package problem

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
	"github.com/stagecoach-serving/stagecoach/internal/yamlfile"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// The bounds of a problem.
const (
	maxNodes    = 10_000
	maxDevices  = 64 // per node
	maxReplicas = 100_000
	maxTasks    = 1 << 30
	maxBatch    = 1024
	maxRate     = 1e9
	maxCV       = 1000
	maxItems    = 10_000
	maxLength   = 1 << 30
	maxTime     = 24 * time.Hour
	maxAge      = 400 * 24 * time.Hour
	maxCount    = 1 << 30 // measurements
	minService  = time.Microsecond
	minTick     = 10 * time.Millisecond
)

// problems is a list of errors with the paths of fields.
type problems []error

// add records that a field has a wrong value.
func (p *problems) add(path, got, format string, want ...any) {
	*p = append(*p, fmt.Errorf("%s: got %s, want %s", path, got, fmt.Sprintf(format, want...)))
}

// within records a problem unless low <= v <= high.
func within[T int | float64 | time.Duration](p *problems, path string, v, low, high T) {
	if v >= low && v <= high { // false for NaN
		return
	}
	p.add(path, fmt.Sprint(v), "%v to %v", low, high)
}

// checked completes p, checks it and makes its snapshot.
func (p *Problem) checked() (*Problem, error) {
	p.complete()
	var errs problems
	within(&errs, "budget", p.Budget, 0, maxReplicas)
	within(&errs, "tick", p.Tick, minTick, maxTime)
	checkPolicies(p.Policies, &errs)
	p.checkNodes(&errs)
	p.checkPipelines(&errs)
	p.checkStages(&errs)
	if len(errs) == 0 {
		p.observe(&errs)
	}
	return p, errors.Join(errs...)
}

// checkPolicies checks the names of policies, level by level, and the price.
func checkPolicies(n policy.Names, p *problems) {
	_, err := n.Choose()
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return
	}
	for _, err := range joined.Unwrap() {
		var unknown *policy.NameError
		if errors.As(err, &unknown) {
			p.add("policies."+unknown.Level, fmt.Sprintf("%q", unknown.Name), "%s", unknown.Want)
		}
		var price *policy.PriceError
		if errors.As(err, &price) {
			p.add("policies.price", fmt.Sprint(price.Price), "%s", price.Want())
		}
	}
}

// ownName records a problem unless a name has the form of a function's name and is new.
func ownName(p *problems, path, name string, seen map[string]bool) {
	switch {
	case !pipeline.ValidName(name):
		p.add(path, fmt.Sprintf("%.70q", name), "a name of 1 to 63 lower-case letters, digits and -")
	case seen[name]:
		p.add(path, fmt.Sprintf("%q twice", name), "a name of its own")
	}
	seen[name] = true
}

func (p *Problem) checkNodes(errs *problems) {
	if len(p.Nodes) == 0 {
		errs.add("nodes", "none", "one or more with memory and cpu")
	}
	total, names := 0, map[string]bool{}
	for i, n := range p.Nodes {
		path := fmt.Sprintf("nodes[%d]", i)
		ownName(errs, path+".name", n.Name, names)
		within(errs, path+".count", n.Count, 1, maxNodes)
		within(errs, path+".gpus", n.GPUs, 0, maxDevices)
		if n.Memory <= 0 {
			errs.add(path+".memory", "0", "some, such as 64Gi")
		}
		if n.CPU <= 0 {
			errs.add(path+".cpu", "0", "some, such as 16")
		}
		if n.GPUs > 0 && n.GPUMemory <= 0 {
			errs.add(path+".gpuMemory", "0", "some, such as 24Gi")
		}
		total += n.Count
	}
	if total > maxNodes {
		errs.add("nodes", fmt.Sprintf("%d in all", total), "at most %d", maxNodes)
	}
}

func (p *Problem) checkPipelines(errs *problems) {
	if len(p.Pipelines) == 0 {
		errs.add("pipelines", "none", "one or more")
	}
	names := map[string]bool{}
	allocators, routes := policy.Known()
	for i, x := range p.Pipelines {
		path := fmt.Sprintf("pipelines[%d]", i)
		ownName(errs, path+".name", x.Name, names)
		within(errs, path+".slo", x.SLO, 0, maxAge)
		within(errs, path+".rate", x.Rate, 0, maxRate)
		within(errs, path+".cv", x.CV, 0, maxCV)
		within(errs, path+".length", x.Length, 0, maxLength)
		for _, is := range []struct {
			field, name string
			known       []string
		}{{"allocator", x.Allocator, allocators}, {"rank", x.Rank, plan.Ranks}, {"route", x.Route, routes}} {
			if is.name != "" && !slices.Contains(is.known, is.name) {
				errs.add(path+"."+is.field, fmt.Sprintf("%q", is.name), "one of %s", strings.Join(is.known, ", "))
			}
		}
	}
	for i, st := range p.Stages {
		for k, name := range st.Pipelines {
			if !names[name] {
				errs.add(fmt.Sprintf("stages[%d].pipelines[%d]", i, k), fmt.Sprintf("%q", name), "one of the problem's pipelines")
			}
		}
	}
}

func (p *Problem) checkStages(errs *problems) {
	if len(p.Stages) == 0 {
		errs.add("stages", "none", "one or more")
	}
	names := map[string]bool{}
	for i := range p.Stages {
		st, path := &p.Stages[i], fmt.Sprintf("stages[%d]", i)
		ownName(errs, path+".name", st.Name, names)
		within(errs, path+".join", st.Join, 0, 1000)
		if st.Demand != nil {
			within(errs, path+".demand.rate", st.Demand.Rate, 0, maxRate)
			within(errs, path+".demand.cv", st.Demand.CV, 0, maxCV)
		}
		st.Declared.check(path, errs)
		st.Measured.check(path, errs)
		for k := range st.Variants {
			v, path := &st.Variants[k], fmt.Sprintf("%s.variants[%d]", path, k)
			ownName(errs, path+".name", v.Name, names)
			v.Declared.check(path, errs)
			v.Measured.check(path, errs)
		}
		st.checkShares(path, errs)
	}
}

// checkShares checks that the parts of a stage's functions are one whole.
func (s *Stage) checkShares(path string, errs *problems) {
	sum := 0.0
	for i := range s.Variants {
		sum += *s.Variants[i].Share
	}
	switch {
	case sum > 1+1e-9:
		errs.add(path+".variants", fmt.Sprintf("shares of %g together", sum), "at most 1")
	case s.Share == nil:
		rest := max(1-sum, 0)
		s.Share = &rest
	case sum+*s.Share < 1-1e-9 || sum+*s.Share > 1+1e-9:
		errs.add(path+".share", fmt.Sprintf("%g, and %g of its variants", *s.Share, sum), "1 together")
	}
}

func (d *Declared) check(path string, p *problems) {
	if !(d.Accuracy > 0 && d.Accuracy <= 1) {
		p.add(path+".accuracy", fmt.Sprint(d.Accuracy), "above 0 and at most 1")
	}
	within(p, path+".maxLength", d.MaxLength, 0, maxLength)
	within(p, path+".batch", d.Batch, 1, maxBatch)
	within(p, path+".slots", d.Slots, 1, maxBatch)
	within(p, path+".min", d.Min, 0, maxReplicas)
	within(p, path+".max", d.Max, max(d.Min, 1), maxReplicas)
	within(p, path+".zeroAge", d.ZeroAge, time.Millisecond, maxAge)
	within(p, path+".gpu", d.GPU, 0, maxDevices)
	if d.CPULimit > 0 && d.CPULimit < plan.LeastCPU {
		p.add(path+".cpuLimit", fmt.Sprintf("%dm", d.CPULimit), "none, or at least %dm", plan.LeastCPU)
	}
}

func (m *Measured) check(path string, p *problems) {
	service := path + ".service"
	if m.Service.Mean != 0 {
		within(p, service+".mean", m.Service.Mean, minService, maxTime)
	} else if m.Service.CV != 0 || len(m.Service.Batches) > 0 {
		p.add(service+".mean", "none", "one beside cv and batches")
	}
	within(p, service+".cv", m.Service.CV, 0, maxCV)
	for i, b := range m.Service.Batches {
		path := fmt.Sprintf("%s.batches[%d]", service, i)
		within(p, path+".size", b.Size, 1, maxBatch)
		within(p, path+".mean", b.Mean, minService, maxTime)
		within(p, path+".n", b.N, 1, maxCount)
		if i > 0 && m.Service.Batches[i-1].Size >= b.Size {
			p.add(path+".size", fmt.Sprint(b.Size), "more than the one before, %d", m.Service.Batches[i-1].Size)
		}
	}
	m.checkProfile(path+".profile", p)
	within(p, path+".items", m.Items, 0, maxItems)
	if m.Share != nil {
		within(p, path+".share", *m.Share, 0, 1)
	}
	within(p, path+".waiting", m.Waiting, 0, maxTasks)
	within(p, path+".running", m.Running, 0, maxTasks)
	within(p, path+".expected", m.Expected, 0, maxTasks)
	for _, w := range []struct {
		field string
		v     time.Duration
	}{{"mean", m.Wait.Mean}, {"p50", m.Wait.P50}, {"p95", m.Wait.P95}, {"p99", m.Wait.P99}, {"oldest", m.Wait.Oldest}} {
		within(p, path+".wait."+w.field, w.v, 0, maxAge)
	}
	if m.Busy != nil {
		within(p, path+".busy", *m.Busy, 0, 1)
	}
	if m.CPUNow > 0 && m.CPUNow < plan.LeastCPU {
		p.add(path+".cpuNow", fmt.Sprintf("%dm", m.CPUNow), "none, or at least %dm", plan.LeastCPU)
	}
	m.checkReplicas(path, p)
	m.Target.check(path+".target", p)
}

func (m *Measured) checkProfile(path string, p *problems) {
	type point struct {
		cpu           yamlfile.Milli
		batch, length int
	}
	seen := map[point]bool{}
	for i, x := range m.Profile {
		path, at := fmt.Sprintf("%s[%d]", path, i), point{x.CPU, x.Batch, x.Length}
		if x.CPU < plan.LeastCPU {
			p.add(path+".cpu", fmt.Sprintf("%dm", x.CPU), "at least %dm", plan.LeastCPU)
		}
		within(p, path+".batch", x.Batch, 1, maxBatch)
		within(p, path+".length", x.Length, 0, maxLength)
		within(p, path+".mean", x.Mean, minService, maxTime)
		within(p, path+".err", x.Err, 0, maxTime)
		within(p, path+".cv", x.CV, 0, maxCV)
		within(p, path+".n", x.N, 1, maxCount)
		if seen[at] {
			p.add(path, "a second point with its cpu, batch and length", "one")
		}
		seen[at] = true
	}
}

// states are the words for the states of replicas.
var states = map[string]plan.State{"starting": plan.Starting, "ready": plan.Ready, "draining": plan.Draining}

func (m *Measured) checkReplicas(path string, p *problems) {
	total := 0
	for i, r := range m.Replicas {
		path := fmt.Sprintf("%s.replicas[%d]", path, i)
		within(p, path+".count", r.Count, 1, maxReplicas)
		if _, ok := states[r.State]; !ok {
			p.add(path+".state", fmt.Sprintf("%q", r.State), "starting, ready or draining")
		}
		total += r.Count
	}
	if total > maxReplicas {
		p.add(path+".replicas", fmt.Sprintf("%d in all", total), "at most %d", maxReplicas)
	}
	paths := map[string]bool{}
	for i, s := range m.Starts {
		path := fmt.Sprintf("%s.starts[%d]", path, i)
		ownName(p, path+".path", s.Path, paths)
		within(p, path+".mean", s.Mean, 0, maxTime)
		within(p, path+".n", s.N, 1, maxCount)
	}
}

func (t *Target) check(path string, p *problems) {
	if !slices.Contains([]string{"", "rps", "capacity", "cpu"}, t.Type) {
		p.add(path+".type", fmt.Sprintf("%q", t.Type), "rps, capacity or cpu")
	}
	within(p, path+".value", t.Value, 0, maxRate)
	within(p, path+".load", t.Load, 0, maxRate)
}

// complete fills in the defaults, except for shares.
func (p *Problem) complete() {
	p.Tick = cmp.Or(p.Tick, time.Second)
	for i := range p.Nodes {
		n := &p.Nodes[i]
		n.Name, n.Count = cmp.Or(n.Name, fmt.Sprintf("node%d", i+1)), cmp.Or(n.Count, 1)
	}
	for i := range p.Stages {
		st := &p.Stages[i]
		st.Function.complete()
		if len(st.Pipelines) == 0 {
			for _, x := range p.Pipelines {
				st.Pipelines = append(st.Pipelines, x.Name)
			}
		}
		for k := range st.Variants {
			v := &st.Variants[k]
			v.Function.complete()
			if v.Share == nil {
				v.Share = new(float64)
			}
		}
	}
}

func (f *Function) complete() {
	f.Accuracy = cmp.Or(f.Accuracy, 1)
	f.Batch, f.Slots = cmp.Or(f.Batch, 1), cmp.Or(f.Slots, 1)
	if !f.Zero {
		f.Min = cmp.Or(f.Min, pipeline.DefaultMin)
	}
	f.Max = cmp.Or(f.Max, max(pipeline.DefaultMax, f.Min))
	f.ZeroAge = cmp.Or(f.ZeroAge, pipeline.DefaultZeroAge)
	const measured = 100 // batches
	for i := range f.Service.Batches {
		f.Service.Batches[i].N = cmp.Or(f.Service.Batches[i].N, measured)
	}
	for i := range f.Profile {
		f.Profile[i].N = cmp.Or(f.Profile[i].N, measured)
	}
	for i := range f.Starts {
		f.Starts[i].N = cmp.Or(f.Starts[i].N, 1)
	}
	for i := range f.Replicas {
		r := &f.Replicas[i]
		r.Count, r.State = cmp.Or(r.Count, 1), cmp.Or(r.State, "ready")
	}
}
