package pods

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/kube"
	"github.com/stagecoach-serving/stagecoach/keysmanager/container/guest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// Named returns the parts of a function's key.
type Named func(key string) (name, namespace string)

// Config says where a Runtime makes pods.
type Config struct {
	Cluster *kube.Client
	Machine string // name of this machine in Kubernetes
	// Namespaces are those in which there may be pods. A function's pods are in the namespace that has
	// the name of the function's.
	Namespaces []string
	Named      Named
	Image      string // of Stagecoach, for pods of stages and for copies of stagecoach-init
	Init       string // path of stagecoach-init in Image
	Folder     string // in which the kubelet of this machine has the folders of pods
	// PullSecrets are Secrets of the namespaces, for the registries of images.
	PullSecrets []string
	// Tolerations let the pods run on machines with taints, as those of the daemon do.
	Tolerations []map[string]any
	// Labels are those of all Commands, in addition to a Command's own. With Labels, the Runtime is a
	// watchdog's.
	Labels map[string]string
	// Installation names the release of Stagecoach that this Runtime belongs to, as the value of a
	// label. Runtimes of other releases do not touch its pods.
	Installation string
	// Run labels the pods of this Runtime, so that another Runtime can delete those that it leaves
	// behind. If Run is empty, Open chooses a unique name. A watchdog gets it from the Runtime that
	// starts it (EnvRun).
	Run string

	Log *slog.Logger
}

// Bounds of the waits for the cluster.
const (
	startTimeout  = 50 * time.Second // for the start of a pod
	removeTimeout = 20 * time.Second // for all removals in Close
	endTimeout    = 10 * time.Second // for the status of a pod that has ended
	lookPause     = 5 * time.Millisecond
	troublePause  = time.Second // between questions why a pod does not start
	removePause   = time.Second // before a removal that has failed is tried again
	maxStarts     = 16          // under way
)

// Runtime starts processes in pods. Its methods are safe for concurrent use.
type Runtime struct {
	cfg     Config
	spawner *sandbox.Spawner // for processes of the platform
	owner   string           // identifies this Runtime's pods

	open     context.Context // ends when Close begins; so do starts
	shut     context.CancelFunc
	remove   context.Context // ends when Close has waited long enough for removals
	giveUp   context.CancelFunc
	starting chan struct{} // has an element per start under way
	tasks    sync.WaitGroup

	mu     sync.Mutex
	closed bool
	live   map[*process]bool
}

// Open returns a Runtime. The caller closes it.
func Open(cfg Config) (*Runtime, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("runtime pod: must run as root, to enter pods")
	}
	if _, err := os.Stat(cfg.Folder); err != nil {
		return nil, fmt.Errorf("runtime pod: %w; want the kubelet's folder of pods, as a volume hostPath", err)
	}
	r := &Runtime{cfg: cfg, spawner: sandbox.NewSpawner(), owner: cmp.Or(cfg.Run, newRun()), starting: make(chan struct{}, maxStarts), live: map[*process]bool{}}
	r.open, r.shut = context.WithCancel(context.Background())
	r.remove, r.giveUp = context.WithCancel(context.Background())
	return r, nil
}

// Start implements sandbox.Runtime.
func (r *Runtime) Start(ctx context.Context, c sandbox.Command) (sandbox.Process, error) {
	if c.Platform {
		return r.startPlatform(ctx, c)
	}
	var p *process
	err := r.inTurn(ctx, c, func(ctx context.Context) (err error) {
		p, err = r.start(ctx, c)
		return err
	})
	if err != nil {
		return nil, err
	}
	return p, nil
}

// inTurn starts a command's pod once fewer than maxStarts starts are under way.
func (r *Runtime) inTurn(ctx context.Context, c sandbox.Command, start func(ctx context.Context) error) error {
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return sandbox.ErrClosed
	}
	r.tasks.Add(1)
	r.mu.Unlock()
	defer r.tasks.Done()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(r.open, func() { cancel(sandbox.ErrClosed) })()
	ctx, end := context.WithTimeoutCause(ctx, startTimeout, fmt.Errorf("it has not started within %v", startTimeout))
	defer end()
	select {
	case r.starting <- struct{}{}:
		defer func() { <-r.starting }()
	case <-ctx.Done():
		return fmt.Errorf("%d starts of pods are under way: %w", maxStarts, context.Cause(ctx))
	}
	err := start(ctx)
	if why := context.Cause(ctx); err != nil && why != nil && !errors.Is(err, why) {
		err = fmt.Errorf("%w: %w", why, err)
	}
	if err != nil {
		return fmt.Errorf("start %s in a pod: %w", c.Args()[0], err)
	}
	return nil
}

