package watchdog

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/netnstest"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/stage"
)

// elsewhere is a Runtime with a network of its own, as pods are.
type elsewhere struct {
	*sandbox.Spawner
	network string       // path of the namespace
	rooms   atomic.Int64 // made
	started atomic.Int64 // in rooms
}

// Start implements sandbox.Runtime.
func (r *elsewhere) Start(ctx context.Context, c sandbox.Command) (sandbox.Process, error) {
	network, err := r.Network(nil)
	if err != nil {
		return nil, err
	}
	defer network.Close()
	c.Network = network
	return r.Spawner.Start(ctx, c)
}

// Network implements sandbox.Apart.
func (r *elsewhere) Network(sandbox.Process) (*os.File, error) { return os.Open(r.network) }

// Room implements sandbox.Apart.
func (r *elsewhere) Room(context.Context, sandbox.Command) (sandbox.Room, error) {
	r.rooms.Add(1)
	return roomElsewhere{r, make(chan struct{})}, nil
}

type roomElsewhere struct {
	*elsewhere
	ended chan struct{}
}

// Start implements sandbox.Runtime.
func (r roomElsewhere) Start(ctx context.Context, c sandbox.Command) (sandbox.Process, error) {
	r.started.Add(1)
	return r.elsewhere.Start(ctx, c)
}

// Ended implements sandbox.Room.
func (r roomElsewhere) Ended() <-chan struct{} { return r.ended }

// Close implements sandbox.Room.
func (r roomElsewhere) Close() {}

// apart returns a Runtime with a network of its own.
func apart(t *testing.T) *elsewhere {
	t.Helper()
	_, all := netnstest.New(t, 1)
	r := &elsewhere{Spawner: sandbox.NewSpawner(), network: all[0].Namespace()}
	t.Cleanup(r.Close)
	return r
}

// TestProgramsElsewhereShareAPort runs two programs that listen on port 8080, each in a network of
// its own. The port is taken in the network of this process.
func TestProgramsElsewhereShareAPort(t *testing.T) {
	if l, err := net.Listen("tcp", "127.0.0.1:"+ownPort); err == nil { // else another process has it
		defer l.Close()
	}
	for _, name := range []string{"one", "two"} {
		r := apart(t)
		c := programAt("", "127.0.0.1:"+ownPort, false)
		ctx, cancel := context.WithTimeout(t.Context(), soon)
		defer cancel()
		p, err := startChild(ctx, r, c)
		if err != nil {
			t.Fatal(name, err)
		}
		defer func() { p.kill(); <-p.gone }()
		if err := p.wait(ctx, ""); err != nil {
			t.Fatal(name, err)
		}
		h, done := proxy(p, 4, 0)
		defer done()
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/", nil))
		if w.Code != http.StatusOK || p.guard != nil {
			t.Errorf("%s: status %d, guard %v", name, w.Code, p.guard)
		}
	}
}

// TestErrorSaysWhereAProgramElsewhereListens asks a program that listens on another port.
func TestErrorSaysWhereAProgramElsewhereListens(t *testing.T) {
	r := apart(t)
	c := programAt("", "127.0.0.1:9999", false)
	p, err := startChild(t.Context(), r, c)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { p.kill(); <-p.gone }()
	proctest.Until(t, "the program to listen", func() bool { return p.listensAt() != "" })
	if text := p.listensAt(); !strings.Contains(text, "it listens on 9999; want "+ownPort) {
		t.Errorf("%q", text)
	}
}

// TestUnreadBytesOfAProgramElsewhere counts what a program in another network has not read.
func TestUnreadBytesOfAProgramElsewhere(t *testing.T) {
	_, all := netnstest.New(t, 1)
	network, err := os.Open(all[0].Namespace())
	if err != nil {
		t.Fatal(err)
	}
	defer network.Close()
	l := all[0].Listen(7000)
	defer l.Close()
	conn, err := sandbox.DialIn(t.Context(), network, "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	c := &programConn{TCPConn: conn.(*net.TCPConn), network: network, heard: new(atomic.Int64)}
	h := &hold{}
	if _, err := c.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	if !h.queued(conn, c) {
		t.Error("five unread bytes are not seen")
	}
}

// TestProcessesPerRequestShareARoom runs a process per request, in one room.
func TestProcessesPerRequestShareARoom(t *testing.T) {
	r := apart(t)
	c := shell(modeStreaming, "cat /proc/net/tcp >/dev/null; tr a-z A-Z")
	w := &watchdog{c: c, runtime: r, holds: newHolds(t.Context().Done())}
	if err := w.place(t.Context(), &stage.Replica{Log: slog.New(slog.DiscardHandler)}); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		answer := httptest.NewRecorder()
		w.function.ServeHTTP(answer, httptest.NewRequest(http.MethodPost, "/", strings.NewReader(fmt.Sprint("call ", i))))
		if got := answer.Body.String(); got != fmt.Sprint("CALL ", i) {
			t.Errorf("answer %q", got)
		}
	}
	w.stop()
	if r.rooms.Load() != 1 || r.started.Load() != 3 {
		t.Errorf("%d rooms, %d processes in them", r.rooms.Load(), r.started.Load())
	}
}
