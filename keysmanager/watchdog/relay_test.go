package watchdog

import (
	"io"
	"net/http"
	"strings"
	"testing"
)

// TestGatewayOnAnotherMachine checks that a replica meets a gateway on another machine at its
// node's socket, where it names the control plane first, and keeps that connection.
func TestGatewayOnAnotherMachine(t *testing.T) {
	v := newRendezvous(t)
	e := newExchanges(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = io.Copy(w, r.Body) }), 1, 0, 0)
	defer e.close(t.Context())
	e.relay = v.path
	met := make(chan error)
	meet := func(token string) {
		at, err := parseAddress("unix+tls " + token + " up-1 /no/such place/http")
		if err != nil {
			t.Fatal(err)
		}
		go func() { met <- e.meet(t.Context(), at) }()
	}
	meet("one")
	c := <-v.conns
	if line, err := c.in.ReadString('\n'); line != "up-1\n" || err != nil {
		t.Fatalf("the first line is %q, %v, want the control plane's name", line, err)
	}
	c.ask(t, "one", hello)
	c.answer(t, "hello")
	if err := <-met; err != nil {
		t.Error(err)
	}
	meet("two")
	c.ask(t, "two", hello)
	c.answer(t, "hello")
	if err := <-met; err != nil {
		t.Error(err)
	}
	near, err := parseAddress("unix token /some/http")
	if err != nil {
		t.Fatal(err)
	}
	if err := e.meet(t.Context(), near); err == nil || !strings.Contains(err.Error(), "names no control plane") {
		t.Errorf("without a name: %v", err)
	}
	for _, address := range []string{"unix token", "tcp token path", "unix+tls token up"} {
		if _, err := parseAddress(address); err == nil {
			t.Errorf("%q is accepted", address)
		}
	}
}
