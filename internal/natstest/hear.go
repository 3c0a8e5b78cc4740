package natstest

import (
	"testing"

	"github.com/nats-io/nats.go"
)

// Hear calls f with each message that any client publishes, until flush is called. flush returns
// when f has been called with all messages that the server had at the call.
func Hear(t testing.TB, url string, f func(subject string, header map[string][]string, data []byte)) (flush func()) {
	t.Helper()
	closed := make(chan struct{})
	nc, err := nats.Connect(url, nats.ClosedHandler(func(*nats.Conn) { close(closed) }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	if _, err := nc.Subscribe(">", func(m *nats.Msg) { f(m.Subject, m.Header, m.Data) }); err != nil {
		t.Fatal(err)
	}
	return func() {
		t.Helper()
		if err := nc.Drain(); err != nil {
			t.Fatal(err)
		}
		<-closed
	}
}
