package keysmanager

import (
	"context"
	"errors"
	"fmt"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// watchdogMemory is added to a function's memory limit if a watchdog runs its program, in bytes. It
// is twice what a watchdog takes after thousands of requests on 16 connections (docs/adr/0062).
const watchdogMemory = 24 << 20

// limits returns the cgroup limits of a replica.
func limitsOf(s node.Spec) GroupLimits {
	return GroupLimits{Memory: s.Memory, CPUMilli: s.CPUMilli, PIDs: resources.MaxProcesses}
}

// tenantOf returns what a process of the function asks of the pool.
func tenantOf(s node.Spec) resources.Tenant {
	return resources.Tenant{Function: s.Function, Image: s.Image, Namespace: s.Namespace, Group: s.Group, Secrets: s.Secrets, Network: s.Network, Gateway: s.Gateway, Options: optionsOf(s)}
}

// optionsOf returns what the function asks for its processes.
func optionsOf(s node.Spec) sandbox.Options {
	return sandbox.Options{Class: s.Options.RuntimeClass, Drop: s.Options.DropCapabilities, Devices: s.Options.CDIDevices}
}

// ErrUnknown is the error for a replica that does not run here.
var ErrUnknown = errors.New("no replica of this name runs here")

// SetCPU sets how much CPU a replica may use from now on, in thousandths of a core. 0 restores the
// function's own limit. On a node without cgroups the error is errors.ErrUnsupported.
func (m *Manager) SetCPU(_ context.Context, replica string, milli int) error {
	m.store.mu.Lock()
	p := m.store.processes.running(replica)
	m.store.mu.Unlock()
	switch {
	case p == nil:
		return fmt.Errorf("replica %q: %w", replica, ErrUnknown)
	case p.zygote.Works():
		return fmt.Errorf("replica %q: its processor cannot be bounded, it is a part of worker %q: %w", replica, p.zygote.Key.Worker, errors.ErrUnsupported)
	case p.held.Group() == nil:
		return fmt.Errorf("replica %q: its processor cannot be bounded without cgroups: %w", replica, errors.ErrUnsupported)
	case milli < 0:
		return fmt.Errorf("replica %q: cpu %dm, want none below 0", replica, milli)
	}
	if err := p.held.Group().Bound(milli); err != nil {
		return err
	}
	m.starter.keep(p)
	return nil
}
