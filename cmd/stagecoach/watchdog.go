package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/watchdog"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider"
	"github.com/stagecoach-serving/stagecoach/request/gateway"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/stage"
)

// watchdogLine starts this program as a watchdog, also if its file was replaced since.
var watchdogLine = [...]string{"/proc/self/exe", "watchdog"}

func runWatchdog(ctx context.Context, args []string, _ io.Writer) error {
	fs := flag.NewFlagSet("watchdog", flag.ContinueOnError)
	node := fs.String(nodeFlag, "", "name of the node, which no other node of the machine has")
	runs := defaultRuntime()
	runs.addFlags(fs)
	runs.pods.addFlags(fs)
	if err := console.ParseFlags(fs, args); err != nil {
		return fmt.Errorf("%w (`stagecoach up` starts it, and says in its environment what to run)", err)
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	labels := map[string]string{sandbox.LabelFunction: os.Getenv(wire.EnvFunction), sandbox.LabelReplica: os.Getenv(wire.EnvReplica)}
	r, err := runs.open(ctx, *node, labels, log)
	if err != nil {
		return err
	}
	defer r.Close()
	return watchdog.Run(ctx, r)
}

// openRendezvous opens the socket on which functions that speak HTTP meet the gateway.
func (u *up) openRendezvous() error {
	folder := filepath.Join(u.cfg.State, "rendezvous")
	// The path of a socket must be short.
	if abs, err := filepath.Abs(folder); err != nil || len(abs) > gateway.MaxFolder {
		var err error
		if folder, err = os.MkdirTemp("", "stagecoach-"); err != nil {
			return fmt.Errorf("rendezvous: %w", err)
		}
		u.onClose(func() error { return os.RemoveAll(folder) })
	}
	var err error
	u.meets = folder
	if u.meeting, err = gateway.NewRendezvous(folder, u.log); err != nil {
		return err
	}
	if u.nodes.far != nil {
		u.meeting.Name(u.nodes.far.me.Name)
	}
	u.onClose(func() error { u.meeting.Close(); return nil })
	return nil
}

// resolver resolves images.
type resolver interface {
	Resolve(image string) (sandbox.Image, error)
}

// kinds knows which functions speak HTTP themselves. It inspects an image when its function is
// deployed.
type kinds struct {
	images resolver
	known  sync.Map // pipeline.Key → *kind
}

// kind describes one function.
type kind struct {
	image string
	env   map[string]string
	found bool // its image could be inspected
	http  bool
	exec  time.Duration // its exec_timeout; 0: none
}

func (k *kinds) look(f kind) *kind {
	image, err := k.images.Resolve(f.image)
	if err == nil {
		f.found, f.http = true, keysmanager.Watched(image, f.env)
	}
	f.exec = execTimeout(image.Env, f.env)
	return &f
}

// execTimeout returns the exec_timeout of a function. The function's environment overrides that of
// the image. It returns 0 if neither sets one, or if the value is invalid. Replicas refuse an
// invalid value when they start.
func execTimeout(image []string, env map[string]string) time.Duration {
	const name = "exec_timeout"
	value, ok := env[name]
	for _, kv := range image {
		if v, is := strings.CutPrefix(kv, name+"="); is && !ok {
			value = v
		}
	}
	d, err := stage.Duration(name, value)
	if err != nil {
		return 0
	}
	return d
}

// changed inspects the function that is deployed under a key now; nil: the function was removed.
func (k *kinds) changed(key pipeline.Key, f *provider.Deployed) {
	if f == nil {
		k.known.Delete(key)
		return
	}
	k.known.Store(key, k.look(kind{image: pinned(f), env: f.Environment()}))
}

// speaksHTTP reports whether key is a function that speaks HTTP itself, and not a pipeline.
func (u *up) speaksHTTP(key pipeline.Key) bool { return u.registry.Alone(key) && u.kinds.HTTP(key) }

// execTimeout returns how long an invocation of key may run, from the environment of its function.
// 0 means until its deadline.
func (u *up) execTimeout(key pipeline.Key) time.Duration {
	if !u.speaksHTTP(key) {
		return 0
	}
	return u.kinds.of(key).exec
}

// measures reports whether key is a function that this holder has pinned, and not a pipeline.
func (u *up) measures(key pipeline.Key, holder string) bool {
	return u.registry.Alone(key) && u.local.PinnedBy(key, holder)
}

// HTTP reports whether the function with this key speaks HTTP itself.
func (k *kinds) HTTP(key pipeline.Key) bool { return k.of(key).http }

// of returns the kind of the function with this key; for a pipeline it returns an empty kind.
func (k *kinds) of(key pipeline.Key) *kind {
	v, ok := k.known.Load(key)
	if !ok {
		return &kind{}
	}
	f, _ := v.(*kind)
	if f.found {
		return f
	}
	now := k.look(*f) // its image may have been added since
	if now.found && !k.known.CompareAndSwap(key, v, now) {
		return k.of(key) // another revision was deployed meanwhile
	}
	return now
}
