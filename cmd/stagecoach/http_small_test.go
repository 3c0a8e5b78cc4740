package main

import (
	"context"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestSmallExchangesTravelWithTheirTasks checks that small exchanges work while nobody can reach
// the rendezvous. Streams and large bodies do not.
func TestSmallExchangesTravelWithTheirTasks(t *testing.T) {
	t.Parallel()
	r := start(t)
	r.deployAll(httpFn("web", map[string]string{"min": "1", "max": "1"}))
	socket := filepath.Join(r.state, "rendezvous", "http")
	if err := os.Rename(socket, socket+".away"); err != nil {
		t.Fatal(err)
	}
	large := strings.Repeat("x", 100<<10)
	for _, size := range []int{0, 1, 1 << 10, 2000} {
		// An answer with a length: one in chunks streams if it comes in pieces.
		if a := r.must(http.StatusOK, http.MethodPost, "/function/web/status?code=200", large[:size]); len(a.Body) == 0 {
			t.Errorf("a request of %d bytes: an empty answer", size)
		}
	}
	r.must(http.StatusNoContent, http.MethodGet, "/function/web/status?code=204", "")
	stream := func() int {
		ctx, leave := context.WithCancel(t.Context())
		defer leave()
		resp, err := r.HTTP.Do(request(t, http.MethodGet, r.Base+"/function/web/events?n=2&every=1h", nil).WithContext(ctx))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		return resp.StatusCode // its first event is here, and its second one far
	}
	if status := stream(); status < 500 {
		t.Errorf("a stream without the rendezvous: %d", status)
	}
	if a := r.send(http.MethodPost, "/function/web/echo", large); a.Status < 500 {
		t.Errorf("a large body without the rendezvous: %d", a.Status)
	}
	if err := os.Rename(socket+".away", socket); err != nil {
		t.Fatal(err)
	}
	if status := stream(); status != http.StatusOK {
		t.Errorf("a stream: %d", status)
	}
	if a := r.must(http.StatusOK, http.MethodPost, "/function/web/echo", large); string(a.Body) != large {
		t.Errorf("%d bytes came back", len(a.Body))
	}
}
