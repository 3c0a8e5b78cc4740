package transfer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/stagecoach-serving/stagecoach/image"
	"github.com/stagecoach-serving/stagecoach/internal/disk"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// modelSize is the size of the model in test images, in bytes.
const modelSize = 5 << 20

func newStore(t testing.TB, dir string) *image.Store {
	t.Helper()
	s, err := image.OpenStore(filepath.Join(dir, ".oci"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// filled returns a store with an image that has a model of random bytes.
func filled(t testing.TB, size int) (s *image.Store, digest string) {
	t.Helper()
	return newStoreWith(t, t.TempDir(), size)
}

func newStoreWith(t testing.TB, dir string, size int) (*image.Store, string) {
	t.Helper()
	s := newStore(t, dir)
	digest, err := s.Add(t.Context(), packed(t, size), "")
	if err != nil {
		t.Fatal(err)
	}
	return s, digest
}

// packed returns an image that has a model of random bytes.
func packed(t testing.TB, size int) *image.Image {
	t.Helper()
	folder := t.TempDir()
	model := make([]byte, size)
	random := rand.NewChaCha8([32]byte{1})
	if _, err := random.Read(model); err != nil {
		t.Fatal(err)
	}
	for name, b := range map[string][]byte{"stage": []byte("#!/bin/true\n"), "model.bin": model} {
		if err := os.WriteFile(filepath.Join(folder, name), b, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	img, err := image.Pack(folder, image.Config{Entrypoint: []string{"/stage"}, Labels: map[string]string{image.ProtocolLabel: image.ProtocolVersion}})
	if err != nil {
		t.Fatal(err)
	}
	return img
}

func linksOf(info os.FileInfo) uint64 {
	return info.Sys().(*syscall.Stat_t).Nlink //nolint:forcetypeassert // on Linux
}

// logs collects what a fetcher logs.
type logs struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logs) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logs) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func newFetcher(t testing.TB, s *image.Store) (*Fetcher, *logs) {
	t.Helper()
	l := &logs{}
	f := NewFetcher(FetcherConfig{Store: s, Log: slog.New(slog.NewTextHandler(l, nil)), Stall: 3 * time.Second})
	t.Cleanup(f.Close)
	return f, l
}

func newServer(s *image.Store, change func(*ServerConfig)) *Server {
	cfg := ServerConfig{Store: s, Log: slog.New(slog.DiscardHandler)}
	if change != nil {
		change(&cfg)
	}
	return NewServer(cfg)
}

// front is a listener with a handler before a server. It counts the requests for blobs.
type front struct {
	*httptest.Server
	blobs atomic.Int64
}

func listen(t testing.TB, h http.Handler) *front {
	t.Helper()
	f := &front{}
	f.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if strings.Contains(q.URL.Path, "/blobs/") {
			f.blobs.Add(1)
		}
		h.ServeHTTP(w, q)
	}))
	t.Cleanup(f.Close)
	return f
}

func (f *front) dial(ctx context.Context) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, "tcp", f.Listener.Addr().String())
}

func (f *front) peer(name string) Source { return Peer(name, f.dial) }

// complete checks that a store has an image, and that it can be unpacked.
func complete(t *testing.T, s *image.Store, digest string) {
	t.Helper()
	root, err := s.Root(t.Context(), digest)
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(filepath.Join(root.Dir, "model.bin"))
	if err != nil || info.Size() != modelSize || !root.Stage {
		t.Fatalf("%+v: the model has %v, %v, want %d bytes", root, info, err, modelSize)
	}
}

func TestFetch(t *testing.T) {
	t.Parallel()
	from, digest := filled(t, modelSize)
	to := newStore(t, t.TempDir())
	peer := listen(t, newServer(from, nil))
	f, log := newFetcher(t, to)
	if err := f.Fetch(t.Context(), digest, []Source{peer.peer("a")}); err != nil {
		t.Fatal(err)
	}
	complete(t, to, digest)
	asked := peer.blobs.Load()
	if err := f.Fetch(t.Context(), digest, []Source{peer.peer("a")}); err != nil || peer.blobs.Load() != asked {
		t.Errorf("%v, and %d blobs were asked for again, want none", err, peer.blobs.Load()-asked)
	}
	if !strings.Contains(log.String(), "image has arrived") {
		t.Errorf("the log does not say that the image has arrived:\n%s", log)
	}
	// The bytes of the model are once on the disk: as a file, which the root links to.
	big := 0
	var links uint64
	err := filepath.WalkDir(image.Dir(to), func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		if err == nil && info.Size() >= modelSize {
			big++
			links = linksOf(info)
		}
		return err
	})
	if err != nil || links != uint64(big) || big != 2 {
		t.Errorf("%d names of big files, the last one with %d links, %v, want 2 names of one file", big, links, err)
	}
	// What was received can be served on.
	next := newStore(t, t.TempDir())
	g, _ := newFetcher(t, next)
	if err := g.Fetch(t.Context(), digest, []Source{listen(t, newServer(to, nil)).peer("b")}); err != nil {
		t.Fatal(err)
	}
	complete(t, next, digest)
}

