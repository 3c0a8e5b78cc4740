package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// stubborn is a Worker whose starts ignore their context. They succeed when they are released.
type stubborn struct {
	let chan struct{}

	mu   sync.Mutex
	did  []string // kinds and replicas
	fars []*os.File
}

func (w *stubborn) note(s string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.did = append(w.did, s)
}

func (w *stubborn) done() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.did)
}

func (w *stubborn) Start(_ context.Context, o Order, _ func(Phase)) (Started, error) {
	w.note("start " + o.Replica)
	<-w.let
	// Deadlines need SOCK_NONBLOCK.
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return Started{}, err
	}
	f := os.NewFile(uintptr(fds[0]), "near")
	defer f.Close()
	conn, err := net.FileConn(f)
	if err != nil {
		return Started{}, err
	}
	w.mu.Lock()
	w.fars = append(w.fars, os.NewFile(uintptr(fds[1]), "far"))
	w.mu.Unlock()
	return Started{PID: len(w.done()), Conn: wire.NewSocket(conn.(*net.UnixConn))}, nil
}

func (w *stubborn) Do(_ context.Context, o Order) (int64, error) {
	w.note(string(o.Kind) + " " + o.Replica)
	return 0, nil
}

func (*stubborn) Inventory() Inventory { return Inventory{} }

// bare is a server that is given orders by hand, and its answers.
type bare struct {
	*Server
	*stubborn
	t       *testing.T
	answers chan Answer
	free    func() // lets starts end
}

func newBare(t *testing.T) *bare {
	t.Helper()
	me, err := Identify("n1", "test")
	if err != nil {
		t.Fatal(err)
	}
	b := &bare{stubborn: &stubborn{let: make(chan struct{})}, t: t, answers: make(chan Answer, 64)}
	bus := &table{all: map[string][]func(string, string, []byte){}}
	if _, err := bus.Listen("n1", "answer.T", func(_, _ string, data []byte) {
		a, err := DecodeAnswer(data)
		if err != nil {
			t.Error(err)
		}
		b.answers <- a
	}); err != nil {
		t.Fatal(err)
	}
	b.Server, err = NewServer(ServerConfig{
		Me: me, Bus: bus, Worker: b.stubborn, Socket: filepath.Join(t.TempDir(), "run", "s"), Log: slog.New(slog.DiscardHandler), Unclaimed: time.Hour,
	})
	if err != nil {
		t.Fatal(err)
	}
	b.free = sync.OnceFunc(func() { close(b.let) })
	t.Cleanup(func() {
		b.free()
		b.Close()
		for _, f := range b.fars {
			_ = f.Close()
		}
	})
	return b
}

// give gives the server an order as it comes from the bus.
func (b *bare) give(o Order) {
	b.t.Helper()
	o.V, o.Within = Version, time.Minute
	data, err := json.Marshal(o)
	if err != nil {
		b.t.Fatal(err)
	}
	b.receive("answer.T", data)
}

// last waits for the answer that ends an order.
func (b *bare) last(id string) Answer {
	b.t.Helper()
	limit := time.After(time.Minute)
	for {
		select {
		case a := <-b.answers:
			if a.ID == id && a.Done {
				return a
			}
		case <-limit:
			b.t.Fatalf("order %s has no answer", id)
		}
	}
}

func (b *bare) start(id, replica string) Order {
	return Order{ID: id, To: b.cfg.Me.ID, Kind: OrderStart, Replica: replica, Spec: Spec{Function: "f.ns", Namespace: "ns", Image: "i"}}
}

// TestRepeatedOrderIsCarriedOutOnce repeats an order while it is carried out and afterwards. It
// must be answered, but not carried out again.
func TestRepeatedOrderIsCarriedOutOnce(t *testing.T) {
	b := newBare(t)
	o := b.start("A", "r-1")
	b.give(o)
	b.give(o)
	b.free()
	first := b.last("A")
	b.give(o)
	again := b.last("A")
	if first.Error != "" || again.Error != "" || first.PID != again.PID {
		t.Errorf("answers %+v and %+v, want the same", first, again)
	}
	if got := b.done(); len(got) != 1 {
		t.Errorf("carried out were %q, want one start", got)
	}
}

