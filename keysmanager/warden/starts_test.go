package warden

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// hanging is a Runtime whose starts of "hang" wait, as those in containers wait for containerd.
type hanging struct {
	sandbox.Runtime
	waiting atomic.Int32
	release chan struct{}
	ended   chan error // gets why the context of a start has ended
}

func (h *hanging) Start(ctx context.Context, c sandbox.Command) (sandbox.Process, error) {
	if len(c.Argv) > 0 && c.Argv[0] == "hang" {
		h.waiting.Add(1)
		defer h.waiting.Add(-1)
		select {
		case <-h.release:
			return nil, sandbox.ErrClosed
		case <-ctx.Done():
			h.ended <- context.Cause(ctx)
			return nil, fmt.Errorf("it hangs: %w", context.Cause(ctx))
		}
	}
	return h.Runtime.Start(ctx, c)
}

// serveHanging serves a warden with a hanging Runtime, and connects to it. The warden ends with the
// test.
func serveHanging(t *testing.T) (*remote, *hanging) {
	t.Helper()
	dir, err := os.MkdirTemp("", "warden-") //nolint:usetesting // a socket's path must be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	socket := filepath.Join(dir, "socket")
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: socket, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	h := &hanging{Runtime: sandbox.NewSpawner(), release: make(chan struct{}), ended: make(chan error, maxStarts)}
	ctx, end := context.WithCancel(context.Background())
	var group sync.WaitGroup
	group.Go(func() {
		if err := Serve(ctx, Server{Listener: l, Runtime: h, Linger: time.Minute, Log: slog.New(slog.DiscardHandler)}); err != nil {
			t.Error(err)
		}
	})
	// After r is closed: it would kill a warden that ends, which is this process.
	t.Cleanup(func() { end(); group.Wait() })
	r, err := connect(t.Context(), socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.close)
	return r, h
}

func hang(name string) Process {
	return Process{Name: name, Command: sandbox.Command{Argv: []string{"hang"}}}
}

func (h *hanging) until(t *testing.T, waiting int32) {
	t.Helper()
	proctest.Until(t, fmt.Sprintf("%d starts wait", waiting), func() bool { return h.waiting.Load() == waiting })
}

// TestCanceledStartsEndInTheWarden cancels a start, lets one wait for too long, and goes away
// during one. The warden ends them and keeps no entry.
func TestCanceledStartsEndInTheWarden(t *testing.T) {
	r, h := serveHanging(t)
	why := errors.New("nobody waits for it")
	failed := make(chan error, 1)
	begin := func(ctx context.Context) {
		t.Helper()
		go func() { // the test waits for it
			_, err := r.start(ctx, hang("a"))
			failed <- err
		}()
		h.until(t, 1)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	begin(ctx)
	cancel(why)
	if err := <-failed; !errors.Is(err, why) || err.Error() != "it hangs: "+why.Error() {
		t.Errorf("%v, want what the warden says: %v", err, why)
	}
	if got := <-h.ended; got.Error() != why.Error() {
		t.Errorf("in the warden it has ended for %v, want %v", got, why)
	}
	if _, err := r.start(ctx, hang("a")); !errors.Is(err, why) {
		t.Errorf("%v, want that the context has ended", err)
	}
	r.patience = 2 * time.Second // enough to see that the start waits
	begin(t.Context())
	if err := <-failed; err == nil || !strings.Contains(err.Error(), "not answered within") {
		t.Errorf("%v, want that the warden does not answer", err)
	}
	if got := <-h.ended; !strings.Contains(got.Error(), "not answered within") {
		t.Errorf("in the warden it has ended for %v, want that it took too long", got)
	}
	r.patience = answerTimeout
	h.until(t, 0)
	begin(t.Context()) // the name is free
	r.close()
	if err := <-failed; !errors.Is(err, ErrClosed) {
		t.Errorf("%v, want that the client is closed", err)
	}
	if got := <-h.ended; !errors.Is(got, errGone) {
		t.Errorf("in the warden it has ended for %v, want %v", got, errGone)
	}
}

// TestCancellationsPassStartsThatWait has more starts than the warden works on.
func TestCancellationsPassStartsThatWait(t *testing.T) {
	r, h := serveHanging(t)
	ctx, cancel := context.WithCancel(t.Context())
	var group sync.WaitGroup
	for i := range maxStarts + 10 {
		group.Go(func() {
			if _, err := r.start(ctx, hang(fmt.Sprint(i))); !errors.Is(err, context.Canceled) {
				t.Errorf("%v, want that its context has ended", err)
			}
		})
	}
	h.until(t, maxStarts)
	cancel()
	group.Wait()
	h.until(t, 0)
}

// TestSignalsPassStartsThatWait has more starts wait than other requests may run, and signals a
// process meanwhile.
func TestSignalsPassStartsThatWait(t *testing.T) {
	r, h := serveHanging(t)
	var group sync.WaitGroup
	exits := make(chan Exit, 1)
	if _, err := r.attach(func(e Exit) { exits <- e }); err != nil {
		t.Fatal(err)
	}
	if _, err := r.start(t.Context(), Process{Name: "runs", Command: script("sleep 600")}); err != nil {
		t.Fatal(err)
	}
	for i := range maxRequests + 1 {
		group.Go(func() {
			if _, err := r.start(t.Context(), hang(fmt.Sprint(i))); err == nil {
				t.Error("it starts")
			}
		})
	}
	h.until(t, maxRequests+1)
	if err := r.signal("runs", syscall.SIGKILL); err != nil {
		t.Error(err)
	}
	if e := <-exits; e.Name != "runs" {
		t.Errorf("%+v, want the end of the signaled process", e)
	}
	if err := r.drop("runs"); err != nil {
		t.Error(err)
	}
	close(h.release)
	group.Wait()
}
