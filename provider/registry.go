package provider

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// DefaultNamespace is where a function without a namespace lives.
const DefaultNamespace = "openfaas-fn"

// Registry is what is deployed, as the store's watch tells it. Reading takes no lock, and a change costs what it changes: the
// function and the pipelines that have to do with it.
type Registry struct {
	log  *slog.Logger
	stop func()

	functions sync.Map // by key: *entry
	profiles  sync.Map // by key: *profiled; of functions that may be gone
	graphs    sync.Map // by key: *pipeline.Pipeline; not those of functions of their own
	sorted    atomic.Pointer[[]*Deployed]
	pipelines atomic.Pointer[[]pipeline.Pipeline] // those of graphs, sorted; nil: to be sorted when somebody asks
	declared  atomic.Pointer[map[string]Namespace]

	mu        sync.Mutex
	assembly  assembly
	seen      uint64          // the highest revision applied
	present   map[string]bool // keys in the store, as far as applied
	changed   chan struct{}   // closed at the next change
	listeners []func(Change)
}

// entry is a function and its graph when it is invoked by itself.
type entry struct {
	Deployed
	alone pipeline.Pipeline
}

// Change is a change of one function.
type Change struct {
	Key      string
	Function *Deployed // nil: it is not deployed any more
}

// OpenRegistry reads the store and follows it until Close. Stored functions that cannot be read are left out and logged.
func OpenRegistry(ctx context.Context, s Store, log *slog.Logger) (*Registry, error) {
	r := &Registry{log: log, changed: make(chan struct{}), assembly: newAssembly(), present: map[string]bool{}}
	r.sorted.Store(&[]*Deployed{})
	r.declared.Store(&map[string]Namespace{})
	stop, err := s.Watch(ctx, r.apply)
	if err != nil {
		return nil, fmt.Errorf("registry: %w", err)
	}
	r.stop = stop
	return r, nil
}

// Close stops following the store. What was read stays readable.
func (r *Registry) Close() { r.stop() }

// Functions returns what is deployed, sorted by key. Slice and functions are shared and must not be changed.
func (r *Registry) Functions() []*Deployed { return *r.sorted.Load() }

// Function returns the function with this key.
func (r *Registry) Function(key string) (Deployed, bool) {
	if e, ok := r.functions.Load(key); ok {
		return e.(*entry).Deployed, true
	}
	return Deployed{}, false
}

