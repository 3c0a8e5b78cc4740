package watchdog

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/hop"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/stage"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// carried returns the HTTP request that came with a call, or nil if the gateway sends it at the
// rendezvous.
func carried(call *stage.Call) []byte {
	if items := call.Items(); len(items) == 1 && items[0].ContentType == task.TypeRequest {
		return items[0].Bytes
	}
	return nil
}

// carry answers a request that came with its call. The answer becomes the call's result if it is
// complete before it is too large or flushed. Otherwise it goes to the gateway at the rendezvous.
func (e *exchanges) carry(call *stage.Call, address string, request []byte) stage.Result {
	return e.carryIn(call.Context(), call, address, request)
}

// carryIn is carry with a context, which is the call's.
func (e *exchanges) carryIn(ctx context.Context, call *stage.Call, address string, request []byte) stage.Result {
	at, err := parseAddress(address)
	if err != nil {
		return stage.Result{Err: err}
	}
	pool := e.begin(at.place)
	if pool == nil {
		return stage.Result{Err: errEnds}
	}
	defer e.running.Done()
	caller := ctx
	ctx, cancel := context.WithCancel(context.WithValue(ctx, callKey{}, call))
	defer cancel()
	defer context.AfterFunc(e.ctx, cancel)()
	k := &lazyConn{ctx: ctx, at: at, dial: e.dial, pool: pool, write: e.server.Write}
	server := *e.server
	server.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if call.Traceparent != "" {
			r.Header.Set("Traceparent", call.Traceparent)
		}
		e.server.Handler.ServeHTTP(&timed{ResponseWriter: w, begun: time.Now()}, r)
	})
	served := server.Run(ctx, k, request)
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case served.Silent:
		return stage.Result{Err: errors.New("the gateway's request cannot be read, want one HTTP/1.1 request")}
	case ctx.Err() != nil:
	case k.failed != nil:
		return stage.Result{Err: k.failed}
	case served.Whole && k.conn == nil:
		return stage.Result{Output: tensor.Activation{{ContentType: task.TypeResponse, Bytes: k.kept}}}
	case k.conn == nil && len(k.kept) > 0:
		if err := k.meet(); err != nil { // to pass on an answer that breaks off
			return stage.Result{Err: err}
		}
	case served.Kept && !k.closed:
		pool.Put(k.conn)
		k.conn = nil
	}
	if k.conn != nil {
		_ = k.conn.Close()
	}
	return stage.Result{Err: caller.Err()}
}

// errEnds is the error of calls that a replica does not answer because it ends.
var errEnds = errors.New("the replica ends")

// meeting is where the gateway waits for a replica.
type meeting struct {
	token string
	place
}

// place is a gateway's socket.
type place struct {
	path    string // on the gateway's machine
	control string // name of its control plane, for other machines; empty: they cannot meet it
}

// parseAddress splits the gateway's address of the rendezvous.
func parseAddress(address string) (r meeting, err error) {
	network, rest, _ := strings.Cut(address, " ")
	token, rest, ok := strings.Cut(rest, " ")
	r.token = token
	switch network {
	case "unix":
		r.path = rest
	case "unix+tls":
		r.control, r.path, ok = strings.Cut(rest, " ")
	default:
		ok = false
	}
	if !ok {
		return r, fmt.Errorf("rendezvous %.20q…, want unix TOKEN PATH or unix+tls TOKEN CONTROL PATH", address)
	}
	return r, nil
}

// dial connects to the gateway. On another machine than the gateway's, the node's daemon passes the
// connection on.
func (e *exchanges) dial(ctx context.Context, to place) (net.Conn, error) {
	d := net.Dialer{}
	if e.relay == "" {
		return d.DialContext(ctx, "unix", to.path)
	}
	if to.control == "" {
		return nil, errors.New("the gateway is on another machine, and names no control plane")
	}
	c, err := d.DialContext(ctx, "unix", e.relay)
	if err == nil {
		if _, err = c.Write([]byte(to.control + "\n")); err != nil {
			_ = c.Close()
		}
	}
	return c, err
}

// timed is a ResponseWriter that adds to the answer how long the function has worked.
type timed struct {
	http.ResponseWriter
	begun time.Time
	said  bool
}

