package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/control"
	"github.com/stagecoach-serving/stagecoach/control/cluster"
	"github.com/stagecoach-serving/stagecoach/control/events"
	"github.com/stagecoach-serving/stagecoach/control/telemetry"
	"github.com/stagecoach-serving/stagecoach/internal/child"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/internal/peer"
	"github.com/stagecoach-serving/stagecoach/keysmanager/items"
	"github.com/stagecoach-serving/stagecoach/provider"
	"github.com/stagecoach-serving/stagecoach/provider/admin"
	"github.com/stagecoach-serving/stagecoach/provider/logbook"
	"github.com/stagecoach-serving/stagecoach/provider/secret"
	"github.com/stagecoach-serving/stagecoach/request/dispatch"
	"github.com/stagecoach-serving/stagecoach/request/flow"
	"github.com/stagecoach-serving/stagecoach/request/gateway"
	"github.com/stagecoach-serving/stagecoach/request/queue"
)

func runUp(ctx context.Context, args []string, out io.Writer) error {
	cfg, log, err := upConfig(args)
	if err != nil {
		return err
	}
	defer raiseHeap()()
	return beginAgain(ctx, log, time.Second, func() (func() error, error) {
		u, err := newUp(ctx, cfg, log)
		if err != nil {
			return nil, errors.Join(err, u.close())
		}
		return func() error { return errors.Join(u.serve(ctx, out), u.close()) }, nil
	})
}

// beginAgain opens a control plane and serves until that ends. If it ends with errAgain, beginAgain
// opens another one, and tries that again after a pause until it succeeds or ctx ends.
func beginAgain(ctx context.Context, log *slog.Logger, pause time.Duration, open func() (serve func() error, err error)) error {
	for first := true; ; first = false {
		serve, err := open()
		switch {
		case err == nil:
			if err = serve(); !errors.Is(err, errAgain) || ctx.Err() != nil {
				return err
			}
			log.Warn("this control plane begins again, to stand by", "cause", err)
		case first:
			return err
		case ctx.Err() != nil:
			return nil
		default:
			log.Error("this control plane could not begin again; trying again", "error", err)
			select {
			case <-time.After(pause):
			case <-ctx.Done():
				return nil
			}
		}
	}
}