// cut is a dialer whose connections end after a number of bytes.
type cut struct {
	*front
	after func() int
}

func (c cut) peer(name string) Source {
	return Peer(name, func(ctx context.Context) (net.Conn, error) {
		conn, err := c.dial(ctx)
		if err != nil {
			return nil, err
		}
		return &short{Conn: conn, left: c.after()}, nil
	})
}

type short struct {
	net.Conn
	left int
}

func (s *short) Read(p []byte) (int, error) {
	if s.left == 0 {
		_ = s.Close()
		return 0, errors.New("cut by the test")
	}
	n, err := s.Conn.Read(p[:min(len(p), s.left)])
	s.left -= n
	return n, err
}

// TestBrokenConnections cuts connections at random bytes. Each time, the rest alone is sent again.
func TestBrokenConnections(t *testing.T) {
	t.Parallel()
	from, digest := filled(t, modelSize)
	for seed := range 8 {
		random := rand.New(rand.NewPCG(uint64(seed), 7))
		var mu sync.Mutex
		total := 0
		after := func() int {
			mu.Lock()
			defer mu.Unlock()
			n := 20_000 + random.IntN(2<<20)
			total += n
			return n
		}
		to := newStore(t, t.TempDir())
		f, log := newFetcher(t, to)
		peer := cut{listen(t, newServer(from, nil)), after}
		if err := f.Fetch(t.Context(), digest, []Source{peer.peer("a")}); err != nil {
			t.Fatalf("seed %d: %v\n%s", seed, err, log)
		}
		complete(t, to, digest)
		if !strings.Contains(log.String(), "broke off after") {
			t.Errorf("seed %d: no connection was cut", seed)
		}
		if most := modelSize + 3<<20; total > most {
			t.Errorf("seed %d: the connections could carry %d bytes, want at most %d: what has arrived is not asked for again", seed, total, most)
		}
	}
}