// Pipelines returns the pipelines that the functions form, sorted by namespace and name, faulty ones included. The slice is
// shared and must not be changed.
func (r *Registry) Pipelines() []pipeline.Pipeline {
	if all := r.pipelines.Load(); all != nil {
		return *all
	}
	r.mu.Lock() // no change meanwhile
	defer r.mu.Unlock()
	all := []pipeline.Pipeline{}
	r.graphs.Range(func(_, p any) bool {
		all = append(all, *p.(*pipeline.Pipeline))
		return true
	})
	slices.SortFunc(all, func(a, b pipeline.Pipeline) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	r.pipelines.Store(&all)
	return all
}

// Graph returns what an invocation of key walks: the function with this key alone, as a pipeline of one stage, or else the
// pipeline of this name, which may have faults.
func (r *Registry) Graph(key string) (pipeline.Pipeline, bool) {
	if e, ok := r.functions.Load(key); ok {
		return e.(*entry).alone, true
	}
	if p, ok := r.graphs.Load(key); ok {
		return *p.(*pipeline.Pipeline), true
	}
	return pipeline.Pipeline{}, false
}

// Resolve returns the key of the function or pipeline that a URL names, either in full, "name.namespace", or by its name
// alone in the default namespace. When both readings exist the full one is meant.
func (r *Registry) Resolve(name string) (key string, ok bool) {
	for _, key := range [...]string{name, pipeline.Key(name, DefaultNamespace)} {
		if _, ok := r.functions.Load(key); ok {
			return key, true
		}
		if _, ok := r.graphs.Load(key); ok {
			return key, true
		}
	}
	return "", false
}

// Namespaces returns those that were declared, by name; others are there as long as they have functions. The map is shared
// and must not be changed.
func (r *Registry) Namespaces() map[string]Namespace { return *r.declared.Load() }

// OnChange has f called after each change of a function from now on, when the registry shows it and before the deploy that
// made it is answered. Calls come one at a time and hold up the next change, so f must be short.
func (r *Registry) OnChange(f func(Change)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.listeners = append(r.listeners, f)
}

// apply takes one entry of the store's watch; calls come one at a time.
func (r *Registry) apply(e Entry) {
	if name, ok := strings.CutPrefix(e.Key, namespacePrefix); ok {
		r.applyNamespace(name, e)
	} else if key, ok := strings.CutPrefix(e.Key, profilePrefix); ok {
		r.applyProfile(key, e)
	} else {
		r.applyFunction(e)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.seen = max(r.seen, e.Revision)
	if r.present[e.Key] = !e.Deleted; e.Deleted {
		delete(r.present, e.Key)
	}
	close(r.changed)
	r.changed = make(chan struct{})
}

func (r *Registry) applyNamespace(name string, e Entry) {
	next := maps.Clone(r.Namespaces())
	delete(next, name)
	if !e.Deleted {
		n, err := decodeNamespace(name, e.Value)
		if err != nil {
			r.log.Warn("a stored namespace is left out", "error", err)
		} else {
			next[name] = n
		}
	}
	r.declared.Store(&next)
}

func (r *Registry) applyFunction(e Entry) {
	change := Change{Key: e.Key}
	if !e.Deleted {
		d, err := decode(e)
		if err != nil { // it is no longer what it was
			r.log.Warn("a stored function is left out", "error", err)
		} else {
			change.Function = &d
		}
	}
	r.mu.Lock()
	var old *pipeline.Function
	if before, ok := r.functions.Load(e.Key); ok {
		old = &before.(*entry).Declared
	}
	if change.Function != nil {
		r.functions.Store(e.Key, &entry{*change.Function, alone(change.Function.Declared)})
	} else {
		r.functions.Delete(e.Key)
	}
	r.sorted.Store(with(r.Functions(), change))
	r.reassemble(old, change)
	listeners := slices.Clone(r.listeners)
	r.mu.Unlock()
	for _, f := range listeners {
		f(change)
	}
}

// with returns sorted functions after a change.
func with(all []*Deployed, c Change) *[]*Deployed {
	i, there := slices.BinarySearchFunc(all, c.Key, func(d *Deployed, key string) int { return cmp.Compare(d.Key, key) })
	out := make([]*Deployed, i, len(all)+1)
	copy(out, all)
	if c.Function != nil {
		out = append(out, c.Function)
	}
	if there {
		i++
	}
	out = append(out, all[i:]...)
	return &out
}

// reassemble makes the pipelines anew that a change may have changed; r.mu is held.
func (r *Registry) reassemble(old *pipeline.Function, c Change) {
	var now *pipeline.Function
	if c.Function != nil {
		now = &c.Function.Declared
	}
	changed := r.assembly.change(c.Key, old, now)
	if len(changed) == 0 {
		return
	}
	for _, key := range changed {
		if p, ok := r.assembly.pipeline(key); ok {
			r.graphs.Store(key, &p)
		} else {
			r.graphs.Delete(key)
		}
	}
	r.pipelines.Store(nil)
}

// wait returns when revision and, with it, all before it have been applied and every listener knows.
func (r *Registry) wait(ctx context.Context, revision uint64) error {
	return r.until(ctx, func() bool { return r.seen >= revision })
}

// waitGone returns when key is not in the store and every listener knows.
func (r *Registry) waitGone(ctx context.Context, key string) error {
	return r.until(ctx, func() bool { return !r.present[key] })
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

// alone is the function as a pipeline of one stage, which has no predecessor to wait for.
func alone(f pipeline.Function) pipeline.Pipeline {
	f.Join = 0
	return pipeline.Pipeline{
		Name: f.Name, Namespace: f.Namespace, Entry: f.Name, SLO: f.SLO, Stages: []pipeline.Stage{{Function: f}},
	}
}
