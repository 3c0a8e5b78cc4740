package main

import (
	"io"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"testing"
)

// TestOneListenerForAllAddresses checks that a listener on all addresses of the machine also serves
// functions, and recognizes their requests.
func TestOneListenerForAllAddresses(t *testing.T) {
	needRoot(t)
	n, err := openNetworks(networkConfig{cidr: defaultNetwork}, "test", t.TempDir(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := n.close(); err != nil {
			t.Error(err)
		}
	}()
	says := func(text string) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, text) })
	}
	u := &up{networks: n, handler: says("outside"), inside: says("inside"), log: slog.New(slog.DiscardHandler)}
	for addr, want := range map[string]bool{"0.0.0.0:8080": true, "[::]:8080": true, "127.0.0.1:8080": false, "0.0.0.0:8081": false} {
		a, err := net.ResolveTCPAddr("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		if got := coversGateway(a); got != want {
			t.Errorf("a listener at %s gets what functions send: %t, want %t", addr, got, want)
		}
	}
	l, err := net.Listen("tcp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: u.byAddress(), ReadHeaderTimeout: soon}
	done := make(chan error)
	go func() { done <- srv.Serve(l) }()
	defer func() { _, _ = srv.Close(), <-done }()
	for host, want := range map[string]string{"127.0.0.1": "outside", "::1": "outside", n.Gateway().String(): "inside"} {
		resp, err := http.Get("http://" + net.JoinHostPort(host, strconv.Itoa(l.Addr().(*net.TCPAddr).Port)))
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if err != nil || string(b) != want {
			t.Errorf("at %s: %q, %v, want %s", host, b, err, want)
		}
	}
}
