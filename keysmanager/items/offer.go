package items

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
	"github.com/stagecoach-serving/stagecoach/keysmanager/tunnel"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// offers has the items of a control plane that nodes may get from it.
type offers struct {
	dir *tensor.Dir
	me  string // name of this process; empty: no node can reach this process

	mu     sync.Mutex
	names  map[string]*offer   // by name
	owners map[string][]*offer // by owner
}

// offer is an item that nodes may get. Its name is random, because whoever knows it gets the item.
type offer struct {
	stored tensor.Ref // in the folder
	ref    tensor.Ref // for nodes
	ready  bool       // the checksum is known
}

// Offer returns a reference with which nodes can get an item of the folder from this process, until
// the item's owner is dropped.
func (p *Plane) Offer(stored tensor.Ref) (tensor.Ref, error) {
	if p.offers.me == "" {
		return tensor.Ref{}, errors.New("there are no nodes on other machines")
	}
	o, known := p.offers.add(stored)
	if known {
		return o.ref, nil
	}
	sum, err := p.offers.sum(stored)
	if err != nil {
		p.offers.remove(o)
		return tensor.Ref{}, err
	}
	p.offers.mu.Lock()
	defer p.offers.mu.Unlock()
	o.ref.Sum, o.ready = sum, true
	return o.ref, nil
}

// add adds an offer of an item. If the item has a ready offer already, add returns that offer, and
// known is true. The caller opens the item after add. If the item exists then, its owner was not
// dropped before, so a later drop removes the offer.
func (s *offers) add(stored tensor.Ref) (o *offer, known bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, o := range s.owners[stored.Owner] {
		if o.stored == stored && o.ready {
			return o, true
		}
	}
	o = &offer{stored: stored, ref: tensor.Ref{
		Owner: stored.Owner, Blob: rand.Text(), Size: stored.Size, Keeper: tensor.Keeper{Node: s.me, Address: tensor.AtControl},
	}}
	s.names[o.ref.Blob] = o
	s.owners[stored.Owner] = append(s.owners[stored.Owner], o)
	return o, false
}

// sum returns the checksum of an item of the folder.
func (s *offers) sum(stored tensor.Ref) (uint64, error) {
	f, err := s.dir.Open(stored)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	b := buffers.Get().(*[]byte)
	defer buffers.Put(b)
	sum := xxhash.New()
	n, err := io.CopyBuffer(sum, struct{ io.Reader }{f}, *b) // not f.WriteTo, which has its own buffer
	if err == nil && n != stored.Size {
		err = fmt.Errorf("blob %q of %q: %d bytes, want %d", stored.Blob, stored.Owner, n, stored.Size)
	}
	return sum.Sum64(), err
}

// remove removes an offer that did not become ready.
func (s *offers) remove(o *offer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.names, o.ref.Blob)
	all := s.owners[o.stored.Owner]
	for i := range all {
		if all[i] == o {
			all = append(all[:i:i], all[i+1:]...)
			break
		}
	}
	if s.owners[o.stored.Owner] = all; len(all) == 0 {
		delete(s.owners, o.stored.Owner)
	}
}

// drop removes the offers of an owner.
func (s *offers) drop(owner string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, o := range s.owners[owner] {
		delete(s.names, o.ref.Blob)
	}
	delete(s.owners, owner)
}

// open returns an item that a node asks for. The caller closes it.
func (s *offers) open(ref tensor.Ref) (*os.File, error) {
	s.mu.Lock()
	o := s.names[ref.Blob]
	there := o != nil && o.ready && o.ref == ref
	s.mu.Unlock()
	if !there {
		return nil, errors.New("this control plane does not offer the item: its request has ended")
	}
	return s.dir.Open(o.stored)
}

// give sends an item of this process to a node.
func (p *Plane) give(ctx context.Context, peer identity.Name, ref tensor.Ref, c net.Conn) {
	f, err := p.offers.open(ref)
	if err != nil {
		p.log.Warn("refused to give an item to a node", "to", peer.String(), "item", ref.Blob, "error", err)
		_ = tunnel.Refuse(c, err)
		return
	}
	defer f.Close()
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	if tunnel.Accept(c) != nil {
		return
	}
	if err := send(c, f, ref.Size); err != nil {
		p.log.Debug("failed to give an item", "to", peer.String(), "item", ref.Blob, "error", err)
		abort(c)
		return
	}
	p.given.Add(1)
	p.givenBytes.Add(uint64(ref.Size))
}

// send sends the first size bytes of a file. It fails if the receiver stalls.
func send(c net.Conn, f io.ReaderAt, size int64) error {
	p := buffers.Get().(*[]byte)
	defer buffers.Put(p)
	for at := int64(0); at < size; {
		b := (*p)[:min(size-at, int64(len(*p)))]
		_ = c.SetWriteDeadline(time.Now().Add(stall)) // fails if closed, and then Write fails too
		if _, err := f.ReadAt(b, at); err != nil {
			return err
		}
		if _, err := c.Write(b); err != nil {
			return err
		}
		at += int64(len(b))
	}
	return nil
}
