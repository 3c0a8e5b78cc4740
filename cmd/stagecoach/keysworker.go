package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// keysWorker gives a node's server access to its KeysManager.
type keysWorker struct {
	*keysmanager.Manager
	// lists its containers; nil: its functions run in none
	containers func() []node.Container
	far        *farSide // nil: all orders are of this machine
}

// Start implements node.Worker.
func (w *keysWorker) Start(ctx context.Context, o node.Order, progress func(node.Phase)) (node.Started, error) {
	o, err := w.far.localized(o)
	if err != nil {
		return node.Started{}, err
	}
	r, err := w.Manager.Start(ctx, o, progress)
	var short *task.MemoryError
	if errors.As(err, &short) {
		err = detailed{err, (*node.MemoryError)(short)}
	}
	return r, err
}

// Do implements node.Worker.
func (w *keysWorker) Do(ctx context.Context, o node.Order) (int64, error) {
	o, err := w.far.localized(o)
	if err != nil {
		return 0, err
	}
	switch o.Kind {
	case node.OrderStop:
		return 0, w.Stop(ctx, o.Replica, o.Grace)
	case node.OrderSetCPU:
		return 0, w.SetCPU(ctx, o.Replica, o.CPUMilli)
	case node.OrderWarm:
		return 0, w.Warm(ctx, o.Wanted)
	case node.OrderLoad:
		z, err := w.Load(ctx, o.Spec)
		return z.Bytes, err
	case node.OrderEvict:
		what := o.Function
		if what == "" {
			what = o.Digest
		}
		return w.Evict(ctx, what)
	case node.OrderInvalidate:
		_, err := w.Invalidate(ctx, o.Function)
		return 0, err
	case node.OrderForget:
		w.Forget(o.Function)
		if w.far != nil {
			w.far.secrets.forget(o.Function)
		}
		return 0, nil
	}
	return 0, fmt.Errorf("order to %s: %w", o.Kind, errors.ErrUnsupported)
}

// Inventory implements node.Worker.
func (w *keysWorker) Inventory() node.Inventory {
	all := w.Manager.Inventory()
	inv := inventoryOf(all)
	if w.containers != nil {
		inv.Containers = named(w.containers(), all.Replicas)
	}
	if w.far != nil {
		inv.Secrets = w.far.secrets.functions()
	}
	return inv
}
