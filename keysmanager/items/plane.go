package items

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
	"github.com/stagecoach-serving/stagecoach/keysmanager/tunnel"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Plane is the store of a control plane: a folder with its own items, and items that nodes keep.
// Its methods are safe for concurrent use.
type Plane struct {
	*tensor.Dir
	open Opener // nil: there are no nodes on other machines
	// alive reports whether a node is known to run.
	alive func(node string) bool
	pause time.Duration
	room  *room // memory of items for replicas of this machine
	// answers is of items that come for this process. A batch may hold memory of room until an answer
	// comes, so answers have their own.
	answers *room
	log     *slog.Logger
	ctx     context.Context // ends with Close
	end     context.CancelFunc
	work    sync.WaitGroup

	passing
	offers offers

	held atomic.Int64 // len(owners)
	mu   sync.Mutex
	// By request: addresses of the nodes that keep items of it, by their names.
	owners map[string]map[string]string
	queues map[string]*dropQueue // by node
	closed bool
}

// passing counts the items of nodes, see [Passed].
type passing struct {
	direct, directBytes, fetched, fetchedBytes, relayed, relayedBytes, given, givenBytes atomic.Uint64
}

// Opener opens a stream to a node.
type Opener func(ctx context.Context, node, addr string, first any) (net.Conn, error)

// dropQueue holds ended requests that a node was not told of yet.
type dropQueue struct {
	addr   string
	owners []string
}

// Bounds of a Plane.
const (
	openTime    = 10 * time.Second // for a stream to a node
	fetchTime   = 5 * time.Minute  // for an item that the control plane itself needs
	dropsAtOnce = 256              // requests in one stream
	dropsKept   = 64 << 10         // requests that wait per node
)

// NewPlane returns a Plane over a folder. limit bounds the memory of items that are fetched from
// nodes for replicas of this machine, in bytes.
func NewPlane(dir *tensor.Dir, limit int64, log *slog.Logger) *Plane {
	p := &Plane{
		Dir: dir, log: log, pause: backoff, room: newRoom(limit), answers: newRoom(limit), owners: map[string]map[string]string{}, queues: map[string]*dropQueue{},
		offers: offers{dir: dir, names: map[string]*offer{}, owners: map[string][]*offer{}},
	}
	p.ctx, p.end = context.WithCancel(context.Background())
	return p
}

// Reach sets how nodes are reached, and how to tell which nodes run. me is the name by which nodes
// know this process. The caller calls Reach before the first item of a node comes.
func (p *Plane) Reach(me string, open Opener, alive func(node string) bool) {
	p.offers.me, p.open, p.alive = me, open, alive
}

// Fetching describes the memory of items that were fetched for replicas of this machine.
func (p *Plane) Fetching() Rooms { return p.room.stats() }

// Reserve waits for memory for items of nodes, until ctx ends.
func (p *Plane) Reserve(ctx context.Context, refs []tensor.Ref) (release func(), err error) {
	return p.room.reserve(ctx, refs)
}

// Close ends transfers. Nodes remove items themselves that they were not told of.
func (p *Plane) Close() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.end()
	p.work.Wait()
}

// Passed counts the items of nodes.
type Passed struct {
	Left, LeftBytes       uint64 // items that stayed on their nodes
	Fetched, FetchedBytes uint64 // items that the control plane itself has needed
	Relayed, RelayedBytes uint64 // items that it has passed on from one node to another
	Given, GivenBytes     uint64 // its own items that nodes have got
}

// Passed returns the current counts.
func (p *Plane) Passed() Passed {
	return Passed{p.direct.Load(), p.directBytes.Load(), p.fetched.Load(), p.fetchedBytes.Load(), p.relayed.Load(), p.relayedBytes.Load(), p.given.Load(), p.givenBytes.Load()}
}

// Adopt notes items of a reply that stay on their node, so that the node is told when their request
// ends.
func (p *Plane) Adopt(a tensor.Activation) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range a {
		ref := a[i].Ref
		if ref == nil || ref.Node == "" {
			continue
		}
		p.direct.Add(1)
		p.directBytes.Add(uint64(ref.Size))
		if p.owners[ref.Owner] == nil {
			p.owners[ref.Owner] = map[string]string{}
		}
		p.owners[ref.Owner][ref.Node] = ref.Address
	}
	p.held.Store(int64(len(p.owners)))
}

