package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/control/learn"
	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// TestForwardedRequests has a control plane that stands by forward requests to the one that leads,
// over NATS.
func TestForwardedRequests(t *testing.T) {
	server, err := queue.StartServer(queue.ServerConfig{Dir: t.TempDir(), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Close)
	nc, err := server.Connect("test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	begun, gone := make(chan struct{}), make(chan struct{})
	leaders := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/system/endless":
			_, _ = io.WriteString(w, "first")
			_ = http.NewResponseController(w).Flush()
			close(begun)
			<-r.Context().Done()
			close(gone)
		case "/system/panics":
			w.Header().Set("X-Half", "made")
			panic("a fault of the handler")
		case "/system/breaks":
			_, _ = io.WriteString(w, "first")
			_ = http.NewResponseController(w).Flush()
			panic("a late fault of the handler")
		case "/system/large":
			_, _ = w.Write(make([]byte, 1<<20))
		default:
			b, err := io.ReadAll(r.Body)
			w.Header().Set("X-Seen", fmt.Sprint(r.Method, " ", r.URL.RequestURI(), " ", r.Host, " ", r.RemoteAddr != "", " ", r.Header.Get("X-Mine")))
			w.WriteHeader(http.StatusTeapot)
			fmt.Fprintf(w, "%d %v", len(b), err)
		}
	})
	var holder atomic.Value
	holder.Store("other")
	yes, no := func() bool { return true }, func() bool { return false }
	of := func(h http.Handler, leads func() bool) *forwarder {
		return &forwarder{Handler: h, leads: leads, holder: func() string { return holder.Load().(string) }, bus: queue.NewBus(nc), most: 1 << 20, log: slog.New(slog.DiscardHandler), why: func() string { return "it lacks secrets" }}
	}
	stop, err := of(leaders, yes).serve("leader")
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	own := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "own") })
	front := httptest.NewServer(of(own, no))
	defer front.Close()
	send := func(ctx context.Context, path, body string) (*http.Response, string, error) {
		req, err := http.NewRequestWithContext(ctx, http.MethodPut, front.URL+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Host = "gateway.example"
		req.Header.Set("X-Mine", "m")
		resp, err := front.Client().Do(req)
		if err != nil {
			return nil, "", err
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		return resp, string(b), err
	}

	// The leader is not known at first. The request waits for it.
	time.AfterFunc(3*forwardAgain, func() { holder.Store("leader") })
	resp, body, err := send(t.Context(), "/system/x?y=z", "hello")
	if err != nil || resp.StatusCode != http.StatusTeapot || body != "5 <nil>" {
		t.Fatalf("got %+v, %q, %v", resp, body, err)
	}
	if got, want := resp.Header.Get("X-Seen"), "PUT /system/x?y=z gateway.example true m"; got != want {
		t.Errorf("the leader has seen %q, want %q", got, want)
	}
	if resp, body, err = send(t.Context(), "/system/large", ""); err != nil || len(body) != 1<<20 || resp.StatusCode != http.StatusOK {
		t.Errorf("a large answer: %d bytes, %v", len(body), err)
	}
	if resp, body, err = send(t.Context(), "/system/x", strings.Repeat("x", 1<<20)); err != nil || resp.StatusCode != http.StatusRequestEntityTooLarge || !strings.Contains(body, "max_payload") {
		t.Errorf("a large body: %+v, %q, %v", resp, body, err)
	}
	if _, body, err = send(t.Context(), "/function/f", ""); err != nil || body != "own" {
		t.Errorf("a sync request: %q, %v; want it answered here", body, err)
	}
	if resp, body, err = send(t.Context(), "/system/panics", ""); err != nil || resp.StatusCode != http.StatusInternalServerError ||
		resp.Header.Get("X-OpenFaaS-Internal") == "" || resp.Header.Get("X-Half") != "" || !strings.Contains(body, "a fault of the handler") {
		t.Errorf("a panic of the leader's handler: %+v, %q, %v; want 500 with X-OpenFaaS-Internal", resp, body, err)
	}
	if _, body, err = send(t.Context(), "/system/breaks", ""); err == nil {
		t.Errorf("a panic in the middle of an answer: the answer %q ends like a whole one", body)
	}
	if _, body, err = send(t.Context(), "/system/x", "alive"); err != nil || body != "5 <nil>" {
		t.Errorf("after the panics: %q, %v", body, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() { <-begun; cancel() }()
	if _, _, err = send(ctx, "/system/endless", ""); err == nil {
		t.Error("an endless answer has ended")
	}
	<-gone // the leader notices that the client has gone
	holder.Store("nobody")
	if resp, body, err = send(t.Context(), "/async-function/f", "x"); err != nil || resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "" || !strings.Contains(body, "it lacks secrets") {
		t.Errorf("without a leader: %+v, %q, %v; want 503", resp, body, err)
	}
}

// learnStore is a store that counts.
type learnStore struct {
	learn.Store
	puts int
}

func (s *learnStore) Put(context.Context, string, []byte) (uint64, error) {
	s.puts++
	return 1, nil
}

// TestDemandOfALeader checks that only a leader that may act stores learned demand.
func TestDemandOfALeader(t *testing.T) {
	var lapsed error
	leads, to := false, &learnStore{}
	s := leadersStore{to, func() bool { return leads }, func() (uint64, error) { return 7, lapsed }}
	if _, err := s.Put(t.Context(), "0", nil); err != nil || to.puts != 0 {
		t.Errorf("standing by: %v, and %d records were stored; want none", err, to.puts)
	}
	leads, lapsed = true, errNoLease
	if _, err := s.Put(t.Context(), "0", nil); !errors.Is(err, errNoLease) || to.puts != 0 {
		t.Errorf("without the lease: %v, and %d records were stored; want %v, so that it is tried again", err, to.puts, errNoLease)
	}
	lapsed = nil
	if _, err := s.Put(t.Context(), "0", nil); err != nil || to.puts != 1 {
		t.Errorf("leading: %v, and %d records were stored; want one", err, to.puts)
	}
}
