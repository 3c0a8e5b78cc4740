package watchdog

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/hop"
)

// timeoutError is the cause for the end of a request that took longer than exec_timeout.
type timeoutError time.Duration

func (o timeoutError) Error() string {
	return fmt.Sprintf("the function ran for longer than exec_timeout, %v", time.Duration(o))
}

// bounded applies the function's exec_timeout to each request.
func bounded(limit time.Duration, h http.Handler) http.Handler {
	if limit == 0 {
		return h
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeoutCause(r.Context(), limit, timeoutError(limit))
		defer cancel()
		h.ServeHTTP(w, r.WithContext(ctx))
	})
}

// refuse answers a request instead of the function.
func refuse(w http.ResponseWriter, status int, text string) {
	w.Header().Set("X-Content-Type-Options", "nosniff")
	http.Error(w, text, status)
}

// idle is how long a connection to the program is kept for the next request. It is short, because
// servers close idle connections, too: a request fails if it is sent while the program closes its
// connection.
const idle = time.Second

// lastMoment is how long a program that broke a connection may take to end.
const lastMoment = 200 * time.Millisecond

// proxy passes requests to the program unchanged, over kept connections. silence is how long an
// upgraded connection may have no traffic before it is closed; 0: for ever.
func proxy(p *child, slots int, silence time.Duration) (h http.Handler, done func()) {
	pool := &hop.Pool{Max: slots, Idle: idle}
	prefix := strings.TrimSuffix(p.at.EscapedPath(), "/")
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := holdOf(r)
		out := &hop.Request{In: r, Target: prefix + r.URL.RequestURI(), Host: r.Host, Whole: h.releaseAnswered, Silence: silence}
		if strings.HasPrefix(r.RequestURI, "/") { // keeps the client's form
			out.Target = prefix + r.RequestURI
		}
		c := pool.Get()
		kept := c != nil
		for {
			if c == nil {
				var err error
				if c, err = p.connect(r.Context(), "tcp", p.at.Host); err != nil {
					p.failed(w, r, err)
					return
				}
			}
			held, _ := c.(*programConn)
			h.take(held)
			result := hop.Do(r.Context(), c, w, out)
			if result.Sent != nil {
				// The rest of the body will not be read.
				_ = http.NewResponseController(w).SetReadDeadline(time.Unix(1, 0))
				<-result.Sent
			}
			switch {
			case result.Kept:
				pool.Put(c)
			case result.Err == nil:
			case result.Begun:
				// So that the client does not take a part of the answer for the whole.
				panic(http.ErrAbortHandler)
			case kept && result.Silent && repeatable(r) && r.Context().Err() == nil:
				c, kept = nil, false // the program closed the connection just before
				continue
			default:
				p.failed(w, r, result.Err)
			}
			return
		}
	}), pool.Close
}

// repeatable reports whether a request may be sent to the program twice.
func repeatable(r *http.Request) bool {
	if r.ContentLength != 0 {
		return false
	}
	switch r.Method {
	case http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace:
		return true
	}
	return r.Header["Idempotency-Key"] != nil || r.Header["X-Idempotency-Key"] != nil
}

// failed answers a request that the program did not answer.
func (p *child) failed(w http.ResponseWriter, r *http.Request, err error) {
	var late timeoutError
	var taken takenError
	switch {
	case errors.As(err, &taken): // this replica ends
		refuse(w, http.StatusBadGateway, taken.Error())
		_ = http.NewResponseController(w).Flush() // before the replica ends
		return
	case errors.As(context.Cause(r.Context()), &late):
		refuse(w, http.StatusGatewayTimeout, late.Error())
		return
	case r.Context().Err() != nil:
		return // nobody waits for an answer
	case errors.Is(err, os.ErrDeadlineExceeded):
		refuse(w, http.StatusRequestTimeout, "the request's body did not come within read_timeout")
		return
	}
	t := time.NewTimer(lastMoment)
	defer t.Stop()
	select {
	case <-t.C:
		refuse(w, http.StatusBadGateway, "the function broke the connection: "+err.Error())
	case <-p.gone:
		// This process ends too, and with it the call, which can then be tried elsewhere.
		<-r.Context().Done()
	}
}
