package items

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
	"github.com/stagecoach-serving/stagecoach/keysmanager/tunnel"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Kinds of streams, see docs/node-protocol.md.
const (
	// Of any process to a node, or of a node to a control plane: the bytes of an item.
	WantItem = "item"
	WantDrop = "drop-items" // control plane to node: requests that have ended
)

// ask is the first line of a stream of kind WantItem.
type ask struct {
	tunnel.Request
	Node    string `json:"node"`
	Address string `json:"address,omitempty"`
	Owner   string `json:"owner"`
	Item    string `json:"item"`
	Size    int64  `json:"size"`
	Sum     uint64 `json:"sum,string"` // XXH64; programs in other languages have no such integers
}

func askFor(ref tensor.Ref) ask {
	return ask{tunnel.Request{V: tunnel.Version, Want: WantItem}, ref.Node, ref.Address, ref.Owner, ref.Blob, ref.Size, ref.Sum}
}

func (a ask) ref() tensor.Ref {
	return tensor.Ref{Owner: a.Owner, Blob: a.Item, Size: a.Size, Keeper: tensor.Keeper{Node: a.Node, Address: a.Address, Sum: a.Sum}}
}

// stall is how long either side waits for the next piece of an item.
const stall = 15 * time.Second

// Errors of transfers.
var (
	// errBroken means that the bytes did not come. They may come another way, or at another try.
	errBroken = errors.New("its bytes did not come")
	// errWrong means that bytes have come that are not the item's.
	errWrong = errors.New("its bytes are wrong")
)

// Bounds of further tries.
const (
	moreTries = 2                      // after the first try, if the bytes did not come
	backoff   = 200 * time.Millisecond // before the second try; twice that before the third
)

// tries calls try until it succeeds, at most three times. It tries again only after errBroken,
// because a connection may have broken. Any other error is final: the item is wrong, or its node
// does not have it. alive reports whether the node may still run. pause is the time before the
// second try, and is doubled before the third.
func tries(ctx context.Context, pause time.Duration, alive func() bool, try func() error) error {
	for more := moreTries; ; more-- {
		err := try()
		if err == nil || more == 0 || !errors.Is(err, errBroken) || ctx.Err() != nil || !alive() {
			return err
		}
		wait := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			wait.Stop()
			return err
		case <-wait.C:
		}
		pause *= 2
	}
}

// receive reads the bytes of an item, to the end of the stream.
func receive(ctx context.Context, c net.Conn, ref tensor.Ref, to io.Writer) error {
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	sum := xxhash.New()
	p := buffers.Get().(*[]byte)
	defer buffers.Put(p)
	for left := ref.Size; ; {
		_ = c.SetReadDeadline(time.Now().Add(stall)) // fails if closed, and then Read fails too
		n, err := c.Read((*p)[:min(left+1, int64(len(*p)))])
		if left -= int64(n); left < 0 {
			return fmt.Errorf("%w: more than %d bytes", errWrong, ref.Size)
		}
		_, _ = sum.Write((*p)[:n]) // never fails
		if _, err := to.Write((*p)[:n]); err != nil {
			return err
		}
		switch {
		case err == nil:
			continue
		case !errors.Is(err, io.EOF):
			return fmt.Errorf("%w: %d of %d: %w", errBroken, ref.Size-left, ref.Size, errors.Join(err, context.Cause(ctx)))
		case left > 0:
			return fmt.Errorf("%w: %d of %d", errBroken, ref.Size-left, ref.Size)
		case sum.Sum64() != ref.Sum:
			return fmt.Errorf("%w: checksum %016x, want %016x", errWrong, sum.Sum64(), ref.Sum)
		}
		return nil
	}
}

// receiveFile is receive into a sealed file in memory.
func receiveFile(ctx context.Context, c net.Conn, ref tensor.Ref) (*os.File, error) {
	f, err := wire.NewMemory()
	if err != nil {
		return nil, err
	}
	if err = receive(ctx, c, ref, f); err == nil {
		err = wire.Seal(f)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// Serve sends an item to another process of the cluster. It implements tunnel.Handler.
func (s *Store) Serve(ctx context.Context, peer identity.Name, first json.RawMessage, c net.Conn) {
	var a ask
	err := json.Unmarshal(first, &a)
	var it *item
	var done func()
	if err == nil {
		it, done, err = s.read(a.ref())
	}
	if err != nil {
		s.refuse(c, peer, fmt.Errorf("item %q of node %q: %w", a.Item, a.Node, err))
		return
	}
	defer done()
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	if tunnel.Accept(c) != nil {
		return
	}
	if err := send(c, it.file, it.ref.Size); err != nil {
		s.cfg.Log.Debug("failed to send an item", "to", peer.String(), "item", a.Item, "error", err)
		abort(c)
		return
	}
	s.mu.Lock()
	s.stats.Sent += uint64(it.ref.Size)
	s.mu.Unlock()
}

// abort ends a stream whose bytes are not complete. The receiver knows the size.
func abort(c net.Conn) { _ = c.Close() }

// refuse refuses a stream, and logs that at most once per second.
func (s *Store) refuse(c net.Conn, peer identity.Name, err error) {
	s.mu.Lock()
	s.stats.Refused++
	silent := time.Since(s.stats.lastRefusal) < time.Second
	if !silent {
		s.stats.lastRefusal = time.Now()
	}
	s.mu.Unlock()
	if !silent {
		s.cfg.Log.Warn("request for an item refused", "from", peer.String(), "error", err)
	}
	_ = tunnel.Refuse(c, err) // the peer may be gone
}

// drops is the first line of a stream of kind WantDrop.
type drops struct {
	tunnel.Request
	Owners []string `json:"owners"`
}

// ServeDrop removes items of requests that have ended. It implements tunnel.Handler.
func (s *Store) ServeDrop(_ context.Context, peer identity.Name, first json.RawMessage, c net.Conn) {
	var d drops
	err := json.Unmarshal(first, &d)
	if err == nil && peer.Role != identity.Control {
		err = fmt.Errorf("%v is no control plane", peer)
	}
	if err != nil {
		s.refuse(c, peer, err)
		return
	}
	s.Drop(d.Owners...)
	_ = tunnel.Accept(c) // the items are gone, whoever hears it
}
