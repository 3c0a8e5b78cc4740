package copies

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/stagecoach-serving/stagecoach/internal/natstest"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/provider/secret"
	"github.com/stagecoach-serving/stagecoach/request/queue"
)

func TestMain(m *testing.M) {
	natstest.Main()
	goleak.VerifyTestMain(m)
}

// bucket adapts the errors of a bucket of NATS.
type bucket struct{ *queue.KV }

func (b bucket) Get(ctx context.Context, key string) ([]byte, uint64, error) {
	v, rev, err := b.KV.Get(ctx, key)
	if errors.Is(err, queue.ErrNotFound) {
		err = ErrNone
	}
	return v, rev, err
}

func (b bucket) Replace(ctx context.Context, key string, value []byte, rev uint64) (uint64, error) {
	rev, err := b.KV.Replace(ctx, key, value, rev)
	if errors.Is(err, queue.ErrConflict) {
		err = ErrConflict
	}
	return rev, err
}

// breaking is a list whose changes fail while it is broken.
type breaking struct {
	List
	mu     sync.Mutex
	broken bool
}

var errBroken = errors.New("broken by the test")

func (b *breaking) fail() { b.set(true) }

func (b *breaking) set(broken bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.broken = broken
}

func (b *breaking) Replace(ctx context.Context, key string, value []byte, rev uint64) (uint64, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.broken {
		return 0, errBroken
	}
	return b.List.Replace(ctx, key, value, rev)
}

// world has the control planes of a cluster.
type world struct {
	t    *testing.T
	list List
	key  string // of the cluster

	mu    sync.Mutex
	alive map[string]*plane
}

// plane is a control plane. Its folder outlives it.
type plane struct {
	*Copies
	name, dir string
	store     *secret.Store
	list      *breaking
	server    *httptest.Server
	leads     atomic.Bool

	mu      sync.Mutex
	stored  []string
	changes [][]string
}

// newWorld returns a world whose list is in a NATS cluster of n servers.
func newWorld(t *testing.T, n int) *world {
	t.Helper()
	of := natstest.Start(t, n)
	c, err := queue.OpenCluster(t.Context(), queue.ClusterConfig{URLs: of.URLs(), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	nc, err := c.Connect("secrets")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	kv, err := queue.OpenKV(t.Context(), nc, c.Disk(), "secrets")
	if err != nil {
		t.Fatal(err)
	}
	return &world{t: t, list: bucket{kv}, key: "key of the cluster", alive: map[string]*plane{}}
}

// plane starts a control plane on a folder; empty: on a new one.
func (w *world) plane(name, dir string) *plane {
	w.t.Helper()
	if dir == "" {
		dir = w.t.TempDir()
	}
	p := &plane{name: name, dir: dir, list: &breaking{List: w.list}}
	var err error
	if p.store, err = secret.Open(dir); err != nil {
		w.t.Fatal(err)
	}
	p.Copies, err = Open(w.t.Context(), Config{
		Store: p.store, File: filepath.Join(dir, "versions.json"), List: p.list, Key: []byte(w.key),
		Peers: func() (out []Peer) {
			w.mu.Lock()
			defer w.mu.Unlock()
			for _, other := range slices.Sorted(maps.Keys(w.alive)) {
				if other != name {
					out = append(out, Peer{other, w.alive[other].server.Listener.Addr().String()})
				}
			}
			return out
		},
		Dial: func(ctx context.Context, to Peer) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "tcp", to.Address)
		},
		Stored: func(namespace, name string) {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.stored = append(p.stored, namespace+"/"+name)
		},
		Leads: p.leads.Load,
		Changed: func(lacking []string) {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.changes = append(p.changes, lacking)
		},
		Log: slog.New(slog.DiscardHandler), patience: time.Minute,
	})
	if err != nil {
		w.t.Fatal(err)
	}
	p.server = httptest.NewServer(p.Handler())
	w.mu.Lock()
	w.alive[name] = p
	w.mu.Unlock()
	w.t.Cleanup(func() { w.end(p) })
	return p
}

