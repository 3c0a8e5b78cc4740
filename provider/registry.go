package provider

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// DefaultNamespace is where a function without a namespace lives.
const DefaultNamespace = "openfaas-fn"

// Registry is what is deployed, as the store's watch tells it. Reading takes no lock: each change publishes a new view.
type Registry struct {
	view atomic.Pointer[view]
	log  *slog.Logger
	stop func()

	mu        sync.Mutex
	deployed  map[string]Deployed
	seen      uint64        // the highest revision applied
	synced    bool          // all that was there at the start has been applied
	changed   chan struct{} // closed at the next change
	listeners []func()
}

// view is the registry at one instant. It never changes.
type view struct {
	functions []Deployed // sorted by key
	byKey     map[string]Deployed
	names     map[string]string // a name in a URL → key
	graphs    map[string]pipeline.Pipeline
	pipelines []pipeline.Pipeline // sorted by namespace and name; functions of their own are not among them
}

// OpenRegistry reads the store and follows it until Close. Stored functions that cannot be read are left out and logged.
func OpenRegistry(ctx context.Context, s Store, log *slog.Logger) (*Registry, error) {
	r := &Registry{log: log, deployed: map[string]Deployed{}, changed: make(chan struct{})}
	r.view.Store(&view{})
	stop, err := s.Watch(ctx, r.apply)
	if err != nil {
		return nil, fmt.Errorf("registry: %w", err)
	}
	r.stop = stop
	r.mu.Lock()
	defer r.mu.Unlock()
	r.synced = true
	r.view.Store(newView(r.deployed))
	return r, nil
}

// Close stops following the store. What was read stays readable.
func (r *Registry) Close() { r.stop() }

// Functions returns what is deployed, sorted by key. The slice is shared and must not be changed.
func (r *Registry) Functions() []Deployed { return r.view.Load().functions }

// Function returns the function with this key.
func (r *Registry) Function(key string) (Deployed, bool) {
	d, ok := r.view.Load().byKey[key]
	return d, ok
}

// Pipelines returns the pipelines that the functions form, sorted by namespace and name, faulty ones included. The slice is
// shared and must not be changed.
func (r *Registry) Pipelines() []pipeline.Pipeline { return r.view.Load().pipelines }

// Graph returns what an invocation of key walks: the function with this key alone, as a pipeline of one stage, or else the
// pipeline of this name, which may have faults.
func (r *Registry) Graph(key string) (pipeline.Pipeline, bool) {
	p, ok := r.view.Load().graphs[key]
	return p, ok
}

// Resolve returns the key of the function or pipeline that a URL names, either in full, "name.namespace", or by its name
// alone in the default namespace. When both readings exist the full one is meant.
func (r *Registry) Resolve(name string) (key string, ok bool) {
	key, ok = r.view.Load().names[name]
	return key, ok
}

// OnChange has f called after each change from now on, when the registry shows it and before the deploy that made it is
// answered. Calls come one at a time and hold up the next change, so f must be short.
func (r *Registry) OnChange(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.listeners = append(r.listeners, f)
}

// apply takes one entry of the store's watch; calls come one at a time.
func (r *Registry) apply(e Entry) {
	d, err := Deployed{}, error(nil)
	if !e.Deleted {
		d, err = decode(e)
	}
	r.mu.Lock()
	switch {
	case e.Deleted:
		delete(r.deployed, e.Key)
	case err != nil:
		delete(r.deployed, e.Key) // it is no longer what it was
		r.log.Warn("a stored function is left out", "error", err)
	default:
		r.deployed[e.Key] = d
	}
	synced, listeners := r.synced, slices.Clone(r.listeners)
	if synced {
		r.view.Store(newView(r.deployed))
	}
	r.mu.Unlock()
	if synced {
		for _, f := range listeners {
			f()
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.seen = max(r.seen, e.Revision)
	close(r.changed)
	r.changed = make(chan struct{})
}

// wait returns when revision and, with it, all before it have been applied and every listener knows.
func (r *Registry) wait(ctx context.Context, revision uint64) error {
	return r.until(ctx, func() bool { return r.seen >= revision })
}

// waitGone returns when key is not deployed.
func (r *Registry) waitGone(ctx context.Context, key string) error {
	return r.until(ctx, func() bool { _, there := r.deployed[key]; return !there })
}

func (r *Registry) until(ctx context.Context, ok func() bool) error {
	for {
		r.mu.Lock()
		done, changed := ok(), r.changed
		r.mu.Unlock()
		if done {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("the change is stored but not yet seen: %w", ctx.Err())
		}
	}
}

func newView(deployed map[string]Deployed) *view {
	v := &view{byKey: maps.Clone(deployed), names: map[string]string{}, graphs: map[string]pipeline.Pipeline{}}
	v.functions = slices.SortedFunc(maps.Values(deployed), func(a, b Deployed) int { return cmp.Compare(a.Key, b.Key) })
	declared := make([]pipeline.Function, len(v.functions))
	for i, d := range v.functions {
		declared[i] = d.Declared
	}
	v.pipelines = pipeline.Assemble(declared)
	for _, p := range v.pipelines {
		v.graphs[pipeline.Key(p.Name, p.Namespace)] = p
	}
	for _, d := range v.functions { // after the pipelines: of the same name, the function is meant
		v.graphs[d.Key] = alone(d.Declared)
	}
	for key := range v.graphs {
		v.names[key] = key
	}
	for key, p := range v.graphs {
		if _, full := v.names[p.Name]; !full && p.Namespace == DefaultNamespace {
			v.names[p.Name] = key
		}
	}
	return v
}

// alone is the function as a pipeline of one stage, which has no predecessor to wait for.
func alone(f pipeline.Function) pipeline.Pipeline {
	f.Join = 0
	return pipeline.Pipeline{
		Name: f.Name, Namespace: f.Namespace, Entry: f.Name, SLO: f.SLO, Stages: []pipeline.Stage{{Function: f}},
	}
}
