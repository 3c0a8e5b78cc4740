package queue

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

// NodeSubjects is the first part of the subjects of nodes, NodeSubjects.NODE.KIND. Connections of
// other machines may use only these subjects.
const NodeSubjects = "stagecoach.v1.node"

// JoinSubjects is the first part of the subjects on which processes ask to join,
// JoinSubjects.TOKEN.KIND, where TOKEN identifies a join token.
const JoinSubjects = "stagecoach.v1.join"

// reconnectWait is the pause between attempts to reach a lost server.
const reconnectWait = 250 * time.Millisecond

// Connect opens a connection from another process to a listening server. url may be several, with
// commas between. The connection reconnects for ever. While the server is away, sending fails, and
// subscriptions are kept. Connect fails only if url is invalid.
func Connect(url string, a Access, name string, log *slog.Logger) (*nats.Conn, error) {
	var mu sync.Mutex
	last := ""
	changed := func(state string) bool {
		mu.Lock()
		defer mu.Unlock()
		defer func() { last = state }()
		return state != last
	}
	failed := func(err error) {
		if changed(err.Error()) {
			log.Warn("nats: not connected yet; trying again", "url", url, "error", err)
		}
		switch is := classified(err); {
		case a.Refused != nil && refused(err):
			a.Refused(is)
		case a.NoTLS != nil && errors.Is(is, ErrNoTLS):
			a.NoTLS(is)
		}
	}
	options := append(a.reporting(failed).options(), nats.Name(name),
		nats.RetryOnFailedConnect(true), nats.MaxReconnects(-1), nats.ReconnectWait(reconnectWait), nats.ReconnectJitter(0, 0),
		nats.IgnoreAuthErrorAbort(), nats.ReconnectBufSize(-1), nats.PingInterval(2*time.Second), nats.MaxPingsOutstanding(2),
		nats.Timeout(2*time.Second), nats.FlusherTimeout(2*time.Second), nats.NoCallbacksAfterClientClose(),
		nats.ConnectHandler(func(*nats.Conn) { changed(""); log.Info("nats: connected", "url", url) }),
		nats.ReconnectHandler(func(*nats.Conn) { changed(""); log.Info("nats: connected", "url", url) }),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err != nil { // nil: ForceReconnect
				log.Warn("nats: connection lost", "url", url, "error", err)
			}
		}),
		nats.ReconnectErrHandler(func(_ *nats.Conn, err error) { failed(err) }),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			if refused(err) { // not reported as a failed attempt to connect
				failed(err)
				return
			}
			log.Error("nats", "connection", name, "error", err)
		}))
	nc, err := nats.Connect(url, options...)
	if err != nil {
		return nil, fmt.Errorf("connect to nats at %q: %w", url, err)
	}
	return nc, nil
}

// Link carries small messages between the control plane and its nodes. A message has the name of a
// node and a kind, which is one or more words separated by dots. Messages are not stored: without a
// listener they are lost.
type Link struct {
	nc     *nats.Conn
	prefix string
}

// NewLink returns a Link over nc. The caller closes nc.
func NewLink(nc *nats.Conn) *Link { return &Link{nc, NodeSubjects} }

// NewJoinLink returns a Link over nc that carries the messages of processes that join. In place of
// a node's name, its messages have the id of a join token.
func NewJoinLink(nc *nats.Conn) *Link { return &Link{nc, JoinSubjects} }

// Joins returns a Link like that of [NewJoinLink], over the same connection.
func (l *Link) Joins() *Link { return NewJoinLink(l.nc) }

func (l *Link) subject(node, kind string) string { return l.prefix + "." + Token(node) + "." + kind }

// Send sends a message about a node. kind must not be empty. reply is the kind that the answer
// shall have; empty: no answer. An answer is a message about the same node. If the server is
// unreachable, Send fails at once.
func (l *Link) Send(node, kind, reply string, data []byte) error {
	var err error
	if reply == "" {
		err = l.nc.Publish(l.subject(node, kind), data)
	} else {
		err = l.nc.PublishRequest(l.subject(node, kind), l.subject(node, reply), data)
	}
	if err != nil {
		return fmt.Errorf("send %d bytes to node %q: %w", len(data), node, err)
	}
	return nil
}

// Flush returns when the server has all messages that were sent, and has passed them on to
// listeners that are connected.
func (l *Link) Flush() error {
	if err := l.nc.FlushTimeout(2 * time.Second); err != nil {
		return fmt.Errorf("flush messages: %w", err)
	}
	return nil
}

// linkPending bounds the messages that wait for a listener of a [Link]; more are dropped.
const linkPending = 64 << 10

// Listen calls f with each message of a kind about a node, in order, until stop is called. An empty
// node means all nodes. f gets empty data if a message that asked for a reply of this kind had no
// listener. When stop returns, f does not run and will not be called again.
func (l *Link) Listen(node, kind string, f func(node, reply string, data []byte)) (stop func(), err error) {
	token := Token(node)
	if node == "" {
		token = "*"
	}
	subject := l.prefix + "." + token + "." + kind
	sub, err := l.nc.Subscribe(subject, func(m *nats.Msg) {
		rest, _ := strings.CutPrefix(m.Subject, l.prefix+".")
		token, _, _ := strings.Cut(rest, ".")
		name, err := Name(token)
		if err != nil {
			return // not sent by a Link
		}
		reply, ok := strings.CutPrefix(m.Reply, l.prefix+"."+token+".")
		if !ok {
			reply = ""
		}
		f(name, reply, m.Data)
	})
	if err != nil {
		return nil, fmt.Errorf("listen to %q: %w", subject, err)
	}
	done := make(chan struct{})
	sub.SetClosedHandler(func(string) { close(done) }) // called when f has ended
	if err = sub.SetPendingLimits(linkPending, 64<<20); err == nil && l.nc.IsConnected() {
		// Now the server knows the subscription. A lost server learns of it when it is back.
		_ = l.nc.FlushTimeout(time.Second)
	}
	if err != nil {
		_ = sub.Unsubscribe() // the connection may be gone
		return nil, fmt.Errorf("listen to %q: %w", subject, err)
	}
	return func() {
		_ = sub.Unsubscribe() // fails if it has ended already
		<-done
	}, nil
}
