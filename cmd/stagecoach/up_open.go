package main

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"path/filepath"
	"slices"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
	"github.com/stagecoach-serving/stagecoach/control"
	"github.com/stagecoach-serving/stagecoach/control/cluster"
	"github.com/stagecoach-serving/stagecoach/control/learn"
	"github.com/stagecoach-serving/stagecoach/internal/peer"
	"github.com/stagecoach-serving/stagecoach/keysmanager/items"
	"github.com/stagecoach-serving/stagecoach/keysmanager/nodemetrics"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider"
	"github.com/stagecoach-serving/stagecoach/provider/admin"
	"github.com/stagecoach-serving/stagecoach/request/dispatch"
	"github.com/stagecoach-serving/stagecoach/request/flow"
	"github.com/stagecoach-serving/stagecoach/request/gateway"
	"github.com/stagecoach-serving/stagecoach/request/queue"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// openState locks the state folder, because two processes on one journal would lose requests.
func (u *up) openState(ctx context.Context) error {
	f, err := lockState(u.cfg.State)
	if err != nil {
		return err
	}
	u.onClose(f.Close)
	if u.accounts, err = openAccounts(u.cfg.Isolation.UIDs, u.log); err != nil {
		return err
	}
	u.onClose(u.accounts.close)
	if u.networks, err = openNetworks(u.cfg.Isolation.networks(), "up", u.cfg.State, u.log); err != nil {
		return err
	}
	u.onClose(u.networks.close)
	if err := u.openSecrets(ctx); err != nil {
		return err
	}
	u.onClose(u.secrets.Close)
	blobs, err := tensor.OpenDir(filepath.Join(u.cfg.State, "blobs"), blobLimit)
	if err != nil {
		return err
	}
	u.store = items.NewPlane(blobs, defaultItems, u.log)
	u.onClose(func() error { u.store.Close(); return nil })
	return u.metrics.Register(newPlaneMetrics(u.store))
}

// blobLimit bounds the large items of all requests under way, in bytes.
const blobLimit = 8 << 30

// openQueue starts NATS and opens the streams that it keeps.
func (u *up) openQueue(ctx context.Context) error {
	var err error
	if u.nodes, err = newNodes(u.cfg.Node.Name); err != nil {
		return err
	}
	server := queue.ServerConfig{Log: u.log}
	if err := u.nodes.openAuthority(u.cfg, &server); err != nil {
		return err
	}
	if u.nodes.shared, err = u.cfg.Cluster.keys(); err == nil {
		u.nodes.joinSecret, err = openJoinSecret(u.cfg.Cluster, u.log)
	}
	if err != nil {
		return err
	}
	if u.nats, err = u.cfg.openBroker(ctx, server, u.nodes.shared); err != nil {
		return err
	}
	if url := u.nats.URL(); url != "" && !u.leading.outside() {
		u.log.Info("nodes can join", "url", url, "token", tokenFile(u.cfg.State))
	} else if url != "" {
		u.log.Info("nodes can join", "url", url)
	}
	u.onClose(func() error { u.nats.Close(); return nil })
	if err := openSharedAuthority(ctx, u); err != nil {
		return err
	}
	nc, err := u.nats.Connect("state")
	if err != nil {
		return err
	}
	u.onClose(func() error { nc.Close(); return nil })
	if u.specs, err = queue.OpenKV(ctx, nc, u.nats.Disk(), "functions"); err != nil {
		return err
	}
	if u.registry, err = provider.OpenRegistry(ctx, u.specs, u.log); err != nil {
		return err
	}
	u.onClose(func() error { u.registry.Close(); return nil })
	u.registry.Outside = u.leading.kube.outside()
	mountSecrets(u.secrets, u.registry.Functions(), u.log)
	if !u.leading.outside() {
		err = u.leading.openJournal(ctx)
	} else {
		err = u.leading.openOutside()
	}
	if err != nil {
		return err
	}
	bucket, err := queue.OpenKV(ctx, nc, u.nats.Disk(), demandBucket)
	if err != nil {
		return err
	}
	if u.demand, err = learn.Open(ctx, learn.Config{Store: leadersStore{bucket, u.leading.leads, u.leading.epoch}, Graph: u.registry.Graph, Log: u.log, Metrics: u.metrics}); err != nil {
		return err
	}
	u.onClose(u.demand.Close)
	if err := u.metrics.Register(queue.NewDiskMetrics(u.nats.Disk())); err != nil {
		return err
	}
	if inside, is := u.nats.(*queue.Server); is {
		u.metrics.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{
			Namespace: "stagecoach", Subsystem: "queue", Name: "messages_total", Help: "Messages that the embedded NATS server has received.",
		}, func() float64 { n, _ := inside.Messages(); return float64(n) }))
	}
	u.metrics.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return nil
}

