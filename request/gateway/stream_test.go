package gateway

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// stage is a gateway behind a real server. Its function speaks HTTP, and replica answers the
// requests.
type stage struct {
	addr  string
	front *front
	mu    sync.Mutex
	log   bytes.Buffer // the server's log
}

// Write implements io.Writer for the server's log.
func (s *stage) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.log.Write(b)
}

// newStage runs replica for each request. The task ends when replica returns.
func newStage(t testing.TB, stall time.Duration, replica func(c net.Conn, in *bufio.Reader)) *stage {
	t.Helper()
	v, err := NewRendezvous(t.TempDir(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	s := &stage{}
	s.front = newFront(t, func(c *Config) {
		c.Rendezvous, c.HTTP, c.Stall = v, func(pipeline.Key) bool { return true }, stall
	})
	s.front.invoker.f = func(ctx context.Context, r task.Request) (*task.Response, *task.Error) {
		part := strings.SplitN(header(r, task.HeaderDirect)[0], " ", 3)
		c, err := net.Dial("unix", part[2])
		if err != nil {
			return nil, &task.Error{Status: http.StatusBadGateway, Cause: err.Error()}
		}
		defer c.Close()
		defer context.AfterFunc(ctx, func() { _ = c.Close() })()
		_, _ = io.WriteString(c, part[1]+"\n")
		replica(c, bufio.NewReader(c))
		return &task.Response{}, nil
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s.addr = l.Addr().String()
	srv := &http.Server{Handler: s.front.handler, ConnState: Unframed, ErrorLog: log.New(s, "", 0), ReadHeaderTimeout: time.Minute}
	served := make(chan struct{})
	go func() { defer close(served); _ = srv.Serve(Strict(l.(*net.TCPListener))) }()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := srv.Shutdown(ctx); err != nil {
			t.Errorf("a request does not end: %v", err)
			_ = srv.Close()
		}
		<-served
		v.Close()
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.log.Len() > 0 {
			t.Errorf("the server says: %.600s", s.log.String())
		}
	})
	return s
}

// client is one connection to a stage.
type client struct {
	*net.TCPConn
	in *bufio.Reader
}

func (s *stage) dial(t testing.TB) client {
	t.Helper()
	c, err := net.Dial("tcp", s.addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	return client{c.(*net.TCPConn), bufio.NewReader(c)}
}

func (c client) send(text string) { _, _ = io.WriteString(c, text) }

// answer reads an answer. It returns an error as the body's text.
func (c client) answer() (status int, body string) {
	resp, err := http.ReadResponse(c.in, nil)
	if err != nil {
		return 0, err.Error()
	}
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return resp.StatusCode, err.Error()
	}
	return resp.StatusCode, string(b)
}

const (
	post    = "POST /function/echo HTTP/1.1\r\nHost: x\r\n"
	chunked = post + "Transfer-Encoding: chunked\r\n\r\n"
	plain   = "GET /function/echo/next HTTP/1.1\r\nHost: x\r\n\r\n"
	ok      = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
	okay    = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"
)

// early returns a replica that sends answer after the first byte of the body, if there is a body.
func early(answer string) func(net.Conn, *bufio.Reader) {
	return func(c net.Conn, in *bufio.Reader) {
		r, err := http.ReadRequest(in)
		if err != nil {
			return
		}
		_, _ = r.Body.Read(make([]byte, 1))
		_, _ = io.WriteString(c, answer)
		_ = c.(*net.UnixConn).CloseWrite()
		_, _ = io.Copy(io.Discard, c) // closing with unread data would destroy the answer
	}
}

// TestBodyEndsAfterAnswer checks that a client may send the end of its body after the answer and
// keep its connection.
func TestBodyEndsAfterAnswer(t *testing.T) {
	t.Parallel()
	for name, body := range map[string][2]string{
		"chunks":     {chunked + "1\r\na\r\n", "0\r\n\r\n"},
		"a trailer":  {post + "Transfer-Encoding: chunked\r\nTrailer: Sum\r\n\r\n1\r\na\r\n", "5\r\nbcdef\r\n0\r\nSum: 6\r\n\r\n"},
		"a length":   {post + "Content-Length: 5\r\n\r\nab", "cde"},
		"a request":  {post + "Content-Length: 80\r\n\r\nab", strings.Repeat(" ", 80-2-len(plain)) + plain},
		"many bytes": {post + "Content-Length: 100002\r\n\r\nab", strings.Repeat("c", 100000)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStage(t, time.Minute, early(ok))
			c := s.dial(t)
			for i := range 20 {
				c.send(body[0])
				if status, b := c.answer(); status != http.StatusOK || b != "ok" {
					t.Fatalf("request %d: %d %q", i, status, b)
				}
				c.send(body[1])
			}
			c.send(plain)
			if status, b := c.answer(); status != http.StatusOK || b != "ok" {
				t.Fatalf("the last one: %d %q", status, b)
			}
			if n := len(s.front.invoker.asked); n != 21 {
				t.Errorf("%d requests, want 21", n)
			}
		})
	}
}

