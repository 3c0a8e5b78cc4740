package main

import (
	"context"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/control/cluster"
	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider"
	"github.com/stagecoach-serving/stagecoach/provider/logbook"
	"github.com/stagecoach-serving/stagecoach/provider/secret"
	"github.com/stagecoach-serving/stagecoach/request/flow"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// Adapters connect the packages: each one implements an interface of one package with another
// package.

// envSecrets is the variable with the folder of a function's secrets. OpenFaaS's own SDKs read it,
// too.
const envSecrets = "secret_mount_path"

// mountSecrets fills the secret folders of all functions when up starts, because opening the store
// has removed the folders of the earlier process. If a folder cannot be filled, for example because
// somebody removed a secret by hand, mountSecrets logs the error and goes on with the others.
func mountSecrets(s *secret.Store, functions []*provider.Deployed, log *slog.Logger) {
	for _, f := range functions {
		if err := s.Mount(f.Declared.Namespace, f.Declared.Name, f.Deployment.Secrets); err != nil {
			log.Error("function does not see its secrets; create them and deploy it again", "function", f.Key, "error", err)
		}
	}
}

// bookLogs gives the provider access to the logbook.
type bookLogs struct{ *logbook.Book }

// Read implements provider.Logs.
func (b bookLogs) Read(q provider.LogQuery) provider.LogReader {
	return bookReader{b.Book.Read(logbook.Query{Function: q.Key, Replica: q.Replica, Since: q.Since, Tail: q.Tail, Follow: q.Follow})}
}

type bookReader struct{ *logbook.Reader }

// Read implements provider.LogReader.
func (r bookReader) Read(ctx context.Context) ([]provider.LogLine, uint64, error) {
	lines, lost, err := r.Reader.Read(ctx)
	out := make([]provider.LogLine, len(lines))
	for i, l := range lines {
		out[i] = provider.LogLine{At: l.At, Replica: l.Replica, Text: l.Text}
	}
	return out, lost, err
}

// deployed gives the cluster the functions of the provider's registry.
type deployed struct {
	*provider.Registry
	secrets *secret.Store
	gateway string // where their replicas reach functions; empty: unreachable
}

func (u *up) deployedFunctions() deployed {
	return deployed{u.registry, u.secrets, u.networks.gateway()}
}

// Functions implements cluster.Functions.
func (d deployed) Functions() []cluster.FunctionSpec {
	all := d.Registry.Functions()
	out := make([]cluster.FunctionSpec, len(all))
	for i, f := range all {
		out[i] = cluster.FunctionSpec{Key: f.Key, Function: f.Planned(d.Points(f)), Spec: d.replicaSpec(f)}
		out[i].Accuracy = d.Accuracy.Function(f).Accuracy
	}
	return out
}

// replicaSpec returns what a node needs to start f's replicas.
func (d deployed) replicaSpec(f *provider.Deployed) node.Spec {
	names := f.Deployment.Secrets
	folder := d.secrets.MountPath(f.Declared.Namespace, f.Declared.Name, names)
	// An error also kept the secrets from being mounted, which logged it.
	group, _ := d.secrets.Group(f.Declared.Namespace, names)
	env := f.Environment()
	delete(env, envSecrets)
	if folder != "" {
		env[envSecrets] = folder
	}
	if !f.Declared.Idempotent {
		env[wire.EnvIdempotent] = "false"
	}
	res := f.Resources()
	return node.Spec{
		Function: f.Key.String(), Namespace: f.Declared.Namespace, Group: group, Secrets: folder, Image: pinned(f),
		Process: f.Process(), Env: env, Ready: annotation(f, "com.openfaas.ready.http.path"),
		Health:   annotation(f, "com.openfaas.health.http.initialDelay") + "," + annotation(f, "com.openfaas.health.http.periodSeconds") + "," + annotation(f, "com.openfaas.health.http.path"),
		ReadOnly: f.Deployment.ReadOnlyRootFilesystem, Devices: f.Declared.GPU, DeviceMemory: f.Declared.GPUMemory, Start: f.Declared.Start, Worker: f.Declared.Process,
		Memory: res.MemoryLimit, CPUMilli: res.CPULimit, Network: f.Declared.Network, Gateway: d.gateway,
		Options: node.Options{RuntimeClass: f.Declared.RuntimeClass, DropCapabilities: f.Declared.DropCapabilities, CDIDevices: f.Declared.CDIDevices, Spares: f.Declared.Spares},
	}
}

// Spec returns the spec from which a node starts a function.
func (d deployed) Spec(key pipeline.Key) (node.Spec, bool) {
	f, there := d.Function(key)
	if !there {
		return node.Spec{}, false
	}
	return d.replicaSpec(&f), true
}

// lined hides a graph until each of its stages has a line. During a deploy, a function's graph
// exists a moment before the function's line, and a task for the function would find no line.
type lined struct {
	flow.Graphs
	owns func(pipeline.Key) bool
}

// Graph implements flow.Graphs.
func (l lined) Graph(key pipeline.Key) (pipeline.Pipeline, bool) {
	g, ok := l.Graphs.Graph(key)
	for i := range g.Stages { // stages are large: none is copied
		ok = ok && l.owns(g.Stages[i].Key())
	}
	return g, ok
}

func annotation(f *provider.Deployed, name string) string {
	if f.Deployment.Annotations == nil {
		return ""
	}
	return (*f.Deployment.Annotations)[name]
}

// keeper is what localNode needs of a KeysManager.
type keeper interface {
	Start(ctx context.Context, o node.Order, progress func(node.Phase)) (node.Started, error)
	Stop(ctx context.Context, replica string, grace time.Duration) error
	SetCPU(ctx context.Context, replica string, milli int) error
	Warm(ctx context.Context, wanted []node.Wanted) error
	Forget(function string)
	Inventory() keysmanager.Inventory
}

// localNode is this machine's KeysManager as a node of the cluster. An order may reach the
// KeysManager after the function was removed, and load its parameters again. So localNode forgets
// such functions when the order has ended, as heard does for the functions of daemons.
type localNode struct {
	keeper

	deployed func(function string) bool // reports whether a function is deployed now
	// returns an error if a function would start without its secrets; nil: it is not checked
	secrets func(node.Spec) error
}

// Start implements cluster.Node.
func (n localNode) Start(ctx context.Context, o node.Order, progress func(node.Phase)) (node.Started, error) {
	defer n.forgetRemoved(o.Spec.Function)
	if n.secrets != nil {
		if err := n.secrets(o.Spec); err != nil {
			return node.Started{}, err
		}
	}
	return n.keeper.Start(ctx, o, progress)
}

// Warm implements cluster.Node.
func (n localNode) Warm(ctx context.Context, wanted []node.Wanted) error {
	defer func() {
		for i := range wanted {
			n.forgetRemoved(wanted[i].Spec.Function)
		}
	}()
	return n.keeper.Warm(ctx, wanted)
}

// forgetRemoved forgets a function that is not deployed any more.
func (n localNode) forgetRemoved(function string) {
	if !n.deployed(function) {
		n.Forget(function)
	}
}

// Inventory implements cluster.Node.
func (n localNode) Inventory() plan.Node { return planned(inventoryOf(n.keeper.Inventory())) }

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
		ch <- prometheus.MustNewConstMetric(c.desc, prometheus.GaugeValue, float64(ready), f.Key.String())
	}
}

// maxReplicas returns the most replicas that a function may have.
func maxReplicas(f pipeline.Function) int { return max(f.Scale.Min, f.Scale.Max) }