// TestTooManyOrdersAreRefused sends an order while the largest number of orders runs. The order
// must be refused with that number. When there is room again, it must be carried out.
func TestTooManyOrdersAreRefused(t *testing.T) {
	b := newBare(t)
	b.free()
	b.Server.mu.Lock()
	for i := range maxRunning {
		b.running[fmt.Sprint(i)] = &task{cancel: func(error) {}}
	}
	b.Server.mu.Unlock()
	b.give(b.start("B", "r-b"))
	if a := b.last("B"); !strings.Contains(a.Error, fmt.Sprintf("%d orders are under way, want at most %d", maxRunning, maxRunning)) {
		t.Errorf("answer %+v, want a refusal with the bound", a)
	}
	b.give(Order{ID: "C", Kind: OrderWho})
	if a := b.last("C"); a.Error != "" || a.From.ID != b.cfg.Me.ID {
		t.Errorf("answer %+v, want who it is, however much is under way", a)
	}
	b.Server.mu.Lock()
	clear(b.running)
	b.Server.mu.Unlock()
	b.give(b.start("B", "r-b"))
	if a := b.last("B"); a.Error != "" {
		t.Errorf("answer %+v, want the start carried out now", a)
	}
}

// TestOrdersForAnotherDaemonAreRefused sends an order for a daemon that no longer exists.
func TestOrdersForAnotherDaemonAreRefused(t *testing.T) {
	b := newBare(t)
	o := b.start("A", "r-1")
	o.To = "ANOTHER"
	b.give(o)
	if a := b.last("A"); !strings.Contains(a.Error, "for an earlier daemon") || len(b.done()) > 0 {
		t.Errorf("answer %+v, carried out %q, want a refusal", a, b.done())
	}
}

// TestCancelledStartLeavesNoReplica cancels a start that succeeds all the same, one that has ended
// unclaimed, and one that arrives only afterwards. No replica may be left.
func TestCancelledStartLeavesNoReplica(t *testing.T) {
	for name, tc := range map[string]struct {
		do   func(b *bare)
		want []string
	}{
		"under way": {func(b *bare) {
			b.give(b.start("A", "r-1"))
			b.give(Order{ID: "B", To: b.cfg.Me.ID, Kind: OrderCancel, Target: "A"})
			b.free()
			if a := b.last("A"); a.Error == "" {
				b.t.Error("a cancelled start succeeds")
			}
		}, []string{"start r-1", "stop r-1"}},
		"unclaimed": {func(b *bare) {
			b.free()
			b.give(b.start("A", "r-1"))
			b.last("A")
			b.give(Order{ID: "B", To: b.cfg.Me.ID, Kind: OrderCancel, Target: "A"})
		}, []string{"start r-1", "stop r-1"}},
		"to come": {func(b *bare) {
			b.free()
			b.give(Order{ID: "B", To: b.cfg.Me.ID, Kind: OrderCancel, Target: "A"})
			b.give(b.start("A", "r-1"))
			if a := b.last("A"); !strings.Contains(a.Error, "cancelled before it arrived") {
				b.t.Errorf("answer %+v", a)
			}
		}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBare(t)
			tc.do(b)
			b.work.Wait()
			if got := b.done(); !slices.Equal(got, tc.want) {
				t.Errorf("carried out were %q, want %q", got, tc.want)
			}
			if len(b.kept) > 0 {
				t.Error("a socket is kept")
			}
			for _, far := range b.fars {
				_ = far.SetReadDeadline(time.Now().Add(time.Minute))
				if _, err := far.Read(make([]byte, 1)); !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) {
					t.Errorf("the replica's socket: %v, want its end", err)
				}
			}
		})
	}
}

// TestCloseDisconnectsUnclaimedReplicas closes a server with an unclaimed replica, which must see
// that its connection is closed.
func TestCloseDisconnectsUnclaimedReplicas(t *testing.T) {
	b := newBare(t)
	b.free()
	b.give(b.start("A", "r-1"))
	b.last("A")
	b.Close()
	_ = b.fars[0].SetReadDeadline(time.Now().Add(time.Minute))
	if _, err := b.fars[0].Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("the replica's socket: %v, want its end", err)
	}
}
