package hop

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
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// soon bounds events that are expected at once.
const soon = time.Minute

// sockets returns both ends of a unix socket.
func sockets(t testing.TB) (client, server net.Conn) {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if client, err = net.Dial("unix", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if server, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = client.Close(), server.Close() })
	for _, c := range []net.Conn{client, server} {
		_ = c.SetDeadline(time.Now().Add(soon))
	}
	return client, server
}

// answers runs one exchange with a server that runs the handler. It returns the outcome on both
// sides.
func answers(t *testing.T, r *http.Request, h http.HandlerFunc) (*httptest.ResponseRecorder, Result, Served) {
	t.Helper()
	client, server := sockets(t)
	served := make(chan Served)
	go func() {
		served <- (&Server{Handler: h, MaxHead: 1 << 16}).Serve(t.Context(), server)
	}()
	w := httptest.NewRecorder()
	out := Do(t.Context(), client, w, &Request{In: r, Target: r.URL.RequestURI(), Host: "function"})
	if out.Sent != nil {
		<-out.Sent
	}
	return w, out, <-served
}

// streamed is a body of unknown length.
type streamed struct{ io.Reader }

// TestConnectionIsKeptAfterProperEnds checks that a connection is kept only if both request and
// answer have ended properly.
func TestConnectionIsKeptAfterProperEnds(t *testing.T) {
	t.Parallel()
	echo := func(w http.ResponseWriter, r *http.Request) { _, _ = io.Copy(w, r.Body) }
	none := func() io.Reader { return nil }
	text := func(s string) func() io.Reader { return func() io.Reader { return strings.NewReader(s) } }
	large := strings.Repeat("x", 1<<20)
	for name, tc := range map[string]struct {
		method  string
		body    func() io.Reader
		handler http.HandlerFunc
		kept    bool
		want    string
	}{
		"no bodies":                {"GET", none, func(http.ResponseWriter, *http.Request) {}, true, ""},
		"bodies with a length":     {"POST", text("hello"), echo, true, "hello"},
		"large bodies":             {"POST", text(large), echo, true, large},
		"chunks":                   {"POST", func() io.Reader { return streamed{strings.NewReader(large)} }, echo, true, large},
		"HEAD":                     {"HEAD", none, func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("Content-Length", "9") }, true, ""},
		"204":                      {"GET", none, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) }, true, ""},
		"a body that is not read":  {"POST", text(large), func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "no") }, false, "no"},
		"an answer that is broken": {"GET", none, func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, false, ""},
		"an answer that is short": {"GET", none, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "9")
			_, _ = io.WriteString(w, "four")
		}, false, "four"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, out, served := answers(t, httptest.NewRequest(tc.method, "/", tc.body()), tc.handler)
			// If the answer is read before the goroutine that has sent the body ends, Do closes a
			// connection that it could keep.
			for i := 0; tc.kept && served.Kept && !out.Kept && out.Err == nil && i < 100; i++ {
				w, out, served = answers(t, httptest.NewRequest(tc.method, "/", tc.body()), tc.handler)
			}
			if served.Kept != tc.kept || tc.kept && !out.Kept || w.Body.String() != tc.want {
				t.Errorf("%+v, %+v, %d bytes; want kept %t and %d bytes", out, served, w.Body.Len(), tc.kept, len(tc.want))
			}
			if tc.kept && out.Err != nil {
				t.Error(out.Err)
			}
		})
	}
}

// TestConnectionIsNotKeptAfterUnclearEnds checks raw answers of a server. The connection is kept
// only if the answer ends where its headers say, and nothing follows.
func TestConnectionIsNotKeptAfterUnclearEnds(t *testing.T) {
	t.Parallel()
	for text, kept := range map[string]bool{
		"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok":                                                 true,
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n":                      true,
		"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok":                            false,
		"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok":                                                 false,
		"HTTP/1.1 200 OK\r\n\r\nok":                                                                      false,
		"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil": false,
	} {
		client, server := sockets(t)
		_, _ = io.WriteString(server, text)
		_ = server.(*net.UnixConn).CloseWrite()
		w := httptest.NewRecorder()
		out := Do(t.Context(), client, w, &Request{In: httptest.NewRequest("GET", "/", nil), Target: "/", Host: "f"})
		if out.Kept != kept || out.Err != nil || w.Body.String() != "ok" {
			t.Errorf("%q: %+v, %q, want kept %t", text, out, w.Body, kept)
		}
	}
	for text, silent := range map[string]bool{
		"": true, "HTTP/1.1 2": false, "HTTP/1.1 099 Odd\r\n\r\n": false, "SSH-2.0\r\n\r\n": false,
		"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: odd\r\n\r\n": false,
	} {
		client, server := sockets(t)
		_, _ = io.WriteString(server, text)
		_ = server.(*net.UnixConn).CloseWrite()
		out := Do(t.Context(), client, httptest.NewRecorder(), &Request{In: httptest.NewRequest("GET", "/", nil), Target: "/", Host: "f"})
		if out.Err == nil || out.Begun || out.Kept || out.Silent != silent {
			t.Errorf("%q: %+v, want an error and silent %t", text, out, silent)
		}
	}
}

