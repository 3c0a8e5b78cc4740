package queue

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// waitLimit bounds waits of tests. They normally need a fraction of it.
const waitLimit = time.Minute

func listening(t *testing.T, dir, listen string, keys *Keys) *Server {
	t.Helper()
	s, err := StartServer(ServerConfig{Dir: dir, Log: slog.New(slog.DiscardHandler), Listen: listen, Keys: keys})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func newKeys(t *testing.T) *Keys {
	t.Helper()
	k, err := NewKeys()
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// nodeAccess is that of a node's daemon.
func nodeAccess(t *testing.T, keys *Keys, name string) Access {
	t.Helper()
	seed, public, err := NewUser()
	if err != nil {
		t.Fatal(err)
	}
	token, err := keys.Node(public, name, time.Now().Add(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	return Access{User: func() (string, error) { return token, nil }, Seed: seed}
}

func foreign(t *testing.T, url string, a Access, log *slog.Logger) *nats.Conn {
	t.Helper()
	nc, err := Connect(url, a, t.Name(), log)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return nc
}

// heard is a message that a listener got.
type heard struct{ node, reply, data string }

// listen returns a channel of a link's messages.
func listen(t *testing.T, l *Link, node, kind string) <-chan heard {
	t.Helper()
	got := make(chan heard, 16)
	stop, err := l.Listen(node, kind, func(node, reply string, data []byte) { got <- heard{node, reply, string(data)} })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	return got
}

func next(t *testing.T, from <-chan heard) heard {
	t.Helper()
	select {
	case m := <-from:
		return m
	case <-time.After(waitLimit):
		t.Fatalf("no message within %v", waitLimit)
		return heard{}
	}
}

// TestLinkCarriesMessagesBothWays sends both ways between a foreign and an in-process connection,
// with a name that must be escaped, and sends to a kind without listeners.
func TestLinkCarriesMessagesBothWays(t *testing.T) {
	keys := newKeys(t)
	s := listening(t, t.TempDir(), "127.0.0.1:0", keys)
	t.Cleanup(s.Close)
	in, out := NewLink(connect(t, s)), NewLink(foreign(t, s.URL(), nodeAccess(t, keys, "box.example"), slog.New(slog.DiscardHandler)))
	all, one := listen(t, in, "", "inventory"), listen(t, out, "box.example", "order")
	answers := listen(t, in, "box.example", "answer.A")
	if err := out.Send("box.example", "inventory", "", []byte("1")); err != nil {
		t.Fatal(err)
	}
	if m := next(t, all); m != (heard{"box.example", "", "1"}) {
		t.Errorf("got %+v", m)
	}
	if err := in.Send("box.example", "order", "answer.A", []byte("2")); err != nil {
		t.Fatal(err)
	}
	m := next(t, one)
	if m != (heard{"box.example", "answer.A", "2"}) {
		t.Errorf("got %+v", m)
	}
	if err := out.Send(m.node, m.reply, "", []byte("3")); err != nil {
		t.Fatal(err)
	}
	if m := next(t, answers); m.data != "3" {
		t.Errorf("got %+v, want the answer", m)
	}
	if err := in.Send("box.example", "nobody", "answer.A", []byte("4")); err != nil {
		t.Fatal(err)
	}
	if m := next(t, answers); m.data != "" {
		t.Errorf("got %+v, want an empty message: nobody listens there", m)
	}
}

// TestNodesMayUseOnlyTheirSubjects tries what a node must not do: use other subjects or JetStream,
// use those of other nodes, or connect with a token of other keys.
func TestNodesMayUseOnlyTheirSubjects(t *testing.T) {
	keys := newKeys(t)
	s := listening(t, t.TempDir(), "127.0.0.1:0", keys)
	t.Cleanup(s.Close)
	inside := connect(t, s)
	tasks := make(chan []byte, 1)
	stop, err := NewBus(inside).Tasks("f.ns", func(msg []byte, _ bool) { tasks <- msg })
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	nc := foreign(t, s.URL(), nodeAccess(t, keys, "n"), slog.New(slog.DiscardHandler))
	refused := make(chan error, 4)
	nc.SetErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { refused <- err })
	attempts := map[string]func() error{
		"a task":            func() error { return nc.Publish(taskSubject("f.ns"), []byte("x")) },
		"JetStream":         func() error { return nc.Publish("$JS.API.STREAM.DELETE.KV_functions", nil) },
		"the journal":       func() error { _, err := nc.SubscribeSync("$KV.>"); return err },
		"the system's":      func() error { _, err := nc.SubscribeSync("$SYS.>"); return err },
		"all subjects":      func() error { _, err := nc.SubscribeSync(">"); return err },
		"inboxes of others": func() error { _, err := nc.SubscribeSync("_INBOX.>"); return err },
		"another's orders":  func() error { _, err := nc.SubscribeSync(NodeSubjects + ".b.order"); return err },
		"all orders":        func() error { _, err := nc.SubscribeSync(NodeSubjects + ".*.order"); return err },
		"another's answers": func() error { _, err := nc.SubscribeSync(NodeSubjects + ".b.answer.>"); return err },
		"what another is":   func() error { return nc.Publish(NodeSubjects+".b.inventory", []byte("x")) },
		"another's events":  func() error { return nc.Publish(NodeSubjects+".b.event", []byte("x")) },
		"an order":          func() error { return nc.Publish(NodeSubjects+".b.order", []byte("x")) },
		"an answer":         func() error { return nc.Publish(NodeSubjects+".b.answer.A", []byte("x")) },
		"another's renewal": func() error { return nc.Publish(NodeSubjects+".b.identity", []byte("x")) },
		"a revocation":      func() error { return nc.Publish(NodeSubjects+".n.revoked", []byte("x")) },
		"to join":           func() error { return nc.Publish(JoinSubjects+".x.ask", []byte("x")) },
		"who joins":         func() error { _, err := nc.SubscribeSync(JoinSubjects + ".>"); return err },
	}
	for what, try := range attempts {
		if err := errors.Join(try(), nc.Flush()); err != nil {
			t.Fatal(err)
		}
		select {
		case err := <-refused:
			if !errors.Is(err, nats.ErrPermissionViolation) {
				t.Errorf("%s: %v, want a violation of permissions", what, err)
			}
		case <-tasks:
			t.Errorf("%s: it came", what)
		case <-time.After(waitLimit):
			t.Errorf("%s: not refused", what)
		}
	}
	log := lockedBuffer{wrote: make(chan struct{}, 1)}
	wrong := foreign(t, s.URL(), nodeAccess(t, newKeys(t), "n"), slog.New(slog.NewTextHandler(&log, nil)))
	deadline := time.After(waitLimit)
	for !strings.Contains(strings.ToLower(log.String()), "authorization violation") {
		select {
		case <-log.wrote:
		case <-deadline:
			t.Fatalf("a wrong token is not told; log: %s", log.String())
		}
	}
	if wrong.IsConnected() {
		t.Error("a wrong token connects")
	}
}

// TestConnectionsReturnAfterServerRestart restarts the server at the same address. Connections and
// subscriptions must be there again.
func TestConnectionsReturnAfterServerRestart(t *testing.T) {
	dir, keys := t.TempDir(), newKeys(t)
	s := listening(t, dir, fmt.Sprintf("127.0.0.1:%d", proctest.Ports(t, 1)[0]), keys)
	url := s.URL()
	out := NewLink(foreign(t, url, nodeAccess(t, keys, "n"), slog.New(slog.DiscardHandler)))
	orders := listen(t, out, "n", "order")
	s.Close()
	s = listening(t, dir, strings.TrimPrefix(url, "nats://"), keys)
	defer func() { s.Close() }()
	in := NewLink(connect(t, s))
	answers := listen(t, in, "n", "answer.A")
	deadline := time.Now().Add(waitLimit)
	for { // nobody listens until the other connection is back
		if err := in.Send("n", "order", "answer.A", []byte("x")); err != nil {
			t.Fatal(err)
		}
		select {
		case <-orders:
			return
		case m := <-answers:
			if m.data != "" || time.Now().After(deadline) {
				t.Fatalf("got %+v, want the order to come within %v", m, waitLimit)
			}
		}
	}
}

// TestListenRefused checks the errors of servers that cannot listen.
func TestListenRefused(t *testing.T) {
	keys := newKeys(t)
	s := listening(t, t.TempDir(), "127.0.0.1:0", keys)
	t.Cleanup(s.Close)
	for name, tc := range map[string]struct {
		listen string
		keys   *Keys
		want   string
	}{
		"taken":   {strings.TrimPrefix(s.URL(), "nats://"), keys, "address already in use"},
		"no keys": {"127.0.0.1:0", nil, "any client could join"},
		"no port": {"127.0.0.1", keys, "missing port"},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := StartServer(ServerConfig{Dir: t.TempDir(), Log: slog.New(slog.DiscardHandler), Listen: tc.listen, Keys: tc.keys})
			if err == nil {
				s.Close()
			}
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
}

// lockedBuffer is a log that can be read while it is written.
type lockedBuffer struct {
	mu    sync.Mutex
	b     bytes.Buffer
	wrote chan struct{} // receives after a write
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case l.wrote <- struct{}{}:
	default:
	}
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