// upConfig merges defaults, file and flags. Flags win over the file, and the file wins over
// defaults.
func upConfig(args []string) (Config, *slog.Logger, error) {
	cfg := defaultConfig()
	fs := flag.NewFlagSet("up", flag.ContinueOnError)
	file := fs.String("config", "", "YAML file; see docs/config.md")
	fs.TextVar(&cfg.Log.Level, "log", cfg.Log.Level, "debug, info, warn or error")
	fs.StringVar(&cfg.Log.Format, "log-format", cfg.Log.Format, "text or json")
	fs.StringVar(&cfg.Listen, "listen", cfg.Listen, "host:port of the API and the data path")
	fs.StringVar(&cfg.State, "state", cfg.State, "folder that survives restarts")
	fs.StringVar(&cfg.Images, "images", cfg.Images, "folder with the images of the process runtime; default STATE/images")
	fs.Func("image-rate", "bytes per second that this process sends of its images to nodes, such as 50Mi; default not limited", func(s string) error {
		return cfg.ImageRate.UnmarshalText([]byte(s))
	})
	fs.StringVar(&cfg.Registry.Auth, "registry-config", cfg.Registry.Auth, "file with credentials for registries; default ~/.docker/config.json, or DOCKER_CONFIG/config.json")
	fs.StringVar(&cfg.ORT, "ort", cfg.ORT, "ONNX Runtime's shared library, for functions with a model")
	cfg.NATS.addFlags(fs)
	cfg.Cluster.addFlags(fs)
	cfg.Kubernetes.addFlags(fs)
	fs.BoolVar(&cfg.Node.None, "no-node", cfg.Node.None, "run no replicas in this process; nodes that join do")
	fs.StringVar(&cfg.BasicAuthDir, "basic-auth-dir", cfg.BasicAuthDir, "folder with basic-auth-user and basic-auth-password")
	fs.Func("trusted-proxies", "CIDRs of proxies whose X-Forwarded-For is believed, by commas; default none", func(list string) error {
		cfg.Requests.TrustedProxies = strings.Split(list, ",")
		return nil
	})
	fs.IntVar(&cfg.Control.Budget, "budget", cfg.Control.Budget, "replicas that all functions together may have; 0: as many as the nodes hold")
	fs.StringVar(&cfg.Control.Policies.Allocator, "allocator", cfg.Control.Policies.Allocator, "policy that sizes functions; see docs/config.md")
	fs.StringVar(&cfg.Control.Policies.Corrector, "corrector", cfg.Control.Policies.Corrector, "policy that corrects sizes by what was measured; none leaves it out")
	fs.StringVar(&cfg.Control.Policies.Sharer, "sharer", cfg.Control.Policies.Sharer, "policy that trims sizes to what there is; none leaves it out")
	fs.StringVar(&cfg.Control.Policies.Rank, "rank", cfg.Control.Policies.Rank, "order of waiting lines: fifo, fair or least-slack")
	fs.StringVar(&cfg.Control.Policies.Route, "route", cfg.Control.Policies.Route, "policy that routes tasks to the variants of a stage; see docs/config.md")
	fs.Float64Var(&cfg.Control.Policies.Price, "price", cfg.Control.Policies.Price, "replica-seconds that a second of a request's latency is worth; 0: nothing")
	fs.StringVar(&cfg.Control.Record, "record", cfg.Control.Record, "file that gets each decision of the autoscaler and the requests, for stagecoach replay and sim --recorded")
	cfg.Runtime.addFlags(fs)
	cfg.Runtime.addImageFlags(fs)
	cfg.Runtime.addSparesFlag(fs)
	fs.StringVar(&cfg.Isolation.Network, "network-cidr", cfg.Isolation.Network, "addresses of replicas, when this process is root")
	addCNIFlags(fs, &cfg.Isolation.CNIConf, &cfg.Isolation.CNIBinDir)
	fs.BoolVar(&cfg.Isolation.HostNetwork, "allow-host-network", cfg.Isolation.HostNetwork, "let functions have the machine's network (annotation stagecoach.dev/network: host)")
	if err := console.ParseFlags(fs, args); err != nil {
		return cfg, nil, err
	}
	if *file != "" {
		cfg = defaultConfig()
		if err := cfg.readConfig(*file); err != nil {
			return cfg, nil, err
		}
		if err := console.ParseFlags(fs, args); err != nil { // again, over the file
			return cfg, nil, err
		}
	}
	if err := cfg.Validate(); err != nil {
		return cfg, nil, err
	}
	return cfg, cfg.Log.logger(os.Stderr), nil
}

// Bounds of the lines that replicas have printed, in bytes of memory.
const (
	logsPerFunction = 1 << 20
	logsInAll       = 64 << 20
)

// up is all of Stagecoach in one process. newUp opens its parts, each after those that it needs,
// and close closes them in reverse order.
type up struct {
	cfg     Config
	log     *slog.Logger
	closers []func() error

	metrics  *prometheus.Registry
	images   *images
	book     *logbook.Book
	nats     queue.Broker
	specs    *queue.KV
	registry *provider.Registry
	proxies  peer.Proxies
	accounts accounts
	networks networks
	secrets  *secret.Store
	store    *items.Plane
	lines    *dispatch.Shell
	nodes    *nodes
	cpu      *cpuLoad
	local    *cluster.Local
	loop     *control.Loop
	teaching
	flow      *flow.Coordinator
	walking   atomic.Pointer[flow.Coordinator] // flow, for the control loop, which starts earlier
	leading   *leading
	calls     *admin.Calls
	callbacks *gateway.Callbacks
	gateway   *gateway.Gateway
	kinds     *kinds
	meeting   *gateway.Rendezvous
	meets     string // folder of the rendezvous's socket
	status    *status
	tracer    *telemetry.Tracer // nil: spans are sent nowhere
	events    *events.Hub
	handler   http.Handler
	inside    http.Handler // used in place of handler, for functions
}