// TestSourcesThatFail asks sources that are wrong in different ways, and then one that is right.
func TestSourcesThatFail(t *testing.T) {
	t.Parallel()
	from, digest := filled(t, modelSize)
	right := newServer(from, nil)
	blob := func(f func(http.ResponseWriter, *http.Request)) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
			if strings.Contains(q.URL.Path, "/blobs/") {
				f(w, q)
				return
			}
			right.ServeHTTP(w, q)
		})
	}
	recorded := func(q *http.Request) *httptest.ResponseRecorder {
		r := httptest.NewRecorder()
		right.ServeHTTP(r, q)
		return r
	}
	for name, tc := range map[string]struct {
		handler http.Handler
		want    string // in the log or the error
	}{
		"wrong bytes": {blob(func(w http.ResponseWriter, q *http.Request) {
			r := recorded(q)
			b := r.Body.Bytes()
			b[len(b)/2] ^= 1
			w.WriteHeader(r.Code)
			_, _ = w.Write(b)
		}), "corrupt: "},
		"a wrong header": {blob(func(w http.ResponseWriter, q *http.Request) {
			r := recorded(q)
			b := r.Body.Bytes()
			if len(b) > 1000 { // not the configuration
				b[100] ^= 64
			}
			w.WriteHeader(r.Code)
			_, _ = w.Write(b)
		}), "corrupt: "},
		"a blob that is too short": {blob(func(w http.ResponseWriter, q *http.Request) {
			r := recorded(q)
			_, _ = w.Write(r.Body.Bytes()[:r.Body.Len()-1])
		}), "bytes of sha256:"},
		"no ranges, and it breaks off": {blob(func(w http.ResponseWriter, q *http.Request) {
			q.Header.Del("Range")
			r := recorded(q)
			w.Header().Set("Content-Length", fmt.Sprint(r.Body.Len()))
			_, _ = w.Write(r.Body.Bytes()[:r.Body.Len()/2])
		}), "broke off after"},
		"the wrong range": {blob(func(w http.ResponseWriter, q *http.Request) {
			if q.Header.Get("Range") == "" {
				r := recorded(q)
				w.Header().Set("Content-Length", fmt.Sprint(r.Body.Len()))
				_, _ = w.Write(r.Body.Bytes()[:r.Body.Len()/2])
				return
			}
			q.Header.Set("Range", "bytes=1-")
			right.ServeHTTP(w, q)
		}), "want one from byte"},
		"no blobs": {blob(http.NotFound), "404"},
		"errors":   {blob(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) }), "status 500"},
		"a stall": {blob(func(w http.ResponseWriter, q *http.Request) {
			w.Header().Set("Content-Length", fmt.Sprint(recorded(q).Body.Len()))
			w.WriteHeader(http.StatusOK)
			_ = http.NewResponseController(w).Flush()
			<-q.Context().Done()
		}), "nothing came in"},
		"a stalled manifest": {http.HandlerFunc(func(_ http.ResponseWriter, q *http.Request) { <-q.Context().Done() }), "no manifest came in"},
		"another manifest": {http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, `{"schemaVersion":2}`)
		}), "corrupt: a manifest of 19 bytes"},
		"nobody": {nil, "refused"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			wrong := listen(t, tc.handler)
			if tc.handler == nil {
				wrong.Close()
			}
			to := newStore(t, t.TempDir())
			f, log := newFetcher(t, to)
			good := listen(t, right)
			if err := f.Fetch(t.Context(), digest, []Source{wrong.peer("wrong"), good.peer("right")}); err != nil {
				t.Fatalf("%v\n%s", err, log)
			}
			complete(t, to, digest)
			// Without the right source, the error names the wrong one.
			alone, log2 := newFetcher(t, newStore(t, t.TempDir()))
			err := alone.Fetch(t.Context(), digest, []Source{wrong.peer("wrong")})
			if err == nil || !strings.Contains(err.Error(), digest) || !strings.Contains(err.Error(), "wrong: ") || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%v, want an error with the digest, the source and %q\n%s", err, tc.want, log2)
			}
		})
	}
}

// TestUnreachable asks a source to which no connection comes about. It is asked once per fetch, and
// the next source sends the image.
func TestUnreachable(t *testing.T) {
	t.Parallel()
	from, digest := filled(t, modelSize)
	good := listen(t, newServer(from, nil))
	var dials atomic.Int64
	dark := Peer("dark", func(context.Context) (net.Conn, error) {
		dials.Add(1)
		return nil, fmt.Errorf("%w: a firewall drops packets", ErrUnreachable)
	})
	to := newStore(t, t.TempDir())
	f, _ := newFetcher(t, to)
	if err := f.Fetch(t.Context(), digest, []Source{dark, good.peer("right")}); err != nil {
		t.Fatal(err)
	}
	complete(t, to, digest)
	if n := dials.Load(); n != 1 {
		t.Errorf("%d dials, want 1", n)
	}
	alone, _ := newFetcher(t, newStore(t, t.TempDir()))
	err := alone.Fetch(t.Context(), digest, []Source{dark})
	if !errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), "dark: ") || !strings.Contains(err.Error(), "a firewall") {
		t.Errorf("%v, want what is wrong with the source", err)
	}
	if n := dials.Load(); n != 2 {
		t.Errorf("%d dials after both fetches, want 2", n)
	}
}

// TestWrongBytesAfterABreak has one source break off, and another send a wrong rest. The fetch
// finds out which of the two was wrong.
func TestWrongBytesAfterABreak(t *testing.T) {
	t.Parallel()
	from, digest := filled(t, modelSize)
	right := newServer(from, nil)
	breaks := cut{listen(t, right), func() int { return 3 << 20 }}
	wrong := listen(t, http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		r := httptest.NewRecorder()
		right.ServeHTTP(r, q)
		b := r.Body.Bytes()
		if strings.Contains(q.URL.Path, "/blobs/") && len(b) > 1<<20 {
			b[len(b)-10_000] ^= 1
		}
		for k, v := range r.Header() {
			w.Header()[k] = v
		}
		w.WriteHeader(r.Code)
		_, _ = w.Write(b)
	}))
	to := newStore(t, t.TempDir())
	f, log := newFetcher(t, to)
	if err := f.Fetch(t.Context(), digest, []Source{breaks.peer("breaks"), wrong.peer("wrong")}); err != nil {
		t.Fatalf("%v\n%s", err, log)
	}
	complete(t, to, digest)
	if !strings.Contains(log.String(), "a part of an image is refused") {
		t.Errorf("no part was refused:\n%s", log)
	}
}

