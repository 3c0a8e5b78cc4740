package main

import (
	"context"
	"fmt"
	"io"
	"sync/atomic"

	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/provider"
	"github.com/stagecoach-serving/stagecoach/sandbox"
	"github.com/stagecoach-serving/stagecoach/watchdog"
)

// watchdogLine starts this program as a watchdog, also when its file was replaced since.
var watchdogLine = [...]string{"/proc/self/exe", "watchdog"}

func runWatchdog(ctx context.Context, args []string, _ io.Writer) error {
	if len(args) > 0 {
		return fmt.Errorf("watchdog: got argument %q, want none: `stagecoach up` starts it, and says in its environment what to run", args[0])
	}
	return watchdog.Run(ctx)
}

// resolver knows images.
type resolver interface {
	Resolve(image string) (sandbox.Image, error)
}

// kinds knows which functions speak HTTP themselves. It looks at an image when its function is deployed.
type kinds struct {
	images resolver
	known  atomic.Pointer[map[string]kind]
}

// kind is a function's, as of a revision.
type kind struct {
	revision uint64
	http     bool
}

func newKinds(images resolver) *kinds {
	k := &kinds{images: images}
	k.known.Store(&map[string]kind{})
	return k
}

// update follows what is deployed. Calls come one at a time.
func (k *kinds) update(functions []provider.Deployed) {
	old, now := *k.known.Load(), make(map[string]kind, len(functions))
	for _, f := range functions {
		was, ok := old[f.Key]
		if !ok || was.revision != f.Revision {
			image, err := k.images.Resolve(pinned(&f))
			if err != nil {
				continue // its replicas do not start either, and tell why
			}
			was = kind{f.Revision, keysmanager.Watched(image, f.Deployment.EnvVars)}
		}
		now[f.Key] = was
	}
	k.known.Store(&now)
}

// HTTP tells whether the function with this key speaks HTTP itself.
func (k *kinds) HTTP(key string) bool { return (*k.known.Load())[key].http }