// TestUnendedBodyClosesConnection checks a client that never ends its body. After the answer, the
// request is over and the server closes the connection. The server does not take later bytes for a
// new request, and reads as few of them as possible.
func TestUnendedBodyClosesConnection(t *testing.T) {
	t.Parallel()
	const stall, is200 = 2 * time.Second, "HTTP/1.1 200 "
	for name, tc := range map[string]struct {
		sent, answer string
		stall        time.Duration
		want         string
	}{
		"chunks":            {chunked + "1\r\na\r\n", ok, stall, is200},
		"its answer's end":  {chunked + "1\r\na\r\n", okay, 0, is200},
		"a length":          {post + "Content-Length: 5\r\n\r\nab", ok, stall, is200},
		"too large":         {post + "Content-Length: 1000000\r\n\r\nab", ok, 0, is200},
		"a bad chunk":       {chunked + "1\r\na\r\n0x1\r\n", ok, 0, "HTTP/1.1 "},
		"Expect":            {post + "Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n", ok, 0, "HTTP/1.1 100 Continue\r\n\r\n" + is200},
		"Connection: close": {post + "Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n", ok, 0, is200},
		"HTTP/1.0":          {strings.Replace(post, "1.1", "1.0", 1) + "Content-Length: 5\r\n\r\nab", okay, 0, "HTTP/1.0 200 "},
		"it breaks off":     {chunked + "1\r\na\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok", 0, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStage(t, tc.stall, early(tc.answer))
			c := s.dial(t)
			c.send(tc.sent)
			all, err := io.ReadAll(c.in) // the server closes
			if text := string(all); err != nil || strings.Count(text, "HTTP/1.") != strings.Count(tc.want, "HTTP/1.") || !strings.HasPrefix(text, tc.want) {
				t.Errorf("%q, %v; want %s and the end", text, err, tc.want)
			}
			if n := s.front.inFlight.Load(); n != 0 {
				t.Errorf("%d requests in flight", n)
			}
		})
	}
	t.Run("the rest is no request", func(t *testing.T) {
		t.Parallel()
		s := newStage(t, stall, early(ok))
		c := s.dial(t)
		c.send(chunked + "1\r\na\r\n")
		if status, b := c.answer(); status != http.StatusOK || b != "ok" {
			t.Fatalf("%d %q", status, b)
		}
		// the server has closed its side and reads no more.
		if b, err := io.ReadAll(c.in); len(b) > 0 || err != nil {
			t.Fatalf("%q, %v, want the end", b, err)
		}
		c.send(plain)
		if n := len(s.front.invoker.asked); n != 1 {
			t.Errorf("%d requests, want 1", n)
		}
	})
}

// TestBodyThatEndsLaterCounts checks that a body whose end is awaited still counts its memory, but
// the request is no longer in flight.
func TestBodyThatEndsLaterCounts(t *testing.T) {
	t.Parallel()
	s := newStage(t, time.Minute, early(ok))
	c := s.dial(t)
	c.send(post + "Content-Length: 60002\r\n\r\nab")
	if status, b := c.answer(); status != http.StatusOK || b != "ok" {
		t.Fatalf("%d %q", status, b)
	}
	proctest.Until(t, "the request to end", func() bool { return s.front.inFlight.Load() == 0 })
	if n := s.front.memory.Load(); n != 60002 {
		t.Errorf("bodies take %d bytes, want 60002", n)
	}
	c.send(strings.Repeat("c", 60000))
	proctest.Until(t, "its memory to be free", func() bool { return s.front.memory.Load() == 0 })
}

// TestPipelinedRequestIsServed checks that the request that follows an unwanted body is served and
// not lost.
func TestPipelinedRequestIsServed(t *testing.T) {
	t.Parallel()
	s := newStage(t, time.Minute, early(ok))
	c := s.dial(t)
	const n = 50
	var text strings.Builder
	for range n {
		text.WriteString(chunked + "1\r\na\r\n5\r\nbcdef\r\n0\r\n\r\n" + post + "Content-Length: 5\r\n\r\nabcde" + plain)
	}
	c.send(text.String())
	for i := range 3 * n {
		if status, b := c.answer(); status != http.StatusOK || b != "ok" {
			t.Fatalf("answer %d: %d %q", i, status, b)
		}
	}
}

