package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestStalledClientIsCutOff checks that a client that neither sends nor reads is disconnected, and
// that it then holds no slot or memory.
func TestStalledClientIsCutOff(t *testing.T) {
	t.Parallel()
	config := filepath.Join(t.TempDir(), "config.yml")
	if err := os.WriteFile(config, []byte("requests: {stall: 500ms}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r := start(t, "--config", config)
	r.deployAll(httpFn("web", map[string]string{"min": "1"}), fn{name: "noop", image: "noop", labels: map[string]string{"min": "1"}})
	for _, function := range []string{"web/echo", "noop"} {
		if status, _ := r.raw(t, "POST /function/"+function+" HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc"); !strings.HasPrefix(status, "408") {
			t.Errorf("%s: a body that does not come: %s", function, status)
		}
	}
	c, err := net.Dial("tcp", r.up.Addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(soon))
	const size = 64 << 20
	fmt.Fprintf(c, "POST /function/web/echo HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n", size)
	_, err = io.CopyN(c, zeros{}, size) // nobody reads the answer, so at some point nobody reads this
	if err == nil {
		_, err = io.Copy(io.Discard, c)
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("a client that does not read is still connected")
	}
	r.until(soon, "the slot to be free", func() bool { return r.line("web").Running == 0 })
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

// raw sends bytes and returns the status line and the body of what comes until the server closes.
func (r *rig) raw(t *testing.T, text string) (status, body string) {
	t.Helper()
	c, err := net.Dial("tcp", r.up.Addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(soon))
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(c)
	if err != nil && (len(b) == 0 || errors.Is(err, os.ErrDeadlineExceeded)) {
		t.Fatalf("%.60q: %v", text, err)
	}
	head, body, _ := strings.Cut(string(b), "\r\n\r\n")
	status, _, _ = strings.Cut(head, "\r\n")
	return strings.TrimPrefix(status, "HTTP/1.1 "), body
}

// TestAmbiguousRequestsAreRefused checks that a request is refused if two servers could read it in
// two ways (request smuggling), and that nothing after it is read. Package gateway's tests have
// more of these requests.
func TestAmbiguousRequestsAreRefused(t *testing.T) {
	t.Parallel()
	r := start(t)
	r.deployAll(httpFn("web", map[string]string{"min": "1"}), fn{name: "noop", image: "noop", labels: map[string]string{"min": "1"}})
	const after = "GET /function/web/status?code=418 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
	for name, tc := range map[string]struct{ text, want string }{
		"length and chunks":    {"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + after, "400"},
		"chunks and length":    {"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n" + after, "400"},
		"two lengths":          {"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd" + after, "400"},
		"length list":          {"Content-Length: 3, 4\r\n\r\nabcd" + after, "400"},
		"length with sign":     {"Content-Length: +3\r\n\r\nabc" + after, "400"},
		"odd coding":           {"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + after, "400"},
		"two codings":          {"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n" + after, "400"},
		"spaced name":          {"Content-Length : 3\r\n\r\nabc" + after, "400"},
		"folded header":        {"X-A: b\r\n c: d\r\nContent-Length: 0\r\n\r\n" + after, "400"},
		"header ends with LF":  {"X-A: b\nContent-Length: 0\r\n\r\n" + after, "400"},
		"NUL in a header":      {"X-A: b\x00c\r\n\r\n" + after, "400"},
		"CR in a header":       {"X-A: b\rc\r\n\r\n" + after, "400"},
		"odd chunk size":       {"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n" + after, "400"},
		"chunk without end":    {"Transfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n" + after, "400"},
		"no host":              {"\x00", "400"},
		"a head that is large": {"X-A: " + strings.Repeat("a", 100<<10) + "\r\n\r\n", "431"},
		"clear":                {"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + after, "200"},
	} {
		for _, function := range []string{"web", "noop"} {
			text := "POST /function/" + function + "/seen HTTP/1.1\r\nHost: x\r\n" + tc.text
			if name == "no host" {
				text = "POST /function/" + function + " HTTP/1.1\r\n\r\n" + after
			}
			if status, body := r.raw(t, text); !strings.HasPrefix(status, tc.want) || (name == "clear") != strings.Contains(body, "HTTP/1.1 418 ") {
				t.Errorf("%s to %s: %s, %q", name, function, status, body)
			}
		}
	}
	status, _ := r.raw(t, "GET http://elsewhere/function/web/status?code=418 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
	if !strings.HasPrefix(status, "418") {
		t.Errorf("absolute form: %s", status)
	}
}
