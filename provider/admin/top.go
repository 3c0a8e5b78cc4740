package admin

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// topEvents is how many of the latest events top shows.
const topEvents = 50

// top returns the present state of all that top shows.
func (c *Config) top(now time.Time) schema.Top {
	v := schema.Top{At: now, Pipelines: []schema.TopPipeline{}, Functions: []schema.TopFunction{}, Nodes: []schema.TopNode{}, Events: c.Events(topEvents)}
	for _, p := range c.Registry.Pipelines() {
		v.Pipelines = append(v.Pipelines, c.topPipeline(p))
	}
	counts := c.Replicas.Counts()
	for _, f := range c.Registry.Functions() {
		if g, ok := c.Registry.Graph(f.Key); ok && c.Registry.Alone(f.Key) {
			if p := c.topPipeline(g); p.Rate > 0 || p.InFlight > 0 {
				v.Pipelines = append(v.Pipelines, p)
			}
		}
		of := c.topFunction(f.Key, counts[f.Key], now)
		if f.Declared.VariantOf != "" {
			of.VariantOf = pipeline.Key{Name: f.Declared.VariantOf, Namespace: f.Declared.Namespace}.String()
		}
		v.Functions = append(v.Functions, of)
	}
	slices.SortStableFunc(v.Functions, func(a, b schema.TopFunction) int {
		return cmp.Or(cmp.Compare(cmp.Or(a.VariantOf, a.Name), cmp.Or(b.VariantOf, b.Name)), cmp.Compare(a.VariantOf, b.VariantOf))
	})
	slices.SortFunc(v.Pipelines, func(a, b schema.TopPipeline) int { return strings.Compare(a.Name, b.Name) })
	// A pipeline and a function of one name are possible if an earlier version has stored them.
	v.Pipelines = slices.CompactFunc(v.Pipelines, func(a, b schema.TopPipeline) bool { return a.Name == b.Name })
	s, _ := c.Loop.Last()
	for _, n := range s.Nodes {
		out := schema.TopNode{Name: n.Name, Memory: n.Memory, MemoryUsed: n.MemoryUsed, Zygotes: len(n.Zygotes)}
		for _, f := range s.Functions {
			for _, r := range f.Replicas {
				if r.Node == n.Name && r.State != plan.Starting {
					out.Replicas++
				}
			}
		}
		v.Nodes = append(v.Nodes, out)
	}
	return v
}

func (c *Config) topPipeline(p pipeline.Pipeline) schema.TopPipeline {
	key := p.Key()
	r := c.Recent.Recent(key, p.SLO)
	out := schema.TopPipeline{
		Name: key.String(), Rate: r.Rate, P50: r.P50.Seconds(), P99: r.P99.Seconds(), SLO: p.SLO.Seconds(),
		Within: r.Within, Failed: r.Failed, InFlight: r.InFlight,
	}
	if len(p.Faults) > 0 {
		out.Fault = fmt.Sprint(p.Faults[0])
	}
	return out
}

func (c *Config) topFunction(key pipeline.Key, n Count, now time.Time) schema.TopFunction {
	is := c.Lines.Signals(key, now)
	out := schema.TopFunction{
		Name: key.String(), Rate: is.Demand.Rate, CV: is.Demand.CV, Waiting: is.Waiting, Running: is.Running, Service: is.Service.Mean.Seconds(),
		Wait: c.Lines.Waited(key).Seconds(), Ready: n.Ready, Starting: n.Starting, Draining: n.Draining,
	}
	if servers := c.Lines.Load(key).Servers; servers > 0 {
		out.Utilisation = is.Demand.Rate * is.Service.Mean.Seconds() / float64(servers)
	}
	if w, ok := decided(c.Loop, key); ok {
		out.Wanted, out.Why = len(w.Slots), w.Why
		if w.Short != "" {
			out.Why = w.Short
		}
	}
	if n, _, cause := c.Replicas.Failure(key); n > 0 {
		out.Why = fmt.Sprintf("%d starts failed: %s", n, cause)
	}
	return out
}

// decided returns the last decision on a function.
func decided(loop Loop, key pipeline.Key) (plan.Want, bool) {
	_, p := loop.Last()
	i, ok := slices.BinarySearchFunc(p.Wants, key.String(), func(w plan.Want, key string) int { return cmp.Compare(w.Function, key) })
	if !ok {
		return plan.Want{}, false
	}
	return p.Wants[i], true
}