// end ends a control plane.
func (w *world) end(p *plane) {
	w.mu.Lock()
	is := w.alive[p.name] == p
	if is {
		delete(w.alive, p.name)
	}
	w.mu.Unlock()
	if is {
		p.server.Close()
		p.Close()
		_ = p.store.Close()
	}
}

func (p *plane) value(name string) string {
	b, err := p.store.Read("ns", name)
	if err != nil {
		return ""
	}
	return string(b)
}

// versionOf returns the version of a secret in the list.
func (p *plane) versionOf(key string) uint64 {
	p.Copies.mu.Lock()
	defer p.Copies.mu.Unlock()
	return p.listed[key].Version
}

func (w *world) put(p *plane, name, value string, have, alive int) {
	w.t.Helper()
	h, a, err := p.Put(w.t.Context(), "ns", name, []byte(value))
	if err != nil || h != have || a != alive {
		w.t.Errorf("%d of %d have the secret, %v; want %d of %d", h, a, err, have, alive)
	}
}

// TestCopies creates, changes and deletes secrets while control planes come and go.
func TestCopies(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3)
	a := w.plane("a", "")
	w.put(a, "alone", "v0", 0, 0)
	b, c := w.plane("b", ""), w.plane("c", "")
	w.put(a, "s", "v1", 2, 2)
	for _, p := range []*plane{a, b, c} {
		if got := p.value("s"); got != "v1" {
			t.Errorf("%s has %q when Put returns, want v1", p.name, got)
		}
	}
	proctest.Until(t, "the new ones to have the earlier secret", func() bool {
		return b.value("alone") == "v0" && c.value("alone") == "v0" && len(b.Lacking())+len(c.Lacking()) == 0
	})
	b.mu.Lock()
	if len(b.changes) < 2 || !slices.Equal(b.changes[0], []string{"ns/alone"}) || len(b.changes[len(b.changes)-1]) > 0 || !slices.Contains(b.stored, "ns/alone") {
		t.Errorf("b was told that %q is lacking and that %q was stored, want ns/alone", b.changes, b.stored)
	}
	b.mu.Unlock()

	w.end(c)
	w.put(a, "s", "v2", 1, 1)
	if err := a.Delete(t.Context(), "ns", "alone"); err != nil {
		t.Error(err)
	}
	proctest.Until(t, "b to delete its copy", func() bool { return b.value("alone") == "" })
	w.end(a)
	w.end(b)
	c = w.plane("c", c.dir)
	if got := c.Lacking(); !slices.Equal(got, []string{"ns/s"}) {
		t.Errorf("c lacks %q, want the secret that has changed", got)
	}
	proctest.Until(t, "c to delete its copy", func() bool { return c.value("alone") == "" })
	if got := c.value("s"); got != "v1" {
		t.Errorf("c has %q, want what it had", got)
	}
	b = w.plane("b", b.dir)
	proctest.Until(t, "c to get the change", func() bool { return c.value("s") == "v2" && len(c.Lacking()) == 0 })
	if got := b.Lacking(); len(got) > 0 || b.value("s") != "v2" {
		t.Errorf("b lacks %q after its return, and has %q", got, b.value("s"))
	}
	w.put(b, "alone", "v3", 1, 1) // again, after its deletion
	if got := c.value("alone"); got != "v3" {
		t.Errorf("c has %q, want v3", got)
	}
}

