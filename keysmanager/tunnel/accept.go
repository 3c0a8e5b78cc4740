package tunnel

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
)

// hello is the first line of a connection, from the side that has dialed. The other side answers
// with its own.
type hello struct {
	V    int    `json:"v"`
	Run  string `json:"run"`            // of the process
	ID   string `json:"id,omitempty"`   // of the connection, which the dialer chooses
	Lost string `json:"lost,omitempty"` // the latest connection that has ended, as the dialer knows
	// Why the connection is refused; empty: it is not.
	Error string `json:"error,omitempty"`
	// It is refused because there is another one between the two, or soon will be.
	Duplicate bool `json:"duplicate,omitempty"`
}

const maxHello = 4 << 10 // bytes

func (t *Tunnel) accept(l net.Listener) {
	for {
		t.hands <- struct{}{}
		c, err := l.Accept()
		if err != nil {
			<-t.hands
			if errors.Is(err, net.ErrClosed) {
				return
			}
			// No descriptor is free, perhaps.
			t.cfg.Log.Error("failed to accept a connection of the tunnel", "error", err)
			select {
			case <-time.After(acceptPause):
			case <-t.ctx.Done():
			}
			continue
		}
		if !t.greets(c) || !t.background(func() {
			defer func() { <-t.hands }()
			t.welcome(c)
		}) {
			_ = c.Close()
			<-t.hands
		}
	}
}

// greets records a connection whose peer is not known yet, for Close.
func (t *Tunnel) greets(c net.Conn) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.closed {
		t.greeting[c] = struct{}{}
	}
	return !t.closed
}

func (t *Tunnel) greeted(c net.Conn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.greeting, c)
}

// welcome makes a session of an accepted connection.
func (t *Tunnel) welcome(raw net.Conn) {
	defer t.greeted(raw)
	_ = raw.SetDeadline(time.Now().Add(t.cfg.greeting))
	c := t.secured(raw, tls.Server, t.cfg.Source.Server())
	peer, h, err := t.handshake(c)
	if err != nil {
		t.stranger(raw.RemoteAddr(), err)
		_ = c.Close()
		return
	}
	refusal := t.admit(peer, h)
	mine := hello{V: Version, Run: t.run}
	if refusal != nil {
		mine.Error, mine.Duplicate = refusal.Error(), errors.Is(refusal, errDuplicate)
	}
	err = writeLine(c, mine)
	if err == nil {
		err = raw.SetDeadline(time.Time{})
	}
	if refusal != nil || err != nil {
		_ = c.Close()
		if refusal == nil {
			t.settle(peer, nil)
		}
		return
	}
	t.begin(c, peer, h, false)
}

// handshake authenticates the dialing side and reads its hello.
func (t *Tunnel) handshake(c *secured) (identity.Name, hello, error) {
	var h hello
	ctx, cancel := context.WithTimeout(t.ctx, t.cfg.greeting)
	defer cancel()
	if err := c.HandshakeContext(ctx); err != nil {
		return identity.Name{}, h, err
	}
	peer, err := identity.PeerOf(c.ConnectionState())
	if err != nil {
		return peer, h, err
	}
	if me := t.cfg.Source.Me(); peer.Cluster != me.Cluster {
		return peer, h, fmt.Errorf("%v is of cluster %q, want %q", peer, peer.Cluster, me.Cluster)
	}
	if err := readLine(c, &h, maxHello); err != nil {
		return peer, h, fmt.Errorf("hello of %v: %w", peer, err)
	}
	if h.Run == "" || h.ID == "" {
		return peer, h, fmt.Errorf("hello of %v without run or id", peer)
	}
	return peer, h, nil
}

// stranger logs why a connection was not accepted, once for each of the latest faults.
func (t *Tunnel) stranger(from net.Addr, err error) {
	const most = 256
	host, _, _ := net.SplitHostPort(from.String())
	text := host + " " + err.Error()
	t.mu.Lock()
	known := t.said[text] || t.closed
	if !known {
		if len(t.said) >= most {
			clear(t.said)
		}
		t.said[text] = true
	}
	t.mu.Unlock()
	if !known {
		t.cfg.Log.Warn("connection of the tunnel refused", "from", from, "error", err)
	}
}

// readLine decodes a line of JSON from the very beginning of a connection. It reads nothing after
// the line.
func readLine(c net.Conn, into any, most int) error {
	var line []byte
	var b [1]byte
	for len(line) < most {
		if _, err := c.Read(b[:]); err != nil {
			return err
		}
		if b[0] == '\n' {
			return decode(line, into)
		}
		line = append(line, b[0])
	}
	return fmt.Errorf("a first line of more than %d bytes", most)
}

// decode decodes a message's version first, because only that is the same in all versions.
func decode(line []byte, into any) error {
	var v struct{ V int }
	if err := json.Unmarshal(line, &v); err != nil {
		return fmt.Errorf("first line: %d bytes, want a JSON object: %w", len(line), err)
	}
	if v.V != Version {
		return fmt.Errorf("first line: version %d, want %d: run the same release of stagecoach everywhere", v.V, Version)
	}
	return json.Unmarshal(line, into)
}

func writeLine(c net.Conn, v any) error {
	b, err := json.Marshal(v)
	if err == nil {
		_, err = c.Write(append(b, '\n'))
	}
	return err
}