// openReplicas opens the parts that start replicas and send them tasks.
func (u *up) openReplicas(ctx context.Context) error {
	var err error
	var stop func()
	if u.nodes.cordons, stop, err = openCordons(ctx, u.nats, u.cfg.Cluster.FollowCordons, u.log); err != nil {
		return err
	}
	u.onClose(func() error { stop(); return nil })
	if !u.cfg.Node.None {
		if err := u.openNode(); err != nil {
			return err
		}
	}
	if err := u.connectNodes(); err != nil {
		return err
	}
	nc, err := u.nats.Connect("dispatch")
	if err != nil {
		return err
	}
	u.onClose(func() error { nc.Close(); return nil })
	cfg := dispatch.Config{
		Bus: queue.NewBus(nc), Store: u.store, Items: u.store, Logger: u.log, Registerer: u.metrics,
		Near:        func(to string, r *task.Reply) bool { return u.flow.Reply(to, r) },
		OnDemand:    func(pipeline.Key) { u.loop.Poke() },
		Revive:      func(function pipeline.Key, revision uint64) { u.local.Revive(function, revision) },
		FirstAnswer: func(f dispatch.First) { u.local.Answered(f.Replica, f.After, f.Call) },
		OutOfMemory: func(_ pipeline.Key, replica string, short *task.MemoryError) { u.local.OutOfMemory(replica, short) },
		Stuck:       func(_ pipeline.Key, replica, cause string) { u.local.Stuck(replica, cause) },
		Dropped:     func(_ pipeline.Key, replica string, death task.Death) { u.local.Lost(replica, death) },
	}
	if u.leading.outside() {
		cfg.Bus, cfg.Most, cfg.Me = u.leading.owners, u.leading.Most(), u.leading.me
		cfg.Apart = func(to string) bool { return u.flow.Elsewhere(to) }
	}
	if u.lines, err = dispatch.New(cfg); err != nil {
		return err
	}
	u.onClose(func() error { u.lines.Close(); return nil })
	if !u.leading.outside() {
		if err := u.leading.openInside(ctx); err != nil {
			return err
		}
	}
	u.cpu = &cpuLoad{nodes: u.nodes, log: u.log}
	u.local, err = cluster.New(cluster.Config{
		Functions: u.deployedFunctions(), Lines: u.lines, Replicas: u.lines, Nodes: u.nodes.own(u.deployedFunctions()), Joining: joiningNodes(u), Budget: u.cfg.Control.Budget, CPU: u.cpu.of,
		Expected: u.expected, Cordons: &u.nodes.cordons.closed,
		Reign: u.leading.reign.Load, Changed: func() { u.loop.Poke() }, Event: u.replicaEvent, Log: u.log, Metrics: u.metrics,
		StartTimeout: u.cfg.Control.StartTimeout, DrainTimeout: u.cfg.Control.DrainTimeout,
	})
	if err != nil {
		return err
	}
	u.onClose(func() error {
		ctx, cancel := context.WithTimeout(context.Background(), u.cfg.Control.DrainTimeout)
		defer cancel()
		return u.local.Close(ctx)
	})
	if err := nodemetrics.Register(u.metrics, u.nodes.Inventories); err != nil {
		return err
	}
	if err := u.metrics.Register(newVariantInfo(u.registry)); err != nil {
		return err
	}
	return u.metrics.Register(newReplicaCount(u.registry, u.local))
}

// recordLimit bounds the record of decisions, in bytes.
const recordLimit = 256 << 20