// TestLeaderEndsDuringAChange ends a leader that has sent a value to some of the others, but cannot
// change the list. One of these can lead, and its value counts.
func TestLeaderEndsDuringAChange(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	a, b, c := w.plane("a", ""), w.plane("b", ""), w.plane("c", "")
	w.put(a, "s", "v1", 2, 2)
	w.end(c)
	a.list.fail()
	if _, _, err := a.Put(t.Context(), "ns", "s", []byte("v2")); !errors.Is(err, errBroken) {
		t.Errorf("a change that is not listed: %v", err)
	}
	w.end(a)
	c = w.plane("c", c.dir)
	for _, p := range []*plane{b, c} {
		if got := p.Lacking(); len(got) > 0 {
			t.Errorf("%s lacks %q: it could lead", p.name, got)
		}
	}
	if err := b.Lead(t.Context()); err != nil {
		t.Error(err)
	}
	proctest.Until(t, "the change to reach c", func() bool { return c.value("s") == "v2" })
	a = w.plane("a", a.dir)
	if got := a.Lacking(); len(got) > 0 {
		t.Errorf("a lacks %q", got)
	}

	// Two leaders have tried different changes. The one that leads wins.
	a.list.fail()
	_, _, _ = a.Put(t.Context(), "ns", "s", []byte("of a"))
	w.end(a)
	w.put(b, "s", "of b", 1, 1)
	a = w.plane("a", a.dir)
	proctest.Until(t, "all to have one value", func() bool { return a.value("s") == "of b" && b.value("s") == "of b" && c.value("s") == "of b" })
}

// TestListFailsDuringAChange makes changes while the list cannot be changed. The leader lists them
// later, also that of a new secret. A process that does not lead lists nothing.
func TestListFailsDuringAChange(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	a, b := w.plane("a", ""), w.plane("b", "")
	w.put(a, "s", "v1", 1, 1)
	w.end(b)
	a.list.fail()
	for _, name := range []string{"s", "new"} {
		if _, _, err := a.Put(t.Context(), "ns", name, []byte("v2")); !errors.Is(err, errBroken) {
			t.Errorf("a change that is not listed: %v", err)
		}
	}
	a.list.set(false)
	if said := a.again(""); said != "" || a.versionOf("ns/s") != 1 {
		t.Errorf("a process that does not lead has listed version %d: %s", a.versionOf("ns/s"), said)
	}
	a.leads.Store(true)
	b = w.plane("b", b.dir)
	proctest.Until(t, "b to get the changes", func() bool { return b.value("s") == "v2" && b.value("new") == "v2" })
	a.mu.Lock()
	defer a.mu.Unlock()
	if !slices.Contains(a.stored, "ns/s") || !slices.Contains(a.stored, "ns/new") {
		t.Errorf("a was told that %q was stored, want ns/s and ns/new", a.stored)
	}
}

// ending is a store of a process that ends before or after it has stored a value.
type ending struct {
	Store
	after bool
}

func (s ending) Put(namespace, name string, value []byte) error {
	if s.after {
		if err := s.Store.Put(namespace, name, value); err != nil {
			return err
		}
	}
	panic(errBroken)
}

// TestEndDuringAChange ends the only control plane right before and right after it stores a value.
// When it is back, it can lead.
func TestEndDuringAChange(t *testing.T) {
	t.Parallel()
	for _, after := range []bool{false, true} {
		w := newWorld(t, 1)
		a := w.plane("a", "")
		w.put(a, "s", "v1", 0, 0)
		a.cfg.Store = ending{a.store, after}
		func() {
			defer func() { _ = recover() }()
			_, _, _ = a.Put(t.Context(), "ns", "s", []byte("v2"))
		}()
		w.end(a)
		a = w.plane("a", a.dir)
		if got := a.Lacking(); len(got) > 0 {
			t.Errorf("after the storage: %v: lacks %q, and nobody else could lead", after, got)
		}
		if err := a.Lead(t.Context()); err != nil {
			t.Error(err)
		}
		b := w.plane("b", "")
		proctest.Until(t, "b to get the value", func() bool { return b.value("s") == a.value("s") && len(b.Lacking()) == 0 })
		w.put(b, "s", "v3", 1, 1)
	}
}

// TestFullDiskDuringAChange checks that the version stays the same if a value cannot be stored.
func TestFullDiskDuringAChange(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	a := w.plane("a", "")
	w.put(a, "s", "v1", 0, 0)
	a.cfg.Store = failing{a.store}
	if _, _, err := a.Put(t.Context(), "ns", "s", []byte("v2")); !errors.Is(err, errBroken) {
		t.Errorf("a change that is not stored: %v", err)
	}
	if got, err := readVersions(a.cfg.File); err != nil || got["ns/s"] != 1 {
		t.Errorf("versions %v, %v, want 1", got, err)
	}
}

