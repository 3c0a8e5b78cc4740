package watchdog

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/stage"
)

// exchanges serves HTTP on connections that the replica itself dials, one request each.
type exchanges struct {
	function    http.Handler
	read, write time.Duration // of a request; 0: no bound of its own
	srv         *http.Server
	conns       chan net.Conn // to the server
	closed      chan struct{}
	once        sync.Once
	served      chan struct{}
}

// Times that an exchange on one machine, with a gateway that waits for it, never takes.
const (
	dialTimeout = 5 * time.Second
	askTimeout  = 10 * time.Second
	lingerTime  = 500 * time.Millisecond
)

// maxHead bounds a request's head in bytes: the gateway's bound and room for what it adds.
const maxHead = 128 << 10

func newExchanges(function http.Handler, read, write time.Duration, log *slog.Logger) *exchanges {
	e := &exchanges{
		function: function, read: read, write: write,
		conns: make(chan net.Conn), closed: make(chan struct{}), served: make(chan struct{}),
	}
	e.srv = &http.Server{
		Handler: e, ReadHeaderTimeout: askTimeout, MaxHeaderBytes: maxHead,
		ErrorLog:    slog.NewLogLogger(log.Handler(), slog.LevelDebug),
		ConnContext: func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, connKey{}, c) },
	}
	e.srv.SetKeepAlivesEnabled(false)
	go func() { // close waits for it
		defer close(e.served)
		_ = e.srv.Serve(e) // http.ErrServerClosed
	}()
	return e
}

// close ends the server once what it writes has gone out, or ctx has ended.
func (e *exchanges) close(ctx context.Context) {
	if e.srv.Shutdown(ctx) != nil {
		_ = e.srv.Close()
	}
	<-e.served
}

// Accept implements net.Listener.
func (e *exchanges) Accept() (net.Conn, error) {
	select {
	case c := <-e.conns:
		return c, nil
	case <-e.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (e *exchanges) Close() error { e.once.Do(func() { close(e.closed) }); return nil }

// Addr implements net.Listener.
func (e *exchanges) Addr() net.Addr { return &net.UnixAddr{Net: "unix"} }

type connKey struct{}

// conn is the connection of one call.
type conn struct {
	net.Conn
	call *stage.Call
	once sync.Once
	over chan struct{} // closed when the exchange has ended, well or not
}

func (c *conn) end() { c.once.Do(func() { close(c.over) }) }

// Close implements net.Conn, for the server. The gateway may still send of a body that nobody wants, and would take it for the
// replica's loss, and the answer for lost, if it could not: it closes first.
func (c *conn) Close() error {
	c.end()
	if s, ok := c.Conn.(interface{ CloseWrite() error }); ok && s.CloseWrite() == nil && c.SetReadDeadline(time.Now().Add(lingerTime)) == nil {
		_, _ = io.Copy(io.Discard, c.Conn)
	}
	return c.Conn.Close()
}

// abort closes at once what is not to go on.
func (c *conn) abort() {
	c.end()
	_ = c.Conn.Close()
}

// do dials the call's rendezvous and returns when the exchange there has ended.
func (e *exchanges) do(call *stage.Call, address string) error {
	network, rest, _ := strings.Cut(address, " ")
	token, path, ok := strings.Cut(rest, " ")
	if network != "unix" || !ok {
		return fmt.Errorf("rendezvous %.20q…, want unix TOKEN PATH", address)
	}
	ctx := call.Context()
	d := net.Dialer{Timeout: dialTimeout}
	raw, err := d.DialContext(ctx, network, path)
	if err != nil {
		return fmt.Errorf("rendezvous with the gateway: %w", err)
	}
	c := &conn{Conn: raw, call: call, over: make(chan struct{})}
	defer context.AfterFunc(ctx, c.abort)()
	if _, err := raw.Write([]byte(token + "\n")); err != nil {
		c.abort()
		return fmt.Errorf("rendezvous with the gateway: %w", err)
	}
	select {
	case e.conns <- c:
	case <-e.closed:
		c.abort()
		return errors.New("the replica ends")
	}
	<-c.over // the server, or the end of ctx, sees to it
	return ctx.Err()
}

// ServeHTTP ends the exchange's call when its answer is on its way.
func (e *exchanges) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c := r.Context().Value(connKey{}).(*conn)
	defer c.end()
	rc := http.NewResponseController(w)
	_ = rc.EnableFullDuplex() // a function may answer while it reads
	if e.read > 0 {
		_ = rc.SetReadDeadline(time.Now().Add(e.read))
	}
	if e.write > 0 {
		_ = rc.SetWriteDeadline(time.Now().Add(e.write))
	}
	patience(r, c.call)
	e.function.ServeHTTP(w, r)
	_ = rc.Flush() // the client has most of it before its slot is free
}

// patience tells the function how long its caller still waits, as a duration that it can pass on.
func patience(r *http.Request, call *stage.Call) {
	r.Header.Del("X-Timeout")
	if !call.Deadline.IsZero() {
		r.Header.Set("X-Timeout", max(time.Until(call.Deadline), time.Millisecond).Round(time.Millisecond).String())
	}
}
