package queue

import (
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

// NodeSubjects is the first part of the subjects of nodes: NodeSubjects.NODE.KIND. What a foreign connection may send and hear
// is these alone.
const NodeSubjects = "stagecoach.v1.node"

// nodeUser is the user of foreign connections; their password is the server's token.
const nodeUser = "node"

// reconnectWait is the pause between attempts to reach a server that has gone.
const reconnectWait = 250 * time.Millisecond

// Connect opens a connection of another process to a server that listens, with its token. It comes and goes with the server
// without end: what is sent meanwhile fails, and what is listened to goes on. Only a url that is none is an error.
func Connect(url, token, name string, log *slog.Logger) (*nats.Conn, error) {
	var mu sync.Mutex
	last := ""
	changed := func(state string) bool {
		mu.Lock()
		defer mu.Unlock()
		defer func() { last = state }()
		return state != last
	}
	nc, err := nats.Connect(url, nats.UserInfo(nodeUser, token), nats.Name(name),
		nats.RetryOnFailedConnect(true), nats.MaxReconnects(-1), nats.ReconnectWait(reconnectWait), nats.ReconnectJitter(0, 0),
		nats.IgnoreAuthErrorAbort(), nats.ReconnectBufSize(-1), nats.PingInterval(2*time.Second), nats.MaxPingsOutstanding(2),
		nats.Timeout(2*time.Second), nats.FlusherTimeout(2*time.Second), nats.NoCallbacksAfterClientClose(),
		nats.ConnectHandler(func(*nats.Conn) { changed(""); log.Info("nats: connected", "url", url) }),
		nats.ReconnectHandler(func(*nats.Conn) { changed(""); log.Info("nats: connected", "url", url) }),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) { log.Warn("nats: connection lost", "url", url, "error", err) }),
		nats.ReconnectErrHandler(func(_ *nats.Conn, err error) {
			if changed(err.Error()) {
				log.Warn("nats: no connection yet; it is tried again and again", "url", url, "error", err)
			}
		}),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			log.Error("nats", "connection", name, "error", err)
		}))
	if err != nil {
		return nil, fmt.Errorf("connect to nats at %q: %w", url, err)
	}
	return nc, nil
}

// Link carries the small messages between those who steer a cluster and its nodes, by the node's name and the message's kind:
// a word, or several with dots between. Nobody keeps them: what is sent while nobody listens is lost.
type Link struct{ nc *nats.Conn }

// NewLink returns a Link over nc, which stays the caller's to close.
func NewLink(nc *nats.Conn) *Link { return &Link{nc: nc} }

func nodeSubject(node, kind string) string { return NodeSubjects + "." + Token(node) + "." + kind }

// Send sends a message of a kind, which is not empty, about a node. Whoever answers does so to the node's messages of the kind
// reply; empty: nobody does. When the sender is cut off from the server, that is an error at once.
func (l *Link) Send(node, kind, reply string, data []byte) error {
	var err error
	if reply == "" {
		err = l.nc.Publish(nodeSubject(node, kind), data)
	} else {
		err = l.nc.PublishRequest(nodeSubject(node, kind), nodeSubject(node, reply), data)
	}
	if err != nil {
		return fmt.Errorf("send %d bytes to node %q: %w", len(data), node, err)
	}
	return nil
}

// linkPending bounds what waits for a listener of a [Link], in messages; more is dropped.
const linkPending = 64 << 10

// Listen calls f with each message of a kind about a node, in order, until stop is called; an empty node is any. An empty data
// says that nobody had listened to what was sent with this kind as its reply. When stop returns, f is not running and will not
// be called again.
func (l *Link) Listen(node, kind string, f func(node, reply string, data []byte)) (stop func(), err error) {
	token := Token(node)
	if node == "" {
		token = "*"
	}
	subject := NodeSubjects + "." + token + "." + kind
	sub, err := l.nc.Subscribe(subject, func(m *nats.Msg) {
		rest, _ := strings.CutPrefix(m.Subject, NodeSubjects+".")
		token, _, _ := strings.Cut(rest, ".")
		name, err := Name(token)
		if err != nil {
			return // not sent by us
		}
		reply, ok := strings.CutPrefix(m.Reply, NodeSubjects+"."+token+".")
		if !ok {
			reply = ""
		}
		f(name, reply, m.Data)
	})
	if err != nil {
		return nil, fmt.Errorf("listen to %q: %w", subject, err)
	}
	done := make(chan struct{})
	sub.SetClosedHandler(func(string) { close(done) }) // when f is not running any more
	if err = sub.SetPendingLimits(linkPending, 64<<20); err == nil && l.nc.IsConnected() {
		_ = l.nc.FlushTimeout(time.Second) // from here on the server knows the interest; one that has gone is told when it is back
	}
	if err != nil {
		_ = sub.Unsubscribe() // the connection may be gone
		return nil, fmt.Errorf("listen to %q: %w", subject, err)
	}
	return func() {
		_ = sub.Unsubscribe() // fails when it has ended already
		<-done
	}, nil
}
