package queue

import (
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"github.com/nats-io/nats.go"
)

// TestNeighboursReachEachOtherByHand: in one process a message does not go through the broker, and comes in order, once,
// in memory of its own.
func TestNeighboursReachEachOtherByHand(t *testing.T) {
	const messages = 1000
	server, err := StartServer(t.TempDir(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	connect := func(name string) *nats.Conn {
		nc, err := server.Connect(name)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(nc.Close)
		return nc
	}
	near := &Neighbours{}
	owner, asker, stranger := NewBus(connect("owner"), near), NewBus(connect("asker"), near), NewBus(connect("stranger"), nil)
	inbox := make(chan string, 2*messages)
	to, stopInbox, err := asker.Inbox(func(msg []byte) { inbox <- string(msg) })
	if err != nil {
		t.Fatal(err)
	}
	defer stopInbox()
	stop, err := owner.Tasks("echo.ns", func(msg []byte, _ bool) {
		if err := owner.Reply(to, msg); err != nil {
			t.Error(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	before, err := server.Messages()
	if err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 0, 16)
	for i := range messages {
		buf = fmt.Appendf(buf[:0], "%d", i)
		if err := asker.Submit("echo.ns", buf); err != nil {
			t.Fatal(err)
		}
	}
	for i := range messages {
		if got := <-inbox; got != fmt.Sprint(i) {
			t.Fatalf("message %d is %q: order or memory", i, got)
		}
	}
	if after, err := server.Messages(); err != nil || after != before {
		t.Errorf("the broker has carried %d messages (%v), want none", after-before, err)
	}
	if err := stranger.Submit("echo.ns", []byte("from afar")); err != nil {
		t.Fatal(err)
	}
	if got := <-inbox; got != "from afar" {
		t.Errorf("who is no neighbour got %q, want its answer through the broker", got)
	}
	stop()
	if taken, err := near.send(taskSubject("echo.ns"), []byte("late")); taken || err != nil {
		t.Errorf("a subject that nobody listens to took a message: %v, %v", taken, err)
	}
}

// TestHandlerRunsAlone: a listener is not called by the broker and by a neighbour at the same time, and never after stop.
func TestHandlerRunsAlone(t *testing.T) {
	nc := start(t, t.TempDir())
	near := &Neighbours{}
	bus, remote := NewBus(nc, near), NewBus(nc, nil)
	var busy, stopped bool // guarded by the handler running alone; -race sees when it does not
	var got sync.WaitGroup
	got.Add(200)
	stop, err := bus.Tasks("f.ns", func([]byte, bool) {
		if busy || stopped {
			t.Error("called while it runs or after stop")
		}
		busy = true
		got.Done()
		busy = false
	})
	if err != nil {
		t.Fatal(err)
	}
	for range 100 {
		for _, b := range []*Bus{bus, remote} {
			if err := b.Submit("f.ns", []byte("x")); err != nil {
				t.Fatal(err)
			}
		}
	}
	got.Wait()
	stop()
	stopped = true
}

func TestMailboxIsBounded(t *testing.T) {
	entered, release := make(chan struct{}), make(chan struct{})
	near := &Neighbours{}
	stop := near.listen("s", func([]byte, bool) { entered <- struct{}{}; <-release })
	large := make([]byte, pendingBytes/2+1)
	for i := range 3 { // one is with the handler, one waits, one is too many
		taken, err := near.send("s", large)
		if !taken || (err != nil) != (i == 2) {
			t.Errorf("message %d: %v, %v", i, taken, err)
		}
		if i == 0 {
			<-entered
		}
		if i == 2 && !strings.Contains(err.Error(), "want at most") {
			t.Errorf("got %v, want the bound", err)
		}
	}
	close(release)
	<-entered
	stop()
}