func TestUnknownDigest(t *testing.T) {
	t.Parallel()
	from, _ := filled(t, modelSize)
	f, _ := newFetcher(t, newStore(t, t.TempDir()))
	unknown := "sha256:" + strings.Repeat("0123456789abcdef", 4)
	err := f.Fetch(t.Context(), unknown, []Source{listen(t, newServer(from, nil)).peer("a")})
	if !errors.Is(err, image.ErrNoImage) || !strings.Contains(err.Error(), unknown) || !strings.Contains(err.Error(), "a: ") {
		t.Errorf("%v, want %v with the digest and the source", err, image.ErrNoImage)
	}
	if err := f.Fetch(t.Context(), unknown, nil); !errors.Is(err, image.ErrNoImage) {
		t.Errorf("without sources: %v", err)
	}
}

// TestOneFetchPerDigest asks for an image many times at once. One caller gives up; the fetch goes
// on.
func TestOneFetchPerDigest(t *testing.T) {
	t.Parallel()
	from, digest := filled(t, modelSize)
	came, all := make(chan struct{}, 64), make(chan struct{})
	right := newServer(from, nil)
	peer := listen(t, http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if strings.Contains(q.URL.Path, "/blobs/") {
			came <- struct{}{}
			<-all
		}
		right.ServeHTTP(w, q)
	}))
	to := newStore(t, t.TempDir())
	f := NewFetcher(FetcherConfig{Store: to, Log: slog.New(slog.DiscardHandler)})
	t.Cleanup(f.Close)
	gone, cancel := context.WithCancel(t.Context())
	first := make(chan error, 1)
	go func() { first <- f.Fetch(gone, digest, []Source{peer.peer("a")}) }()
	<-came
	cancel()
	if err := <-first; !errors.Is(err, context.Canceled) {
		t.Errorf("the first caller gets %v, want %v", err, context.Canceled)
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if err := f.Fetch(t.Context(), digest, []Source{peer.peer("a")}); err != nil {
				t.Error(err)
			}
		})
	}
	close(all)
	wg.Wait()
	complete(t, to, digest)
	if n := peer.blobs.Load(); n != 3 {
		t.Errorf("%d blobs were asked for, want 3: the configuration and two layers", n)
	}
}

func TestFullDisk(t *testing.T) {
	t.Parallel()
	from, digest := filled(t, modelSize)
	peer := listen(t, newServer(from, nil))
	dir := proctest.Disk(t, "32m")
	to := newStore(t, dir)
	free := proctest.Fill(t, dir, 2<<20)
	f, _ := newFetcher(t, to)
	err := f.Fetch(t.Context(), digest, []Source{peer.peer("a")})
	var full *disk.FullError
	if !errors.As(err, &full) || full.Want < modelSize || !strings.Contains(err.Error(), digest) {
		t.Errorf("%v, want a *disk.FullError that names the digest and %d bytes", err, modelSize)
	}
	if n := peer.blobs.Load(); n != 0 {
		t.Errorf("%d blobs were asked for, want none: they do not fit", n)
	}
	free()
	if err := f.Fetch(t.Context(), digest, []Source{peer.peer("a")}); err != nil {
		t.Fatal(err)
	}
	complete(t, to, digest)
}

// TestDiskFillsUp fills the disk while an image arrives.
func TestDiskFillsUp(t *testing.T) {
	t.Parallel()
	from, digest := filled(t, modelSize)
	dir := proctest.Disk(t, "32m")
	to := newStore(t, dir)
	right := newServer(from, nil)
	var free func()
	peer := listen(t, http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if strings.Contains(q.URL.Path, "/blobs/") && free == nil {
			free = proctest.Fill(t, dir, 2<<20)
		}
		right.ServeHTTP(w, q)
	}))
	f, _ := newFetcher(t, to)
	err := f.Fetch(t.Context(), digest, []Source{peer.peer("a")})
	if !disk.IsFull(err) || !strings.Contains(err.Error(), "free some space") {
		t.Errorf("%v, want the error of a full disk", err)
	}
	free()
	if err := f.Fetch(t.Context(), digest, []Source{peer.peer("a")}); err != nil {
		t.Fatal(err)
	}
	complete(t, to, digest)
}
