package transfer

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"

	"github.com/stagecoach-serving/stagecoach/image"
)

func TestServerRefuses(t *testing.T) {
	t.Parallel()
	from, digest := filled(t, modelSize)
	s := listen(t, newServer(from, nil))
	for _, tc := range []struct {
		method, path string
		want         int
	}{
		{http.MethodGet, "/v2/", http.StatusOK},
		{http.MethodHead, "/v2/a/b/manifests/" + digest, http.StatusOK},
		{http.MethodPost, "/v2/a/blobs/uploads/", http.StatusMethodNotAllowed},
		{http.MethodDelete, "/v2/a/manifests/" + digest, http.StatusMethodNotAllowed},
		{http.MethodGet, "/v2/a/manifests/latest", http.StatusNotFound},
		{http.MethodGet, "/v2/a/manifests/sha256:..", http.StatusNotFound},
		{http.MethodGet, "/v2/a/blobs/..%2f..%2f..%2findex.json", http.StatusNotFound},
		{http.MethodGet, "/v2/a/blobs/sha256:" + strings.Repeat("0", 64), http.StatusNotFound},
		{http.MethodGet, "/index.json", http.StatusNotFound},
	} {
		q, err := http.NewRequestWithContext(t.Context(), tc.method, s.URL+tc.path, nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := s.Client().Do(q)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode != tc.want {
			t.Errorf("%s %s: status %d, want %d", tc.method, tc.path, resp.StatusCode, tc.want)
		}
	}
}

// TestServeConn serves one connection, as over a stream of another protocol.
func TestServeConn(t *testing.T) {
	t.Parallel()
	from, digest := filled(t, modelSize)
	s := newServer(from, nil)
	ctx, cancel := context.WithCancel(t.Context())
	var served sync.WaitGroup
	peer := Peer("a", func(context.Context) (net.Conn, error) {
		here, there := net.Pipe()
		served.Go(func() { s.ServeConn(ctx, there) })
		return here, nil
	})
	to := newStore(t, t.TempDir())
	f, _ := newFetcher(t, to)
	if err := f.Fetch(t.Context(), digest, []Source{peer}); err != nil {
		t.Fatal(err)
	}
	complete(t, to, digest)
	served.Wait() // the fetch has closed its connections
	here, there := net.Pipe()
	defer here.Close()
	served.Go(func() { s.ServeConn(ctx, there) })
	cancel()
	served.Wait()
}

func TestRate(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, began := newRate(1<<20), time.Now()
		for range 41 {
			if err := r.wait(t.Context(), 1<<18); err != nil {
				t.Fatal(err)
			}
		}
		if took := time.Since(began); took != 10*time.Second {
			t.Errorf("10 MiB and a quarter at 1 MiB per second took %v before the last quarter, want 10s", took)
		}
		gone, cancel := context.WithCancel(t.Context())
		cancel()
		if err := r.wait(gone, 1); !errors.Is(err, context.Canceled) {
			t.Errorf("%v, want %v", err, context.Canceled)
		}
	})
}

// TestBusySource has the first source refuse because it sends to others. The second one is asked.
func TestBusySource(t *testing.T) {
	t.Parallel()
	from, digest := filled(t, modelSize)
	one := newServer(from, func(c *ServerConfig) { c.Transfers = 1 })
	one.room <- struct{}{} // another transfer
	busy, idle := listen(t, one), listen(t, newServer(from, nil))
	to := newStore(t, t.TempDir())
	f, log := newFetcher(t, to)
	if err := f.Fetch(t.Context(), digest, []Source{busy.peer("busy"), idle.peer("idle")}); err != nil {
		t.Fatalf("%v\n%s", err, log)
	}
	if busy.blobs.Load() == 0 || idle.blobs.Load() < 3 {
		t.Errorf("%d requests to the busy source and %d to the idle one, want some and all parts", busy.blobs.Load(), idle.blobs.Load())
	}
	// Alone, the source is asked until it has room.
	other, _ := newFetcher(t, newStore(t, t.TempDir()))
	done := make(chan error, 1)
	n := busy.blobs.Load()
	go func() { done <- other.Fetch(t.Context(), digest, []Source{busy.peer("busy")}) }()
	for busy.blobs.Load() < n+1 {
		time.Sleep(time.Millisecond)
	}
	<-one.room
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestRegistryIsTheLastSource(t *testing.T) {
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	from, digest := filled(t, modelSize)
	empty := listen(t, newServer(newStore(t, t.TempDir()), nil))
	host := listen(t, registry.New(registry.Logger(slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug))))
	name := strings.TrimPrefix(host.URL, "http://") + "/team/ocr:1"
	named := packed(t, modelSize)
	if _, err := from.Add(t.Context(), named, name); err != nil {
		t.Fatal(err)
	}
	var r image.Registry
	if _, err := r.Push(t.Context(), from, name); err != nil {
		t.Fatal(err)
	}
	to := newStore(t, t.TempDir())
	f, log := newFetcher(t, to)
	if err := f.Fetch(t.Context(), digest, []Source{empty.peer("empty"), Registry(r, name+"@"+digest)}); err != nil {
		t.Fatalf("%v\n%s", err, log)
	}
	complete(t, to, digest)
	unknown := "sha256:" + strings.Repeat("ab", 32)
	err := f.Fetch(t.Context(), unknown, []Source{Registry(r, name+"@"+unknown)})
	if !errors.Is(err, image.ErrNoImage) || !strings.Contains(err.Error(), "404") {
		t.Errorf("%v, want %v", err, image.ErrNoImage)
	}
}