// Drop removes all items of a request, also those on nodes. It does not wait for the nodes.
func (p *Plane) Drop(owner string) error {
	if p.held.Load() > 0 {
		p.mu.Lock()
		for node, addr := range p.owners[owner] {
			p.tell(node, addr, owner)
		}
		delete(p.owners, owner)
		p.held.Store(int64(len(p.owners)))
		p.mu.Unlock()
	}
	err := p.Dir.Drop(owner)
	p.offers.drop(owner) // after its items, see offers.add
	return err
}

// tell queues the end of a request for a node. The caller holds p.mu.
func (p *Plane) tell(node, addr, owner string) {
	q := p.queues[node]
	switch {
	case p.closed:
	case q == nil:
		q = &dropQueue{addr: addr, owners: []string{owner}}
		p.queues[node] = q
		p.work.Go(func() { p.sendDrops(node, q) })
	case len(q.owners) < dropsKept:
		q.addr, q.owners = addr, append(q.owners, owner)
	}
}

// sendDrops tells a node of ended requests, until none waits.
func (p *Plane) sendDrops(node string, q *dropQueue) {
	for {
		p.mu.Lock()
		n := min(len(q.owners), dropsAtOnce)
		if n == 0 {
			delete(p.queues, node)
			p.mu.Unlock()
			return
		}
		owners, addr := q.owners[:n:n], q.addr
		q.owners = q.owners[n:]
		p.mu.Unlock()
		ctx, cancel := context.WithTimeout(p.ctx, openTime)
		c, err := p.open(ctx, node, addr, drops{tunnel.Request{V: tunnel.Version, Want: WantDrop}, owners})
		cancel()
		if err != nil {
			p.log.Debug("failed to tell a node that requests have ended; it removes their items by itself", "node", node, "requests", n, "error", err)
			continue
		}
		_ = c.Close()
	}
}

// Get returns an encoded item.
func (p *Plane) Get(ref tensor.Ref) ([]byte, error) {
	if ref.Node == "" {
		return p.Dir.Get(ref)
	}
	return p.Read(p.ctx, ref)
}

// Read returns an encoded item of a node. It waits for memory while the item comes.
func (p *Plane) Read(ctx context.Context, ref tensor.Ref) ([]byte, error) {
	ctx, done := p.until(ctx)
	defer done()
	ctx, cancel := context.WithTimeout(ctx, fetchTime)
	defer cancel()
	release, err := p.answers.reserve(ctx, []tensor.Ref{ref})
	if err != nil {
		return nil, lost(ref, err)
	}
	defer release()
	var b bytes.Buffer
	err = p.fetch(ctx, ref, func(ctx context.Context, c net.Conn) error {
		b.Reset()
		return receive(ctx, c, ref, &b)
	})
	return b.Bytes(), lost(ref, err)
}

// until returns a context that also ends with Close. The caller calls done.
func (p *Plane) until(ctx context.Context) (_ context.Context, done func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(p.ctx, func() { cancel(os.ErrClosed) })
	return ctx, func() { stop(); cancel(nil) }
}

// Open returns an encoded item as a file for reading. The caller closes the file.
func (p *Plane) Open(ref tensor.Ref) (*os.File, error) {
	if ref.Node == "" {
		return p.Dir.Open(ref)
	}
	f, err := p.Fetch(p.ctx, ref)
	return f, lost(ref, err)
}

// Fetch returns an encoded item of a node as a file for reading. The caller closes the file.
func (p *Plane) Fetch(ctx context.Context, ref tensor.Ref) (f *os.File, err error) {
	ctx, done := p.until(ctx)
	defer done()
	err = p.fetch(ctx, ref, func(ctx context.Context, c net.Conn) (err error) {
		f, err = receiveFile(ctx, c, ref)
		return err
	})
	return f, err
}

// lost returns the error for an item that a call needs and that could not be fetched.
func lost(ref tensor.Ref, err error) error {
	if err == nil {
		return nil
	}
	return &task.LostError{Item: ref.Blob, Text: fmt.Sprintf("item %s of %d bytes, which node %q keeps, is lost: %v", ref.Blob, ref.Size, ref.Node, err)}
}

