package main

import (
	"context"
	"errors"
	"net"
	"sync"
)

// nodeInside is where the functions of a node call functions, whichever control plane of this
// machine leads. Connections go to the one that has claimed a replica last.
type nodeInside struct {
	at string // address; empty: there is none, and functions know the address of their control plane

	mu      sync.Mutex
	gateway string // of that control plane; empty: none, or it is on another machine
}

// claimed records where the control plane that has claimed a replica listens for functions.
func (n *nodeInside) claimed(gateway string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.gateway = gateway
}

// near returns the address where the control plane that has claimed a replica last listens for
// functions. It is empty if that control plane is on another machine.
func (n *nodeInside) near() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.gateway
}

// dial connects to the control plane.
func (n *nodeInside) dial(ctx context.Context, _ net.Conn) (net.Conn, error) {
	to := n.near()
	if to == "" {
		return nil, errors.New("no control plane has claimed a replica")
	}
	return new(net.Dialer).DialContext(ctx, "tcp", to)
}

// openInside listens where functions call functions, unless nodes on other machines do so already.
// Without it, replicas are started again if another control plane of this machine leads.
func (d *daemon) openInside(n networks) {
	at := n.gateway()
	if d.cfg.keep == 0 || at == "" {
		return
	}
	if d.far == nil {
		l, err := net.Listen("tcp", at)
		if err != nil {
			d.log.Info("functions call the gateway of their control plane, so only functions without a network outlive it", "error", err)
			return
		}
		r := newRelay(l, d.inside.dial)
		d.onClose(r.close)
	}
	d.inside.at = at
}
