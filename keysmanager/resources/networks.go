package resources

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"

	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// Networks makes network namespaces for processes; package network implements it.
type Networks interface {
	// Create makes a namespace with loopback and a route to other machines. resolv is the path of its
	// own /etc/resolv.conf; empty: that of Files.
	Create() (ns *os.File, resolv string, err error)
	// Kind names what Create makes, as a part of a zygote's key. It is NetworkDefault or another
	// name that no function can ask for.
	Kind() string
	// Ended says that a process has ended. It may have been the last one in its namespace.
	Ended()
	// Lonely makes a namespace with loopback alone.
	Lonely() (*os.File, error)
	// Admit lets processes in namespaces of Create reach an address of the machine: the gateway's.
	Admit(gateway netip.AddrPort) error
	// Files returns the paths of the files that these processes see as /etc/hosts and
	// /etc/resolv.conf. The hosts file maps the gateway's names to its address. If gateway is zero, no
	// gateway listens, and the names stand for the address under which these processes see the
	// machine.
	Files(gateway netip.AddrPort) (hosts, resolv string, err error)
}

// The networks that a function can ask for, in the words of the annotation stagecoach.dev/network.
const (
	NetworkDefault = "default" // a namespace with a route to other machines
	NetworkHost    = "host"    // the machine's network
	NetworkNone    = "none"    // a namespace with loopback alone
)

// ErrHostNetwork refuses a function that asks for the machine's network.
var ErrHostNetwork = errors.New("annotation stagecoach.dev/network is host, and this node gives no function the machine's network: " +
	"want default or none, or start the node with --allow-host-network")

// NetworkOf returns the network in which a process is started. It is the network that the function
// asks for, or the machine's if this node makes no networks. The network is part of a zygote's key,
// so a replica is never forked from a zygote in another kind of network, such as one that an
// earlier daemon has started.
func (p *Pool) NetworkOf(asked string) string {
	if p.cfg.Networks == nil {
		return NetworkHost
	}
	if asked = cmp.Or(asked, NetworkDefault); asked == NetworkDefault {
		return p.cfg.Networks.Kind()
	}
	return asked
}

// CheckNetwork returns an error if a process asks for a network that this node does not give.
func (p *Pool) CheckNetwork(asked string) error {
	if asked == NetworkHost && !p.cfg.HostNetwork {
		return ErrHostNetwork
	}
	return nil
}

// connect gives a command the network that its function asks for. The caller calls release once the
// process has started or has failed to start. From then on only the process keeps the namespace.
func (p *Pool) connect(c *sandbox.Command, t Tenant, who AccountUser) (release func(), err error) {
	release = func() {
		if c.Network != nil {
			_ = c.Network.Close() // nothing was written
		}
	}
	if err := p.CheckNetwork(t.Network); err != nil {
		return release, err
	}
	switch p.NetworkOf(t.Network) {
	case NetworkHost:
	case NetworkNone:
		c.Network, err = p.cfg.Networks.Lonely()
	default:
		err = p.wayOut(c, t)
	}
	if err == nil && c.Network != nil && who != Itself {
		err = tellWatchdog(c)
	}
	if err != nil {
		release()
		return release, fmt.Errorf("a network for the function: %w", err)
	}
	return release, nil
}

// wayOut gives a command a network namespace from which it reaches other machines, and the gateway.
func (p *Pool) wayOut(c *sandbox.Command, t Tenant) (err error) {
	var gateway netip.AddrPort
	if t.Gateway != "" {
		if gateway, err = netip.ParseAddrPort(t.Gateway); err != nil {
			return fmt.Errorf("gateway %q: %w", t.Gateway, err)
		}
		if err = p.cfg.Networks.Admit(gateway); err != nil {
			return err
		}
	}
	if c.Hosts, c.Resolv, err = p.cfg.Networks.Files(gateway); err != nil {
		return err
	}
	var resolv string
	c.Network, resolv, err = p.cfg.Networks.Create()
	c.Resolv = cmp.Or(resolv, c.Resolv)
	return err
}

// tellWatchdog sets in a watchdog's environment which network its program is in.
func tellWatchdog(c *sandbox.Command) error {
	b, err := json.Marshal(wire.Network{Own: true, Hosts: c.Hosts, Resolv: c.Resolv})
	c.Env[wire.EnvNetwork] = string(b)
	return err
}
