package warden

import (
	"context"
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
}

func (h *hanging) Start(ctx context.Context, c sandbox.Command) (sandbox.Process, error) {
	if len(c.Argv) > 0 && c.Argv[0] == "hang" {
		h.waiting.Add(1)
		<-h.release
		return nil, sandbox.ErrClosed
	}
	return h.Runtime.Start(ctx, c)
}

// TestSignalsPassStartsThatWait has more starts wait than other requests may run, and signals a
// process meanwhile.
func TestSignalsPassStartsThatWait(t *testing.T) {
	dir, err := os.MkdirTemp("", "warden-") //nolint:usetesting // a socket's path must be short
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	socket := filepath.Join(dir, "socket")
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: socket, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	h := &hanging{Runtime: sandbox.NewSpawner(), release: make(chan struct{})}
	var group sync.WaitGroup
	group.Go(func() {
		if err := Serve(t.Context(), Server{Listener: l, Runtime: h, Linger: time.Minute, Log: slog.New(slog.DiscardHandler)}); err != nil {
			t.Error(err)
		}
	})
	r, err := connect(t.Context(), socket)
	if err != nil {
		t.Fatal(err)
	}
	exits := make(chan Exit, 1)
	if _, err := r.attach(func(e Exit) { exits <- e }); err != nil {
		t.Fatal(err)
	}
	if _, err := r.start(t.Context(), Process{Name: "runs", Command: script("sleep 600")}); err != nil {
		t.Fatal(err)
	}
	for i := range maxRequests + 1 {
		group.Go(func() {
			_, err := r.start(t.Context(), Process{Name: "hangs" + strings.Repeat("x", i), Command: sandbox.Command{Argv: []string{"hang"}}})
			if err == nil {
				t.Error("it starts")
			}
		})
	}
	proctest.Until(t, "all starts wait", func() bool { return h.waiting.Load() == maxRequests+1 })
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
	r.close()
	group.Wait()
}