func (u *up) openControl(context.Context) error {
	u.kinds = &kinds{images: u.images.here()}
	scales := &announcer{events: u.events, wants: map[string]int{}}
	cfg := control.Config{Tick: u.cfg.Control.Tick, Policies: u.cfg.Control.Policies, Applied: scales.applied}
	if u.cfg.Control.Record != "" {
		record, err := control.OpenRecord(u.cfg.Control.Record, recordLimit, u.log, u.metrics)
		if err != nil {
			return fmt.Errorf("control.record: %w", err)
		}
		u.onClose(record.Close)
		u.traffic = newTraffic(u.registry)
		cfg.Recorder, cfg.Traffic = record, u.traffic
	}
	var err error
	u.loop, err = control.New(heldObserver{learnedObserver{u.local, u.demand, &u.registry.Accuracy}, u.leading.epoch}, u.local, cfg, u.log, u.metrics)
	if err != nil {
		return err
	}
	if !u.leading.outside() {
		u.background(u.loop.Run)
	}
	u.nodes.cordons.tell(u.loop.Poke)
	return nil
}

// background runs f in a goroutine. close waits for it.
func (u *up) background(f func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := f(ctx); err != nil && ctx.Err() == nil {
			u.log.Error("a part of stagecoach ended by itself", "error", err)
		}
	})
	u.onClose(func() error { cancel(); wg.Wait(); return nil })
}

// expected returns how many requests will still reach each function. It returns nil until there is
// a coordinator, because the control loop starts earlier.
func (u *up) expected() map[string]int {
	if f := u.walking.Load(); f != nil {
		return f.Expected()
	}
	return nil
}

func (u *up) openFlow(context.Context) error {
	nc, err := u.nats.Connect("flow")
	if err != nil {
		return err
	}
	u.onClose(func() error { nc.Close(); return nil })
	cfg := flow.Config{
		Bus: queue.NewBus(nc), Near: u.lines, Graphs: lined{u.registry, u.leading.hasLine}, Loads: u.lines, Store: u.store, Log: u.log, Metrics: u.metrics,
	}
	if u.leading.outside() {
		cfg.Remote = remoteOwners{u.leading}
	}
	u.flow, err = flow.New(cfg)
	if err != nil {
		return err
	}
	u.walking.Store(u.flow)
	u.onClose(func() error {
		ctx, cancel := context.WithTimeout(context.Background(), u.cfg.Control.DrainTimeout)
		defer cancel()
		return u.flow.Close(ctx)
	})
	if err := u.openRendezvous(); err != nil {
		return err
	}
	if u.proxies, err = peer.ParseProxies(u.cfg.Requests.TrustedProxies); err != nil {
		return fmt.Errorf("requests.trustedProxies: %w", err)
	}
	u.callbacks = gateway.NewCallbacks(gateway.CallbackTransport(u.networks.dial), gateway.CallbackTransport(u.networks.dialInside))
	u.onClose(func() error { u.callbacks.Close(); return nil })
	u.gateway, err = gateway.New(gateway.Config{
		Directory: u.registry, Invoker: taught{u.flow, u.teaching}, Journal: asyncJournal{heldJournal{u.leading}, u.calls}, Callbacks: u.callbacks,
		Timeout: u.cfg.Requests.Timeout, MaxTimeout: u.cfg.Requests.MaxTimeout, MaxBody: int64(u.cfg.Requests.MaxBody),
		BodyMemory: int64(u.cfg.Requests.BodyMemory), Spool: u.store,
		InFlight: u.cfg.Requests.InFlight, Metrics: u.metrics, Log: u.log, Tracer: u.gatewayTracer(),
		Rendezvous: u.meeting, HTTP: u.speaksHTTP, Exec: u.execTimeout, Measures: u.measures, Stall: u.cfg.Requests.Stall,
		Lines: u.lines, Proxies: u.proxies, Hide: u.hidePaths(),
	})
	return err
}

