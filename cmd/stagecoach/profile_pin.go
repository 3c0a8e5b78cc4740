package main

import (
	"errors"
	"fmt"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/control/cluster"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider"
)

// pinner lets the provider pin functions of the cluster.
type pinner struct {
	local *cluster.Local
	nodes *nodes
}

// Pin implements provider.Pinner.
func (p pinner) Pin(key pipeline.Key, pin provider.Pin) (provider.Held, error) {
	h, err := p.local.Pin(key, cluster.Pin{Holder: pin.Holder, CPUMilli: pin.CPUMilli, Until: pin.Until})
	switch {
	case errors.Is(err, cluster.ErrInUse):
		return provider.Held{}, fmt.Errorf("%w: %w; measure it when it is idle, or under another name and then store that profile with it", provider.ErrPinned, err)
	case errors.Is(err, cluster.ErrPinned):
		return provider.Held{}, fmt.Errorf("%w: %w", provider.ErrPinned, err)
	case err != nil:
		return provider.Held{}, err
	}
	out := provider.Held{
		Replica: h.Name, Node: h.Node, Ready: h.Alone && h.State == plan.Ready, CPUMilli: h.CPUMilli, Unbounded: h.Unbounded,
		Slots: h.Slots, Batch: h.Batch,
	}
	for _, n := range p.nodes.Inventories() {
		if n.Name == h.Node {
			out.NodeCPU = n.CPU.Total
		}
	}
	return out, nil
}

// Unpin implements provider.Pinner.
func (p pinner) Unpin(key pipeline.Key, holder string) { p.local.Unpin(key, holder) }
