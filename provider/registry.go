package provider

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// Registry holds the present deployments, as the store's watch reports them. Reading takes no lock.
// The cost of a change depends only on the function and its pipelines.
type Registry struct {
	// Outside has the namespaces, if something else than the API makes them; nil: nothing does. It
	// is set before the first request.
	Outside Outside

	log  *slog.Logger
	stop func()

	functions sync.Map // pipeline.Key to *entry
	profiles  sync.Map // pipeline.Key to *profiled; may include removed functions
	graphs    sync.Map // pipeline.Key to *pipeline.Pipeline; without those of single functions
	retained  sync.Map // pipeline.Key to *entry: removed functions whose variants serve their stage
	sorted    atomic.Pointer[[]*Deployed]
	// The values of graphs, sorted; nil: sorted on demand.
	pipelines atomic.Pointer[[]pipeline.Pipeline]
	declared  atomic.Pointer[map[string]Namespace]

	// Accuracy has the measured accuracies of functions and of chains.
	Accuracy Accuracies

	watched
	mu        sync.Mutex
	assembly  assembly
	listeners []func(Change)
}

// entry is a function and its graph for direct invocation.
type entry struct {
	Deployed
	alone pipeline.Pipeline
}

// Change is a change of one function.
type Change struct {
	Key      pipeline.Key
	Function *Deployed // nil: it was removed
}

// OpenRegistry reads the store and follows it until Close. It logs and leaves out stored functions
// that cannot be read.
func OpenRegistry(ctx context.Context, s Store, log *slog.Logger) (*Registry, error) {
	r := &Registry{log: log, watched: newWatched(), assembly: newAssembly()}
	r.Accuracy.registry = r
	r.sorted.Store(&[]*Deployed{})
	r.declared.Store(&map[string]Namespace{})
	stop, err := s.Watch(ctx, r.apply)
	if err != nil {
		return nil, fmt.Errorf("registry: %w", err)
	}
	r.stop = stop
	return r, nil
}

// Close stops following the store. The registry can still be read.
func (r *Registry) Close() { r.stop() }

// Functions returns all deployed functions, sorted by key. The slice and the functions are shared
// and must not be changed.
func (r *Registry) Functions() []*Deployed { return *r.sorted.Load() }

// Function returns the function with this key.
func (r *Registry) Function(key pipeline.Key) (Deployed, bool) {
	if e, ok := r.functions.Load(key); ok {
		return e.(*entry).Deployed, true
	}
	return Deployed{}, false
}

