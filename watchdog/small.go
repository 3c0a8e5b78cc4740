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
	"github.com/stagecoach-serving/stagecoach/stage"
	"github.com/stagecoach-serving/stagecoach/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// carried returns the HTTP request that came with a call; nil: the gateway says it at the rendezvous.
func carried(call *stage.Call) []byte {
	if items := call.Items(); len(items) == 1 && items[0].ContentType == task.TypeRequest {
		return items[0].Bytes
	}
	return nil
}

// carry answers a request that came with its call. The answer is the call's result if the function ends it before it is too large,
// and does not flush before that. Otherwise it goes to the gateway at the rendezvous.
func (e *exchanges) carry(call *stage.Call, address string, request []byte) stage.Result {
	return e.carryIn(call.Context(), call, address, request)
}

// carryIn is carry until ctx ends, which is the call's.
func (e *exchanges) carryIn(ctx context.Context, call *stage.Call, address string, request []byte) stage.Result {
	token, path, err := parseAddress(address)
	if err != nil {
		return stage.Result{Err: err}
	}
	pool := e.begin(path)
	if pool == nil {
		return stage.Result{Err: errEnds}
	}
	defer e.running.Done()
	caller := ctx
	ctx, cancel := context.WithCancel(context.WithValue(ctx, callKey{}, call))
	defer cancel()
	defer context.AfterFunc(e.ctx, cancel)()
	k := &keeper{ctx: ctx, token: token, path: path, pool: pool, write: e.server.Write}
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
		if err := k.meet(); err != nil { // with an answer that breaks off
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

// errEnds is why a replica that ends answers no more.
var errEnds = errors.New("the replica ends")

// parseAddress splits what the gateway says of the rendezvous.
func parseAddress(address string) (token, path string, err error) {
	network, rest, _ := strings.Cut(address, " ")
	token, path, ok := strings.Cut(rest, " ")
	if network != "unix" || !ok {
		return "", "", fmt.Errorf("rendezvous %.20q…, want unix TOKEN PATH", address)
	}
	return token, path, nil
}

// timed has an answer say how long the function has worked before it.
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

// FlushError is for http.ResponseController.
func (t *timed) FlushError() error {
	if !t.said {
		t.WriteHeader(http.StatusOK)
	}
	return http.NewResponseController(t.ResponseWriter).Flush()
}

// Unwrap is for http.ResponseController.
func (t *timed) Unwrap() http.ResponseWriter { return t.ResponseWriter }

// keeper is a connection to the gateway that is made when it is needed: when an answer is flushed, or is too large to be kept.
type keeper struct {
	ctx         context.Context //nolint:containedctx // of the one exchange that it is for
	token, path string
	pool        *hop.Pool
	write       time.Duration // write_timeout

	mu     sync.Mutex
	kept   []byte   // what has been written; nil once there is a connection
	conn   net.Conn // nil: not yet
	failed error    // to meet the gateway
	closed bool
}

// Write implements net.Conn.
func (k *keeper) Write(b []byte) (int, error) {
	c, err := k.keep(b)
	if c == nil || err != nil {
		return len(b), err
	}
	return c.Write(b) // may wait, and Close must not
}

// keep keeps b, or returns the connection that it is to be written to.
func (k *keeper) keep(b []byte) (net.Conn, error) {
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
func (k *keeper) Flush() error {
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

// meet says the token to the gateway, and then what has been kept. k.mu is held; ends with k.ctx, which closes the
// connection.
func (k *keeper) meet() error {
	for c := k.pool.Get(); c != nil; c = nil { // which the gateway may be about to close
		if k.greet(c) == nil {
			return k.begin(c)
		}
	}
	c, err := (&net.Dialer{}).DialContext(k.ctx, "unix", k.path)
	if err == nil {
		err = k.greet(c)
	}
	if err != nil {
		k.failed = fmt.Errorf("rendezvous with the gateway: %w", err)
		return k.failed
	}
	return k.begin(c)
}

// greet says the token, and waits until the gateway wants the answer. It closes a connection where it does not.
func (k *keeper) greet(c net.Conn) error {
	defer context.AfterFunc(k.ctx, func() { _ = c.Close() })()
	_, err := c.Write([]byte(k.token + "+"))
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

// begin writes what has been kept.
func (k *keeper) begin(c net.Conn) error {
	kept := k.kept
	k.conn, k.kept = c, nil
	if k.write > 0 {
		_ = c.SetWriteDeadline(time.Now().Add(k.write))
	}
	_, err := c.Write(kept) // fits into the socket's buffer
	return err
}

// Close implements net.Conn.
func (k *keeper) Close() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.closed = true
	if k.conn == nil {
		return nil
	}
	return k.conn.Close()
}

// Read implements net.Conn. The request is there already.
func (k *keeper) Read([]byte) (int, error) { return 0, os.ErrInvalid }

// LocalAddr implements net.Conn.
func (k *keeper) LocalAddr() net.Addr { return &net.UnixAddr{Name: k.path, Net: "unix"} }

// RemoteAddr implements net.Conn.
func (k *keeper) RemoteAddr() net.Addr { return k.LocalAddr() }

// SetDeadline implements net.Conn.
func (k *keeper) SetDeadline(t time.Time) error { return k.SetWriteDeadline(t) }

// SetReadDeadline implements net.Conn. The request is there already.
func (k *keeper) SetReadDeadline(time.Time) error { return nil }

// SetWriteDeadline implements net.Conn.
func (k *keeper) SetWriteDeadline(t time.Time) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.conn == nil {
		return nil
	}
	return k.conn.SetWriteDeadline(t)
}
