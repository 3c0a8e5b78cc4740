package node_test

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
)

// TestNodeOutOfReach cuts the connection with a node that is heard over NATS. The node must leave
// and say why, so that nothing is started there, and join again when it is reached. A control plane
// that has never reached the node must show it, too.
func TestNodeOutOfReach(t *testing.T) {
	b := startBroker(t)
	var cut atomic.Bool
	cuts := func(cfg *node.DirectoryConfig) {
		dial := cfg.Dial
		cfg.Reach = time.Second // it bounds the first handshake, too, which takes long on a busy machine
		cfg.Dial = func(ctx context.Context, to, at string, first any) (net.Conn, error) {
			if cut.Load() {
				return nil, errors.New("the cable is cut")
			}
			return dial(ctx, to, at, first)
		}
	}
	f, c := b.joinFarTo("n1", cuts)
	c.node("n1")
	c.until(0, "heard n1 []")

	from := c.mark()
	cut.Store(true)
	f.up.Drop(f.name)
	const cause = "its announcements arrive over NATS, but its daemon cannot be reached: the cable is cut"
	c.until(from, "left n1: "+cause)
	if away := c.Away(); len(away) != 1 || !away[0].Heard || away[0].Cause != cause || away[0].Address == "" || len(c.Clients()) != 0 {
		t.Errorf("away %+v, and %d nodes are used; want n1 away and heard, with its address", away, len(c.Clients()))
	}

	other := b.watch(func(cfg *node.DirectoryConfig) {
		cfg.Reach = time.Nanosecond
		cfg.Dial = func(context.Context, string, string, any) (net.Conn, error) { return nil, errors.New("never reached") }
	})
	for deadline := time.Now().Add(limit); ; time.Sleep(time.Millisecond) {
		if away := other.Away(); len(away) == 1 && away[0].Name == "n1" && strings.HasSuffix(away[0].Cause, "never reached") {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("another control plane, which never reaches the node, shows %+v", other.Away())
		}
	}

	from = c.mark()
	cut.Store(false)
	c.until(from, "joined n1")
	if away := c.Away(); len(away) != 0 {
		t.Errorf("away after the cut: %+v", away)
	}
}

// TestRefusalIsNoLoss has a daemon refuse what is asked of it. It was reached, so its node stays.
func TestRefusalIsNoLoss(t *testing.T) {
	b := startBroker(t)
	var refuses atomic.Bool
	asked := make(chan struct{}, 100)
	f, c := b.joinFarTo("n1", func(cfg *node.DirectoryConfig) {
		dial := cfg.Dial
		cfg.Reach = time.Nanosecond
		cfg.Dial = func(ctx context.Context, to, at string, first any) (net.Conn, error) {
			if refuses.Load() {
				asked <- struct{}{}
				return nil, refusal{}
			}
			return dial(ctx, to, at, first)
		}
	})
	c.node("n1")
	from := c.mark()
	refuses.Store(true)
	f.up.Drop(f.name)
	for range 3 {
		<-asked
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, told := range c.told[from:] {
		if strings.HasPrefix(told, "left") {
			t.Errorf("%s: a node that answers must stay", told)
		}
	}
}

// TestClosedAtOnce has a daemon accept connections and close them. Nothing but the log would tell.
func TestClosedAtOnce(t *testing.T) {
	b := startBroker(t)
	var closes atomic.Bool
	var log lockedBuffer
	f, c := b.joinFarTo("n1", func(cfg *node.DirectoryConfig) {
		dial := cfg.Dial
		cfg.Log = slog.New(slog.NewTextHandler(&log, nil))
		cfg.Dial = func(ctx context.Context, to, at string, first any) (net.Conn, error) {
			if closes.Load() {
				near, far := net.Pipe()
				return near, far.Close()
			}
			return dial(ctx, to, at, first)
		}
	})
	c.node("n1")
	closes.Store(true)
	f.up.Drop(f.name)
	for deadline := time.Now().Add(limit); !strings.Contains(log.String(), "closed the connection at once"); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("the log does not tell that the daemon closes connections:\n%s", log.String())
		}
	}
}

// lockedBuffer is a log for several goroutines.
type lockedBuffer struct {
	mu sync.Mutex
	strings.Builder
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.Builder.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.Builder.String()
}

// refusal is an answer of a daemon.
type refusal struct{}

func (refusal) Error() string { return "not now" }
func (refusal) Refused() bool { return true }