// Pipelines returns all pipelines, including faulty ones, sorted by namespace and name. The slice
// is shared and must not be changed.
func (r *Registry) Pipelines() []pipeline.Pipeline {
	if all := r.pipelines.Load(); all != nil {
		return *all
	}
	r.mu.Lock() // no change happens meanwhile
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

// Alone reports whether an invocation of key runs only the function with this key. It is false if
// there is only a pipeline with this key, or if the function is a stage of that pipeline.
func (r *Registry) Alone(key pipeline.Key) bool {
	d, ok := r.Function(key)
	return ok && !d.Declared.StageOf(key.Name)
}

// Graph returns the graph that an invocation of key runs. If [Registry.Alone] is true, that is the
// function as a pipeline of one stage, else the pipeline with this key, which may have faults.
func (r *Registry) Graph(key pipeline.Key) (pipeline.Pipeline, bool) {
	e, function := r.functions.Load(key)
	if function && !e.(*entry).Declared.StageOf(key.Name) {
		return e.(*entry).alone, true
	}
	if p, ok := r.graphs.Load(key); ok {
		return *p.(*pipeline.Pipeline), true
	}
	if function { // the function joins or leaves the pipeline with its name right now
		return e.(*entry).alone, true
	}
	if e, ok := r.retained.Load(key); ok {
		return e.(*entry).alone, true
	}
	return pipeline.Pipeline{}, false
}

// Pipeline returns the pipeline with this key and whether it exists. It may have faults.
func (r *Registry) Pipeline(key pipeline.Key) (pipeline.Pipeline, bool) {
	if p, ok := r.graphs.Load(key); ok {
		return *p.(*pipeline.Pipeline), true
	}
	return pipeline.Pipeline{}, false
}

// Known reports whether a function or pipeline has this key, or a removed function whose variants
// serve its stage.
func (r *Registry) Known(key pipeline.Key) bool {
	_, ok := r.Graph(key)
	return ok
}

// TakesItems reports whether a JSON array that invokes key is a list of items. It returns true for
// an unknown key.
func (r *Registry) TakesItems(key pipeline.Key) bool {
	g, _ := r.Graph(key)
	return g.TakesItems()
}

// HasNamespace reports whether a namespace exists: the default one, a declared one, or one that has
// functions. Those of [Registry.Outside] replace the declared ones.
func (r *Registry) HasNamespace(name string) bool {
	_, declared := r.Namespaces()[name]
	if r.Outside != nil {
		declared = r.Outside.Admit(name) == nil
	}
	if declared || name == pipeline.DefaultNamespace {
		return true
	}
	for _, d := range r.Functions() {
		if d.Declared.Namespace == name {
			return true
		}
	}
	return false
}

// NotFound returns the error for a function or pipeline that does not exist, or whose namespace
// does not exist. what is the word for the text: "function", "pipeline", or both.
func (r *Registry) NotFound(what string, key pipeline.Key) error {
	if !r.HasNamespace(key.Namespace) {
		return r.noNamespace(key.Namespace)
	}
	return refuse(http.StatusNotFound, fmt.Errorf("no %s %s in namespace %s", what, quote(key.Name), quote(key.Namespace)))
}

func (r *Registry) noNamespace(name string) error {
	if r.Outside != nil {
		err := fmt.Errorf("no namespace %s, want one of: %s", quote(name), some(r.namespaceNames()))
		if why := r.Outside.Admit(name); why != nil {
			err = fmt.Errorf("%w; %w", err, why)
		}
		return refuse(http.StatusNotFound, err)
	}
	return refuse(http.StatusNotFound, fmt.Errorf("no namespace %s, want one of: %s; or deploy a function there, which creates it", quote(name), some(r.namespaceNames())))
}

// namespaceNames returns the names of all namespaces, sorted (see HasNamespace).
func (r *Registry) namespaceNames() []string {
	out := map[string]bool{pipeline.DefaultNamespace: true}
	if r.Outside != nil {
		for _, name := range r.Outside.Names() {
			out[name] = true
		}
	} else {
		for name := range r.Namespaces() {
			out[name] = true
		}
	}
	for _, d := range r.Functions() {
		out[d.Declared.Namespace] = true
	}
	return slices.Sorted(maps.Keys(out))
}

// Namespaces returns the declared namespaces by name. Other namespaces exist as long as they have
// functions. The map is shared and must not be changed.
func (r *Registry) Namespaces() map[string]Namespace { return *r.declared.Load() }

// OnChange registers f to be called after each later change of a function. The registry already
// shows the change when f runs, but the deploy is not yet answered. Calls of f come one at a time
// and delay the next change, so f must be quick.
func (r *Registry) OnChange(f func(Change)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.listeners = append(r.listeners, f)
}

// apply applies one entry of the store's watch. Calls come one at a time.
func (r *Registry) apply(e Entry) {
	if name, ok := strings.CutPrefix(e.Key, namespacePrefix); ok {
		r.applyNamespace(name, e)
	} else if key, ok := strings.CutPrefix(e.Key, profilePrefix); ok {
		r.applyProfile(pipeline.ParseKey(key), e)
	} else if key, ok := strings.CutPrefix(e.Key, stagePrefix); ok {
		r.applyRetained(pipeline.ParseKey(key), e)
	} else if !r.Accuracy.apply(e) {
		r.applyFunction(e)
	}
	r.note(e)
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
	change := Change{Key: pipeline.ParseKey(e.Key)}
	if !e.Deleted {
		d, err := decode(e)
		if err != nil { // the old value is void
			r.log.Warn("a stored function is left out", "error", err)
		} else {
			change.Function = &d
			if _, err := parse(d.Deployment, pipeline.Parse); err != nil {
				r.log.Warn("a stored function has a name that is no longer accepted: it still serves, but cannot be updated; deploy it under a new name and remove it",
					"function", change.Key, "error", err)
			}
		}
	}
	r.mu.Lock()
	if change.Function != nil {
		r.functions.Store(change.Key, &entry{*change.Function, change.Function.Declared.Alone()})
	} else {
		r.functions.Delete(change.Key)
	}
	r.sorted.Store(with(r.Functions(), change))
	r.reassemble(change.Key)
	listeners := slices.Clone(r.listeners)
	r.mu.Unlock()
	for _, f := range listeners {
		f(change)
	}
}

// with returns the sorted functions after a change.
func with(all []*Deployed, c Change) *[]*Deployed {
	i, there := slices.BinarySearchFunc(all, c.Key, func(d *Deployed, key pipeline.Key) int { return d.Key.Compare(key) })
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

// reassemble assembles the pipelines that a change of a function may have affected. The caller
// holds r.mu.
func (r *Registry) reassemble(key pipeline.Key) {
	old, now := r.assembly.functions[key], (*pipeline.Function)(nil)
	if e, ok := r.functions.Load(key); ok {
		now = &e.(*entry).Declared
	} else if e, ok := r.retained.Load(key); ok {
		now = &e.(*entry).Declared
	}
	if old == now { // a deployed function counts, whatever is retained
		return
	}
	changed := r.assembly.change(key, old, now)
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

// stagesOf returns the names of a pipeline's stages, sorted.
func stagesOf(all []*Deployed, name, namespace string) (stages []string) {
	for _, d := range all {
		if d.Declared.Namespace == namespace && d.Declared.StageOf(name) {
			stages = append(stages, d.Declared.Name)
		}
	}
	return stages
}