// TestHeadsOfAnswersAreBounded checks the bound of an answer's head together with the informational
// answers before it. The body has no bound.
func TestHeadsOfAnswersAreBounded(t *testing.T) {
	t.Parallel()
	client, server := sockets(t)
	go func() {
		for {
			if _, err := io.WriteString(server, "HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"); err != nil {
				return
			}
		}
	}()
	out := Do(t.Context(), client, httptest.NewRecorder(), &Request{In: httptest.NewRequest("GET", "/", nil), Target: "/", Host: "f"})
	if out.Err == nil || !strings.Contains(out.Err.Error(), "more than 1048576 bytes") {
		t.Errorf("%v", out.Err)
	}
}

// TestHeadGoesFirst checks that the head is sent while the client has not sent its body yet.
func TestHeadGoesFirst(t *testing.T) {
	t.Parallel()
	for _, length := range []int64{5, -1} {
		client, server := sockets(t)
		body, say := io.Pipe()
		r := httptest.NewRequest("POST", "/", body)
		r.ContentLength = length
		done := make(chan Result)
		w := httptest.NewRecorder()
		go func() { done <- Do(t.Context(), client, w, &Request{In: r, Target: "/", Host: "f"}) }()
		got, err := http.ReadRequest(bufio.NewReader(server))
		if err != nil || got.ContentLength != length {
			t.Fatalf("%v, %v", got, err)
		}
		go func() { _, _ = io.WriteString(say, "hello"); _ = say.Close() }()
		if b, err := io.ReadAll(got.Body); string(b) != "hello" || err != nil {
			t.Errorf("%q, %v", b, err)
		}
		_, _ = io.WriteString(server, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
		out := <-done
		<-out.Sent
		if out.Err != nil {
			t.Error(out.Err)
		}
	}
}

// TestAmbiguousRequestsAreNotSent checks that requests that could be read as another request are
// not sent.
func TestAmbiguousRequestsAreNotSent(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*Request){
		"method": func(r *Request) { r.In.Method = "GET / HTTP/1.1\r\nX:" },
		"path":   func(r *Request) { r.Target = "/ HTTP/1.1\r\nX: y" },
		"host":   func(r *Request) { r.Host = "x\r\nX: y" },
		"name":   func(r *Request) { r.In.Header["X: y\r\nZ"] = []string{"v"} },
		"value":  func(r *Request) { r.In.Header["X"] = []string{"v\r\nContent-Length: 5"} },
		"field":  func(r *Request) { r.Header = []Field{{"X", "v\nY: z"}} },
	} {
		client, server := sockets(t)
		r := &Request{In: httptest.NewRequest("GET", "/", nil), Target: "/", Host: "f"}
		change(r)
		if out := Do(t.Context(), client, httptest.NewRecorder(), r); out.Err == nil || !strings.Contains(out.Err.Error(), "want a") {
			t.Errorf("%s: %+v", name, out)
		}
		if b, err := io.ReadAll(server); len(b) > 0 || err != nil {
			t.Errorf("%s: %q was sent, %v", name, b, err)
		}
	}
}

