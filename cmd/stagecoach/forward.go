package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"runtime/debug"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// A control plane that does not hold the lease of control forwards requests that only the holder
// can answer: of the API, and async ones. They travel over NATS, so that control planes need no
// addresses of each other.

// forwardable reports whether a request is for the holder of the lease.
func forwardable(path string) bool {
	return path != "/system/control-planes" && (strings.HasPrefix(path, "/system/") || strings.HasPrefix(path, "/async-function/"))
}

// forwardRoom is the part of the largest message that a forwarded request's body leaves free.
const forwardRoom = 256 << 10

// A request waits this long for a process that leads, and looks for it this often.
const (
	forwardWait  = 5 * time.Second
	forwardAgain = 100 * time.Millisecond
)

// forwardPart is the size of the parts of an answer.
const forwardPart = 128 << 10

// forwardedRequest is a request without its body.
type forwardedRequest struct {
	V      int         `json:"v"`
	Method string      `json:"method"`
	URI    string      `json:"uri"`
	Host   string      `json:"host"`
	From   string      `json:"from"`
	Header http.Header `json:"header"`
}

// forwardedAnswer is an answer without its body.
type forwardedAnswer struct {
	Status int         `json:"status"`
	Header http.Header `json:"header"`
}

// forwarder answers requests, or forwards them to the control plane that can.
type forwarder struct {
	http.Handler // of this process
	leads        func() bool
	holder       func() string // id of the process that holds the lease; empty: none
	bus          *queue.Bus
	most         int // largest message
	log          *slog.Logger
	why          func() string // why this process does not lead; empty: it could
}

// ServeHTTP implements http.Handler.
func (f *forwarder) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if f.leads() || !forwardable(r.URL.Path) {
		f.Handler.ServeHTTP(w, r)
		return
	}
	unavailable := func(cause string) {
		w.Header().Set("Retry-After", "1")
		http.Error(w, cause, http.StatusServiceUnavailable)
	}
	holder := f.holder()
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, int64(f.most-forwardRoom)))
	if large := (*http.MaxBytesError)(nil); errors.As(err, &large) {
		http.Error(w, fmt.Sprintf("the body has more than %d bytes, which this control plane cannot forward over NATS (max_payload); "+
			"send it to the control plane that holds the lease of control: %s", large.Limit, holder), http.StatusRequestEntityTooLarge)
		return
	}
	if err != nil {
		http.Error(w, "failed to read the body: "+err.Error(), http.StatusBadRequest)
		return
	}
	msg, err := json.Marshal(forwardedRequest{V: 1, Method: r.Method, URI: r.URL.RequestURI(), Host: r.Host, From: r.RemoteAddr, Header: r.Header})
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	begun := false
	msg = append(append(msg, '\n'), body...)
	answer := func(part []byte) error {
		if begun {
			_, err := w.Write(part)
			if err == nil {
				err = http.NewResponseController(w).Flush()
			}
			return err
		}
		begun = true
		var a forwardedAnswer
		if err := json.Unmarshal(part, &a); err != nil {
			return err
		}
		for name, values := range a.Header {
			w.Header()[name] = values
		}
		w.WriteHeader(a.Status)
		return nil
	}
	for until := time.Now().Add(forwardWait); ; {
		if err = f.bus.Call(r.Context(), "api "+holder, msg, answer); !errors.Is(err, queue.ErrNobody) || time.Now().After(until) {
			break
		}
		select { // the holder has ended, or does not lead yet
		case <-time.After(forwardAgain):
			holder = f.holder()
		case <-r.Context().Done():
			return
		}
	}
	switch {
	case err == nil:
	case begun:
		panic(http.ErrAbortHandler) // the client must not take a part for the whole
	case errors.Is(err, queue.ErrNobody):
		cause := "no control plane that holds the lease of control answers; try again"
		if why := f.why(); why != "" {
			cause += "; " + why
		}
		unavailable(cause)
	default:
		unavailable("the request may have been carried out: " + err.Error())
	}
}

// serve answers the requests that other control planes forward.
func (f *forwarder) serve(me string) (stop func(), err error) {
	return f.bus.Serve("api "+me, func(ctx context.Context, msg []byte, send func([]byte) error) error {
		w := &partWriter{send: send, header: http.Header{}}
		head, body, _ := bytes.Cut(msg, []byte("\n"))
		var is forwardedRequest
		err := json.Unmarshal(head, &is)
		if err == nil && is.V != 1 {
			err = fmt.Errorf("version %d, want 1: run the same release of stagecoach everywhere", is.V)
		}
		var r *http.Request
		if err == nil {
			r, err = http.NewRequestWithContext(ctx, is.Method, is.URI, bytes.NewReader(body))
		}
		if err != nil {
			http.Error(w, "forwarded request: "+err.Error(), http.StatusBadRequest)
			err = nil
		} else {
			r.Header, r.Host, r.RemoteAddr, r.RequestURI = is.Header, is.Host, is.From, is.URI
			err = f.answer(w, r)
		}
		w.Flush()
		return err
	})
}

// answer answers a request of another control plane. No server of package http recovers from a
// panic of the handler here. answer returns an error if a part of the answer was sent before.
func (f *forwarder) answer(w *partWriter, r *http.Request) (err error) {
	defer func() {
		p := recover()
		if p == nil {
			return
		}
		if cause, is := p.(error); !is || !errors.Is(cause, http.ErrAbortHandler) {
			f.log.Error("a forwarded request has caused a panic", "method", r.Method, "path", r.URL.Path, "panic", p, "stack", string(debug.Stack()))
		}
		err = fmt.Errorf("the control plane that leads has failed to answer: %v", p)
		if !w.begun {
			clear(w.header)
			w.header.Set("X-OpenFaaS-Internal", "stagecoach")
			http.Error(w, err.Error(), http.StatusInternalServerError)
			err = nil
		}
	}()
	f.Handler.ServeHTTP(w, r)
	return nil
}

// partWriter sends an answer in parts.
type partWriter struct {
	send   func([]byte) error
	header http.Header
	begun  bool
	buffer []byte
	err    error
}

// Header implements http.ResponseWriter.
func (w *partWriter) Header() http.Header { return w.header }

// WriteHeader implements http.ResponseWriter.
func (w *partWriter) WriteHeader(status int) {
	if w.begun || status < http.StatusOK {
		return
	}
	w.begun = true
	b, err := json.Marshal(forwardedAnswer{status, w.header})
	if err == nil {
		err = w.send(b)
	}
	w.err = errors.Join(w.err, err)
}

// Write implements http.ResponseWriter.
func (w *partWriter) Write(b []byte) (int, error) {
	w.WriteHeader(http.StatusOK)
	w.buffer = append(w.buffer, b...)
	for w.err == nil && len(w.buffer) >= forwardPart {
		w.err = w.send(w.buffer[:forwardPart])
		w.buffer = w.buffer[forwardPart:]
	}
	return len(b), w.err
}

// Flush implements http.Flusher.
func (w *partWriter) Flush() {
	w.WriteHeader(http.StatusOK)
	if w.err == nil && len(w.buffer) > 0 {
		w.err = w.send(w.buffer)
		w.buffer = nil
	}
}