func newUp(ctx context.Context, cfg Config, log *slog.Logger) (*up, error) {
	u := &up{cfg: cfg, log: log, events: events.New(uint64(time.Now().UnixNano())), metrics: prometheus.NewRegistry(), calls: admin.NewCalls(), book: logbook.New(logsPerFunction, logsInAll)}
	u.leading = &leading{u: u}
	u.leading.openID()
	for _, step := range []func(context.Context) error{
		u.openState, u.openTelemetry, u.openQueue, u.openImages, u.openReplicas, u.leading.openControls,
		func(ctx context.Context) error { return openSecretCopies(ctx, u) }, u.openControl, u.openFlow, u.openHTTP, u.follow, u.openNodes, u.leading.open,
	} {
		if err := step(ctx); err != nil {
			return u, err
		}
	}
	return u, nil
}

func (u *up) onClose(f func() error) { u.closers = append(u.closers, f) }

func (u *up) close() error {
	var errs []error
	for i := len(u.closers) - 1; i >= 0; i-- {
		errs = append(errs, u.closers[i]())
	}
	u.closers = nil
	return errors.Join(errs...)
}

// deposedDrain bounds how long requests may go on after another control plane has taken over.
const deposedDrain = 5 * time.Second

// serve listens until ctx ends, or another control plane takes over. Then it lets requests finish.
func (u *up) serve(ctx context.Context, out io.Writer) error {
	l, err := net.Listen("tcp", u.cfg.Listen)
	if err != nil {
		if errors.Is(err, syscall.EADDRINUSE) {
			err = fmt.Errorf("%w; stop the program that listens there, such as another stagecoach, or choose another --listen", err)
		}
		return fmt.Errorf("listen: %w", err)
	}
	inside, err := u.listenInside(l.Addr())
	if err != nil {
		return errors.Join(err, l.Close())
	}
	srv := &http.Server{
		Handler: u.byAddress(), ConnState: gateway.Unframed, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10,
		ErrorLog: slog.NewLogLogger(u.log.Handler(), slog.LevelWarn),
	}
	fmt.Fprintf(out, "%shttp://%s\n", child.Listening, l.Addr())
	srv.RegisterOnShutdown(u.book.Close) // clients that follow logs would delay the shutdown
	srv.RegisterOnShutdown(u.events.Close)
	served := make(chan error, 3)
	running := 0
	for _, at := range []net.Listener{l, inside} {
		if at != nil {
			running++
			go func() { served <- srv.Serve(gateway.Strict(at.(*net.TCPListener))) }() // ends with Shutdown
		}
	}
	if u.nodes.far != nil {
		running++
		go func() { served <- srv.Serve(u.nodes.far.inside) }() // ends with Shutdown
	}
	var fault error
	limit := u.cfg.Control.DrainTimeout
	select {
	case err := <-served:
		running--
		fault = fmt.Errorf("serve: %w", err)
	case <-ctx.Done():
	case fault = <-u.leading.deposed:
		limit = min(limit, deposedDrain)
	}
	u.log.Info("draining", "at most", limit)
	drain, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	if err := srv.Shutdown(drain); err != nil {
		fault = errors.Join(fault, fmt.Errorf("requests were cut off after %v: %w", limit, errors.Join(err, srv.Close())))
	}
	for range running {
		if err := <-served; !errors.Is(err, http.ErrServerClosed) {
			fault = errors.Join(fault, err)
		}
	}
	return fault
}