// fetch gets an item from the node that keeps it.
func (p *Plane) fetch(ctx context.Context, ref tensor.Ref, into func(context.Context, net.Conn) error) error {
	ctx, cancel := context.WithTimeout(ctx, fetchTime)
	defer cancel()
	err := tries(ctx, p.pause, func() bool { return p.alive(ref.Node) }, func() error {
		c, err := p.stream(ctx, ref)
		if err == nil {
			err = into(ctx, c)
			_ = c.Close()
		}
		return err
	})
	if err != nil {
		return err
	}
	p.fetched.Add(1)
	p.fetchedBytes.Add(uint64(ref.Size))
	return nil
}

func (p *Plane) stream(ctx context.Context, ref tensor.Ref) (net.Conn, error) {
	if p.open == nil {
		return nil, errors.New("there are no nodes on other machines")
	}
	if ref.Address == tensor.AtControl {
		return nil, errors.New("only nodes can fetch items of a control plane")
	}
	ctx, cancel := context.WithTimeout(ctx, openTime)
	defer cancel()
	c, err := p.open(ctx, ref.Node, ref.Address, askFor(ref))
	if err != nil {
		return nil, unopened(err)
	}
	return c, nil
}

// Relay answers a node that asks for an item. It sends an item of this process, or passes on the
// item of another node that the asking node cannot connect to. It implements tunnel.Handler.
func (p *Plane) Relay(ctx context.Context, peer identity.Name, first json.RawMessage, c net.Conn) {
	var a ask
	err := json.Unmarshal(first, &a)
	if err == nil && peer.Role != identity.Node {
		err = fmt.Errorf("%v is no node", peer)
	}
	ref := a.ref()
	if err == nil && ref.Address == tensor.AtControl {
		p.give(ctx, peer, ref, c)
		return
	}
	if err == nil {
		ref.Address, err = p.address(ref) // nodes do not choose what is dialed
	}
	var from net.Conn
	if err == nil {
		from, err = p.source(ctx, ref)
	}
	if err != nil {
		p.log.Debug("an item is not passed on to a node", "to", peer.String(), "from", a.Node, "item", a.Item, "error", err)
		_ = tunnel.Refuse(c, err)
		return
	}
	defer from.Close()
	defer context.AfterFunc(ctx, func() { _, _ = c.Close(), from.Close() })()
	if tunnel.Accept(c) != nil {
		return
	}
	n, err := pass(c, from)
	p.relayedBytes.Add(uint64(n))
	if err != nil {
		p.log.Debug("failed to pass on an item", "to", peer.String(), "from", a.Node, "item", a.Item, "error", err)
		return
	}
	p.relayed.Add(1)
}

// source opens a stream to the node that keeps an item that another node waits for.
func (p *Plane) source(ctx context.Context, ref tensor.Ref) (c net.Conn, err error) {
	ctx, cancel := context.WithTimeout(ctx, 2*openTime) // the other node waits for longer
	defer cancel()
	err = tries(ctx, p.pause, func() bool { return p.alive(ref.Node) }, func() (err error) {
		c, err = p.stream(ctx, ref)
		return err
	})
	return c, err
}

// address returns where the node of an item that a request needs is reached.
func (p *Plane) address(ref tensor.Ref) (string, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	addr, ok := p.owners[ref.Owner][ref.Node]
	if !ok {
		return "", fmt.Errorf("request %q has no items with node %q any more", ref.Owner, ref.Node)
	}
	return addr, nil
}

// pass copies one stream to another. It fails if either of them stalls.
func pass(to, from net.Conn) (n int64, err error) {
	b := buffers.Get().(*[]byte)
	defer buffers.Put(b)
	for {
		_ = from.SetReadDeadline(time.Now().Add(stall))
		got, err := from.Read(*b)
		if got > 0 {
			_ = to.SetWriteDeadline(time.Now().Add(stall))
			if _, err := to.Write((*b)[:got]); err != nil {
				return n, err
			}
			n += int64(got)
		}
		if errors.Is(err, io.EOF) {
			return n, nil
		}
		if err != nil {
			return n, err
		}
	}
}
