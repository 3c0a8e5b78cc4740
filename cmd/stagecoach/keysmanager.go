package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/stagecoach-serving/stagecoach/image"
	"github.com/stagecoach-serving/stagecoach/image/contained"
	"github.com/stagecoach-serving/stagecoach/internal/child"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/keysmanager/device"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/nodemetrics"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// waits are times that a daemon gives replicas.
type waits struct{ drain, keep time.Duration }

// keysManagerConfig configures `stagecoach keysmanager`.
type keysManagerConfig struct {
	node                       string
	join                       joinConfig
	memory                     Bytes
	cpus                       int
	devices                    string // UUIDs or indices, separated by commas; "all", "none"
	images, ort, state, listen string
	uids                       string
	network                    networkConfig
	tunnel                     tunnelConfig
	runtime                    RuntimeConfig
	registry                   image.Registry
	imageRate                  Bytes
	hostNetwork                bool
	pod                        bool // it is a pod of a DaemonSet of Kubernetes
	waits
	log LogConfig
}

func readKeysManagerConfig(args []string) (keysManagerConfig, error) {
	c := keysManagerConfig{log: LogConfig{Format: "text"}, runtime: defaultRuntime()}
	defaults := defaultConfig()
	fs := flag.NewFlagSet("keysmanager", flag.ContinueOnError)
	for flag, alias := range map[string]string{"name": "", "node": "the same as --name"} {
		fs.StringVar(&c.node, flag, "", cmp.Or(alias, "name of the node, which no other daemon has; default the host's"))
	}
	for flag, alias := range map[string]string{"join": "", "nats": "the same as --join"} {
		fs.StringVar(&c.join.urls, flag, "nats://127.0.0.1:4222", cmp.Or(alias, "URLs where stagecoach up --nats-listen listens, or of the servers of up --cluster-key, with commas between"))
	}
	for flag, alias := range map[string]string{"token": "", "nats-token": "the same as --token"} {
		fs.StringVar(&c.join.token, flag, tokenFile(defaults.State), cmp.Or(alias, "join token (stagecoach node token), or a file that has it; needed until the node has joined"))
	}
	fs.StringVar(&c.join.ca, "nats-ca", "", "file with the certificates that the NATS servers' certificates are checked against; default the cluster's own authority")
	fs.BoolVar(&c.join.outside, "nats-outside", false, "--join has the servers of an up --nats without --cluster-key: connect without a join token")
	fs.Func("memory", "for zygotes and replicas, such as 4Gi; default: what the machine or the cgroup has", func(s string) error {
		return c.memory.UnmarshalText([]byte(s))
	})
	fs.IntVar(&c.cpus, "cpus", 0, "cores that are its share; 0: what this process may run on")
	fs.StringVar(&c.devices, "devices", "all", "accelerators that are its share, by index or UUID, with commas between; all or none")
	fs.StringVar(&c.images, "images", "", "folder with the node's images; on one machine, nodes and up may share it; default .stagecoach/images")
	fs.Func("image-rate", "bytes per second that the node sends of its images to other nodes, such as 50Mi; default not limited", func(s string) error {
		return c.imageRate.UnmarshalText([]byte(s))
	})
	fs.StringVar(&c.registry.Auth, "registry-config", "", "file with credentials for registries; default ~/.docker/config.json, or DOCKER_CONFIG/config.json")
	fs.Func("insecure", "hosts[:port] of registries without TLS, with commas between; loopback addresses never need TLS", func(list string) (err error) {
		c.registry.Insecure, err = splitHosts(list)
		return err
	})
	fs.StringVar(&c.ort, "ort", "", "ONNX Runtime's shared library, for functions with a model")
	fs.StringVar(&c.state, "state", "", "folder that survives restarts; default .stagecoach/nodes/NODE")
	fs.StringVar(&c.listen, "metrics", "", "host:port of its metrics, and of /healthz for probes; default nowhere")
	fs.DurationVar(&c.drain, "drain", defaults.Control.DrainTimeout, "that replicas have, on SIGTERM, to finish what they do elsewhere")
	fs.DurationVar(&c.keep, "keep", time.Minute, "how long replicas wait for the next control plane if the one with their calls ends, with NATS outside; 0: they end with it")
	fs.StringVar(&c.uids, "uids", defaults.Isolation.UIDs, "numbers of users and groups that functions run as, when this process is root")
	c.tunnel.addFlags(fs)
	c.runtime.addFlags(fs)
	c.runtime.pods.addFlags(fs)
	c.runtime.addImageFlags(fs)
	c.runtime.addSparesFlag(fs)
	c.network.plugins = defaults.Isolation.CNIBinDir
	addCNIFlags(fs, &c.network.cni, &c.network.plugins)
	fs.StringVar(&c.network.cidr, "network-cidr", defaults.Isolation.Network, "addresses of replicas, when this process is root")
	fs.BoolVar(&c.hostNetwork, "allow-host-network", false, "let functions have the machine's network (annotation stagecoach.dev/network: host)")
	fs.BoolVar(&c.pod, "pod", false, "run as a pod of a DaemonSet of Kubernetes: make /sys/fs/cgroup and /proc/sys/net of the container writable, append a random part, kept in --state, to --name, and be a node on another machine as with --remote")
	fs.TextVar(&c.log.Level, "log", c.log.Level, "debug, info, warn or error")
	fs.StringVar(&c.log.Format, "log-format", c.log.Format, "text or json")
	if err := console.ParseFlags(fs, args); err != nil {
		return c, err
	}
	c.node = cmp.Or(c.node, defaults.Node.Name)
	// Pods share a machine with control planes, but no files.
	c.tunnel.remote = c.tunnel.remote || c.pod
	if c.images == "" {
		c.images = defaults.imagesDir()
	}
	if c.state == "" {
		c.state = filepath.Join(defaults.State, "nodes", c.node)
	}
	err := c.validate()
	return c, err
}

