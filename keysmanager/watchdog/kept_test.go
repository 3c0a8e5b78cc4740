package watchdog

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/hop"
)

// rendezvous is a fake gateway's socket. Its connections arrive in conns.
type rendezvous struct {
	path  string
	conns chan *caller
}

// caller is one connection of a replica.
type caller struct {
	net.Conn
	in *bufio.Reader
}

func newRendezvous(t *testing.T) *rendezvous {
	t.Helper()
	v := &rendezvous{path: filepath.Join(t.TempDir(), "http"), conns: make(chan *caller, 8)}
	l, err := net.Listen("unix", v.path)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	t.Cleanup(func() { _ = l.Close(); <-done })
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_ = c.SetDeadline(time.Now().Add(soon))
			v.conns <- &caller{c, bufio.NewReader(c)}
		}
	}()
	return v
}

// ask reads the token and sends a request.
func (c *caller) ask(t *testing.T, token, request string) {
	t.Helper()
	if line, err := c.in.ReadString('\n'); line != token+"\n" || err != nil {
		t.Fatalf("the token is %q, %v, want %q", line, err, token)
	}
	if _, err := io.WriteString(c, request); err != nil {
		t.Fatal(err)
	}
}

// answer reads an answer and offers the next exchange.
func (c *caller) answer(t *testing.T, want string) {
	t.Helper()
	c.read(t, want)
	_, _ = c.Write([]byte{hop.Ready}) // fails if the replica has closed the connection
}

func (c *caller) read(t *testing.T, want string) {
	t.Helper()
	resp, err := http.ReadResponse(c.in, nil)
	if err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(resp.Body); string(b) != want || err != nil {
		t.Errorf("%q, %v, want %q", b, err, want)
	}
}

const hello = "POST / HTTP/1.1\r\nHost: f\r\nContent-Length: 5\r\n\r\nhello"

// TestConsecutiveExchangesShareAConnection checks that consecutive exchanges share one connection
// to the gateway. If the gateway has closed that connection, before or after the token was sent,
// the replica makes a new one, and the function still runs once per request.
func TestConsecutiveExchangesShareAConnection(t *testing.T) {
	t.Parallel()
	v := newRendezvous(t)
	var ran atomic.Int64
	e := newExchanges(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ran.Add(1)
		_, _ = io.Copy(w, r.Body)
	}), 4, 0, 0)
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	defer e.close(ctx)
	met := make(chan error, 1)
	meet := func(token string) { go func() { met <- e.meet(ctx, meeting{token, place{path: v.path}}) }() }

	meet("first")
	c := <-v.conns
	c.ask(t, "first", hello)
	c.answer(t, "hello")
	if err := <-met; err != nil {
		t.Error(err)
	}
	for i := range 3 {
		token := fmt.Sprint("next ", i)
		meet(token)
		c.ask(t, token, hello)
		c.answer(t, "hello")
		if err := <-met; err != nil {
			t.Error(err)
		}
	}
	_ = c.Close()
	meet("closed before")
	c = <-v.conns
	c.ask(t, "closed before", hello)
	c.answer(t, "hello")
	<-met
	meet("closed after")
	c.ask(t, "closed after", "")
	_ = c.Close()
	c = <-v.conns
	c.ask(t, "closed after", hello)
	c.answer(t, "hello")
	<-met
	if n := ran.Load(); n != 6 || len(v.conns) != 0 {
		t.Errorf("the function ran %d times, with %d more connections, want 6 and none", n, len(v.conns))
	}
	// A request that has started must not run again.
	meet("cut")
	c.ask(t, "cut", "POST / HTTP/1.1\r\nHost:")
	_ = c.Close()
	if err := <-met; err != nil || len(v.conns) != 0 {
		t.Errorf("%v, %d more connections", err, len(v.conns))
	}
	e.close(ctx)
	if err := e.meet(ctx, meeting{"late", place{path: v.path}}); err == nil {
		t.Error("an exchange after close")
	}
}

// TestConnectionWaitsForASlowClient checks that a connection carries no other request while the
// gateway still passes its answer on, and does so once the gateway is ready.
func TestConnectionWaitsForASlowClient(t *testing.T) {
	t.Parallel()
	v := newRendezvous(t)
	e := newExchanges(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = io.Copy(w, r.Body) }), 4, 0, 0)
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	defer e.close(ctx)
	met := make(chan error, 1)
	meet := func(token string) { go func() { met <- e.meet(ctx, meeting{token, place{path: v.path}}) }() }
	meet("slow")
	slow := <-v.conns
	slow.ask(t, "slow", hello)
	<-met // the replica has written the answer
	meet("other")
	other := <-v.conns
	other.ask(t, "other", hello)
	other.read(t, "hello")
	<-met
	slow.answer(t, "hello")
	meet("next")
	slow.ask(t, "next", hello)
	slow.read(t, "hello")
	<-met
	if n := len(v.conns); n != 0 {
		t.Errorf("%d more connections, want none", n)
	}
}

// TestSlowGatewayGetsItsAnswer checks that a gateway gets the answer even if it is slow to send the
// request or to read the token.
func TestSlowGatewayGetsItsAnswer(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		near, far := net.Pipe()
		defer far.Close()
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		e := newExchanges(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "late") }), 1, 0, 0)
		defer e.close(ctx)
		e.kept = &hop.Pool{Max: 1, Idle: time.Hour}
		e.kept.Put(near)
		e.at.path = "pipe"
		met := make(chan error, 1)
		go func() { met <- e.meet(ctx, meeting{"token", place{path: "pipe"}}) }()
		time.Sleep(20 * time.Minute)
		c := &caller{far, bufio.NewReader(far)}
		c.ask(t, "token", "")
		time.Sleep(20 * time.Minute)
		_, _ = io.WriteString(far, "GET / HTTP/1.1\r\nHost: f\r\n\r\n")
		c.read(t, "late")
		if err := <-met; err != nil {
			t.Error(err)
		}
	})
}

// TestConnectionWithUnreadRequestIsClosed checks that a connection whose request was not read
// completely is closed after the gateway has its answer.
func TestConnectionWithUnreadRequestIsClosed(t *testing.T) {
	t.Parallel()
	v := newRendezvous(t)
	e := newExchanges(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "no") }), 4, 0, 0)
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	defer e.close(ctx)
	met := make(chan error, 1)
	go func() { met <- e.meet(ctx, meeting{"token", place{path: v.path}}) }()
	c := <-v.conns
	c.ask(t, "token", hello)
	c.answer(t, "no")
	if _, err := c.in.ReadByte(); !errors.Is(err, io.EOF) {
		t.Errorf("%v, want the end", err)
	}
	_ = c.Close()
	if err := <-met; err != nil {
		t.Error(err)
	}
}

// TestRequestSurvivesAClosedKeptConnection checks that a request without a body gets another
// connection if the program closes the kept one when the request comes.
func TestRequestSurvivesAClosedKeptConnection(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	done := make(chan struct{})
	// A program that answers one request per connection, and closes when the second one comes.
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			in := bufio.NewReader(c)
			if _, err := http.ReadRequest(in); err == nil {
				_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
				_, _ = in.Peek(1)
			}
			_ = c.(*net.TCPConn).SetLinger(0)
			_ = c.Close()
		}
	}()
	h, forget := proxy(at(t, "http://"+l.Addr().String()), 4, 0)
	defer func() { forget(); _ = l.Close(); <-done }()
	for i := range 3 {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil))
		if w.Code != http.StatusOK || w.Body.String() != "ok" {
			t.Errorf("request %d: %d %q", i, w.Code, w.Body)
		}
	}
}
