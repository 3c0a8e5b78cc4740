package items

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/tunnel"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Carrier gets items for replicas of a node. Its methods are safe for concurrent use.
type Carrier struct {
	*Store
	direct  func(ctx context.Context, node, addr string, first any) (net.Conn, error)
	control func(ctx context.Context, name string, first any) (net.Conn, error)
	log     *slog.Logger

	near, fetched, relayed, lost atomic.Uint64
	fetchedBytes, relayedBytes   atomic.Uint64

	dialTime, pause time.Duration

	room *room // memory of items that were fetched

	mu    sync.Mutex
	apart map[string]time.Time // by node: until when it is not dialed, because a dial has failed
}

// Bounds of a Carrier.
const (
	// dialTime bounds how long a connection to another node may take. A firewall may let only
	// control planes through.
	dialTime = 3 * time.Second
	// apartTime is how long a node is not dialed after a failure.
	apartTime = 30 * time.Second
)

// CarrierConfig configures a Carrier.
type CarrierConfig struct {
	Store *Store
	// Direct opens a stream to another node. Control opens a stream to the control plane with a name,
	// or, if the name is empty, to any control plane that accepts the stream.
	Direct  func(ctx context.Context, node, addr string, first any) (net.Conn, error)
	Control func(ctx context.Context, name string, first any) (net.Conn, error)
	Log     *slog.Logger

	dialTime, pause time.Duration // set by tests; 0: the constants dialTime and backoff
}

// NewCarrier returns a Carrier.
func NewCarrier(cfg CarrierConfig) *Carrier {
	return &Carrier{
		Store: cfg.Store, direct: cfg.Direct, control: cfg.Control, log: cfg.Log,
		dialTime: cmp.Or(cfg.dialTime, dialTime), pause: cmp.Or(cfg.pause, backoff),
		room: newRoom(cfg.Store.Room()), apart: map[string]time.Time{},
	}
}

// Carried counts the items that a Carrier was asked for.
type Carried struct {
	Near                       uint64 // items that its own node keeps, returned without a copy
	Fetched, Relayed           uint64 // items from other nodes, and from or through a control plane
	FetchedBytes, RelayedBytes uint64
	Lost                       uint64 // items that it could not get
}

// Carried returns the current counts.
func (c *Carrier) Carried() Carried {
	return Carried{c.near.Load(), c.fetched.Load(), c.relayed.Load(), c.fetchedBytes.Load(), c.relayedBytes.Load(), c.lost.Load()}
}

// Fetching describes the memory of items that were fetched. Its bound is that of the Store.
func (c *Carrier) Fetching() Rooms { return c.room.stats() }

// Reserve waits for memory for items of other nodes, until ctx ends.
func (c *Carrier) Reserve(ctx context.Context, refs []tensor.Ref) (release func(), err error) {
	var far []tensor.Ref // items of this node are not copied
	for _, ref := range refs {
		if !c.own(ref) {
			far = append(far, ref)
		}
	}
	return c.room.reserve(ctx, far)
}

// own reports whether this node keeps an item.
func (c *Carrier) own(ref tensor.Ref) bool {
	return ref.Node == c.cfg.Node && ref.Address != tensor.AtControl
}

// Fetch returns an item as a sealed file in memory, which the caller closes. It checks the size and
// the checksum.
func (c *Carrier) Fetch(ctx context.Context, ref tensor.Ref) (f *os.File, err error) {
	if c.own(ref) {
		f, err := c.Open(ref)
		if err == nil {
			c.near.Add(1)
		} else if !errors.Is(err, context.Canceled) {
			c.lost.Add(1)
		}
		return f, err
	}
	// Only control planes know which nodes run. They refuse to pass on items of a node that has ended.
	unknown := func() bool { return true }
	err = tries(ctx, c.pause, unknown, func() (err error) {
		f, err = c.either(ctx, ref)
		return err
	})
	if err != nil && ctx.Err() == nil {
		c.lost.Add(1)
		c.log.Warn("an item of another process is lost", "from", ref.Node, "address", ref.Address, "item", ref.Blob, "bytes", ref.Size, "error", err)
	}
	return f, err
}

// either gets an item from the node or the control plane that keeps it. If the bytes of a node do
// not come, it gets them through a control plane.
func (c *Carrier) either(ctx context.Context, ref tensor.Ref) (*os.File, error) {
	if ref.Address == tensor.AtControl {
		return c.relay(ctx, ref.Node, ref)
	}
	f, err := c.fetch(ctx, ref)
	if err == nil {
		c.fetched.Add(1)
		c.fetchedBytes.Add(uint64(ref.Size))
		return f, nil
	}
	if ctx.Err() != nil || !errors.Is(err, errBroken) {
		return nil, err
	}
	f, again := c.relay(ctx, "", ref)
	if again != nil {
		// Only the error of relay says whether to try again.
		return nil, fmt.Errorf("%s; through the control plane: %w", err.Error(), again)
	}
	return f, nil
}

// fetch gets an item from the node that keeps it.
func (c *Carrier) fetch(ctx context.Context, ref tensor.Ref) (*os.File, error) {
	c.mu.Lock()
	wait := time.Until(c.apart[ref.Node])
	c.mu.Unlock()
	if wait > 0 {
		return nil, fmt.Errorf("%w: no connection came about with node %q; it is dialed again in %v", errBroken, ref.Node, wait.Round(time.Second))
	}
	dialing, cancel := context.WithTimeout(ctx, c.dialTime)
	defer cancel()
	conn, err := c.direct(dialing, ref.Node, ref.Address, askFor(ref))
	if err != nil {
		return nil, c.failed(ctx, ref, err)
	}
	defer conn.Close()
	return receiveFile(ctx, conn, ref)
}

// failed returns the error for a stream that could not be opened. Unless the node has refused the
// stream, the node is not dialed again for apartTime.
func (c *Carrier) failed(ctx context.Context, ref tensor.Ref, err error) error {
	err = unopened(err)
	if errors.Is(err, errBroken) && ctx.Err() == nil {
		c.mu.Lock()
		c.apart[ref.Node] = time.Now().Add(apartTime)
		c.mu.Unlock()
		c.log.Warn("no connection comes about with a node that keeps items; the control plane passes them on", "node", ref.Node, "address", ref.Address, "error", err)
	}
	return err
}

// unopened returns the error for a stream that could not be opened.
func unopened(err error) error {
	var refused *tunnel.RefusedError
	if errors.As(err, &refused) {
		return err
	}
	return fmt.Errorf("%w: %w", errBroken, err)
}

// relay gets an item from the control plane with a name, or, if the name is empty, through any
// control plane.
func (c *Carrier) relay(ctx context.Context, name string, ref tensor.Ref) (*os.File, error) {
	conn, err := c.control(ctx, name, askFor(ref))
	if err != nil {
		return nil, unopened(err)
	}
	defer conn.Close()
	f, err := receiveFile(ctx, conn, ref)
	if err == nil {
		c.relayed.Add(1)
		c.relayedBytes.Add(uint64(ref.Size))
	}
	return f, err
}
