package provider

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"path"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/internal/disk"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider/logbook"
	"github.com/stagecoach-serving/stagecoach/provider/secret"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// memoryStore is a Store that calls its watchers from another goroutine, as the real one does.
type memoryStore struct {
	mu       sync.Mutex
	entries  map[string]Entry
	rev      uint64
	watchers []chan Entry
	refuse   error // error of Put and Delete
	silent   bool  // watchers are not called
}

func newMemoryStore() *memoryStore {
	return &memoryStore{entries: map[string]Entry{}}
}

func (s *memoryStore) Put(_ context.Context, key string, value []byte) (uint64, error) {
	return s.change(Entry{Key: key, Value: value})
}

func (s *memoryStore) Delete(_ context.Context, key string) error {
	_, err := s.change(Entry{Key: key, Deleted: true})
	return err
}

func (s *memoryStore) change(e Entry) (uint64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.refuse != nil {
		return 0, s.refuse
	}
	s.rev++
	e.Revision = s.rev
	s.entries[e.Key] = e
	if e.Deleted {
		delete(s.entries, e.Key)
	}
	for _, w := range s.watchers {
		if !s.silent {
			w <- e
		}
	}
	return s.rev, nil
}

func (s *memoryStore) Watch(_ context.Context, f func(Entry)) (func(), error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range slices.SortedFunc(maps.Values(s.entries), func(a, b Entry) int { return cmp.Compare(a.Revision, b.Revision) }) {
		f(e)
	}
	w, done := make(chan Entry, 1000), make(chan struct{})
	s.watchers = append(s.watchers, w)
	go func() {
		defer close(done)
		for e := range w {
			f(e)
		}
	}()
	return func() {
		s.mu.Lock()
		s.watchers = slices.DeleteFunc(s.watchers, func(c chan Entry) bool { return c == w })
		close(w)
		s.mu.Unlock()
		<-done
	}, nil
}

// fakes implements the provider's other interfaces.
type fakes struct {
	states map[string]State
	usage  map[string]Usage
	scaled map[string]int

	replicas map[string][]Replica
	pins     pins
	lacking  func(plan.Function) []plan.Lack // nil: there is room for everything
	batches  map[string]string               // as Status.Batch returns them
	unready  error                           // error of /readyz
}

// bookLogs is the logbook as the provider's Logs.
type bookLogs struct{ *logbook.Book }

func (b bookLogs) Read(q LogQuery) LogReader {
	return bookReader{b.Book.Read(logbook.Query{Function: q.Key, Replica: q.Replica, Since: q.Since, Tail: q.Tail, Follow: q.Follow})}
}

type bookReader struct{ *logbook.Reader }

func (r bookReader) Read(ctx context.Context) ([]LogLine, uint64, error) {
	lines, lost, err := r.Reader.Read(ctx)
	var out []LogLine
	for _, l := range lines {
		out = append(out, LogLine{At: l.At, Replica: l.Replica, Text: l.Text})
	}
	return out, lost, err
}

// Stage implements Images: images with /stage- in their names are stages.
func (f *fakes) Stage(image, _ string) bool { return strings.Contains(image, "/stage-") }

// Model implements Images: models whose names say so are broken.
func (f *fakes) Model(image, _ string, env map[string]string) error {
	if model := cmp.Or(env[wire.EnvModel], path.Base(image)); strings.HasPrefix(model, "broken") {
		return fmt.Errorf("model %s: tensor 7 is wrong", model)
	}
	return nil
}

func (f *fakes) Pin(_ context.Context, image string) (string, error) {
	switch {
	case strings.HasPrefix(image, "stagecoach/"):
		return "", nil
	case strings.HasPrefix(image, "registry/"):
		return "sha256:of " + image, nil
	case strings.HasPrefix(image, "full/"):
		return "", fmt.Errorf("%w: %w", ErrImages, &disk.FullError{Path: "/state/images", Free: 7, Want: 4096})
	case strings.HasPrefix(image, "slow/"):
		return "", fmt.Errorf("%w: %w", ErrImages, context.DeadlineExceeded)
	case strings.HasPrefix(image, "down/"):
		return "", fmt.Errorf("%w: nobody answers", ErrImages)
	}
	return "", errors.New("there is stagecoach/echo:1")
}

