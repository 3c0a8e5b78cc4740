package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"

	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// runBench runs one of the benches.
func runBench(ctx context.Context, args []string, out io.Writer) error {
	m := machine{isolate: isolateBench, devices: devicesOf}
	on := func(bench func(context.Context, machine, []string, io.Writer) error) func(context.Context, []string, io.Writer) error {
		return func(ctx context.Context, args []string, out io.Writer) error { return bench(ctx, m, args, out) }
	}
	benches := map[string]func(context.Context, []string, io.Writer) error{
		"coldstart":   on(benchColdstart),
		"autoscaler":  benchAutoscaler,
		"gpu":         on(benchGPU),
		"keysmanager": on(benchKeysManager),
		"hop":         benchHop,
		"idle":        benchIdle,
		"wake":        benchWake,
		"sim":         benchSim,
		"echo":        benchEcho, // a server that hop compares with
		"load":        benchLoad, // a process that hop takes its load from
	}
	if len(args) == 0 || benches[args[0]] == nil {
		return fmt.Errorf("bench: got %q, want one of: autoscaler, coldstart, gpu, hop, idle, keysmanager, sim, wake", args)
	}
	return benches[args[0]](ctx, args[1:], out)
}

// isolateBench returns the configuration of a bench's KeysManager, with users, networks and cgroups
// as a node has them.
func isolateBench(dir string, log *slog.Logger) (cfg keysmanager.Config, done func(), err error) {
	users, err := openAccounts(sandbox.DefaultRange.String(), log)
	if err != nil {
		return cfg, nil, err
	}
	nets, err := openNetworks(defaultNetwork, "bench", dir, log)
	if err != nil {
		return cfg, nil, errors.Join(err, users.close())
	}
	groups, closeGroups := openGroups("bench", dir, log)
	done = func() {
		closeGroups()
		_, _ = nets.close(), users.close() // no process has one any more
	}
	cfg.Groups, cfg.Accounts, cfg.Networks, cfg.HostNetwork, cfg.Watchdog = groups, users.forKeys(), nets.forKeys(), true, watchdogLine[:]
	return cfg, done, nil
}
