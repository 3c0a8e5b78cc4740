package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"

	"github.com/stagecoach-serving/stagecoach/bench/autoscaler"
	"github.com/stagecoach-serving/stagecoach/bench/batch"
	"github.com/stagecoach-serving/stagecoach/bench/coldstart"
	"github.com/stagecoach-serving/stagecoach/bench/gpu"
	"github.com/stagecoach-serving/stagecoach/bench/hop"
	"github.com/stagecoach-serving/stagecoach/bench/idle"
	keysbench "github.com/stagecoach-serving/stagecoach/bench/keysmanager"
	nodesbench "github.com/stagecoach-serving/stagecoach/bench/nodes"
	"github.com/stagecoach-serving/stagecoach/bench/remote"
	"github.com/stagecoach-serving/stagecoach/bench/scale"
	simbench "github.com/stagecoach-serving/stagecoach/bench/sim"
	"github.com/stagecoach-serving/stagecoach/bench/starts"
	"github.com/stagecoach-serving/stagecoach/bench/wake"
	"github.com/stagecoach-serving/stagecoach/control/cluster"
	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/warden"
)

// runBench runs one of the benches.
func runBench(ctx context.Context, args []string, out io.Writer) error {
	m := benchMachine(defaultRuntime())
	m.Contain = func(address, namespace string) starts.Machine {
		return benchMachine(RuntimeConfig{Name: runtimeContainerd, Address: address, Namespace: namespace})
	}
	on := func(bench func(context.Context, starts.Machine, []string, io.Writer) error) func(context.Context, []string, io.Writer) error {
		return func(ctx context.Context, args []string, out io.Writer) error { return bench(ctx, m, args, out) }
	}
	benches := map[string]func(context.Context, []string, io.Writer) error{
		"coldstart":   on(coldstart.Run),
		"autoscaler":  autoscaler.Run,
		"batch":       batch.Run,
		"gpu":         on(gpu.Run),
		"keysmanager": on(keysbench.Run),
		"hop":         hop.Run,
		"idle":        idle.Run,
		"nodes":       remote.Run,
		"nodes-scale": func(ctx context.Context, args []string, out io.Writer) error {
			return nodesbench.Run(ctx, func(c *node.Client) cluster.Node { return remoteNode{Client: c} }, args, out)
		},
		"nodes-scale-fleet": nodesbench.RunFleet, // the process of nodes-scale's nodes
		"wake":              wake.Run,
		"scale":             scale.Run,
		"sim":               simbench.Run,
		"echo":              hop.Echo, // a server that hop compares with
		"load":              hop.Load, // a process that sends hop's load
	}
	if len(args) == 0 || benches[args[0]] == nil {
		return fmt.Errorf("bench: got %q, want one of: autoscaler, batch, coldstart, gpu, hop, idle, keysmanager, nodes, nodes-scale, scale, sim, wake", args)
	}
	return benches[args[0]](ctx, args[1:], out)
}

// benchMachine returns this machine with a runtime.
func benchMachine(r RuntimeConfig) starts.Machine {
	return starts.Machine{Devices: devicesOf, Isolate: func(dir string, log *slog.Logger) (keysmanager.Config, func(), error) {
		return isolateBench(r, dir, log)
	}}
}

// isolateBench returns the configuration of a bench's KeysManager, with users, networks, cgroups
// and a runtime as on a node.
func isolateBench(r RuntimeConfig, dir string, log *slog.Logger) (cfg keysmanager.Config, done func(), err error) {
	users, err := openAccounts(sandbox.DefaultRange.String(), log)
	if err != nil {
		return cfg, nil, err
	}
	nets, err := openNetworks(networkConfig{cidr: defaultNetwork}, "bench", dir, log)
	if err != nil {
		return cfg, nil, errors.Join(err, users.close())
	}
	groups, closeGroups := openGroups("bench", dir, log)
	shut := func() {
		closeGroups()
		_, _ = nets.close(), users.close() // no process uses them any more
	}
	node := nodeID("bench", dir)
	opened, err := r.open(context.Background(), node, nil, log)
	if err != nil {
		shut()
		return cfg, nil, err
	}
	processes := warden.InProcess(opened)
	done = func() { processes.Close(); shut() }
	cfg.Warden = processes
	cfg.Groups, cfg.Accounts, cfg.Networks, cfg.Allowed, cfg.Watchdog = groups, users.forKeys(), nets.forKeys(), keysmanager.Allowed{HostNetwork: true, Spares: 1}, r.watchdog(node)
	return cfg, done, nil
}