// validate reports every invalid flag.
func (c *keysManagerConfig) validate() error {
	var errs []error
	bad := func(flag string, got any, want string) {
		errs = append(errs, fmt.Errorf("--%s: %v, want %s", flag, got, want))
	}
	if c.node == "" || strings.ContainsAny(c.node, " \t\n/") {
		bad("name", fmt.Sprintf("%q", c.node), "a name without spaces and slashes")
	}
	if c.memory != 0 && c.memory < 64<<20 {
		bad("memory", int64(c.memory), "at least 64Mi, or 0 for what the machine has")
	}
	if most := runtime.NumCPU(); c.cpus < 0 || c.cpus > most {
		bad("cpus", c.cpus, fmt.Sprintf("1 to %d, or 0 for what there is", most))
	}
	if _, err := device.ParseShare(c.devices); err != nil {
		errs = append(errs, fmt.Errorf("--devices: %w", err))
	}
	c.tunnel.validate(bad)
	c.join.validate(c.tunnel.listen, bad)
	validImageRate("image-rate", c.imageRate, bad)
	if c.drain < 0 {
		bad("drain", c.drain, "0 or more")
	}
	if c.keep < 0 {
		bad("keep", c.keep, "0 or more")
	}
	if c.ort != "" {
		if _, err := os.Stat(c.ort); err != nil {
			bad("ort", err, "the path of libonnxruntime.so")
		}
	}
	if err := validNetwork(c.network.cidr); err != nil {
		bad("network-cidr", fmt.Sprintf("%q", c.network.cidr), err.Error())
	}
	c.runtime.validate(func(field string, got any, want string) { bad(runtimeFlags[field], got, want) })
	if c.log.Format != "text" && c.log.Format != "json" {
		bad("log-format", fmt.Sprintf("%q", c.log.Format), "text or json")
	}
	return errors.Join(errs...)
}

// daemon is a node's KeysManager in a process of its own. newDaemon opens its parts, and close
// closes them in reverse order.
type daemon struct {
	cfg     keysManagerConfig
	log     *slog.Logger
	metrics *prometheus.Registry
	closers []func()

	keys     *keysmanager.Manager
	adopted  atomic.Pointer[keysmanager.Manager] // keys, once it is open
	server   *node.Server
	source   identity.Source // of this node
	far      *farSide        // nil: control planes on other machines do not reach it
	inside   nodeInside      // where its functions call functions
	expelled chan error      // why the node is no member any more
	stopped  bool            // the operator stops the node: nothing is left for the next daemon
}

