package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

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
	inside     *nodeInside
	images     *nodeImages
}

// Start implements node.Worker.
func (w *keysWorker) Start(ctx context.Context, o node.Order, progress func(node.Phase)) (node.Started, error) {
	o, err := w.far.localized(o)
	if err != nil {
		return node.Started{}, err
	}
	fetch, err := w.ensure(ctx, o, progress)
	if err != nil {
		return node.Started{}, fmt.Errorf("replica %q of %q: %w", o.Replica, o.Spec.Function, err)
	}
	r, err := w.Manager.Start(ctx, o, progress)
	r.Phases = append(fetch, r.Phases...)
	var short *task.MemoryError
	if errors.As(err, &short) {
		err = detailed{err, (*node.MemoryError)(short)}
	}
	return r, err
}

// ensure fetches the image of an order, unless the node has it. It returns the phase "image" if it
// has fetched one.
func (w *keysWorker) ensure(ctx context.Context, o node.Order, progress func(node.Phase)) ([]node.Phase, error) {
	begin := time.Now()
	fetched, err := w.images.ensure(ctx, o.Spec.Image, o.Images.Sources)
	if err != nil || !fetched {
		return nil, err
	}
	p := node.Phase{Name: "image", Took: time.Since(begin)}
	progress(p)
	return []node.Phase{p}, nil
}

// warm loads the parameters of the functions whose images the node has, and fetches the other
// images. The control plane orders this again within ten seconds.
func (w *keysWorker) warm(ctx context.Context, o node.Order) error {
	wanted := slices.DeleteFunc(o.Wanted, func(f node.Wanted) bool {
		missing := len(o.Images.Sources) > 0 && !w.images.runs(f.Spec.Image)
		if missing {
			w.images.ahead(f.Spec.Image, o.Images.Sources)
		}
		return missing
	})
	return w.Warm(ctx, wanted)
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
		return 0, w.warm(ctx, o)
	case node.OrderImages:
		return 0, w.images.use(ctx, o.Images.InUse)
	case node.OrderLoad:
		if _, err := w.images.ensure(ctx, o.Spec.Image, o.Images.Sources); err != nil {
			return 0, err
		}
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
	inv.Images, inv.Inside = w.images.list(), w.inside.at
	if w.containers != nil {
		inv.Containers = named(w.containers(), all.Replicas)
	}
	if w.far != nil {
		inv.Secrets = w.far.secrets.functions()
	}
	return inv
}
