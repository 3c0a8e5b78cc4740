package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/cluster"
	"github.com/stagecoach-serving/stagecoach/control"
	"github.com/stagecoach-serving/stagecoach/gateway"
	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/plan"
	"github.com/stagecoach-serving/stagecoach/provider"
	"github.com/stagecoach-serving/stagecoach/queue"
)

// Shells meet here: each adapter gives one of them what another has, in the first one's words.

// specStore is the provider's store in NATS.
type specStore struct{ *queue.KV }

// Watch implements provider.Store.
func (s specStore) Watch(ctx context.Context, f func(provider.Entry)) (func(), error) {
	return s.KV.Watch(ctx, func(e queue.Entry) { f(provider.Entry(e)) })
}

// asyncJournal is the gateway's journal in NATS.
type asyncJournal struct{ *queue.Journal }

// Append implements gateway.Journal.
func (j asyncJournal) Append(ctx context.Context, e gateway.Entry) error {
	b, err := e.MarshalBinary()
	if err != nil {
		return err
	}
	if len(b) > queue.MaxMessage-1<<10 { // NATS counts headers too
		return fmt.Errorf("%d bytes, want at most %d: %w", len(b), queue.MaxMessage-1<<10, gateway.ErrTooLarge)
	}
	return j.Journal.Append(ctx, e.Request.ID, b)
}

// deployed is what the cluster knows of functions, from the provider's registry.
type deployed struct{ *provider.Registry }

// Functions implements cluster.Functions.
func (d deployed) Functions() []cluster.FunctionSpec {
	all := d.Registry.Functions()
	out := make([]cluster.FunctionSpec, len(all))
	for i, f := range all {
		out[i] = cluster.FunctionSpec{Key: f.Key, Revision: f.Revision, Declared: f.Declared, Spec: keysmanager.Spec{
			Function: f.Key, Namespace: f.Declared.Namespace, Image: f.Deployment.Image,
			Process: f.Deployment.EnvProcess, Env: f.Deployment.EnvVars,
		}}
	}
	return out
}

// localNode is this machine's KeysManager as the cluster's node.
type localNode struct{ *keysmanager.Manager }

func spec(f cluster.FunctionSpec) (keysmanager.Spec, error) {
	s, ok := f.Spec.(keysmanager.Spec)
	if !ok {
		return s, fmt.Errorf("function %q: spec is a %T", f.Key, f.Spec)
	}
	return s, nil
}

// Start implements cluster.Node.
func (n localNode) Start(ctx context.Context, o cluster.Order) (cluster.Started, error) {
	s, err := spec(o.Function)
	if err != nil {
		return cluster.Started{}, err
	}
	r, err := n.Manager.Start(ctx, keysmanager.Order{Replica: o.Replica, Spec: s})
	if err != nil {
		return cluster.Started{}, err
	}
	out := cluster.Started{PID: r.PID, Conn: r.Conn, Path: r.Path}
	for _, p := range r.Phases {
		out.Phases = append(out.Phases, cluster.Phase(p))
	}
	return out, nil
}

// Warm implements cluster.Node.
func (n localNode) Warm(ctx context.Context, wanted []cluster.WarmOrder) error {
	var list []keysmanager.Wanted
	var errs []error
	for _, w := range wanted {
		if w.Warmth < plan.Host {
			continue // on disk it is already
		}
		s, err := spec(w.Function)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		list = append(list, keysmanager.Wanted{Spec: s, Key: w.Key})
	}
	return errors.Join(append(errs, n.Manager.Warm(ctx, list))...)
}

// Inventory implements cluster.Node.
func (n localNode) Inventory() plan.Node {
	inv := n.Manager.Inventory()
	out := plan.Node{Name: inv.Node, Memory: inv.Memory, MemoryUsed: inv.MemoryUsed, CPUMilli: inv.CPUMilli}
	for _, z := range inv.Zygotes {
		out.Zygotes = append(out.Zygotes, plan.Zygote{Function: z.Function, Digest: z.Digest, Bytes: z.Bytes, Replicas: z.Replicas})
	}
	return out
}

// status is what the provider shows of functions that run.
type status struct {
	local   *cluster.Local
	gateway *gateway.Gateway
	loop    *control.Loop
}

// State implements provider.Status.
func (s *status) State(key string) provider.State {
	st := provider.State{Invocations: s.gateway.Invocations(key)}
	for _, r := range s.local.Replicas(key) {
		if r.State != plan.Draining {
			st.Replicas++
		}
		if r.State == plan.Ready {
			st.Available++
		}
	}
	if n, until, cause := s.local.Failure(key); n > 0 {
		st.Detail = fmt.Sprintf("%d starts in a row failed, next try %s: %s", n, until.UTC().Format(time.TimeOnly), cause)
	} else if w, ok := s.want(key); ok {
		st.Detail = w.Short
	}
	return st
}

// want returns the last decision on a function.
func (s *status) want(key string) (plan.Want, bool) {
	_, p := s.loop.Last()
	i := slices.IndexFunc(p.Wants, func(w plan.Want) bool { return w.Function == key })
	if i < 0 {
		return plan.Want{}, false
	}
	return p.Wants[i], true
}

// Usage implements provider.Status. The process runtime has no limits of its own to measure against yet.
func (s *status) Usage(string) (provider.Usage, bool) { return provider.Usage{}, false }

// replicaCount exports gateway_service_count, as OpenFaaS's gateway does.
type replicaCount struct {
	registry *provider.Registry
	local    *cluster.Local
	desc     *prometheus.Desc
}

func newReplicaCount(r *provider.Registry, l *cluster.Local) *replicaCount {
	return &replicaCount{r, l, prometheus.NewDesc("gateway_service_count", "Replicas of a function that are ready.", []string{"function_name"}, nil)}
}

// Describe implements prometheus.Collector.
func (c *replicaCount) Describe(ch chan<- *prometheus.Desc) { ch <- c.desc }

// Collect implements prometheus.Collector.
func (c *replicaCount) Collect(ch chan<- prometheus.Metric) {
	for _, f := range c.registry.Functions() {
		ready := 0
		for _, r := range c.local.Replicas(f.Key) {
			if r.State == plan.Ready {
				ready++
			}
		}
		ch <- prometheus.MustNewConstMetric(c.desc, prometheus.GaugeValue, float64(ready), f.Key)
	}
}

// maxReplicas is the most replicas that a function may have.
func maxReplicas(f pipeline.Function) int { return max(f.Scale.Min, f.Scale.Max) }