func runKeysManager(ctx context.Context, args []string, out io.Writer) error {
	cfg, err := readKeysManagerConfig(args)
	if err != nil {
		return err
	}
	if err := cfg.enterPod(); err != nil {
		return err
	}
	if cfg.cpus > 0 {
		runtime.GOMAXPROCS(cfg.cpus) // the number of threads, and the announced one, follow from it
	}
	d := &daemon{cfg: cfg, log: cfg.log.logger(os.Stderr), metrics: prometheus.NewRegistry()}
	defer d.close()
	if err := d.open(ctx); err != nil {
		return err
	}
	fmt.Fprintf(out, "%s%s\n", child.Listening, d.socket())
	return d.run(ctx)
}

func (d *daemon) close() {
	for i := len(d.closers) - 1; i >= 0; i-- {
		d.closers[i]()
	}
}

func (d *daemon) onClose(f func()) { d.closers = append(d.closers, f) }

func (d *daemon) socket() string { return filepath.Join(d.cfg.state, "run", "node.sock") }

// open opens the daemon's parts.
func (d *daemon) open(ctx context.Context) error {
	lock, err := lockState(d.cfg.state)
	if err != nil {
		return err
	}
	d.onClose(func() { _ = lock.Close() })
	link, err := d.openMembership(ctx)
	if err != nil {
		return err
	}
	me, err := node.Identify(d.cfg.node, version())
	if err != nil {
		return err
	}
	found, err := d.openImages(ctx)
	if err != nil {
		return err
	}
	err = d.openTunnel()
	d.onClose(found.close) // fetches end before the tunnel, and what it serves ends before the store
	if err != nil {
		return err
	}
	worker := &keysWorker{far: d.far, inside: &d.inside, images: found} // not used before run
	d.server, err = node.NewServer(node.ServerConfig{
		Me: me, Bus: link, Worker: worker, Codes: errorCodes(), Socket: d.socket(), Address: d.farAddress(), Remote: d.cfg.tunnel.remote,
		Epoch: filepath.Join(d.cfg.state, "epoch"), Images: found.server.ServeConn, Items: d.far.carrier(), Keep: d.cfg.keep, Claimed: d.inside.claimed, Log: d.log,
	})
	if err != nil {
		return err
	}
	d.onClose(d.server.Close)
	if err := d.openKeys(ctx, found.images); err != nil {
		return err
	}
	found.changed = d.server.Changed
	worker.Manager, worker.containers = d.keys, d.cfg.runtime.lists(nodeID(d.cfg.node, d.cfg.state))
	d.serveTunnel(found.server)
	d.metrics.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	if err := nodemetrics.Register(d.metrics, func() []node.Inventory { return []node.Inventory{worker.Inventory()} }); err != nil {
		return err
	}
	return d.openMetrics()
}

// openImages opens the node's images. The caller closes them, and the daemon the store.
func (d *daemon) openImages(ctx context.Context) (*nodeImages, error) {
	store, err := image.OpenStore(image.Folder(d.cfg.images))
	if err != nil {
		return nil, err
	}
	d.onClose(store.Close)
	found := &images{folders: sandbox.Images{Dir: d.cfg.images}, store: store, registry: d.cfg.registry}
	c := contained.Config{Node: d.cfg.node, Built: store, Registry: d.cfg.registry, Log: d.log}
	if found.contained, err = d.cfg.runtime.openImages(ctx, d.cfg.state, c); err != nil {
		return nil, err
	}
	if found.contained != nil {
		d.onClose(func() { d.closeImages(found.contained) })
	}
	fetched := newNodeImages(found, int64(d.cfg.imageRate), nodeID(d.cfg.node, d.cfg.state), d.log)
	fetched.dial = d.dialImages
	return fetched, nil
}

