package gateway

import (
	"bufio"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/hop"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// pooled makes the stage's function keep its connection, as a watchdog does. It runs one request at
// a time.
func (s *stage) pooled(replica func(attempt int, c net.Conn, in *bufio.Reader) (keep bool)) (dials func() int) {
	var kept net.Conn
	n, attempts := 0, 0
	s.front.invoker.f = func(_ context.Context, r task.Request) (*task.Response, *task.Error) {
		part := strings.SplitN(header(r, task.HeaderDirect)[0], " ", 3)
		for {
			c := kept
			if c != nil {
				_, _ = io.ReadFull(c, make([]byte, 1)) // the gateway is ready
			}
			if kept = nil; c == nil {
				var err error
				if c, err = net.Dial("unix", part[2]); err != nil {
					return nil, &task.Error{Status: http.StatusBadGateway, Cause: err.Error()}
				}
				n++
			}
			_ = c.SetDeadline(time.Now().Add(time.Minute))
			_, _ = io.WriteString(c, part[1]+"\n")
			in := bufio.NewReader(c)
			if _, err := in.Peek(1); err != nil { // the gateway closed it before the request came
				_ = c.Close()
				continue
			}
			if attempts++; replica(attempts, c, in) {
				kept = c
				return &task.Response{}, nil
			}
			_ = c.Close()
			if attempts > 10 {
				return nil, &task.Error{Status: http.StatusBadGateway, Cause: "it is lost each time"}
			}
		}
	}
	return func() int { return n }
}

// answered reads a whole request and answers it.
func answered(c net.Conn, in *bufio.Reader, answer string) bool {
	r, err := http.ReadRequest(in)
	if err == nil {
		_, err = io.Copy(io.Discard, r.Body)
	}
	if err == nil {
		_, err = io.WriteString(c, answer)
	}
	return err == nil
}

// TestRequestsShareKeptConnection checks that consecutive requests share one kept connection.
func TestRequestsShareKeptConnection(t *testing.T) {
	t.Parallel()
	s := newStage(t, time.Minute, nil)
	dials := s.pooled(func(_ int, c net.Conn, in *bufio.Reader) bool { return answered(c, in, ok) })
	c := s.dial(t)
	large := post + "Content-Length: 300000\r\n\r\n" + strings.Repeat("x", 300000)
	for i, text := range []string{plain, good, chunked + "5\r\nhello\r\n0\r\n\r\n", large, plain, "HEAD" + strings.TrimPrefix(plain, "GET")} {
		c.send(text)
		resp, err := http.ReadResponse(c.in, &http.Request{Method: strings.Fields(text)[0]})
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("request %d: %v, %v", i, resp, err)
		}
		if b, err := io.ReadAll(resp.Body); err != nil || string(b) != "ok" && !strings.HasPrefix(text, "HEAD") {
			t.Errorf("request %d: %q, %v", i, b, err)
		}
	}
	if n := dials(); n != 1 {
		t.Errorf("%d connections, want 1", n)
	}
}

// TestConnectionIsClosedAfterUncleanExchange checks that a connection is closed if its exchange did
// not end cleanly.
func TestConnectionIsClosedAfterUncleanExchange(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct{ request, answer string }{
		"the function closes it":    {plain, "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"},
		"more than an answer":       {plain, ok + "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"},
		"an answer without an end":  {plain, "HTTP/1.0 200 OK\r\n\r\nok"},
		"an answer before the body": {post + "Content-Length: 100000\r\n\r\n" + strings.Repeat("x", 70000), ok},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStage(t, 2*time.Second, nil)
			closed := make(chan error, 1)
			s.pooled(func(_ int, c net.Conn, in *bufio.Reader) bool {
				if r, err := http.ReadRequest(in); err == nil {
					_, _ = r.Body.Read(make([]byte, 1))
				}
				_, _ = io.WriteString(c, tc.answer)
				if strings.HasPrefix(tc.answer, "HTTP/1.0") {
					_ = c.(*net.UnixConn).CloseWrite()
				}
				_, err := io.Copy(io.Discard, c)
				closed <- err
				return true
			})
			c := s.dial(t)
			c.send(tc.request)
			if status, b := c.answer(); status != http.StatusOK || b != "ok" {
				t.Errorf("%d %q", status, b)
			}
			if err := <-closed; errors.Is(err, context.DeadlineExceeded) {
				t.Error(err)
			}
		})
	}
}

