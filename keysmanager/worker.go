package keysmanager

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// A worker is a process whose threads are replicas. Functions of a namespace that have the same
// name in their annotation stagecoach.dev/process share a worker per device. So the time and memory
// of a device's context are spent only once (docs/adr/0033). In all else, a worker is a zygote.

// workerRests is how long a worker without replicas waits for new ones.
const workerRests = 5 * time.Minute

// workerEnds bounds how long a worker may take to end a replica that has got SIGKILL. After that,
// the daemon ends the whole worker. The worker usually ends itself after two seconds, but it cannot
// if one of its threads blocks the others.
const workerEnds = 10 * time.Second

// residence returns the key of the worker that an order's replica belongs to.
func (l *starter) residence(o node.Order, e engine) (zygote.Key, error) {
	s := o.Spec
	switch what := "annotation stagecoach.dev/process is " + s.Worker; {
	case e.name != python.name:
		return zygote.Key{}, fmt.Errorf("%s: %w: stages of %s=%s have a process each, want none", what, errors.ErrUnsupported, wire.EnvRuntime, cmp.Or(e.name, "onnx"))
	case !choosesPath(s):
		return zygote.Key{}, fmt.Errorf("%s and stagecoach.dev/start is %s, want auto: its stages start in that process", what, s.Start)
	case strings.Contains(o.Device, ","):
		return zygote.Key{}, fmt.Errorf("%s and its replica gets the devices %s, want one: that process has one", what, o.Device)
	}
	return zygote.Key{Namespace: s.Namespace, Process: s.Process, Form: zygote.Worker, Engine: e.name, Worker: s.Worker, Device: o.Device, Network: l.pool.NetworkOf(s.Network), Secrets: secretSet(s), Options: optionsOf(s).Text()}, nil
}

// secretSet returns a text that differs for different sets of secrets. It is empty if there are
// none.
func secretSet(s node.Spec) string {
	if s.Secrets == "" {
		return ""
	}
	return filepath.Base(s.Secrets)
}

// startResident starts p in the worker that its function names. If the worker does not run, it is
// started first.
func (l *starter) startResident(ctx context.Context, o node.Order, p *process, e engine, image sandbox.Image, env map[string]string) (wire.Socket, error) {
	key, err := l.residence(o, e)
	if err != nil {
		return nil, err
	}
	l.loader.store.unuse(p.asking)
	var conn wire.Socket
	if err := l.loader.withZygote(ctx, key, o.Spec, image, func(z *zygote.Zygote, load time.Duration) (err error) {
		l.loader.store.mu.Lock()
		l.loader.store.slots.visit(z.Key, o.Spec.Function)
		l.loader.store.mu.Unlock()
		p.path = z.Path()
		conn, err = l.launch(ctx, o, p, func(socket *os.File) error {
			p.ordered(load)
			if err := z.Held().AdmitTo(z.PID, image.Root); err != nil {
				return err
			}
			if err := z.Held().ShowSecrets(z.PID, o.Spec.Secrets); err != nil {
				return err
			}
			return l.fork(ctx, z, o, p, image.Root, env, socket)
		})
		return err
	}); err != nil {
		return nil, fmt.Errorf("annotation stagecoach.dev/process is %s: %w", o.Spec.Worker, err)
	}
	return conn, nil
}

// usage returns the usage of a replica, for an inventory. In a worker it is an equal share of the
// worker's usage, because threads cannot be measured separately.
func (p *process) usage() *Usage {
	if !p.zygote.Works() {
		return p.held.Group().Info()
	}
	u, n := p.zygote.Held().Group().Info(), max(1, p.zygote.Family.Replicas())
	if u != nil {
		u.CPU, u.Throttled = u.CPU/time.Duration(n), u.Throttled/time.Duration(n)
		u.CPUMilli, u.Memory = u.CPUMilli/float64(n), u.Memory/int64(n)
	}
	return u
}
