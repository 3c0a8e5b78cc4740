package watchdog

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/hop"
	"github.com/stagecoach-serving/stagecoach/stage"
)

// exchanges serves HTTP on connections to the gateway's rendezvous. A connection is either kept
// from an earlier exchange or dialed by the replica.
type exchanges struct {
	server *hop.Server
	keeps  int // most connections to keep

	relay string // socket of the node's daemon, if the gateway is on another machine

	mu      sync.Mutex
	at      place     // of the gateway
	kept    *hop.Pool // kept connections to it
	closed  bool
	running sync.WaitGroup
	abort   context.CancelFunc // ends the running exchanges
	ctx     context.Context    // ends with abort
}

// keptTime is how long a connection to the gateway waits for its next exchange. The gateway waits
// longer.
const keptTime = 20 * time.Second

// maxHead is the largest request head in bytes: the gateway's bound, and room for what the gateway
// adds.
const maxHead = 128 << 10

// newExchanges returns exchanges that pass requests to the function, up to slots at a time. The
// caller closes them.
func newExchanges(function http.Handler, slots int, read, write time.Duration) *exchanges {
	e := &exchanges{keeps: slots, kept: &hop.Pool{}}
	e.server = &hop.Server{Handler: function, MaxHead: maxHead, Read: read, Write: write}
	e.ctx, e.abort = context.WithCancel(context.Background())
	return e
}

// close waits for the running exchanges, and breaks them off when ctx ends.
func (e *exchanges) close(ctx context.Context) {
	e.mu.Lock()
	e.closed = true
	e.mu.Unlock()
	e.kept.Close()
	stop := context.AfterFunc(ctx, e.abort)
	e.running.Wait()
	stop()
	e.abort()
}

// begin counts an exchange with a gateway. It returns the pool of kept connections to that gateway,
// or nil after close.
func (e *exchanges) begin(at place) *hop.Pool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil
	}
	if e.at != at {
		e.kept.Close()
		e.at, e.kept = at, &hop.Pool{Max: e.keeps, Idle: keptTime, Waits: true}
	}
	e.running.Add(1)
	return e.kept
}

// do meets the gateway at the call's rendezvous, and returns when the exchange has ended.
func (e *exchanges) do(call *stage.Call, address string) error {
	at, err := parseAddress(address)
	if err != nil {
		return err
	}
	if err := e.meet(context.WithValue(call.Context(), callKey{}, call), at); err != nil {
		return err
	}
	return call.Context().Err()
}

// meet sends the token to the gateway, and serves the request that follows. It returns when the
// request or ctx has ended. Only ctx bounds the wait for a slow gateway, because the gateway waits
// for the replica, too.
func (e *exchanges) meet(ctx context.Context, at meeting) error {
	pool := e.begin(at.place)
	if pool == nil {
		return errEnds
	}
	defer e.running.Done()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(e.ctx, cancel)()
	greeting := []byte(at.token + "\n")
	if c := pool.Get(); c != nil {
		// If the gateway has closed the kept connection, no request has come, and the token is
		// still valid on another connection.
		if _, err := c.Write(greeting); err != nil {
			_ = c.Close()
		} else if !e.serve(ctx, c, pool) || ctx.Err() != nil {
			return nil
		}
	}
	c, err := e.dial(ctx, at.place)
	if err != nil {
		return fmt.Errorf("rendezvous with the gateway: %w", err)
	}
	if _, err := c.Write(greeting); err != nil {
		_ = c.Close()
		return fmt.Errorf("rendezvous with the gateway: %w", err)
	}
	e.serve(ctx, c, pool)
	return nil
}

// serve runs the exchange on a connection whose token has been sent. It returns true if no request
// came.
func (e *exchanges) serve(ctx context.Context, c net.Conn, pool *hop.Pool) (silent bool) {
	served := e.server.Serve(ctx, c)
	switch {
	case served.Kept:
		pool.Put(c)
	case served.Whole:
		// The gateway may still send the rest of an unwanted body. If that failed, the gateway would
		// believe that the replica is lost.
		e.running.Go(func() { hop.Linger(c) })
	}
	return served.Silent
}

// callKey is the context key of a request's call.
type callKey struct{}

// withTimeoutHeader wraps function with setTimeoutHeader.
func withTimeoutHeader(function http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		setTimeoutHeader(r, r.Context().Value(callKey{}).(*stage.Call))
		function.ServeHTTP(w, r)
	})
}

// setTimeoutHeader sets X-Timeout to the time that the caller will still wait, so that the function
// can pass it on.
func setTimeoutHeader(r *http.Request, call *stage.Call) {
	r.Header.Del("X-Timeout")
	if !call.Deadline.IsZero() {
		r.Header.Set("X-Timeout", max(time.Until(call.Deadline), time.Millisecond).Round(time.Millisecond).String())
	}
}
