package node

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// Dial opens a stream to a node's daemon at an address, with a first line. It returns the stream
// when the daemon has accepted it. Package tunnel implements it.
type Dial func(ctx context.Context, node, addr string, first any) (net.Conn, error)

// Link is how a node's stage sockets and lines reach the control plane.
type Link string

// The links.
const (
	LinkUnix Link = "unix" // descriptors, over the daemon's unix socket
	LinkTLS  Link = "tls"  // streams, over one TLS connection
)

// refusedError is the error that a daemon has answered on its unix socket. Errors of a [Dial] have
// the method Refused, too, if the daemon has answered them.
type refusedError struct{ text string }

func (e *refusedError) Error() string { return e.text }

// Refused tells that the daemon was reached.
func (e *refusedError) Refused() bool { return true }

// reach says how a [Client] reaches its daemon's sockets.
type reach struct {
	boot string // of this machine
	dial Dial   // nil: nodes on other machines cannot be reached
	keep bool   // see DirectoryConfig
	// see DirectoryConfig
	prepare func(ctx context.Context, c *Client, kind OrderKind, spec Spec) error
}

// near reports whether a node has a unix socket on this machine.
func (r reach) near(inv Inventory) bool { return inv.Boot == r.boot && inv.Socket != "" }

// far reports whether a node can be reached over the tunnel.
func (r reach) far(inv Inventory) bool { return r.dial != nil && inv.Address != "" }

// prepare changes an order for its node, which may be on another machine.
func (c *Client) prepare(ctx context.Context, o *Order) error {
	specs := make([]Spec, 0, 1+len(o.Wanted))
	switch o.Kind {
	case OrderStart, OrderLoad:
		specs = append(specs, o.Spec)
	case OrderWarm:
		for _, w := range o.Wanted {
			specs = append(specs, w.Spec)
		}
	}
	if o.Far = len(specs) > 0 && c.Far(); !o.Far {
		c.settle(o)
	}
	if !o.Far || c.reach.prepare == nil {
		return nil
	}
	for _, s := range specs {
		if err := c.reach.prepare(ctx, c, o.Kind, s); err != nil {
			return &Error{c.name, fmt.Errorf("order to %s %q: %w", o.Kind, s.Function, err)}
		}
	}
	return nil
}

// settle replaces the gateway in an order's specs by the address of their node, if the node's
// replicas outlive this process.
func (c *Client) settle(o *Order) {
	at := c.Inventory().Inside
	if !c.reach.keep || at == "" {
		return
	}
	settled := func(s *Spec) {
		if s.Gateway != "" {
			s.Gateway = at
		}
	}
	o.Gateway = o.Spec.Gateway
	settled(&o.Spec)
	o.Wanted = slices.Clone(o.Wanted) // the caller's
	for i := range o.Wanted {
		settled(&o.Wanted[i].Spec)
	}
}

// claim takes the stage socket of a replica that an order has started.
func (c *Client) claim(ctx context.Context, o Order) (wire.Socket, error) {
	return c.take(ctx, socketRequest{V: Version, Want: wantSocket, Replica: o.Replica, Order: o.ID, Epoch: o.Epoch, Keep: c.reach.keep, Gateway: o.Gateway, Revision: o.Revision, Home: o.Home})
}

// take takes a stage socket.
func (c *Client) take(ctx context.Context, req socketRequest) (wire.Socket, error) {
	inv := c.Inventory()
	var err error
	if c.reach.near(inv) {
		var s wire.Socket
		s, err = claimNear(ctx, inv.Socket, req)
		if err == nil || refused(err) {
			return s, err
		}
	}
	if !c.reach.far(inv) {
		return nil, cannot(inv, err)
	}
	stream, far := c.dialFar(ctx, inv, req)
	if far != nil {
		return nil, errors.Join(far, err)
	}
	socket := wire.OverStream(stream)
	if inv.Items > 0 {
		socket = &wire.AtNode{Socket: socket, Node: c.name, Address: inv.Address}
	}
	return socket, nil
}

// lines asks for what the node's replicas print, after what was heard. If the node is on another
// machine, within bounds the time for a connection; 0 or less: socketTimeout does. If such a node
// cannot be reached, the error is an unreachedError.
func (c *Client) lines(ctx context.Context, heard *heardLines, within time.Duration) (io.ReadCloser, *bufio.Reader, error) {
	epoch, err := c.epoch.now()
	if err != nil {
		return nil, nil, err
	}
	inv := c.Inventory()
	req := socketRequest{V: Version, Want: wantLines, Epoch: epoch, After: heard.of(inv.ID)}
	if c.reach.near(inv) {
		var near net.Conn
		var r *bufio.Reader
		near, r, _, err = dialSocket(ctx, inv.Socket, req)
		if err == nil {
			c.linked(LinkUnix)
			return near, r, nil
		}
		if refused(err) {
			return nil, nil, err
		}
	}
	if !c.reach.far(inv) {
		return nil, nil, cannot(inv, err)
	}
	dialing := ctx
	if within > 0 {
		var cancel context.CancelFunc
		dialing, cancel = context.WithTimeout(ctx, within)
		defer cancel()
	}
	stream, far := c.dialFar(dialing, inv, req)
	if far != nil && !refused(far) && !c.reach.near(inv) {
		return nil, nil, unreachedError{far}
	}
	if far != nil {
		return nil, nil, errors.Join(far, err)
	}
	c.linked(LinkTLS)
	return stream, bufio.NewReaderSize(stream, maxLineBytes), nil
}

// dialFar opens a stream to the daemon. socketTimeout bounds it.
func (c *Client) dialFar(ctx context.Context, inv Inventory, req socketRequest) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, socketTimeout)
	defer cancel()
	return c.reach.dial(ctx, c.name, inv.Address, req)
}

func refused(err error) bool {
	var r interface{ Refused() bool }
	return errors.As(err, &r) && r.Refused()
}

// cannot returns why a node's sockets are out of reach.
func cannot(inv Inventory, near error) error {
	if near != nil {
		return near
	}
	return fmt.Errorf("node %q: no socket of this machine and no address", inv.Name)
}

// linked records how the daemon was reached.
func (c *Client) linked(l Link) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.link = l
}