// Network implements sandbox.Apart.
func (r *Runtime) Network(of sandbox.Process) (*os.File, error) {
	p, ok := of.(*process)
	if !ok {
		return nil, fmt.Errorf("a process of type %T is in no pod", of)
	}
	at := fmt.Sprintf("/proc/%d/ns/net", p.pid)
	f, err := os.Open(at)
	if err != nil {
		return nil, fmt.Errorf("network of pod %s: %w", p.pod.Metadata.Name, err)
	}
	// The first program still runs, so the number is its own.
	if err := guest.Signal(p.init, 0); err != nil {
		return nil, errors.Join(fmt.Errorf("network of pod %s: %w", p.pod.Metadata.Name, err), f.Close())
	}
	return f, nil
}

// EnvRun has the Config.Run of a watchdog.
const EnvRun = "STAGECOACH_POD_RUN"

func newRun() string { return strings.ToLower(rand.Text()[:12]) }

// platform is a process of the platform, such as a watchdog. If it is killed, it leaves pods.
type platform struct {
	sandbox.Process
	forget func()
}

// Forget implements sandbox.Process.
func (p platform) Forget() {
	p.Process.Forget()
	p.forget()
}

// startPlatform starts a process of the platform. What it leaves is deleted after its end.
func (r *Runtime) startPlatform(ctx context.Context, c sandbox.Command) (sandbox.Process, error) {
	namespace, err := r.namespaceOf(r.label(c, sandbox.LabelFunction))
	if err != nil {
		return nil, err
	}
	run := newRun()
	c.Env = maps.Clone(c.Env)
	c.Env[EnvRun] = run
	p, err := r.spawner.Start(ctx, c)
	if err != nil {
		return nil, err
	}
	return platform{p, func() { r.removeRun(namespace, run) }}, nil
}

// removeRun deletes in the background the pods of a watchdog that has ended.
func (r *Runtime) removeRun(namespace, run string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed { // the next Sweep finds them
		return
	}
	r.tasks.Go(func() {
		r.repeat("pods of a watchdog are not deleted", run, func(ctx context.Context) error {
			left, err := r.cfg.Cluster.Pods(ctx, namespace, map[string]string{LabelMachine: r.cfg.Machine, LabelInstallation: r.cfg.Installation, labelOwner: run})
			for _, p := range left {
				err = errors.Join(err, r.cfg.Cluster.DeletePod(ctx, namespace, p.Metadata.Name, 0))
			}
			return err
		})
	})
}

// Sweep deletes the pods of this machine that earlier Runtimes have left.
func (r *Runtime) Sweep(ctx context.Context) {
	for _, namespace := range r.cfg.Namespaces {
		left, err := r.cfg.Cluster.Pods(ctx, namespace, map[string]string{LabelMachine: r.cfg.Machine, LabelInstallation: r.cfg.Installation})
		for _, p := range left {
			if p.Metadata.Labels[labelOwner] != r.owner && p.Metadata.Deleted == "" {
				err = errors.Join(err, r.cfg.Cluster.DeletePod(ctx, namespace, p.Metadata.Name, 0))
			}
		}
		if err != nil {
			r.cfg.Log.Warn("pods of an earlier run are left", "namespace", namespace, "error", err)
		}
	}
}

// namespaceOf returns the namespace of a command's pod.
func (r *Runtime) namespaceOf(function string) (string, error) {
	_, namespace := r.cfg.Named(function)
	if !slices.Contains(r.cfg.Namespaces, namespace) {
		return "", fmt.Errorf("namespace %q of the function: this node makes pods in %s (--pod-namespaces)", namespace, strings.Join(r.cfg.Namespaces, ", "))
	}
	return namespace, nil
}

// adopt makes a process one of the Runtime's, once its start has succeeded. Until then, the start
// owns it.
func (r *Runtime) adopt(p *process) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		p.Forget()
		return sandbox.ErrClosed
	}
	r.live[p] = true
	return nil
}

// volume returns the folder of this machine that is a pod's empty volume.
func (r *Runtime) volume(uid, name string) string {
	return filepath.Join(r.cfg.Folder, uid, "volumes", "kubernetes.io~empty-dir", name)
}

// Close implements sandbox.Runtime. It ends starts under way, and returns when the pods are deleted
// or the cluster has had enough time for that.
func (r *Runtime) Close() {
	r.mu.Lock()
	r.closed = true
	var left []*process
	for p := range r.live {
		left = append(left, p)
	}
	r.mu.Unlock()
	r.shut()
	for _, p := range left {
		p.Forget()
	}
	stop := time.AfterFunc(removeTimeout, r.giveUp)
	r.tasks.Wait()
	stop.Stop()
	r.giveUp()
	r.spawner.Close()
}