// WriteHeader implements http.ResponseWriter.
func (t *timed) WriteHeader(status int) {
	if !t.said && status >= 200 {
		t.said = true
		t.Header()[task.HeaderDirect] = []string{time.Since(t.begun).String()}
	}
	t.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (t *timed) Write(b []byte) (int, error) {
	if !t.said {
		t.WriteHeader(http.StatusOK)
	}
	return t.ResponseWriter.Write(b)
}

// FlushError flushes for http.ResponseController.
func (t *timed) FlushError() error {
	if !t.said {
		t.WriteHeader(http.StatusOK)
	}
	return http.NewResponseController(t.ResponseWriter).Flush()
}

// Unwrap returns the wrapped writer for http.ResponseController.
func (t *timed) Unwrap() http.ResponseWriter { return t.ResponseWriter }

// lazyConn is a connection to the gateway that is made on demand: when an answer is flushed, or is
// too large to keep.
type lazyConn struct {
	ctx   context.Context //nolint:containedctx // belongs to the one exchange of this lazyConn
	at    meeting
	dial  func(context.Context, place) (net.Conn, error)
	pool  *hop.Pool
	write time.Duration // write_timeout

	mu     sync.Mutex
	kept   []byte   // bytes written so far; nil once there is a connection
	conn   net.Conn // nil: not connected yet
	failed error    // why the gateway could not be met
	closed bool
}

// Write implements net.Conn.
func (k *lazyConn) Write(b []byte) (int, error) {
	c, err := k.keep(b)
	if c == nil || err != nil {
		return len(b), err
	}
	return c.Write(b) // may block, and must not block Close
}

// keep stores b, or returns the connection to write it to.
func (k *lazyConn) keep(b []byte) (net.Conn, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.closed {
		return nil, net.ErrClosed
	}
	if k.conn == nil {
		if len(k.kept)+len(b) <= task.MaxMessage {
			k.kept = append(k.kept, b...)
			return nil, nil
		}
		if err := k.meet(); err != nil {
			return nil, err
		}
	}
	return k.conn, nil
}

// Flush implements hop.Flusher.
func (k *lazyConn) Flush() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case k.closed:
		return net.ErrClosed
	case k.conn != nil:
		return nil
	}
	return k.meet()
}

// meet sends the token to the gateway, then the stored bytes. The caller holds k.mu. When k.ctx
// ends, the connection is closed and meet returns.
func (k *lazyConn) meet() error {
	// The gateway may be about to close a kept connection.
	for c := k.pool.Get(); c != nil; c = nil {
		if k.greet(c) == nil {
			return k.begin(c)
		}
	}
	c, err := k.dial(k.ctx, k.at.place)
	if err == nil {
		err = k.greet(c)
	}
	if err != nil {
		k.failed = fmt.Errorf("rendezvous with the gateway: %w", err)
		return k.failed
	}
	return k.begin(c)
}

// greet sends the token and waits until the gateway wants the answer. If the gateway does not want
// it, greet closes the connection.
func (k *lazyConn) greet(c net.Conn) error {
	defer context.AfterFunc(k.ctx, func() { _ = c.Close() })()
	_, err := c.Write([]byte(k.at.token + "+"))
	var b [1]byte
	if err == nil {
		_, err = c.Read(b[:])
	}
	if err == nil && b[0] != '\n' {
		err = fmt.Errorf("it says %q, want a newline", b[0])
	}
	if err != nil {
		_ = c.Close()
	}
	return err
}

// begin writes the stored bytes.
func (k *lazyConn) begin(c net.Conn) error {
	kept := k.kept
	k.conn, k.kept = c, nil
	if k.write > 0 {
		_ = c.SetWriteDeadline(time.Now().Add(k.write))
	}
	_, err := c.Write(kept) // fits into the socket's buffer
	return err
}

// Close implements net.Conn.
func (k *lazyConn) Close() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.closed = true
	if k.conn == nil {
		return nil
	}
	return k.conn.Close()
}

// Read implements net.Conn. It always fails, because the request came with the call.
func (k *lazyConn) Read([]byte) (int, error) { return 0, os.ErrInvalid }

// LocalAddr implements net.Conn.
func (k *lazyConn) LocalAddr() net.Addr { return &net.UnixAddr{Name: k.at.path, Net: "unix"} }

// RemoteAddr implements net.Conn.
func (k *lazyConn) RemoteAddr() net.Addr { return k.LocalAddr() }

// SetDeadline implements net.Conn.
func (k *lazyConn) SetDeadline(t time.Time) error { return k.SetWriteDeadline(t) }

// SetReadDeadline implements net.Conn. It does nothing, because the request came with the call.
func (k *lazyConn) SetReadDeadline(time.Time) error { return nil }

// SetWriteDeadline implements net.Conn.
func (k *lazyConn) SetWriteDeadline(t time.Time) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.conn == nil {
		return nil
	}
	return k.conn.SetWriteDeadline(t)
}
