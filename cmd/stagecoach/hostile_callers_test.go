package main

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// TestSilentUploads checks that clients that announce bodies and send none, or one byte, do not
// delay a good request.
func TestSilentUploads(t *testing.T) {
	t.Parallel()
	r := start(t)
	r.deployAll(httpFn("web", map[string]string{"min": "1", "max": "1"}, "max_inflight", "4"))
	r.must(http.StatusOK, http.MethodPost, "/function/web/echo", "hello")
	for name, sent := range map[string]string{"nothing": "", "a byte": "x"} {
		t.Run(name, func(t *testing.T) {
			const uploads = 300
			var all []net.Conn
			defer func() {
				for _, c := range all {
					_ = c.Close()
				}
			}()
			var ended atomic.Int64
			var readers sync.WaitGroup
			defer readers.Wait()
			for range uploads {
				c, err := net.Dial("tcp", r.up.Addr)
				if err != nil {
					t.Fatal(err)
				}
				all = append(all, c)
				_, _ = fmt.Fprintf(c, "POST /function/web/echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n%s", sent)
				readers.Go(func() {
					if resp, err := http.ReadResponse(bufio.NewReader(c), nil); err == nil && resp.StatusCode == http.StatusRequestTimeout {
						ended.Add(1)
					}
				})
			}
			for range 3 { // without the bounds, 300 uploads have four slots for 30 s each
				if a := r.must(http.StatusOK, http.MethodPost, "/function/web/echo", "hello", "X-Timeout", soon.String()); string(a.Body) != "hello" {
					t.Errorf("the good request: %q", a.Body)
				}
			}
			r.until(soon, "all uploads to be ended but one, which nobody waits for", func() bool { return ended.Load() >= uploads-1 })
		})
	}
}

// TestUploadsAreWhole checks that bodies whose bytes come late, in pieces or after a 100 reach the
// function completely.
func TestUploadsAreWhole(t *testing.T) {
	t.Parallel()
	r := start(t)
	r.deployAll(httpFn("web", map[string]string{"min": "1"}))
	const pause = 1200 * time.Millisecond // the request is in the line without its body by then
	for name, pieces := range map[string][]string{"late": {"", "hello"}, "in two parts": {"he", "llo"}, "large and late": {"", strings.Repeat("x", 1<<20)}} {
		for _, expect := range []string{"", "100-continue"} {
			t.Run(name+" "+expect, func(t *testing.T) {
				t.Parallel()
				body, w := io.Pipe()
				var sent sync.WaitGroup
				defer sent.Wait()
				sent.Go(func() {
					for i, piece := range pieces {
						if i > 0 {
							<-time.After(pause)
						}
						_, _ = io.WriteString(w, piece)
					}
					_ = w.Close()
				})
				req := request(t, http.MethodPost, r.Base+"/function/web/echo", body)
				if expect != "" {
					req.Header.Set("Expect", expect)
				}
				resp, err := (&http.Transport{ExpectContinueTimeout: late, DisableKeepAlives: true}).RoundTrip(req)
				if err != nil {
					t.Fatal(err)
				}
				defer resp.Body.Close()
				if b, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != http.StatusOK || string(b) != strings.Join(pieces, "") {
					t.Errorf("%d, %d bytes, %v, want all that was sent", resp.StatusCode, len(b), err)
				}
			})
		}
	}
}
