package image

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"
)

// server is a registry behind a handler of the test.
type server struct {
	*httptest.Server
	host  string
	front atomic.Pointer[func(http.ResponseWriter, *http.Request, http.Handler)]
	blobs atomic.Int64 // number of requests for blobs
}

func serve(t *testing.T) *server {
	t.Helper()
	s := &server{}
	h := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if q.Method == http.MethodGet && strings.Contains(q.URL.Path, "/blobs/") {
			s.blobs.Add(1)
		}
		if f := s.front.Load(); f != nil {
			(*f)(w, q, h)
			return
		}
		h.ServeHTTP(w, q)
	}))
	t.Cleanup(s.Close)
	s.host = strings.TrimPrefix(s.URL, "http://")
	return s
}

func (s *server) behind(f func(http.ResponseWriter, *http.Request, http.Handler)) { s.front.Store(&f) }

// pushed pushes an image to the registry and returns its name.
func pushed(t *testing.T, s *server, r Registry, c Config, name string) string {
	t.Helper()
	from := store(t, t.TempDir())
	name = s.host + "/" + name
	add(t, from, packed(t, folder(t), c), name)
	d, err := r.Push(t.Context(), from, name)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func noHome(t *testing.T) { t.Setenv("DOCKER_CONFIG", t.TempDir()) }

func TestPushAndPull(t *testing.T) {
	noHome(t)
	srv, r, s := serve(t), Registry{}, store(t, t.TempDir())
	name := srv.host + "/team/ocr:1"
	first := pushed(t, srv, r, stageConfig, "team/ocr:1")
	pull := func(name, want string) {
		t.Helper()
		got, err := r.Pull(t.Context(), s, name)
		if err != nil || got != want {
			t.Fatalf("%s is %s, %v, want %s", name, got, err, want)
		}
		if root, err := s.Root(t.Context(), got); err != nil || len(tree(t, root.Dir)) != 5 {
			t.Errorf("%+v, %v", root, err)
		}
	}
	pull(name, first)
	if _, err := s.Resolve(name); !errors.Is(err, ErrNoImage) {
		t.Errorf("the store resolves the tag (%v), so the registry would not be asked again", err)
	}
	n := srv.blobs.Load()
	second := pushed(t, srv, r, Config{User: "x"}, "team/ocr:1") // the tag now names another image
	pull(name, second)
	if asked := srv.blobs.Load() - n; asked != 1 {
		t.Errorf("%d blobs were fetched, want only the new configuration", asked)
	}
	pull(name+"@"+first, first)
}

func TestConcurrentPullsShareOneTransfer(t *testing.T) {
	noHome(t)
	srv, r, s := serve(t), Registry{}, store(t, t.TempDir())
	want := pushed(t, srv, r, stageConfig, "a:1")
	came, all := make(chan struct{}, 64), make(chan struct{})
	srv.behind(func(w http.ResponseWriter, q *http.Request, h http.Handler) {
		if strings.Contains(q.URL.Path, "/manifests/") {
			came <- struct{}{}
			<-all
		}
		h.ServeHTTP(w, q)
	})
	var wg sync.WaitGroup
	pull := func(ctx context.Context) (string, error) { return r.Pull(ctx, s, srv.host+"/a:1") }
	for range 8 {
		wg.Go(func() {
			if got, err := pull(t.Context()); err != nil || got != want {
				t.Errorf("%s, %v, want %s", got, err, want)
			}
		})
	}
	<-came
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := pull(gone); !errors.Is(err, context.Canceled) {
		t.Errorf("a caller that gave up: %v", err)
	}
	close(all)
	wg.Wait()
	if n := srv.blobs.Load(); n != 3 {
		t.Errorf("%d blobs were fetched, want 3", n)
	}
}

func TestPullErrorsNameCauseAndRemedy(t *testing.T) {
	noHome(t)
	srv := serve(t)
	pushed(t, srv, Registry{}, stageConfig, "a:1")
	pushed(t, srv, Registry{}, Config{Platform: "linux/arm64"}, "arm:1")
	answer := func(code int) func(http.ResponseWriter, *http.Request, http.Handler) {
		return func(w http.ResponseWriter, _ *http.Request, _ http.Handler) { w.WriteHeader(code) }
	}
	layers := func(f func(http.ResponseWriter, []byte)) func(http.ResponseWriter, *http.Request, http.Handler) {
		return func(w http.ResponseWriter, q *http.Request, h http.Handler) {
			rec := httptest.NewRecorder()
			h.ServeHTTP(rec, q)
			if strings.Contains(q.URL.Path, "/blobs/") && rec.Code == http.StatusOK {
				f(w, rec.Body.Bytes())
				return
			}
			for k, v := range rec.Header() {
				w.Header()[k] = v
			}
			w.WriteHeader(rec.Code)
			_, _ = w.Write(rec.Body.Bytes())
		}
	}
	stop := make(chan struct{})
	defer close(stop)
	for name, tc := range map[string]struct {
		front func(http.ResponseWriter, *http.Request, http.Handler)
		r     Registry
		image string // after the host; "!" stands for an image that exists
		kind  error
		want  string
	}{
		"404":          {nil, Registry{}, "nosuch:1", ErrNoImage, "404 Not Found"},
		"no tag":       {nil, Registry{}, "a:2", ErrNoImage, "push it there"},
		"401":          {answer(401), Registry{}, "a:1", ErrNoImage, "docker login " + srv.host},
		"403":          {answer(403), Registry{}, "a:1", ErrNoImage, "no credentials: there is no such file"},
		"500":          {answer(500), Registry{}, "a:1", ErrUnavailable, "500 Internal Server Error"},
		"429":          {answer(429), Registry{}, "a:1", ErrUnavailable, "429 Too Many Requests"},
		"other layers": {layers(func(w http.ResponseWriter, b []byte) { b[0]++; _, _ = w.Write(b) }), Registry{}, "a:1", ErrUnavailable, "error verifying sha256"},
		"cut off": {layers(func(w http.ResponseWriter, b []byte) {
			w.Header().Set("Content-Length", fmt.Sprint(len(b)))
			_, _ = w.Write(b[:len(b)/2])
		}), Registry{}, "a:1", ErrUnavailable, "try again"},
		"more than promised": {layers(func(w http.ResponseWriter, b []byte) { _, _ = w.Write(append(b, 'x')) }), Registry{}, "a:1", ErrUnavailable, "try again"},
		"slow": {
			func(_ http.ResponseWriter, q *http.Request, _ http.Handler) {
				select {
				case <-q.Context().Done():
				case <-stop:
				}
			}, Registry{Timeout: 50 * time.Millisecond}, "a:1", context.DeadlineExceeded, "not done in 50ms",
		},
		"slow blobs": {
			func(w http.ResponseWriter, q *http.Request, h http.Handler) {
				if strings.Contains(q.URL.Path, "/blobs/") {
					w.WriteHeader(200)
					_ = http.NewResponseController(w).Flush()
					select {
					case <-q.Context().Done():
					case <-stop:
					}
				}
				h.ServeHTTP(w, q)
			}, Registry{Timeout: 300 * time.Millisecond}, "a:1", context.DeadlineExceeded, "not done in 300ms",
		},
		"another platform":      {nil, Registry{}, "arm:1", ErrNoImage, "it is for linux/arm64, want linux/amd64"},
		"nobody listens":        {nil, Registry{}, "!127.0.0.1:1/a:1", ErrUnavailable, "connection refused"},
		"no such host":          {nil, Registry{Timeout: 5 * time.Second}, "!registry.invalid/a:1", ErrUnavailable, "registry.invalid"},
		"no registry":           {nil, Registry{}, "!a:1", ErrNoImage, "names no registry; want REGISTRY/a:1"},
		"bad name":              {nil, Registry{}, "!A:1", ErrNoImage, "in lower case"},
		"credentials not there": {nil, Registry{Auth: "/nosuch/config.json"}, "a:1", ErrUnavailable, "/nosuch/config.json"},
	} {
		t.Run(name, func(t *testing.T) {
			if tc.front == nil {
				tc.front = func(w http.ResponseWriter, q *http.Request, h http.Handler) { h.ServeHTTP(w, q) }
			}
			srv.behind(tc.front)
			image, whole := strings.CutPrefix(tc.image, "!")
			if !whole {
				image = srv.host + "/" + image
			}
			s := store(t, t.TempDir())
			_, err := tc.r.Pull(t.Context(), s, image)
			if !errors.Is(err, tc.kind) || !strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), fmt.Sprintf("image %q", image)) {
				t.Errorf("got %v,\nwant one that is %q, with %q and the image", err, tc.kind, tc.want)
			}
			if left := tree(t, s.path("tmp")); len(left) > 0 {
				t.Errorf("left over: %v", left)
			}
		})
	}
}