func (f *fakes) Guess(image, _ string) (Guess, error) {
	switch image {
	case "stagecoach/one:1":
		return Guess{Process: "./one", Why: "because"}, nil
	case "stagecoach/two:1":
		return Guess{}, errors.New("its folder has several programs: ./a, ./b")
	}
	return Guess{}, nil
}

// Program implements Images: replicas see nothing below /tmp.
func (f *fakes) Program(_, _, process string, _ map[string]string) error {
	if strings.HasPrefix(process, "/tmp/") {
		program, _, _ := strings.Cut(process, " ")
		return errors.New(program + ": functions have a /tmp of their own")
	}
	return nil
}

func (f *fakes) State(key pipeline.Key) State        { return f.states[key.String()] }
func (f *fakes) Replicas(key pipeline.Key) []Replica { return f.replicas[key.String()] }
func (f *fakes) Batch(key pipeline.Key) string       { return f.batches[key.String()] }
func (f *fakes) Usage(key pipeline.Key) (Usage, bool) {
	u, ok := f.usage[key.String()]
	return u, ok
}

func (f *fakes) Lacking(n plan.Function) []plan.Lack {
	if f.lacking == nil {
		return nil
	}
	return f.lacking(n)
}

func (f *fakes) Scale(_ context.Context, key pipeline.Key, replicas int) error {
	if key == (pipeline.Key{Name: "broken", Namespace: pipeline.DefaultNamespace}) {
		return errors.New("no node answers")
	}
	f.scaled[key.String()] = replicas
	return nil
}

// plainSecrets implements Secrets.
type plainSecrets struct{ *secret.Store }

func (s plainSecrets) Put(_ context.Context, namespace, name string, value []byte) (note string, err error) {
	if name == "noted" {
		note = "it is noted"
	}
	return note, s.Store.Put(namespace, name, value)
}

func (s plainSecrets) Delete(_ context.Context, namespace, name string) error {
	return s.Store.Delete(namespace, name)
}

func newLog(w io.Writer) *slog.Logger {
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// api is a provider under test.
type api struct {
	*Provider
	t     testing.TB
	store *memoryStore
	fakes *fakes
	state string // folder of the secrets
	book  *logbook.Book
	user  string
	pass  string
}

func newAPI(t testing.TB, store *memoryStore, c *Credentials) *api {
	t.Helper()
	log := newLog(t.Output())
	reg, err := OpenRegistry(t.Context(), store, log)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(reg.Close)
	f := &fakes{map[string]State{}, map[string]Usage{}, map[string]int{}, map[string][]Replica{}, pins{}, nil, nil, nil}
	state := t.TempDir()
	secrets, err := secret.Open(state)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = secrets.Close() })
	book := logbook.New(1<<20, 1<<20)
	p, err := New(Config{
		Store: store, Registry: reg, Images: f, Status: f, Scaler: f, Room: f, Pinner: f.pins, Secrets: plainSecrets{secrets}, Mounts: secrets, Logs: bookLogs{book}, Ready: func() error { return f.unready }, Credentials: c,
		Policies: Policies{Allocators: []string{"accuracy", "sizer"}, Routes: []string{"best", "even"}}, Version: "v0.1.0", Log: log,
	})
	if err != nil {
		t.Fatal(err)
	}
	return &api{Provider: p, t: t, store: store, fakes: f, state: state, book: book}
}

// do sends a request. header holds name and value pairs.
func (a *api) do(method, path, body string, header ...string) (int, string) {
	a.t.Helper()
	r := httptest.NewRequest(method, path, strings.NewReader(body))
	if a.user != "" {
		r.SetBasicAuth(a.user, a.pass)
	}
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	a.ServeHTTP(w, r)
	b, err := io.ReadAll(w.Result().Body)
	if err != nil {
		a.t.Fatal(err)
	}
	return w.Code, string(b)
}

// must sends a request and checks its status.
func (a *api) must(status int, method, path, body string) string {
	a.t.Helper()
	got, text := a.do(method, path, body)
	if got != status {
		a.t.Fatalf("%s %s: status %d, want %d: %s", method, path, got, status, text)
	}
	return text
}

const (
	functions = "/system/functions"
	get       = http.MethodGet
	post      = http.MethodPost
	put       = http.MethodPut
	del       = http.MethodDelete
)
