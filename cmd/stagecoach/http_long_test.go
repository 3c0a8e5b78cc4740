package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// frames checks that bodies of every size keep their framing in both directions: with a length or
// in chunks, as they were sent.
func (r *rig) frames(t *testing.T) {
	for _, size := range []int{0, 1, 5000, 100_000, 3 << 20} {
		body := bytes.Repeat([]byte("0123456789"), size/10+1)[:size]
		for _, chunked := range []bool{false, true} {
			for _, chunks := range []string{"", "?chunks"} {
				what := fmt.Sprintf("%d bytes, in chunks: %t, answer %q", size, chunked, chunks)
				req := request(t, http.MethodPost, r.Base+"/function/web/framing"+chunks, bytes.NewReader(body))
				length, coding := strconv.Itoa(size), ""
				if req.ContentLength = int64(size); chunked {
					req.Body, req.ContentLength = io.NopCloser(bytes.NewReader(body)), -1
					req.Trailer = http.Header{"X-Sent": {"yes"}}
					length, coding = "-1", "chunked"
				}
				resp, err := r.HTTP.Do(req)
				if err != nil {
					t.Fatalf("%s: %v", what, err)
				}
				got, err := io.ReadAll(resp.Body)
				resp.Body.Close()
				if err != nil || !bytes.Equal(got, body) {
					t.Errorf("%s: %d bytes came back, %v", what, len(got), err)
				}
				if h := resp.Header; h.Get("X-Length") != length || h.Get("X-Coding") != coding || chunked && h.Get("X-Got") != "yes" {
					t.Errorf("%s: the function saw length %s, coding %q, trailer %q", what, h.Get("X-Length"), h.Get("X-Coding"), h.Get("X-Got"))
				}
				if chunks == "" && (resp.ContentLength != int64(size) || resp.TransferEncoding != nil) {
					t.Errorf("%s: the answer has length %d, coding %v", what, resp.ContentLength, resp.TransferEncoding)
				}
				if chunks != "" && (resp.ContentLength != -1 || resp.Trailer.Get("X-Sum") != strconv.Itoa(size)) {
					t.Errorf("%s: the answer has length %d, trailer %v", what, resp.ContentLength, resp.Trailer)
				}
			}
		}
	}
}

// TestHTTPLongExchanges checks that read_timeout and write_timeout do not end an exchange while
// data flows. A function may run for its exec_timeout, even if that is longer than the default
// timeout of requests.
func TestHTTPLongExchanges(t *testing.T) {
	t.Parallel()
	config := filepath.Join(t.TempDir(), "stagecoach.yml")
	if err := os.WriteFile(config, []byte("requests: {timeout: 2s}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r := start(t, "--config", config)
	r.deployAll(
		httpFn("flows", map[string]string{"min": "1"}, "read_timeout", "3s", "write_timeout", "3s", "exec_timeout", "1m"),
		httpFn("long", map[string]string{"min": "1"}, "exec_timeout", "1m"),
	)
	const pieces, pause = 16, 250 * time.Millisecond // together, longer than the timeouts
	t.Run("an upgraded connection", func(t *testing.T) {
		t.Parallel()
		c, err := net.Dial("tcp", r.up.Addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(soon))
		fmt.Fprint(c, "GET /function/flows/upgrade HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: lines\r\n\r\n")
		b := bufio.NewReader(c)
		if resp, err := http.ReadResponse(b, nil); err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
			t.Fatalf("%v, %v", resp, err)
		}
		for i := range pieces {
			<-time.After(pause)
			fmt.Fprintf(c, "%d\n", i)
			if got, err := b.ReadString('\n'); got != fmt.Sprintf("got %d\n", i) || err != nil {
				t.Fatalf("line %d: %q, %v", i, got, err)
			}
		}
	})
	t.Run("an upload in pieces", func(t *testing.T) {
		t.Parallel()
		body, say := io.Pipe()
		go func() {
			for range pieces {
				<-time.After(pause)
				_, _ = say.Write([]byte("piece"))
			}
			_ = say.Close()
		}()
		resp, err := r.HTTP.Do(request(t, http.MethodPost, r.Base+"/function/flows/framing", body))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if b, err := io.ReadAll(resp.Body); string(b) != strings.Repeat("piece", pieces) || err != nil || resp.StatusCode != http.StatusOK {
			t.Errorf("%d %q, %v", resp.StatusCode, b, err)
		}
	})
	t.Run("events", func(t *testing.T) {
		t.Parallel()
		a := r.must(http.StatusOK, http.MethodGet, fmt.Sprintf("/function/flows/events?n=%d&every=%v", pieces, pause), "")
		if n := strings.Count(string(a.Body), "data: "); n != pieces {
			t.Errorf("%d events of %d", n, pieces)
		}
	})
	t.Run("exec_timeout", func(t *testing.T) {
		t.Parallel()
		if a := r.must(http.StatusOK, http.MethodGet, "/function/long/slow?for=3s", ""); string(a.Body) != "done\n" {
			t.Errorf("%q", a.Body)
		}
		r.must(http.StatusGatewayTimeout, http.MethodGet, "/function/long/slow?for=1m", "", "X-Timeout", "1s")
	})
}
