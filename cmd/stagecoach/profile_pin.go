package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/stagecoach-serving/stagecoach/cluster"
	"github.com/stagecoach-serving/stagecoach/control"
	"github.com/stagecoach-serving/stagecoach/plan"
	"github.com/stagecoach-serving/stagecoach/provider"
)

// pinner is the cluster as the provider's Pinner.
type pinner struct {
	local *cluster.Local
	loop  *control.Loop
	nodes *nodes
}

// quiet is how long nobody must have asked a function for it to be pinned: what it then takes from its users is measured away.
const quiet = 2 * time.Second

// Pin implements provider.Pinner.
func (p pinner) Pin(key string, pin provider.Pin) (provider.Held, error) {
	if now := time.Now(); !p.local.PinnedBy(key, pin.Holder) {
		s, _ := p.loop.Last()
		if f, ok := s.Function(key); ok && (f.Running+f.Waiting > 0 || now.Sub(f.Demand.Last) < quiet) {
			return provider.Held{}, fmt.Errorf("function %q is in use: %w; measure it when it is idle, or under another name and then store that profile with it", key, provider.ErrPinned)
		}
	}
	h, err := p.local.Pin(key, cluster.Pin{Holder: pin.Holder, CPUMilli: pin.CPUMilli, Until: pin.Until})
	if errors.Is(err, cluster.ErrPinned) {
		return provider.Held{}, fmt.Errorf("%w: %w", provider.ErrPinned, err)
	}
	if err != nil {
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
func (p pinner) Unpin(key, holder string) { p.local.Unpin(key, holder) }
