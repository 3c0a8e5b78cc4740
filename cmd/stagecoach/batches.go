package main

import (
	"log/slog"
	"sync"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider"
	"github.com/stagecoach-serving/stagecoach/request/dispatch"
)

// batches keeps the batch sizes of lines as the functions declare them, or as they were chosen from
// profiles. It is safe for concurrent use.
type batches struct {
	// Also held while a line changes, so that no line of a removed function comes back.
	mu     sync.Mutex
	chosen map[pipeline.Key]int
}

// ensure creates or changes the line of a function.
func (b *batches) ensure(lines *dispatch.Shell, f *provider.Deployed, exec *kind) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.apply(lines, f, exec)
}

// apply does what ensure does; b.mu is held.
func (b *batches) apply(lines *dispatch.Shell, f *provider.Deployed, exec *kind) error {
	batch := f.Declared.Batch
	if f.Declared.AutoBatch {
		batch = b.chosen[f.Key] // 0 until a snapshot has the function, which means 1
	}
	return lines.Ensure(dispatch.Spec{
		Function: f.Key, Revision: f.Revision, QueueLimit: f.Declared.QueueLimit, MaxReplicas: maxReplicas(f.Declared), Batch: batch,
		Timeout: exec.exec, VariantOf: f.Declared.Stage(), MaxLength: f.Declared.MaxLength,
	})
}

// remove removes the line of a function.
func (b *batches) remove(lines *dispatch.Shell, key pipeline.Key) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.chosen, key)
	lines.Remove(key)
}

// choose chooses the batches in s and gives them to the lines. The plan that s leads to starts
// replicas later, so they already take the new size.
func (b *batches) choose(s *plan.Snapshot, lines *dispatch.Shell, registry *provider.Registry, kinds *kinds, log *slog.Logger) {
	s.ChooseBatches()
	b.mu.Lock()
	defer b.mu.Unlock()
	for i := range s.Functions {
		f := &s.Functions[i]
		key := pipeline.ParseKey(f.Name)
		if f.AutoBatch == 0 && b.chosen[key] == 0 { // its batch is declared
			continue
		}
		if b.chosen[key] == f.Batch || !lines.Owns(key) {
			continue
		}
		d, there := registry.Function(key)
		if !there || !d.Declared.AutoBatch {
			continue
		}
		if b.chosen == nil {
			b.chosen = map[pipeline.Key]int{}
		}
		b.chosen[key] = f.Batch
		if err := b.apply(lines, &d, kinds.of(key)); err != nil {
			log.Error("function keeps its batch size", "function", key, "error", err)
		}
	}
}