func (u *up) openHTTP(context.Context) error {
	var credentials *provider.Credentials
	if u.cfg.BasicAuthDir != "" {
		var err error
		if credentials, err = provider.ReadCredentials(u.cfg.BasicAuthDir); err != nil {
			return fmt.Errorf("basicAuthDir: %w", err)
		}
	} else {
		u.log.Warn("no credentials: everyone on this machine may deploy; --basic-auth-dir changes that")
	}
	classes, err := u.cfg.Runtime.classes()
	if err != nil {
		return fmt.Errorf("runtime.classes: want %w", err)
	}
	devices, err := u.cfg.Runtime.devices()
	if err != nil {
		return fmt.Errorf("runtime.cdiDevices: want %w", err)
	}
	u.status = &status{registry: u.registry, local: u.local, gateway: u.gateway, loop: u.loop, nodes: u.nodes, log: u.log}
	var policies provider.Policies
	policies.Allocators, policies.Routes = policy.Known()
	api, err := provider.New(provider.Config{
		Store: u.specs, Registry: u.registry, Images: u.images,
		Status: u.status, Scaler: u.local, Room: u.local, Pinner: pinner{u.local, u.nodes}, Secrets: secretsAPI(u), Mounts: u.secrets, Logs: bookLogs{u.book}, Ready: u.nats.Disk().Degraded, Credentials: credentials, Proxies: u.proxies, HostNetwork: u.cfg.Isolation.HostNetwork,
		RuntimeClasses: slices.Sorted(maps.Keys(classes)), CDIDevices: devices, Policies: policies, Spares: u.cfg.Runtime.Spares, Version: version(), Log: u.log,
	})
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(u.metrics, promhttp.HandlerOpts{Registry: u.metrics}))
	admin.Register(mux, u.admin())
	mux.Handle("GET /system/events", u.events)
	mux.Handle("/", api)
	u.handler, u.inside = u.gateway.Handler(api.Guard(mux)), u.gateway.InsideHandler(guardedInside(api, credentials, mux))
	u.handler = u.leading.front(u.handler)
	return nil
}

// follow creates and removes the lines of functions as functions are deployed and removed. Then it
// begins to run the requests that the journal has kept.
func (u *up) follow(context.Context) error {
	update := func(c provider.Change) {
		u.leading.changes.Lock()
		defer u.leading.changes.Unlock()
		u.kinds.changed(c.Key, c.Function)
		if f := c.Function; f == nil {
			u.lines.Remove(c.Key)
			u.nodes.forget(c.Key.String())
			u.book.Forget(c.Key)
			u.status.meter.Forget(c.Key.String())
			u.cpu.meter.Forget(c.Key.String())
			u.gateway.Tidy()
		} else if !u.leading.outside() || u.leading.leads() {
			if err := u.lines.Ensure(lineOf(f, u.kinds.of(f.Key))); err != nil {
				u.log.Error("function has no line", "function", f.Key, "error", err)
			}
		}
		u.leading.kube.deployed(c.Key)
		if spec, there := u.deployedFunctions().Spec(c.Key); there {
			u.nodes.deployed(spec)
		}
		u.loop.Poke()
	}
	// The event comes before the order for replicas.
	u.registry.OnChange(func(c provider.Change) { u.deployed(c); update(c) })
	for _, f := range u.registry.Functions() {
		update(provider.Change{Key: f.Key, Function: f})
	}
	u.background(u.collectImages)
	if u.images.home != nil {
		u.background(func(ctx context.Context) error { return gatherImages(ctx, u) })
	}
	u.background(u.sweepSecrets)
	if !u.leading.outside() {
		u.background(u.async)
	}
	return nil
}

// lineOf returns what the line of a function needs to know.
func lineOf(f *provider.Deployed, exec *kind) dispatch.Spec {
	return dispatch.Spec{
		Function: f.Key, Revision: f.Revision, QueueLimit: f.Declared.QueueLimit, MaxReplicas: maxReplicas(f.Declared),
		Batch: f.Declared.MostBatch(), AutoBatch: f.Declared.AutoBatch, BatchWait: f.Declared.BatchWait,
		Timeout: exec.exec, VariantOf: f.Declared.Stage(), MaxLength: f.Declared.MaxLength,
	}
}

// hidePaths returns a function that removes the operator's folders from texts that clients of
// functions read.
func (u *up) hidePaths() func(string) string {
	return gateway.HidePaths(u.cfg.State, u.cfg.imagesDir(), u.meets)
}