// TestHopByHopHeadersAreNotPassedOn checks that hop-by-hop headers are not passed on, and that a
// Request's headers replace the client's.
func TestHopByHopHeadersAreNotPassedOn(t *testing.T) {
	t.Parallel()
	r := httptest.NewRequest("GET", "/", nil)
	for name, value := range map[string]string{
		"Connection": "close, X-Hop", "X-Hop": "1", "Keep-Alive": "1", "Te": "trailers, gzip", "X-Kept": "1", "X-Call-Id": "client's", "Expect": "100-continue", "Upgrade": "h2c",
	} {
		r.Header.Set(name, value)
	}
	client, server := sockets(t)
	w := httptest.NewRecorder()
	go func() {
		got, err := http.ReadRequest(bufio.NewReader(server))
		if err == nil {
			var b strings.Builder
			_ = got.Header.Write(&b)
			_, _ = fmt.Fprintf(server, "HTTP/1.1 200 OK\r\nConnection: X-Far\r\nX-Far: 1\r\nX-Near: 1\r\nContent-Length: %d\r\n\r\n%s", b.Len(), b.String())
		}
	}()
	out := Do(t.Context(), client, w, &Request{In: r, Target: "/", Host: "f", Header: []Field{{"X-Call-Id", "ours"}, {Name: "Expect"}}})
	if want := "Te: trailers\r\nX-Call-Id: ours\r\nX-Kept: 1\r\n"; w.Body.String() != want || out.Err != nil {
		t.Errorf("the other side saw %q, want %q; %v", w.Body, want, out.Err)
	}
	if h := w.Header(); h.Get("X-Near") != "1" || h.Get("X-Far") != "" || h.Get("Connection") != "" {
		t.Errorf("the client sees %v", h)
	}
}

// TestReadTimeoutBoundsBodies checks that a body with a length must come within the timeout. For
// other bodies, and once the answer has begun, only silence is bounded.
func TestReadTimeoutBoundsBodies(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		chunked, begins bool
		pause           time.Duration
		whole           bool
	}{
		"a length, in time":              {false, false, time.Second, true},
		"a length, too slow":             {false, false, 4 * time.Second, false},
		"a length, the answer has begun": {false, true, 4 * time.Second, true},
		"chunks, slow":                   {true, false, 4 * time.Second, true},
		"chunks, silent":                 {true, false, 11 * time.Second, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				near, far := net.Pipe()
				defer far.Close()
				s := &Server{MaxHead: 1 << 16, Read: 10 * time.Second, Write: 10 * time.Second}
				s.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					if tc.begins {
						_ = http.NewResponseController(w).Flush()
					}
					if n, err := io.Copy(io.Discard, r.Body); (err == nil) != tc.whole || tc.whole && n != 5 {
						t.Errorf("%d bytes, %v, want all of them: %t", n, err, tc.whole)
					}
				})
				served := make(chan Served, 1)
				go func() { served <- s.Serve(t.Context(), near); _ = near.Close() }()
				head, piece := "Content-Length: 5\r\n\r\n", "x"
				if tc.chunked {
					head, piece = "Transfer-Encoding: chunked\r\n\r\n", "1\r\nx\r\n"
				}
				go func() { _, _ = io.Copy(io.Discard, far) }()
				_, _ = io.WriteString(far, "POST / HTTP/1.1\r\nHost: f\r\n"+head)
				for range 5 {
					time.Sleep(tc.pause)
					_, _ = io.WriteString(far, piece)
				}
				if tc.chunked {
					_, _ = io.WriteString(far, "0\r\n\r\n")
				}
				if out := <-served; out.Kept != tc.whole {
					t.Errorf("%+v", out)
				}
			})
		})
	}
}

// TestSilentUpgradedConnectionIsClosed checks that an upgraded connection is closed after a time
// without traffic, and not before.
func TestSilentUpgradedConnectionIsClosed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		clientFar, clientNear := net.Pipe()
		programNear, programFar := net.Pipe()
		s := &Server{MaxHead: 1 << 16, Read: time.Second, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			Do(r.Context(), programNear, w, &Request{In: r, Target: "/", Host: "f", Silence: 10 * time.Second})
		})}
		served := make(chan Served)
		go func() { served <- s.Serve(t.Context(), clientNear) }()
		go func() {
			in := bufio.NewReader(programFar)
			if _, err := http.ReadRequest(in); err == nil {
				_, _ = io.WriteString(programFar, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: lines\r\n\r\n")
				_, _ = io.Copy(programFar, in)
			}
		}()
		_, _ = io.WriteString(clientFar, "GET / HTTP/1.1\r\nHost: f\r\nConnection: Upgrade\r\nUpgrade: lines\r\n\r\n")
		in := bufio.NewReader(clientFar)
		if resp, err := http.ReadResponse(in, nil); err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
			t.Fatalf("%v, %v", resp, err)
		}
		for range 5 {
			time.Sleep(9 * time.Second)
			_, _ = io.WriteString(clientFar, "x\n")
			if line, err := in.ReadString('\n'); line != "x\n" || err != nil {
				t.Fatalf("%q, %v", line, err)
			}
		}
		start := time.Now()
		if _, err := in.ReadByte(); err == nil || time.Since(start) != 10*time.Second {
			t.Errorf("%v after %v, want the end after 10s", err, time.Since(start))
		}
		<-served
		_ = programFar.Close()
	})
}

