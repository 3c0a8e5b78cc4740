package provider

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// Retained reports whether a key is that of a removed function whose variants serve its stage.
func (r *Registry) Retained(key pipeline.Key) bool {
	_, ok := r.retained.Load(key)
	return ok
}

// Variants returns the keys of a function's variants, sorted.
func (r *Registry) Variants(of pipeline.Key) []pipeline.Key {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.SortedFunc(maps.Keys(r.assembly.variants[of]), pipeline.Key.Compare)
}

// VariantFault returns why a variant serves no stage. bad is false if it serves one, or is none.
func (r *Registry) VariantFault(f pipeline.Function) (fault pipeline.Fault, bad bool) {
	if f.VariantOf == "" {
		return pipeline.Fault{}, false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	near := map[string]pipeline.Function{}
	if of := r.assembly.functions[pipeline.Key{Name: f.VariantOf, Namespace: f.Namespace}]; of != nil {
		near[of.Name] = *of
	}
	return pipeline.VariantFault(f, near)
}

// applyRetained follows the declarations of removed functions whose variants serve their stages.
func (r *Registry) applyRetained(key pipeline.Key, e Entry) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.retained.Delete(key)
	if !e.Deleted {
		d, err := decode(Entry{Key: key.String(), Value: e.Value, Revision: e.Revision})
		if err != nil {
			r.log.Warn("a stored stage without a function is left out", "error", err)
		} else {
			d.Declared.Retained = true
			r.retained.Store(key, &entry{d, d.Declared.Alone()})
		}
	}
	r.reassemble(key)
}

// retainer keeps the declarations of removed functions while variants serve their stages. The
// caller of its methods holds the token Provider.change.
type retainer struct {
	store    Store
	registry *Registry
}

// retain stores the declaration of a function that is about to be removed, if it has variants.
func (s retainer) retain(ctx context.Context, d Deployed) error {
	if d.Declared.VariantOf != "" || len(s.registry.Variants(d.Key)) == 0 {
		return nil
	}
	value, err := encode(d)
	if err != nil {
		return err
	}
	rev, err := s.store.Put(ctx, stagePrefix+d.Key.String(), value)
	if err != nil {
		return fmt.Errorf("stage %q, for its variants: %w", d.Key, err)
	}
	return s.registry.wait(ctx, rev)
}

// release drops the retained declaration of a stage whose last variant is about to be removed, or
// about to become something else.
func (s retainer) release(ctx context.Context, old Deployed, now *pipeline.Function) error {
	if old.Declared.VariantOf == "" || now != nil && now.VariantOf == old.Declared.VariantOf {
		return nil
	}
	stage := old.Declared.Stage()
	if !s.registry.Retained(stage) || len(s.registry.Variants(stage)) > 1 {
		return nil
	}
	return s.drop(ctx, stage)
}

// drop removes a retained declaration.
func (s retainer) drop(ctx context.Context, stage pipeline.Key) error {
	if err := s.store.Delete(ctx, stagePrefix+stage.String()); err != nil {
		return fmt.Errorf("stage %q: %w", stage, err)
	}
	return s.registry.waitGone(ctx, stagePrefix+stage.String())
}
