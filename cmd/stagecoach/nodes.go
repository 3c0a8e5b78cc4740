package main

import (
	"context"

	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/node"
)

// nodeList is the nodes of a running stagecoach: its own KeysManager, if it has one, and daemons that have joined.
type nodeList interface {
	// Inventories returns what each node that is heard is and has, sorted by name.
	Inventories() []node.Inventory
	// Load brings a function's parameters into the memory of a node; Evict takes them, by function or digest, out of it, as
	// soon as no replica needs them. Both return when that is done.
	Load(ctx context.Context, node string, spec keysmanager.Spec) error
	Evict(ctx context.Context, node, what string) error
}

// inventoryOf is what a KeysManager has, as the node protocol says it. Who it is the caller adds.
func inventoryOf(inv keysmanager.Inventory) node.Inventory {
	out := node.Inventory{
		V:        node.Version,
		Identity: node.Identity{Name: inv.Node},
		Memory:   node.Memory{Total: inv.Memory, Used: inv.MemoryUsed, Threshold: int64(float64(inv.Memory) * keysmanager.Threshold)},
		CPU:      node.CPU{Total: inv.CPUMilli},
		Devices:  []node.Device{}, Zygotes: []node.Zygote{}, Failures: []node.Failure{}, Replicas: []node.Replica{}, // JSON lists, not null
		Counts: node.Counts{Hits: inv.Hits, Misses: inv.Misses, Evictions: inv.Evictions},
	}
	for _, z := range inv.Zygotes {
		out.Zygotes = append(out.Zygotes, node.Zygote{
			Function: z.Function, Digest: z.Digest, PID: z.PID, Bytes: z.Bytes, Replicas: z.Replicas, State: node.Ready, Load: z.Load,
		})
	}
	for _, f := range inv.Failures {
		out.Failures = append(out.Failures, node.Failure(f))
	}
	for _, r := range inv.Replicas {
		out.Replicas = append(out.Replicas, node.Replica{
			Name: r.Name, Function: r.Function, PID: r.PID, Path: r.Path, Phases: phasesOf(r.Phases), Started: r.Started,
		})
	}
	return out
}

func phasesOf(phases []keysmanager.Phase) []node.Phase {
	out := []node.Phase{}
	for _, p := range phases {
		out = append(out, node.Phase(p))
	}
	return out
}