// TestPoolReturnsTheConnectionKeptLast checks that the connection that was kept last is used first,
// unless it is old, closed at the other end, or has unread data.
func TestPoolReturnsTheConnectionKeptLast(t *testing.T) {
	t.Parallel()
	p := &Pool{Max: 2, Idle: time.Hour}
	defer p.Close()
	var far [4]net.Conn
	var near [4]net.Conn
	for i := range near {
		near[i], far[i] = sockets(t)
	}
	p.Put(near[0])
	p.Put(near[1])
	p.Put(near[2]) // one too many
	if _, err := far[2].Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("one too many: %v, want the end", err)
	}
	if c := p.Get(); c != near[1] {
		t.Error("not the last one")
	}
	p.Put(near[1])
	_ = far[1].Close()
	if c := p.Get(); c != near[0] {
		t.Error("one that is closed at its other end")
	}
	p.Put(near[0])
	_, _ = io.WriteString(far[0], "x")
	if c := p.Get(); c != nil {
		t.Error("one that has something to say")
	}
	p.Put(near[3])
	p.Close()
	if _, err := far[3].Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("after Close: %v, want the end", err)
	}
	w := &Pool{Max: 2, Idle: time.Hour, Waits: true}
	defer w.Close()
	for i := range 2 {
		near[i], far[i] = sockets(t)
		w.Put(near[i])
	}
	if w.Get() != nil {
		t.Error("one whose other end is not ready")
	}
	_, _ = far[0].Write([]byte{Ready})
	if c := w.Get(); c != near[0] {
		t.Error("not the one whose other end is ready")
	}
	for _, said := range []string{"", "x", string(Ready) + "x"} {
		near[2], far[2] = sockets(t)
		_, _ = io.WriteString(far[2], said)
		_ = far[2].Close()
		w.Put(near[2])
		if w.Get() != nil {
			t.Errorf("one that has said %q and is closed", said)
		}
	}
	_, _ = far[1].Write([]byte{Ready})
	if c := w.Get(); c != near[1] {
		t.Error("not the one that was not ready before")
	}
	synctest.Test(t, func(t *testing.T) {
		p := &Pool{Max: 2, Idle: time.Second}
		near, far := net.Pipe()
		p.Put(near)
		start := time.Now()
		if _, err := far.Read(make([]byte, 1)); !errors.Is(err, io.EOF) || time.Since(start) != time.Second {
			t.Errorf("%v after %v, want the end after a second", err, time.Since(start))
		}
		if p.Get() != nil {
			t.Error("it is still there")
		}
		p.Close()
	})
}

// TestExchangeEndsWithItsContext checks that an exchange ends with its context, and that its
// connection is not kept.
func TestExchangeEndsWithItsContext(t *testing.T) {
	t.Parallel()
	client, server := sockets(t)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		_, _ = http.ReadRequest(bufio.NewReader(server))
		cancel()
	}()
	if out := Do(ctx, client, httptest.NewRecorder(), &Request{In: httptest.NewRequest("GET", "/", nil), Target: "/", Host: "f"}); out.Err == nil || out.Kept {
		t.Errorf("%+v", out)
	}
	client, server = sockets(t)
	ctx, cancel = context.WithCancel(t.Context())
	s := &Server{MaxHead: 1 << 16, Handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { cancel(); <-r.Context().Done() })}
	_, _ = io.WriteString(client, "GET / HTTP/1.1\r\nHost: f\r\n\r\n")
	if out := s.Serve(ctx, server); out.Kept || out.Whole {
		t.Errorf("%+v", out)
	}
	if b, err := io.ReadAll(client); len(b) > 0 || err != nil {
		t.Errorf("%q, %v, want no answer", b, err) // nobody waits for one
	}
}