type failing struct{ Store }

func (failing) Put(_, _ string, _ []byte) error { return errBroken }

// TestOldLeaderChangesNothing sends a value with a version that is older than the stored one.
func TestOldLeaderChangesNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	a, b := w.plane("a", ""), w.plane("b", "")
	w.put(a, "s", "v1", 1, 1)
	w.put(a, "s", "v2", 1, 1)
	proctest.Until(t, "b to hear of it", func() bool { return b.versionOf("ns/s") == 2 })
	have, _ := a.push(t.Context(), "ns/s", []byte("old"), 2)
	if got := b.value("s"); have != 0 || got != "v2" {
		t.Errorf("an old version was taken: %d, %q", have, got)
	}
}

// TestWrongValues lets a peer send a value that does not match the list.
func TestWrongValues(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	a := w.plane("a", "")
	w.put(a, "s", "v1", 0, 0)
	liar := &plane{name: "0", server: httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
		rw.Header().Set(headVersion, "1")
		fmt.Fprint(rw, "a lie")
	}))}
	t.Cleanup(liar.server.Close)
	w.mu.Lock()
	delete(w.alive, "a")
	w.alive["0"] = liar
	w.mu.Unlock()
	b := w.plane("b", "")
	proctest.Until(t, "b to refuse the value", func() bool {
		b.Copies.mu.Lock()
		defer b.Copies.mu.Unlock()
		return strings.Contains(b.tries["ns/s"], "other content")
	})
	if got := b.value("s"); got != "" || !slices.Equal(b.Lacking(), []string{"ns/s"}) {
		t.Errorf("b has %q, and lacks %q", got, b.Lacking())
	}
	w.mu.Lock()
	w.alive["a"] = a
	w.mu.Unlock()
	proctest.Until(t, "b to get the value from a", func() bool { return b.value("s") == "v1" })
	w.mu.Lock()
	delete(w.alive, "0")
	w.mu.Unlock()
}

// TestTheListTellsNoValues checks that nobody can find a value by its hash without the key.
func TestTheListTellsNoValues(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	a := w.plane("a", "")
	w.put(a, "s", "1234", 0, 0)
	w.put(a, "same", "1234", 0, 0)
	b, _, err := w.list.Get(t.Context(), "ns/s")
	if err != nil {
		t.Fatal(err)
	}
	plain := sha256.Sum256([]byte("1234"))
	if strings.Contains(string(b), "1234") || strings.Contains(string(b), hex.EncodeToString(plain[:])) {
		t.Errorf("the record tells the value: %s", b)
	}
	var one, other record
	o, _, _ := w.list.Get(t.Context(), "ns/same")
	if err := errors.Join(json.Unmarshal(b, &one), json.Unmarshal(o, &other)); err != nil || one.Sum == other.Sum || len(one.Sum) != 64 {
		t.Errorf("%s and %s, %v; want different hashes of equal values", b, o, err)
	}
	if keyedHash([]byte("another key"), "ns/s", []byte("1234")) == one.Sum {
		t.Error("the hash does not depend on the key")
	}
}

// TestSecretsFromBefore opens folders with secrets from before there was a list, and one that an
// operator has copied.
func TestSecretsFromBefore(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	dirs := map[string]string{}
	for _, name := range []string{"a", "copied"} {
		dirs[name] = t.TempDir()
		s, err := secret.Open(dirs[name])
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(s.Put("ns", "s", []byte("v1")), s.Close()); err != nil {
			t.Fatal(err)
		}
	}
	a := w.plane("a", dirs["a"])
	a.Copies.mu.Lock()
	r := a.listed["ns/s"]
	a.Copies.mu.Unlock()
	if r.Version != 1 || r.Sum == "" {
		t.Errorf("%+v, want that the secret is listed", r)
	}
	w.end(a)
	copied := w.plane("copied", dirs["copied"])
	if got := copied.Lacking(); len(got) > 0 {
		t.Errorf("lacks %q, and has a copy", got)
	}
	b := w.plane("b", "")
	proctest.Until(t, "b to get it", func() bool { return b.value("s") == "v1" })
}
