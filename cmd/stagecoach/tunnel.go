package main

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/image/transfer"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
	"github.com/stagecoach-serving/stagecoach/keysmanager/tunnel"
)

// Kinds of streams between nodes and control planes, besides node.Wants.
const (
	wantRendezvous = "rendezvous" // node to control plane: an exchange of a function that speaks HTTP
	wantGateway    = "gateway"    // node to control plane: a function calls gateway.openfaas
	wantSecrets    = "secrets"    // control plane to node: the secrets of a function
	wantImages     = "images"     // of any process: HTTP requests to its image server
)

// streamTime bounds how long a process waits for a stream to be opened.
const streamTime = 30 * time.Second

// pipe copies between two connections until both directions have ended, and closes them. An end of
// one direction is passed on, and an error ends both.
func pipe(a, b net.Conn) {
	one := func(to, from net.Conn) {
		_, err := io.Copy(to, from)
		if half, ok := to.(interface{ CloseWrite() error }); ok && err == nil {
			err = half.CloseWrite()
		} else if err == nil {
			err = io.EOF
		}
		if err != nil {
			_, _ = a.Close(), b.Close()
		}
	}
	var both sync.WaitGroup
	both.Go(func() { one(a, b) })
	one(b, a)
	both.Wait()
	_, _ = a.Close(), b.Close()
}

// relay accepts connections and connects each with a stream to a control plane.
type relay struct {
	l     net.Listener
	ctx   context.Context // ends with close
	end   context.CancelFunc
	group sync.WaitGroup

	mu     sync.Mutex
	closed bool
	conns  map[net.Conn]bool
}

// acceptPause is the wait after a failed accept.
const acceptPause = 50 * time.Millisecond

// newRelay serves the connections of l until close. open returns the stream for a connection.
func newRelay(l net.Listener, open func(ctx context.Context, c net.Conn) (net.Conn, error)) *relay {
	r := &relay{l: l, conns: map[net.Conn]bool{}}
	r.ctx, r.end = context.WithCancel(context.Background())
	r.group.Go(func() {
		for {
			c, err := l.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil { // no descriptor is free, perhaps
				time.Sleep(acceptPause)
				continue
			}
			if !r.keep(c) {
				return
			}
			r.group.Go(func() {
				defer r.drop(c)
				ctx, cancel := context.WithTimeout(r.ctx, streamTime)
				defer cancel()
				_ = c.SetDeadline(time.Now().Add(streamTime))
				stream, err := open(ctx, c)
				if err != nil {
					return // the caller sees that its connection is closed
				}
				_ = c.SetDeadline(time.Time{}) // fails if c is closed, and pipe ends at once then
				pipe(c, stream)
			})
		}
	})
	return r
}

func (r *relay) keep(c net.Conn) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		_ = c.Close()
		return false
	}
	r.conns[c] = true
	return true
}

func (r *relay) drop(c net.Conn) {
	_ = c.Close()
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.conns, c)
}

// close ends all connections, and waits for them.
func (r *relay) close() {
	_ = r.l.Close()
	r.mu.Lock()
	r.closed = true
	for c := range r.conns {
		_ = c.Close()
	}
	r.mu.Unlock()
	r.end()
	r.group.Wait()
}

// lent is a stream that its handler gives to another part of this process, which closes it.
type lent struct {
	net.Conn
	once sync.Once
	done chan struct{} // closed by Close
}

func lend(c net.Conn) *lent { return &lent{Conn: c, done: make(chan struct{})} }

// Close implements net.Conn.
func (l *lent) Close() error {
	l.once.Do(func() { close(l.done) })
	return l.Conn.Close()
}

// CloseWrite ends what is written.
func (l *lent) CloseWrite() error {
	if half, ok := l.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return errors.ErrUnsupported
}

// wait returns when the stream is closed, or ctx has ended.
func (l *lent) wait(ctx context.Context) {
	select {
	case <-l.done:
	case <-ctx.Done():
	}
}

// servesImages returns a handler that serves images on a stream.
func servesImages(s *transfer.Server) tunnel.Handler {
	return func(ctx context.Context, _ identity.Name, _ json.RawMessage, c net.Conn) {
		if tunnel.Accept(c) == nil {
			s.ServeConn(ctx, c)
		}
	}
}

func wants(kind string) tunnel.Request { return tunnel.Request{V: tunnel.Version, Want: kind} }
