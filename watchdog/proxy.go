package watchdog

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httputil"
	"os"
	"strings"
	"sync"
	"time"
)

// overtime is the cause of a request's end that took longer than exec_timeout.
type overtime time.Duration

func (o overtime) Error() string {
	return fmt.Sprintf("the function ran for longer than exec_timeout, %v", time.Duration(o))
}

// bounded gives each request the function's exec_timeout.
func bounded(limit time.Duration, h http.Handler) http.Handler {
	if limit == 0 {
		return h
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeoutCause(r.Context(), limit, overtime(limit))
		defer cancel()
		h.ServeHTTP(w, r.WithContext(ctx))
	})
}

// refuse answers a request that the function did not.
func refuse(w http.ResponseWriter, status int, text string) {
	w.Header().Set("X-Content-Type-Options", "nosniff")
	http.Error(w, text, status)
}

// idle is how long a connection to the program is kept for the next request: shorter than servers keep theirs, because a
// request on a connection that its server is about to close fails.
const idle = time.Second

// lastMoment is how long a program that broke a connection is given to end.
const lastMoment = 200 * time.Millisecond

// proxy hands requests to the program as they are.
func proxy(p *child, slots int, log *slog.Logger) (h http.Handler, done func()) {
	t := &http.Transport{
		DialContext:        p.connect,
		DisableCompression: true, MaxIdleConnsPerHost: slots, IdleConnTimeout: idle, WriteBufferSize: 32 << 10, ReadBufferSize: 32 << 10,
	}
	prefix := strings.TrimSuffix(p.at.EscapedPath(), "/")
	return &httputil.ReverseProxy{
		BufferPool: &buffers{},
		Rewrite: func(r *httputil.ProxyRequest) {
			u := r.Out.URL
			u.Scheme, u.Host, u.RawQuery, r.Out.Host = "http", p.at.Host, r.In.URL.RawQuery, r.In.Host
			if prefix != "" {
				u.Path, u.RawPath = strings.TrimSuffix(p.at.Path, "/")+u.Path, prefix+r.In.URL.EscapedPath()
			}
			for _, name := range []string{"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto"} {
				if v := r.In.Header[name]; v != nil { // the gateway's, which a proxy that trusts nobody leaves out
					r.Out.Header[name] = v
				}
			}
			if r.Out.Header["User-Agent"] == nil {
				r.Out.Header["User-Agent"] = []string{""} // none, rather than the transport's
			}
		},
		Transport:    t,
		ErrorLog:     slog.NewLogLogger(log.Handler(), slog.LevelDebug),
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) { p.failed(w, r, err) },
	}, t.CloseIdleConnections
}

// failed answers a request that the program did not.
func (p *child) failed(w http.ResponseWriter, r *http.Request, err error) {
	var late overtime
	var taken takenError
	switch {
	case errors.As(err, &taken): // and this replica ends
		refuse(w, http.StatusBadGateway, taken.Error())
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
		<-r.Context().Done() // this process ends too, and with it the call, which can then be tried elsewhere
	}
}

// buffers are what proxies copy with.
type buffers struct{ sync.Pool }

// Get implements httputil.BufferPool.
func (b *buffers) Get() []byte {
	if p, ok := b.Pool.Get().(*[]byte); ok {
		return *p
	}
	return make([]byte, 32<<10)
}

// Put implements httputil.BufferPool.
func (b *buffers) Put(p []byte) { b.Pool.Put(&p) }
