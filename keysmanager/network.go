package keysmanager

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// Networks makes network namespaces for processes; package network does.
type Networks interface {
	// Create makes a namespace with loopback and a way out.
	Create() (*os.File, error)
	// Lonely makes a namespace with loopback alone.
	Lonely() (*os.File, error)
	// Admit lets processes in namespaces of Create reach an address of the machine: the gateway's.
	Admit(gateway netip.AddrPort) error
	// Files returns the paths of what these processes see as /etc/hosts and /etc/resolv.conf. In hosts
	// the gateway has its names; the zero gateway is one where nobody listens.
	Files(gateway netip.AddrPort) (hosts, resolv string, err error)
}

// The networks that a node.Spec can ask for, in the words of the annotation stagecoach.dev/network.
const (
	networkDefault = "default" // a namespace with a way out
	networkHost    = "host"    // the machine's network
	networkNone    = "none"    // a namespace with loopback alone
)

// errHostNetwork refuses a function that asks for the machine's network.
var errHostNetwork = errors.New("annotation stagecoach.dev/network is host, and this node gives no function the machine's network: " +
	"want default or none, or start the node with --allow-host-network")

// networkOf returns the network in which a process of a spec is started: what the spec asks for, or
// the machine's if this node makes no networks. It is part of the keys of zygotes. So a node that
// makes networks forks nothing from a zygote that an earlier daemon has started without one.
func (m *Manager) networkOf(s node.Spec) string {
	if m.cfg.Networks == nil {
		return networkHost
	}
	return cmp.Or(s.Network, networkDefault)
}

// checkNetwork returns an error if a spec asks for a network that this node does not give.
func (m *Manager) checkNetwork(s node.Spec) error {
	if s.Network == networkHost && !m.cfg.HostNetwork {
		return errHostNetwork
	}
	return nil
}

// connect gives a command the network that its function asks for. The caller calls release once the
// process has started or has failed to: from then on the process alone keeps the namespace.
func (m *Manager) connect(c *sandbox.Command, s node.Spec, who lodger) (release func(), err error) {
	release = func() {
		if c.Network != nil {
			_ = c.Network.Close() // nothing was written
		}
	}
	if err := m.checkNetwork(s); err != nil {
		return release, err
	}
	switch m.networkOf(s) {
	case networkHost:
	case networkNone:
		c.Network, err = m.cfg.Networks.Lonely()
	default:
		err = m.wayOut(c, s)
	}
	if err == nil && c.Network != nil && who != itself {
		err = tellWatchdog(c)
	}
	if err != nil {
		release()
		return release, fmt.Errorf("a network for the function: %w", err)
	}
	return release, nil
}

// wayOut gives a command a network namespace from which it reaches other machines, and the gateway.
func (m *Manager) wayOut(c *sandbox.Command, s node.Spec) (err error) {
	var gateway netip.AddrPort
	if s.Gateway != "" {
		if gateway, err = netip.ParseAddrPort(s.Gateway); err != nil {
			return fmt.Errorf("gateway %q: %w", s.Gateway, err)
		}
		if err = m.cfg.Networks.Admit(gateway); err != nil {
			return err
		}
	}
	if c.Hosts, c.Resolv, err = m.cfg.Networks.Files(gateway); err != nil {
		return err
	}
	c.Network, err = m.cfg.Networks.Create()
	return err
}

// tellWatchdog tells a watchdog which network its program is in.
func tellWatchdog(c *sandbox.Command) error {
	b, err := json.Marshal(wire.Network{Own: true, Hosts: c.Hosts, Resolv: c.Resolv})
	c.Env[wire.EnvNetwork] = string(b)
	return err
}
