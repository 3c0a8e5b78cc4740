package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// keysWorker is a KeysManager as a node's server has it.
type keysWorker struct{ *keysmanager.Manager }

// specOf reads a function's spec. A field that is not known here was set by somebody who means it.
func specOf(b json.RawMessage) (keysmanager.Spec, error) {
	var s keysmanager.Spec
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&s); err != nil {
		return s, fmt.Errorf("spec: %w; run the same release of stagecoach everywhere", err)
	}
	if s.Function == "" || s.Namespace == "" || s.Image == "" {
		return s, fmt.Errorf("spec: function %q, namespace %q, image %q, want all of them", s.Function, s.Namespace, s.Image)
	}
	return s, nil
}

// Start implements node.Worker.
func (w *keysWorker) Start(ctx context.Context, o node.Order, progress func(node.Phase)) (node.Started, error) {
	s, err := specOf(o.Spec)
	if err != nil {
		return node.Started{}, err
	}
	r, err := w.Manager.Start(ctx, keysmanager.Order{
		Replica: o.Replica, Spec: s, CPUMilli: o.CPUMilli, Device: o.Device,
		Phase: func(p keysmanager.Phase) { progress(node.Phase(p)) },
	})
	if err != nil {
		var short *task.MemoryError
		if errors.As(err, &short) {
			err = detailed{err, (*node.MemoryError)(short)}
		}
		return node.Started{}, err
	}
	return node.Started{PID: r.PID, Path: r.Path, Phases: phasesOf(r.Phases), Conn: r.Conn}, nil
}

// Do implements node.Worker.
func (w *keysWorker) Do(ctx context.Context, o node.Order) (int64, error) {
	switch o.Kind {
	case node.OrderStop:
		return 0, w.Stop(ctx, o.Replica, o.Grace)
	case node.OrderSetCPU:
		return 0, w.SetCPU(ctx, o.Replica, o.CPUMilli)
	case node.OrderWarm:
		return 0, w.warm(ctx, o.Wanted)
	case node.OrderLoad:
		s, err := specOf(o.Spec)
		if err != nil {
			return 0, err
		}
		z, err := w.Load(ctx, s)
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
		return 0, nil
	}
	return 0, fmt.Errorf("order to %s: %w", o.Kind, errors.ErrUnsupported)
}

func (w *keysWorker) warm(ctx context.Context, wanted []node.Wanted) error {
	var list []keysmanager.Wanted
	var errs []error
	for _, wish := range wanted {
		s, err := specOf(wish.Spec)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		list = append(list, keysmanager.Wanted{Spec: s, Key: wish.Key})
	}
	return errors.Join(append(errs, w.Warm(ctx, list))...)
}

// Inventory implements node.Worker.
func (w *keysWorker) Inventory() node.Inventory { return inventoryOf(w.Manager.Inventory()) }