// TestUnreachableHostIsNotTooSlow checks the error for a host that does not answer. It must not
// suggest a longer timeout, because more time would not help.
func TestUnreachableHostIsNotTooSlow(t *testing.T) {
	_, late := (&net.Dialer{Timeout: time.Nanosecond}).DialContext(t.Context(), "tcp", "127.0.0.1:1")
	r := Registry{}
	ref, err := r.reference("registry.example/a:1")
	if err != nil {
		t.Fatal(err)
	}
	got := r.explain(t.Context(), store(t, t.TempDir()), "registry.example/a:1", ref, late)
	if !errors.Is(late, context.DeadlineExceeded) || !errors.Is(got, ErrUnavailable) || strings.Contains(got.Error(), "not done in") {
		t.Errorf("%v of %v, want nothing of the pull's time", got, late)
	}
}

// TestPullContinuesAfterAnError pulls from a registry that breaks off each layer once.
func TestPullContinuesAfterAnError(t *testing.T) {
	noHome(t)
	srv := serve(t)
	want := pushed(t, srv, Registry{}, stageConfig, "a:1")
	var broken sync.Map
	srv.behind(func(w http.ResponseWriter, q *http.Request, h http.Handler) {
		if _, twice := broken.LoadOrStore(q.URL.Path, true); !twice && strings.Contains(q.URL.Path, "/blobs/") && len(q.URL.Path) > 0 && broken2(&broken) {
			w.Header().Set("Content-Length", "1000000")
			_, _ = w.Write([]byte("part"))
			return
		}
		h.ServeHTTP(w, q)
	})
	if got, err := (Registry{}).Pull(t.Context(), store(t, t.TempDir()), srv.host+"/a:1"); err != nil || got != want {
		t.Errorf("%s, %v, want %s", got, err, want)
	}
}

