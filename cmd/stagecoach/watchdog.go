package main

import (
	"context"
	"flag"
	"fmt"
	"io"
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
	"github.com/stagecoach-serving/stagecoach/stage"
)

// watchdogLine starts this program as a watchdog, also when its file was replaced since.
var watchdogLine = [...]string{"/proc/self/exe", "watchdog"}

func runWatchdog(ctx context.Context, args []string, _ io.Writer) error {
	fs := flag.NewFlagSet("watchdog", flag.ContinueOnError)
	if err := console.ParseFlags(fs, args); err != nil {
		return fmt.Errorf("%w (`stagecoach up` starts it, and says in its environment what to run)", err)
	}
	return watchdog.Run(ctx)
}

// openRendezvous makes the place where the gateway meets functions that speak HTTP, and what knows
// which they are.
func (u *up) openRendezvous() error {
	u.kinds = &kinds{images: u.images}
	folder := filepath.Join(u.cfg.State, "rendezvous")
	if abs, err := filepath.Abs(folder); err != nil || len(abs) > gateway.MaxFolder { // a socket's path is short
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
	u.onClose(func() error { u.meeting.Close(); return nil })
	return nil
}

// resolver knows images.
type resolver interface {
	Resolve(image string) (sandbox.Image, error)
}

// kinds knows which functions speak HTTP themselves. It looks at an image when its function is
// deployed.
type kinds struct {
	images resolver
	known  sync.Map // pipeline.Key → *kind
}

// kind is a function's.
type kind struct {
	image string
	env   map[string]string
	found bool // its image was there to be looked at
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
// the image. It returns 0 if neither has one, and for a value that replicas will refuse.
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

// changed takes what is deployed under a key now; nil: nothing.
func (k *kinds) changed(key pipeline.Key, f *provider.Deployed) {
	if f == nil {
		k.known.Delete(key)
		return
	}
	k.known.Store(key, k.look(kind{image: pinned(f), env: f.Environment()}))
}

// speaksHTTP reports whether an invocation of key is of a function that speaks HTTP itself, and of
// no pipeline.
func (u *up) speaksHTTP(key pipeline.Key) bool { return u.registry.Alone(key) && u.kinds.HTTP(key) }

// execTimeout returns how long an invocation of key may run by the environment of its function; 0:
// until its deadline.
func (u *up) execTimeout(key pipeline.Key) time.Duration {
	if !u.speaksHTTP(key) {
		return 0
	}
	return u.kinds.of(key).exec
}

// measures reports whether an invocation of key is of a function that this holder has pinned, and
// of no pipeline.
func (u *up) measures(key pipeline.Key, holder string) bool {
	return u.registry.Alone(key) && u.local.PinnedBy(key, holder)
}

// HTTP tells whether the function with this key speaks HTTP itself.
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
	now := k.look(*f) // it may have come since
	if now.found && !k.known.CompareAndSwap(key, v, now) {
		return k.of(key) // another revision was deployed meanwhile
	}
	return now
}
