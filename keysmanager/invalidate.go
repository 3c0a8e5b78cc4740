package keysmanager

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/wire"
)

// Invalidation is what Invalidate has done.
type Invalidation struct {
	Digest     string        // of the image whose parameters are not used any more; empty: none were there
	Generation uint64        // of the parameters that starts load from now on
	Replicas   []string      // that still run with the old ones, sorted; the old zygote ends with the last of them
	Took       time.Duration // until nothing could start from the old ones any more and, when no replicas are left, their memory was free
}

// Errors of Load and Evict that callers may want to tell apart.
var (
	ErrNoModel   = errors.New("the function has no model, so there is nothing to keep in memory")
	ErrNotCached = errors.New("no parameters of it are in memory")
	ErrBusy      = errors.New("its parameters are in use")
)

// Load brings the parameters of a function into memory, unless they are there, and returns what is there.
func (m *Manager) Load(ctx context.Context, spec Spec) (ZygoteInfo, error) {
	image, err := m.cfg.Images.Resolve(spec.Image)
	if err != nil {
		return ZygoteInfo{}, err
	}
	if spec = spec.in(image); spec.Env[wire.EnvModel] == "" {
		return ZygoteInfo{}, fmt.Errorf("function %q: %w", spec.Function, ErrNoModel)
	}
	var all []ZygoteInfo
	i := -1
	err = m.loaded(ctx, spec, image, func(z *zygote) {
		all = m.Inventory().Zygotes
		i = slices.IndexFunc(all, func(i ZygoteInfo) bool {
			return i.Digest == z.key.digest && i.Namespace == z.key.namespace && i.Model == z.key.model && i.Path == z.path()
		})
	})
	switch {
	case err != nil:
		return ZygoteInfo{}, fmt.Errorf("load %q: %w", spec.Function, err)
	case i < 0:
		return ZygoteInfo{}, fmt.Errorf("load %q: its zygote has ended again, or each replica loads its parameters by itself (stagecoach.dev/start: cold)", spec.Function)
	}
	return all[i], nil
}

// Evict ends the idle zygotes of a function, or of an image's digest, and returns how many bytes they took, when they are
// gone. When one of them is busy it ends none, and the error says what it is busy with.
func (m *Manager) Evict(ctx context.Context, what string) (bytes int64, err error) {
	m.mu.Lock()
	var idle []zygoteKey
	for _, k := range m.slots.Keys() {
		s, _ := m.slots.Peek(k)
		if used, ok := m.uses[what]; k.digest != what && (!ok || used != k) || s.zygote == nil {
			continue
		}
		if s.users > 0 || s.zygote.replicas() > 0 {
			names := strings.Join(m.replicasOf(s.zygote), ", ")
			m.mu.Unlock()
			return 0, fmt.Errorf("evict %q: %w: replicas run from it (%s); scale the function down first", what, ErrBusy, names)
		}
		idle = append(idle, k)
	}
	var ends []<-chan struct{}
	for _, k := range idle {
		s, _ := m.slots.Peek(k)
		bytes += s.zygote.bytes
		m.counts.Evicted.Asked++
		ends = append(ends, s.zygote.gone)
		m.retire(k)
	}
	m.mu.Unlock()
	if len(idle) == 0 {
		return 0, fmt.Errorf("evict %q: %w; the node's inventory lists what is", what, ErrNotCached)
	}
	for _, gone := range ends {
		select {
		case <-gone:
		case <-ctx.Done():
			return bytes, fmt.Errorf("evict %q: its processes still end: %w", what, context.Cause(ctx))
		}
	}
	return bytes, nil
}

// replicasOf returns the names of the replicas that a zygote has, sorted, with m.mu held.
func (m *Manager) replicasOf(z *zygote) []string {
	var names []string
	for name, p := range m.processes {
		if p.zygote == z && p.running {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// Invalidate says that a function's parameters are not what they were, though its image is: when it has returned, nothing
// starts from them any more, and the next start loads them afresh. Their zygote ends with the last of its replicas, which
// the caller ends. Functions that share the parameters are meant too.
func (m *Manager) Invalidate(_ context.Context, function string) (Invalidation, error) {
	begin := time.Now()
	m.mu.Lock()
	key := m.uses[function]
	out := Invalidation{Digest: key.digest}
	if s, ok := m.slots.Peek(key); ok && s.zygote != nil {
		out.Replicas = m.replicasOf(s.zygote)
	}
	for f, used := range m.uses {
		if used == key {
			delete(m.uses, f)
		}
	}
	m.mu.Unlock()
	m.tidy()
	out.Took = time.Since(begin)
	return out, nil
}