// broken2 lets the first two faults of each key happen.
func broken2(m *sync.Map) bool {
	n, _ := m.LoadOrStore("", new(atomic.Int64))
	return n.(*atomic.Int64).Add(1) <= 2
}

func TestCredentials(t *testing.T) {
	srv := serve(t)
	file := filepath.Join(t.TempDir(), "config.json")
	login := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	srv.behind(func(w http.ResponseWriter, q *http.Request, h http.Handler) {
		if user, password, _ := q.BasicAuth(); user != "me" || password != "s3cret" {
			w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		h.ServeHTTP(w, q)
	})
	auth := func(text string) string {
		return fmt.Sprintf(`{"auths":{%q:{"auth":%q}}}`, srv.host, base64.StdEncoding.EncodeToString([]byte(text)))
	}
	login(auth("me:s3cret"))
	r, s := Registry{Auth: file}, store(t, t.TempDir())
	want := pushed(t, srv, r, stageConfig, "a:1")
	t.Setenv("DOCKER_CONFIG", filepath.Dir(file))
	for name, r := range map[string]Registry{"named": r, "found": {}} {
		if got, err := r.Pull(t.Context(), s, srv.host+"/a:1"); err != nil || got != want {
			t.Errorf("%s: %s, %v, want %s", name, got, err, want)
		}
	}
	for what, tc := range map[string][2]string{
		"wrong password": {auth("me:wrong"), "asked with those of " + file},
		"another host":   {`{"auths":{"other.example":{"auth":"eDp5"}}}`, "asked with no credentials: " + file + " has none for " + srv.host},
		"no JSON":        {"{", "correct the file"},
	} {
		login(tc[0])
		if _, err := r.Pull(t.Context(), s, srv.host+"/a:1"); err == nil || !strings.Contains(err.Error(), tc[1]) || strings.Contains(err.Error(), "wrong") {
			t.Errorf("%s: %v, want an error with %q and no password", what, err, tc[1])
		}
	}
}

// TestPlainHTTPNeedsPermission sends requests to hosts without TLS that are not loopback addresses.
func TestPlainHTTPNeedsPermission(t *testing.T) {
	called := ""
	inner := roundTrip(func(q *http.Request) (*http.Response, error) { called = q.URL.Host; return nil, io.EOF })
	g := guard{inner, []string{"10.0.0.7:5000", "registry.example"}}
	for url, want := range map[string]bool{
		"https://any.example/": true, "http://127.0.0.1:5000/": true, "http://localhost/": true, "http://[::1]:80/": true, "http://10.0.0.7:5000/": true,
		"http://registry.example/": true, "http://registry.example:81/": false, "http://10.0.0.8:5000/": false, "http://any.local/": false, "http://127.0.0.1.example/": false,
	} {
		called = ""
		q, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
		if err != nil {
			t.Fatal(err)
		}
		_, err = g.RoundTrip(q) // there is none
		if (called != "") != want || !want && !errors.Is(err, errPlain) {
			t.Errorf("%s: called %q, %v, want it let through: %t", url, called, err, want)
		}
	}
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(q *http.Request) (*http.Response, error) { return f(q) }

// TestManifestBounds adds an image that is larger than the limits.
func TestManifestBounds(t *testing.T) {
	s := store(t, t.TempDir())
	s.limits = limits{entries: 3, bytes: 1 << 20}
	if _, err := s.Add(t.Context(), packed(t, folder(t), stageConfig), "a:1"); !errors.Is(err, ErrNoImage) || !strings.Contains(err.Error(), "layers of more than") {
		t.Errorf("%v, want an error that it is too large", err)
	}
}