// TestTimeoutWhileBodyIsAwaited checks that a silent client is told at once when its task ends.
func TestTimeoutWhileBodyIsAwaited(t *testing.T) {
	t.Parallel()
	s := newStage(t, 0, nil)
	s.front.invoker.f = func(_ context.Context, r task.Request) (*task.Response, *task.Error) {
		part := strings.SplitN(header(r, task.HeaderDirect)[0], " ", 3)
		c, err := net.Dial("unix", part[2])
		if err != nil {
			return nil, &task.Error{Status: http.StatusBadGateway, Cause: err.Error()}
		}
		defer c.Close()
		_, _ = io.WriteString(c, part[1]+"\n")
		in := bufio.NewReader(c)
		if r, err := http.ReadRequest(in); err == nil {
			_, _ = r.Body.Read(make([]byte, 1))
		}
		return nil, &task.Error{Status: http.StatusGatewayTimeout, Cause: "too late"}
	}
	c := s.dial(t)
	c.send(chunked + "1\r\na\r\n")
	if status, b := c.answer(); status != http.StatusGatewayTimeout || !strings.Contains(b, "too late") {
		t.Errorf("%d %q", status, b)
	}
	if b, err := io.ReadAll(c.in); len(b) > 0 || err != nil {
		t.Errorf("%q, %v, want the end", b, err)
	}
}

// TestErrorBeforeBodyKeepsConnection checks that an error sent before the body was read leaves the
// connection usable.
func TestErrorBeforeBodyKeepsConnection(t *testing.T) {
	t.Parallel()
	s := newStage(t, time.Minute, nil)
	s.front.invoker.f = func(context.Context, task.Request) (*task.Response, *task.Error) {
		return nil, &task.Error{Status: http.StatusServiceUnavailable, Cause: "full"}
	}
	c := s.dial(t)
	for i := range 20 {
		c.send(post + "Content-Length: 5\r\n\r\nab")
		if status, b := c.answer(); status != http.StatusServiceUnavailable || !strings.Contains(b, "full") {
			t.Fatalf("request %d: %d %q", i, status, b)
		}
		c.send("cde" + chunked)
		if status, b := c.answer(); status != http.StatusServiceUnavailable || !strings.Contains(b, "full") {
			t.Fatalf("request %d in chunks: %d %q", i, status, b)
		}
		c.send("5\r\nabcde\r\n0\r\n\r\n")
	}
}

// TestCutEndsLaterReads checks that no Read extends the client's deadline after cut.
func TestCutEndsLaterReads(t *testing.T) {
	t.Parallel()
	for name, stop := range map[string]func(*source){"cut": (*source).cut, "end": func(s *source) { s.end(longAgo) }} {
		w := &timed{ResponseWriter: httptest.NewRecorder()}
		s := &source{mu: newGate(), rc: http.NewResponseController(w), stall: time.Minute, r: strings.NewReader("abc"), keep: 3}
		b := s.again(nil)
		if _, err := b.Read(make([]byte, 1)); err != nil || time.Until(w.deadline) < 0 {
			t.Errorf("%s: %v, a deadline at %v", name, err, w.deadline)
		}
		stop(s)
		_, _ = b.Read(make([]byte, 1))
		if !w.deadline.Equal(longAgo) {
			t.Errorf("%s: a deadline at %v, want one that has passed", name, w.deadline)
		}
		if s.end(time.Now().Add(time.Hour)) {
			t.Errorf("%s: all was read", name)
		}
	}
}

// timed is a ResponseWriter with a read deadline.
type timed struct {
	http.ResponseWriter
	deadline time.Time
}

// SetReadDeadline is for http.ResponseController.
func (w *timed) SetReadDeadline(at time.Time) error {
	w.deadline = at
	return nil
}

// TestResponseWriterWithoutDeadlines checks that a ResponseWriter without deadlines or a connection
// gets its answer, whatever is left of the body.
func TestResponseWriterWithoutDeadlines(t *testing.T) {
	t.Parallel()
	s := newStage(t, time.Minute, early(ok))
	r := httptest.NewRequest(http.MethodPost, "/function/echo", io.MultiReader(strings.NewReader("a"), iotest.ErrReader(io.ErrUnexpectedEOF)))
	r.ContentLength = 100
	w := httptest.NewRecorder()
	s.front.handler.ServeHTTP(w, r)
	if w.Code != http.StatusOK && w.Code != http.StatusBadRequest { // whichever comes first
		t.Errorf("%d %s", w.Code, w.Body)
	}
}
