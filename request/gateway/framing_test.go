package gateway

import (
	"bufio"
	"bytes"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// framed maps what follows "POST / HTTP/1.1\r\nHost: x\r\n" to the outcome: the bodies of the
// requests served, or a refusal.
var framed = map[string]struct {
	text    string
	bodies  []string
	refused bool
}{
	"no body":                  {text: "\r\n", bodies: []string{""}},
	"a length":                 {text: "content-LENGTH:\t3 \r\n\r\nabc", bodies: []string{"abc"}},
	"chunks":                   {text: "Transfer-Encoding: Chunked\r\n\r\n3;a=b\r\nabc\r\nA\r\n0123456789\r\n0\r\nX-T: 1\r\n\r\n", bodies: []string{"abc0123456789"}},
	"pipelined":                {text: "Content-Length: 1\r\n\r\naPOST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nb\r\n0\r\n\r\nGET / HTTP/1.1\r\nHost: x\r\n\r\n", bodies: []string{"a", "b", ""}},
	"a body like a head":       {text: "Content-Length: 17\r\n\r\nA: b\nTransfer-Enc", bodies: []string{"A: b\nTransfer-Enc"}},
	"a long header":            {text: "X-A: " + strings.Repeat("a", 9000) + "\r\nContent-Length: 1\r\n\r\na", bodies: []string{"a"}},
	"a long path":              {text: "\r\nPOST /" + strings.Repeat("a", 2000) + " HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", bodies: []string{"", ""}},
	"length and chunks":        {text: "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", refused: true},
	"chunks and length":        {text: "Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n", refused: true},
	"two lengths":              {text: "Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", refused: true},
	"the same length twice":    {text: "Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc", refused: true},
	"a list of lengths":        {text: "Content-Length: 3, 3\r\n\r\nabc", refused: true},
	"a sign":                   {text: "Content-Length: +3\r\n\r\nabc", refused: true},
	"an empty length":          {text: "Content-Length: \r\n\r\n", refused: true},
	"a long length":            {text: "Content-Length: " + strings.Repeat("0", 300) + "3\r\n\r\nabc", refused: true},
	"another coding":           {text: "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", refused: true},
	"two codings":              {text: "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", refused: true},
	"a coding twice":           {text: "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", refused: true},
	"a vertical tab":           {text: "Transfer-Encoding: \vchunked\r\n\r\n0\r\n\r\n", refused: true},
	"folded":                   {text: "X-A: b\r\n c\r\n\r\n", refused: true},
	"a folded coding":          {text: "Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n", refused: true},
	"a header ends with LF":    {text: "X-A: b\nContent-Length: 0\r\n\r\n", refused: true},
	"the head ends with LF":    {text: "Content-Length: 1\r\n\na", refused: true},
	"an old one with a coding": {text: "Content-Length: 1\r\n\r\naPOST / HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", bodies: []string{"a"}, refused: true},
	"the second is refused":    {text: "Content-Length: 1\r\n\r\naGET / HTTP/1.1\nHost: x\r\n\r\n", bodies: []string{"a"}, refused: true},
}

const before = "POST / HTTP/1.1\r\nHost: x\r\n"

// strictServer starts a server behind Strict that echoes each request's body.
func strictServer(t testing.TB) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{ConnState: Unframed, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") != "" {
			c, rw, err := http.NewResponseController(w).Hijack()
			if err != nil {
				panic(err)
			}
			defer c.Close()
			_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\n\r\n")
			line, _ := rw.ReadString('\n')
			_, _ = io.WriteString(c, "got "+line)
			return
		}
		b, err := io.ReadAll(r.Body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		_, _ = w.Write(b)
	})}
	go func() { _ = s.Serve(Strict(l.(*net.TCPListener))) }()
	t.Cleanup(func() { _ = s.Close() })
	return l.Addr().String()
}

// TestStrictRefusesAmbiguousRequests checks that net/http behind the listener serves unambiguous
// requests and refuses the others, however the bytes are split.
func TestStrictRefusesAmbiguousRequests(t *testing.T) {
	t.Parallel()
	addr := strictServer(t)
	for name, tc := range framed {
		for _, size := range []int{1 << 20, 7, 1} {
			if size == 1 && len(tc.text) > 1000 {
				continue
			}
			c, err := net.Dial("tcp", addr)
			if err != nil {
				t.Fatal(err)
			}
			_ = c.SetDeadline(time.Now().Add(time.Minute))
			for b := []byte(before + tc.text); len(b) > 0; {
				n, err := c.Write(b[:min(size, len(b))])
				if err != nil {
					break // refused already
				}
				b = b[n:]
			}
			if !tc.refused {
				_ = c.(*net.TCPConn).CloseWrite()
			}
			in := bufio.NewReader(c)
			for i := 0; ; i++ {
				resp, err := http.ReadResponse(in, nil)
				if err != nil {
					if i != len(tc.bodies) || tc.refused {
						t.Errorf("%s, %d bytes at a time: answer %d: %v", name, size, i, err)
					}
					break
				}
				body, err := io.ReadAll(resp.Body)
				if i < len(tc.bodies) && (resp.StatusCode != http.StatusOK || string(body) != tc.bodies[i]) {
					t.Errorf("%s, %d bytes at a time: answer %d is %d %q, %v", name, size, i, resp.StatusCode, body, err)
				}
				if i == len(tc.bodies) {
					rest, err := io.ReadAll(in)
					if resp.StatusCode != http.StatusBadRequest || !resp.Close || len(rest) > 0 || !tc.refused {
						t.Errorf("%s, %d bytes at a time: %d, close %t, then %q, %v; want 400 and the end", name, size, resp.StatusCode, resp.Close, rest, err)
					}
					break
				}
			}
			_ = c.Close()
		}
	}
}