// TestRequestIsTriedAgainIfKeptConnectionBreaks checks a request whose kept connection breaks
// before the replica has answered. The gateway tries the request on the next connection and sends
// the body again.
func TestRequestIsTriedAgainIfKeptConnectionBreaks(t *testing.T) {
	t.Parallel()
	s := newStage(t, time.Minute, nil)
	dials := s.pooled(func(attempt int, c net.Conn, in *bufio.Reader) bool {
		if attempt == 2 {
			return false // the replica is lost after it took the second request
		}
		r, err := http.ReadRequest(in)
		if err != nil {
			return false
		}
		b, _ := io.ReadAll(r.Body)
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"+string(b))
		return true
	})
	c := s.dial(t)
	for i := range 3 {
		c.send(good)
		if status, b := c.answer(); status != http.StatusOK || b != "hello" {
			t.Fatalf("request %d: %d %q", i, status, b)
		}
	}
	if n := dials(); n != 2 {
		t.Errorf("%d connections, want 2", n)
	}
}

// TestUpgradedRequestEndsWithItsConnection checks that an upgraded request ends with its connection
// and is counted once.
func TestUpgradedRequestEndsWithItsConnection(t *testing.T) {
	t.Parallel()
	s := newStage(t, time.Minute, func(c net.Conn, in *bufio.Reader) {
		if _, err := http.ReadRequest(in); err == nil {
			_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: lines\r\n\r\n")
			_, _ = io.Copy(c, in)
		}
	})
	ended := make(chan any, 1)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer func() { ended <- recover() }()
		s.front.handler.ServeHTTP(w, r)
	}))
	defer srv.Close()
	s.addr = srv.Listener.Addr().String()
	c := s.dial(t)
	c.send("GET /function/echo HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: lines\r\n\r\nhello\n")
	if resp, err := http.ReadResponse(c.in, nil); err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("%v, %v", resp, err)
	}
	if line, err := c.in.ReadString('\n'); line != "hello\n" || err != nil {
		t.Errorf("%q, %v", line, err)
	}
	_ = c.CloseWrite()
	if rest, err := io.ReadAll(c.in); len(rest) > 0 || err != nil {
		t.Errorf("%q, %v, want the end", rest, err)
	}
	if p := <-ended; p != nil {
		t.Errorf("the handler panicked: %v", p)
	}
	if n := s.front.Invocations(pipeline.Named("echo", "")); n != 1 {
		t.Errorf("%v requests are counted, want 1", n)
	}
}

// TestKeptConnectionServesWaitingTokenOnce checks that a kept connection serves one waiting token
// once, and nothing else.
func TestKeptConnectionServesWaitingTokenOnce(t *testing.T) {
	t.Parallel()
	v, err := NewRendezvous(t.TempDir(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer v.Close()
	ended := func(what string, c net.Conn) {
		t.Helper()
		if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil || errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: %d bytes, %v, want the end", what, n, err)
		}
		_ = c.Close()
	}
	ready := func(c net.Conn) {
		t.Helper()
		var b [1]byte
		if _, err := io.ReadFull(c, b[:]); b[0] != hop.Ready || err != nil {
			t.Errorf("%q, %v, want that the gateway is ready", b, err)
		}
	}
	kept := func() net.Conn {
		m := v.meet()
		defer m.close()
		c := dial(t, v, m.token+"\n")
		v.keep(<-m.conns)
		ready(c)
		return c
	}
	m := v.meet()
	c := kept()
	_, _ = io.WriteString(c, m.token+"\n")
	met := <-m.conns
	v.keep(met)
	ready(c)
	m.close()
	_, _ = io.WriteString(c, m.token+"\n")
	ended("the token of a request that has ended", c)
	c = kept()
	_, _ = io.WriteString(c, strings.Repeat("A", tokenSize)+"\n")
	ended("a token of nobody", c)
	c = kept()
	v.Close()
	ended("one that is kept when the gateway closes", c)
	near, far := net.Pipe()
	v.keep(near)
	ended("one that comes after that", far)
}