// openNetworks opens the networks of replicas. Pods have those of their cluster.
func (d *daemon) openNetworks() (networks, error) {
	if d.cfg.runtime.Name == runtimePod {
		return networks{}, nil
	}
	return openNetworks(d.cfg.network, "keysmanager", d.cfg.state, d.log)
}

// openGroups opens the cgroups of replicas. Pods have those of the kubelet.
func (d *daemon) openGroups() (groups keysmanager.Groups, done func(), err error) {
	if d.cfg.runtime.Name == runtimePod {
		return d.cfg.runtime.pods.openGroups(d.log)
	}
	groups, done = openGroups(d.cfg.node, d.cfg.state, d.log)
	return groups, done, nil
}

// openKeys creates the KeysManager, which adopts the processes of an earlier one.
func (d *daemon) openKeys(ctx context.Context, found *images) error {
	processes, err := launchWarden(ctx, d.cfg.state, d.cfg.runtime, nodeID(d.cfg.node, d.cfg.state))
	if err != nil {
		return err
	}
	d.onClose(processes.Close)
	users, err := openAccounts(d.cfg.uids, d.log)
	if err != nil {
		return err
	}
	d.onClose(func() { _ = users.close() })
	if d.cfg.runtime.Name == runtimePod && users.open != nil {
		users.open.SpareProcesses() // with hostPID, it sees those of other pods; its own end with theirs
	}
	nets, err := d.openNetworks()
	if err != nil {
		return err
	}
	d.onClose(func() { d.leave(nets) })
	if err := d.far.openParts(users, nets); err != nil {
		return err
	}
	d.openInside(nets)
	devices, done, err := openDevices(d.cfg.devices, d.log)
	if err != nil {
		return fmt.Errorf("--devices: %w", err)
	}
	d.onClose(done)
	groups, undo, err := d.openGroups()
	if err != nil {
		return err
	}
	d.onClose(undo)
	show := d.openLogs()
	d.keys, err = keysmanager.New(keysmanager.Config{
		Node: d.cfg.node, Images: found, ORT: d.cfg.ort,
		Cache: filepath.Join(d.cfg.state, "cache"), Memory: int64(d.cfg.memory), Watchdog: d.cfg.runtime.watchdog(nodeID(d.cfg.node, d.cfg.state)), Warden: processes, Accounts: users.forKeys(), Devices: devices,
		Networks: nets.forKeys(), Allowed: keysmanager.Allowed{HostNetwork: d.cfg.hostNetwork, Spares: d.cfg.runtime.spares()}, Groups: groups,
		OnExit: func(e keysmanager.Exit) {
			d.server.Tell(node.Event{Kind: node.EventExit, Replica: e.Replica, Function: e.Function, PID: e.PID, Cause: e.Cause, End: string(e.End), Memory: (*node.MemoryError)(e.Memory)})
		},
		OnEvict: func(function string, bytes int64) {
			d.server.Tell(node.Event{Kind: node.EventEvict, Function: function, Bytes: bytes})
		},
		OnChange: d.server.Changed,
		Output: func(function, replica, stream, line string) {
			d.server.Line(node.Line{At: time.Now().UTC(), Function: function, Replica: replica, Stream: stream, Text: line})
			show(replica, line)
			d.log.Debug("output", "function", function, "replica", replica, "stream", stream, "line", line)
		},
		Log: d.log, Metrics: prometheus.WrapRegistererWith(prometheus.Labels{"node": d.cfg.node}, d.metrics),
	})
	if err != nil {
		return err
	}
	d.adopted.Store(d.keys)
	d.onClose(func() {
		if d.stopped {
			d.keys.Close()
			return
		}
		d.keys.Detach() // its adopted processes go on serving
	})
	return nil
}

// closeImages closes the node's images in containerd.
func (d *daemon) closeImages(of *contained.Store) {
	if err := of.Close(); err != nil {
		d.log.Warn("views of images may be left mounted; the next daemon uses them", "error", err)
	}
}

// leave closes the daemon's networks, or leaves them to replicas that go on serving.
func (d *daemon) leave(n networks) {
	end := n.detach
	if d.stopped {
		end = n.close
	}
	if err := end(); err != nil {
		d.log.Warn("networks of functions may be left over", "error", err)
	}
}