// TestStrictEndsBodyAtBadChunk checks that a bad chunk ends the body and the connection.
func TestStrictEndsBodyAtBadChunk(t *testing.T) {
	t.Parallel()
	addr := strictServer(t)
	for name, text := range map[string]string{
		"no number":        "zz\r\nabc\r\n0\r\n\r\n",
		"a sign":           "+3\r\nabc\r\n0\r\n\r\n",
		"a prefix":         "0x3\r\nabc\r\n0\r\n\r\n",
		"too short a size": "3\r\nabcd\r\n0\r\n\r\n",
		"ends with LF":     "3\nabc\r\n0\r\n\r\n",
		"data end with LF": "3\r\nabc\n0\r\n\r\n",
		"too large":        "ffffffffffffffff\r\nabc\r\n0\r\n\r\n",
		"folded trailer":   "0\r\nA: b\r\n c\r\n\r\n",
	} {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		_ = c.SetDeadline(time.Now().Add(time.Minute))
		_, _ = io.WriteString(c, before+"Transfer-Encoding: chunked\r\n\r\n"+text+"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
		b, err := io.ReadAll(c) // the server closes
		if !strings.HasPrefix(string(b), "HTTP/1.1 400 ") || strings.Count(string(b), "HTTP/1.1 ") != 1 {
			t.Errorf("%s: %q, %v", name, b, err)
		}
		_ = c.Close()
	}
}

// TestStrictIgnoresUpgradedConnections checks that a connection that speaks another protocol is not
// inspected.
func TestStrictIgnoresUpgradedConnections(t *testing.T) {
	t.Parallel()
	c, err := net.Dial("tcp", strictServer(t))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	_, _ = io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: lines\r\n\r\n")
	in := bufio.NewReader(c)
	if resp, err := http.ReadResponse(in, nil); err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
		t.Fatal(resp, err)
	}
	_, _ = io.WriteString(c, " a bare line\n")
	if got, err := in.ReadString('\n'); got != "got  a bare line\n" {
		t.Errorf("%q, %v", got, err)
	}
}

// FuzzFraming checks that framing does not depend on how bytes are split, and ends requests where
// net/http does.
func FuzzFraming(f *testing.F) {
	for _, tc := range framed {
		f.Add([]byte(before+tc.text), byte(3))
	}
	f.Fuzz(func(t *testing.T, b []byte, size byte) {
		var whole, pieces framing
		n, bad := whole.pass(b)
		k, step, badPiece := 0, int(size)%16+1, false
		for k < len(b) && !badPiece {
			var m int
			m, badPiece = pieces.pass(b[k:min(k+step, len(b))])
			k += m
		}
		if bad != badPiece || k < n || pieces.state != whole.state {
			t.Fatalf("%d, %t in one; %d, %t in pieces of %d", n, bad, k, badPiece, step)
		}
		in := bytes.NewReader(b[:n])
		buffered := bufio.NewReader(in)
		for {
			r, err := http.ReadRequest(buffered)
			if err != nil {
				return
			}
			if _, err := io.Copy(io.Discard, r.Body); err != nil {
				return
			}
			end := n - in.Len() - buffered.Buffered()
			var f framing
			if _, bad := f.pass(b[:end]); bad || f.state != startLine || len(f.line) > 0 {
				t.Fatalf("net/http ends a request after %q, framing is in %d with %q", b[:end], f.state, f.line)
			}
		}
	})
}

// BenchmarkFraming measures what framing adds to a request.
func BenchmarkFraming(b *testing.B) {
	request := []byte("POST /function/noop HTTP/1.1\r\nHost: 127.0.0.1:8080\r\nUser-Agent: Go-http-client/1.1\r\nContent-Length: 64\r\n" +
		"Content-Type: text/plain\r\nAccept-Encoding: gzip\r\n\r\n" + strings.Repeat("x", 64))
	var f framing
	b.ReportAllocs()
	for b.Loop() {
		if n, bad := f.pass(request); bad {
			b.Fatal(n)
		}
	}
}
