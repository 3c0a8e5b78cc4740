package tunnel

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
)

// peer is another process, by its name. Tunnel.mu guards it.
type peer struct {
	session *session // nil: there is no connection
	dialing bool     // this process dials it
	// Connections of the peer that were admitted and are not open yet.
	admitted int
	changed  chan struct{} // closed and replaced when one of the above changes
	lost     string        // id of the latest connection that has ended

	// Of dials:
	addr    string
	backoff time.Duration
	again   time.Time // earliest time of the next one
	fault   error     // of the latest one
	faults  int       // how many have failed so far
}

func (p *peer) change() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// peers are those that a Tunnel has heard or dialed. Tunnel.mu guards them.
type peers map[identity.Name]*peer

// of returns the peer with a name.
func (all peers) of(name identity.Name) *peer {
	p := all[name]
	if p == nil {
		p = &peer{changed: make(chan struct{})}
		all[name] = p
	}
	return p
}

// sessions returns the open connections.
func (all peers) sessions() []*session {
	var out []*session
	for _, p := range all {
		if p.session != nil {
			out = append(out, p.session)
		}
	}
	return out
}

// count returns how many connections are open or were admitted.
func (all peers) count() int {
	n := 0
	for _, p := range all {
		if p.session != nil || p.admitted > 0 {
			n++
		}
	}
	return n
}

// errDuplicate refuses a second connection between two processes.
var errDuplicate = errors.New("there is a connection between the two already")

// wins reports whether connections that a process dials win over those that the other one dials at
// the same moment.
func wins(me, other identity.Name) bool { return me.URI().String() < other.URI().String() }

// admit decides about a connection that a peer has dialed. If it returns nil, begin or settle must
// follow.
//
// A connection with a process's earlier run is dead, and so is one that the dialer has seen end.
// Otherwise, if both dial at the same moment, the connection of the side with the smaller name
// wins, and the other side waits for it.
func (t *Tunnel) admit(name identity.Name, h hello) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	p, wins := t.peers.of(name), wins(t.cfg.Source.Me(), name)
	switch s := p.session; {
	case t.closed:
		return ErrClosed
	case s == nil && p.dialing && wins:
		return errDuplicate
	case s != nil && s.dialed && s.run == h.Run && s.id != h.Lost && wins:
		return errDuplicate
	case s == nil && t.peers.count() >= maxConns:
		return fmt.Errorf("%d connections, want at most %d", t.peers.count(), maxConns)
	}
	p.admitted++
	p.change()
	return nil
}

// settle ends what admit has begun. s is nil if the connection has failed.
func (t *Tunnel) settle(name identity.Name, s *session) {
	t.mu.Lock()
	p := t.peers.of(name)
	p.admitted--
	old := p.session
	if s != nil && !s.ended() {
		p.session = s
	}
	p.change()
	t.mu.Unlock()
	if s != nil && old != nil {
		old.close()
	}
}

// connected returns the session with a peer, or dials it. addr is empty if it must not be dialed.
func (t *Tunnel) connected(ctx context.Context, name identity.Name, addr string) (*session, error) {
	t.mu.Lock()
	if addr == "" && t.peers[name] == nil { // functions can ask for any name
		t.mu.Unlock()
		return nil, fmt.Errorf("%w with %v", ErrNotConnected, name)
	}
	p := t.peers.of(name)
	faults := p.faults
	for {
		if t.closed {
			t.mu.Unlock()
			return nil, ErrClosed
		}
		if s := p.session; s != nil && !s.ended() {
			t.mu.Unlock()
			return s, nil
		}
		changed, pause := p.changed, time.Until(p.again)
		switch {
		case p.dialing || p.admitted > 0:
			pause = time.Hour
		case p.faults > faults:
			err := p.fault
			t.mu.Unlock()
			return nil, err
		case addr == "":
			t.mu.Unlock()
			return nil, fmt.Errorf("%w with %v", ErrNotConnected, name)
		case pause <= 0 || p.addr != addr:
			p.dialing, p.addr = true, addr
			lost := p.lost
			t.group.Go(func() { t.dial(name, addr, lost) })
			pause = time.Hour
		}
		fault := p.fault
		t.mu.Unlock()
		wait := time.NewTimer(pause)
		select {
		case <-changed:
		case <-wait.C:
		case <-ctx.Done():
			wait.Stop()
			return nil, errors.Join(fmt.Errorf("tunnel to %v at %s: %w", name, addr, context.Cause(ctx)), fault)
		}
		wait.Stop()
		t.mu.Lock()
	}
}

// dial connects to a peer.
func (t *Tunnel) dial(name identity.Name, addr, lost string) {
	c, h, err := t.call(name, addr, lost)
	if err == nil {
		t.begin(c, name, h, true)
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.peers.of(name)
	if errors.Is(err, errDuplicate) { // the peer's own connection is on its way
		changed := p.changed
		for waited := time.After(t.cfg.greeting); p.session == nil && waited != nil; changed = p.changed {
			t.mu.Unlock()
			select {
			case <-changed:
			case <-waited:
				waited = nil
			case <-t.ctx.Done():
				waited = nil
			}
			t.mu.Lock()
		}
	}
	p.dialing = false
	if p.session == nil {
		p.fault = fmt.Errorf("tunnel to %v at %s: %w", name, addr, err)
		p.faults++
		p.backoff = min(max(2*p.backoff, t.cfg.backoff), mostBackoff)
		p.again = time.Now().Add(p.backoff)
	}
	p.change()
}

// call dials a peer, and returns the connection after both have said hello.
func (t *Tunnel) call(name identity.Name, addr, lost string) (*secured, hello, error) {
	ctx, cancel := context.WithTimeout(t.ctx, t.cfg.greeting)
	defer cancel()
	raw, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, hello{}, err
	}
	if !t.greets(raw) {
		_ = raw.Close()
		return nil, hello{}, ErrClosed
	}
	defer t.greeted(raw)
	_ = raw.SetDeadline(time.Now().Add(t.cfg.greeting))
	c := t.secured(raw, tls.Client, t.cfg.Source.Client(name))
	mine := hello{V: Version, Run: t.run, ID: rand.Text(), Lost: lost}
	theirs, err := introduce(ctx, c, name, mine)
	if err == nil {
		err = raw.SetDeadline(time.Time{})
	}
	if err != nil {
		_ = c.Close()
		return nil, hello{}, err
	}
	theirs.ID = mine.ID
	return c, theirs, nil
}

func introduce(ctx context.Context, c *secured, name identity.Name, mine hello) (hello, error) {
	var theirs hello
	if err := c.HandshakeContext(ctx); err != nil {
		return theirs, err
	}
	if is, err := identity.NameOf(c.ConnectionState().PeerCertificates[0]); err != nil || is != name {
		return theirs, errors.Join(fmt.Errorf("the other side is %v, want %v", is, name), err)
	}
	if err := writeLine(c, mine); err != nil {
		return theirs, err
	}
	if err := readLine(c, &theirs, maxHello); err != nil {
		return theirs, err
	}
	switch {
	case theirs.Duplicate:
		return theirs, errDuplicate
	case theirs.Error != "":
		return theirs, &RefusedError{name, theirs.Error}
	case theirs.Run == "":
		return theirs, errors.New("hello without run")
	}
	return theirs, nil
}