// observed serves a daemon's metrics. A probe asks /healthz, which needs no lock of the daemon and
// little CPU, so it also answers while functions use all of it.
func observed(metrics *prometheus.Registry) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(metrics, promhttp.HandlerOpts{Registry: metrics}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("ok\n")) })
	return mux
}

// openMetrics serves the daemon's metrics.
func (d *daemon) openMetrics() error {
	if d.cfg.listen == "" {
		return nil
	}
	l, err := net.Listen("tcp", d.cfg.listen)
	if err != nil {
		return fmt.Errorf("--metrics: %w", err)
	}
	srv := &http.Server{Handler: observed(d.metrics), ReadHeaderTimeout: 10 * time.Second, ErrorLog: slog.NewLogLogger(d.log.Handler(), slog.LevelWarn)}
	var served sync.WaitGroup
	served.Go(func() { _ = srv.Serve(l) }) // ends with Close
	d.onClose(func() { _ = srv.Close(); served.Wait() })
	d.log.Info("metrics", "url", fmt.Sprintf("http://%s/metrics", l.Addr()))
	return nil
}

// run serves until ctx ends, and then drains the replicas before it returns.
func (d *daemon) run(ctx context.Context) error {
	serve, end := context.WithCancel(context.Background())
	defer end()
	var served error
	done := make(chan struct{})
	go func() { defer close(done); served = d.server.Run(serve) }()
	select {
	case <-done:
		return served
	case err := <-d.expelled:
		d.stopped = errors.Is(err, identity.ErrRevoked)
		end()
		<-done
		return err
	case <-ctx.Done():
	}
	d.stopped = true
	d.log.Info("draining", "at most", d.cfg.drain)
	d.server.Leave(d.cfg.drain > 0)
	d.drain(done)
	end()
	<-done
	return served
}

// drain waits until no replica is left, and nobody needs an item that this node keeps. It waits for
// at most --drain, unless done comes first. For the first half of that time, replicas may wait for
// their replacements on other nodes. The second half is for the calls that then still run.
func (d *daemon) drain(done <-chan struct{}) {
	limit := time.NewTimer(d.cfg.drain)
	defer limit.Stop()
	half := time.AfterFunc(d.cfg.drain/2, func() { d.server.Leave(false) })
	defer half.Stop()
	look := time.NewTicker(50 * time.Millisecond)
	defer look.Stop()
	for {
		left, items := len(d.keys.Inventory().Replicas), d.far.held()
		if left+items == 0 {
			return
		}
		select {
		case <-done:
			return
		case <-limit.C:
			d.log.Warn("replicas are stopped before they were drained", "replicas", left, "items", items, "waited", d.cfg.drain)
			return
		case <-look.C:
		}
	}
}

// lockState reserves a state folder for this process until the file is closed. It writes the
// process id into the file.
func lockState(folder string) (*os.File, error) {
	f, err := openLock(folder)
	if errors.Is(err, fs.ErrPermission) {
		err = fmt.Errorf("%w; it belongs to another user: run as that user, or choose another --state", err)
	}
	if err != nil {
		return nil, fmt.Errorf("state: %w", err)
	}
	err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if err == nil {
		_ = f.Truncate(0) // on a full disk, other processes' errors lack the process id
		_, _ = f.WriteAt(strconv.AppendInt(nil, int64(os.Getpid()), 10), 0)
		return f, nil
	}
	defer f.Close()
	if !errors.Is(err, syscall.EWOULDBLOCK) {
		return nil, fmt.Errorf("state: lock folder %s: %w", folder, err)
	}
	holder, stop := "", "stop it"
	if pid, err := io.ReadAll(io.LimitReader(f, 20)); err == nil && len(pid) > 0 {
		holder, stop = fmt.Sprintf(", process %s", pid), fmt.Sprintf("stop it (kill %s)", pid)
	}
	return nil, fmt.Errorf("state: folder %s is in use by another stagecoach%s; %s, or choose another --state", folder, holder, stop)
}

func openLock(folder string) (*os.File, error) {
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return nil, err
	}
	return os.OpenFile(filepath.Join(folder, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
}
