package depot

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/stagecoach-serving/stagecoach/image"
	"github.com/stagecoach-serving/stagecoach/image/transfer"
	"github.com/stagecoach-serving/stagecoach/internal/natstest"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/request/queue"
)

func TestMain(m *testing.M) {
	natstest.Main()
	goleak.VerifyTestMain(m)
}

// memory is an object store in memory.
type memory struct {
	mu   sync.Mutex
	all  map[string][]byte
	at   map[string]time.Time
	puts []string
	left int // puts that succeed; negative: all do

	deleting func(name string) // called before each deletion; nil: nothing
}

func newMemory() *memory {
	return &memory{all: map[string][]byte{}, at: map[string]time.Time{}, left: -1}
}

var errBroken = errors.New("broken by the test")

func (m *memory) Put(_ context.Context, name string, data []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.left == 0 {
		return errBroken
	}
	m.left--
	m.puts = append(m.puts, name)
	m.all[name], m.at[name] = bytes.Clone(data), time.Now()
	return nil
}

func (m *memory) Get(_ context.Context, name string) ([]byte, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	b, ok := m.all[name]
	if !ok {
		return nil, fmt.Errorf("%q: %w", name, ErrNone)
	}
	return b, nil
}

func (m *memory) Stat(ctx context.Context, name string) (Object, error) {
	b, err := m.Get(ctx, name)
	return Object{name, int64(len(b)), m.at[name]}, err
}

func (m *memory) List(ctx context.Context) (out []Object, err error) {
	for _, name := range m.names() {
		o, err := m.Stat(ctx, name)
		if err != nil {
			return nil, err
		}
		out = append(out, o)
	}
	return out, nil
}

func (m *memory) Delete(_ context.Context, name string) error {
	if m.deleting != nil {
		m.deleting(name)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.all, name)
	return nil
}

func (m *memory) names() (out []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for name := range m.all {
		out = append(out, name)
	}
	slices.Sort(out)
	return out
}

func newStore(t testing.TB) *image.Store {
	t.Helper()
	s, err := image.OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// modelSize is that of a part with three pieces.
const modelSize = 2*piece + 12345

// filled returns a store with an image that has a model of random bytes.
func filled(t testing.TB, seed byte) (s *image.Store, digest string) {
	t.Helper()
	folder, model := t.TempDir(), make([]byte, modelSize)
	if _, err := rand.NewChaCha8([32]byte{seed}).Read(model); err != nil {
		t.Fatal(err)
	}
	for name, b := range map[string][]byte{"stage": []byte("#!/bin/true\n"), "model.bin": model} {
		if err := os.WriteFile(filepath.Join(folder, name), b, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	s = newStore(t)
	digest, err := image.PackFolder(t.Context(), s, folder, true)
	if err != nil {
		t.Fatal(err)
	}
	return s, digest
}

func fetch(t testing.TB, d *Depot, digest string) (*image.Store, error) {
	t.Helper()
	to := newStore(t)
	f := transfer.NewFetcher(transfer.FetcherConfig{Store: to, Log: slog.New(slog.DiscardHandler)})
	defer f.Close()
	return to, f.Fetch(t.Context(), digest, []transfer.Source{d.Source()})
}

// complete checks that a store has the model, and that the image can be unpacked.
func complete(t testing.TB, s *image.Store, digest string) {
	t.Helper()
	root, err := s.Root(t.Context(), digest)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(filepath.Join(root.Dir, "model.bin")); err != nil || info.Size() != modelSize {
		t.Fatalf("the model has %v, %v, want %d bytes", info, err, modelSize)
	}
}

// TestPut breaks off copies of an image. Until a copy is complete, nobody gets the image. The next
// attempt copies the rest alone, and a copy of a copied image no part at all.
func TestPut(t *testing.T) {
	t.Parallel()
	from, digest := filled(t, 1)
	m := newMemory()
	d := New(m)
	m.left = 2
	for tries := 1; ; tries++ {
		err := d.Put(t.Context(), from, digest)
		if err == nil {
			break
		}
		if !errors.Is(err, errBroken) || tries > 10 {
			t.Fatal(err)
		}
		if _, err := fetch(t, d, digest); !errors.Is(err, image.ErrNoImage) {
			t.Fatalf("a fetch of a part of an image: %v, want %v", err, image.ErrNoImage)
		}
		m.left = 2
	}
	counts := map[string]int{}
	for _, name := range m.puts {
		if counts[name]++; counts[name] > 1 {
			t.Errorf("%s was copied twice", name)
		}
	}
	if len(counts) < 6 {
		t.Errorf("%d objects, want the manifest, the configuration, the small layer, and three of the model: %v", len(counts), m.puts)
	}
	to, err := fetch(t, d, digest)
	if err != nil {
		t.Fatal(err)
	}
	complete(t, to, digest)
	m.left, m.puts = -1, nil
	if err := d.Put(t.Context(), to, digest); err != nil || len(m.puts) != 1 || !strings.HasPrefix(m.puts[0], images) {
		t.Errorf("another copy: %v, and it has stored %q, want the manifest alone", err, m.puts)
	}
}

// TestWrongBytes puts wrong bytes on either side. They become no image anywhere.
func TestWrongBytes(t *testing.T) {
	t.Parallel()
	from, digest := filled(t, 1)
	m := newMemory()
	d := New(m)
	if err := d.Put(t.Context(), from, digest); err != nil {
		t.Fatal(err)
	}
	right := m.all
	for _, name := range m.names() {
		m.all = map[string][]byte{}
		for n, b := range right {
			m.all[n] = b
		}
		b := bytes.Clone(m.all[name])
		b[len(b)/2] ^= 1
		m.all[name] = b
		if _, err := fetch(t, d, digest); err == nil || !strings.Contains(err.Error(), digest) {
			t.Errorf("%s was changed: %v, want an error with the digest", name, err)
		}
		delete(m.all, name)
		if _, err := fetch(t, d, digest); err == nil || !strings.Contains(err.Error(), digest) {
			t.Errorf("%s is missing: %v, want an error with the digest", name, err)
		}
	}

	manifest, err := read(t.Context(), from, digest)
	if err != nil {
		t.Fatal(err)
	}
	all, err := image.Parts(manifest)
	if err != nil {
		t.Fatal(err)
	}
	config := filepath.Join(image.Dir(from), "blobs", "sha256", hexOf(all[0].Digest))
	b, err := os.ReadFile(config)
	if err != nil {
		t.Fatal(err)
	}
	b[len(b)/2] ^= 1
	if err := os.WriteFile(config, b, 0o600); err != nil {
		t.Fatal(err)
	}
	d = New(newMemory())
	if err := d.Put(t.Context(), from, digest); !errors.Is(err, image.ErrCorrupt) {
		t.Errorf("a copy of wrong bytes: %v, want %v", err, image.ErrCorrupt)
	}
	if _, err := fetch(t, d, digest); !errors.Is(err, image.ErrNoImage) {
		t.Errorf("an image with wrong bytes counts as one: %v", err)
	}
}

// TestCollect keeps what functions use and what is new, and deletes the rest.
func TestCollect(t *testing.T) {
	t.Parallel()
	m := newMemory()
	d := New(m)
	digests := map[string]string{}
	for i, name := range []string{"used:1", "unused:1", "new:1"} {
		from, digest := filled(t, byte(i))
		digests[name] = digest
		if err := errors.Join(d.Put(t.Context(), from, digest), d.Name(t.Context(), name, digest, time.Now())); err != nil {
			t.Fatal(err)
		}
		if name != "new:1" {
			for o := range m.at {
				m.at[o] = time.Now().Add(-2 * time.Hour)
			}
		}
	}
	// new:1 has become new when it was deployed again, and its parts are old.
	for o := range m.at {
		if strings.HasPrefix(o, parts) {
			m.at[o] = time.Now().Add(-2 * time.Hour)
		}
	}
	m.all["later/x"], m.at["later/x"] = []byte("of a later version"), time.Time{}
	freed, err := d.Collect(t.Context(), []string{digests["used:1"], "sha256:" + strings.Repeat("0", 64)}, time.Hour)
	if err != nil || freed < modelSize || freed > modelSize+piece {
		t.Errorf("%d bytes, %v, want those of one image", freed, err)
	}
	for name, digest := range digests {
		_, err := fetch(t, d, digest)
		_, _, named := d.Resolve(t.Context(), name)
		if gone := name == "unused:1"; gone != errors.Is(err, image.ErrNoImage) || gone != errors.Is(named, image.ErrNoImage) || !gone && (err != nil || named != nil) {
			t.Errorf("%s: image %v, name %v", name, err, named)
		}
	}
	if len(m.all["later/x"]) == 0 {
		t.Error("an object of a later version was deleted")
	}
}

// TestPutDuringCollect puts images while Collect deletes an object. An image that needs the object
// waits for this deletion, as long as its context allows, and nobody else waits. What was put or
// named meanwhile stays.
func TestPutDuringCollect(t *testing.T) {
	t.Parallel()
	m := newMemory()
	d := New(m)
	from, digest := filled(t, 1)
	other, otherDigest := filled(t, 2)
	for _, err := range []error{
		d.Put(t.Context(), from, digest), d.Put(t.Context(), other, otherDigest),
		d.Name(t.Context(), "x:1", digest, time.Now()),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for o := range m.at {
		m.at[o] = time.Time{}
	}
	begun, goOn := make(chan struct{}), make(chan struct{})
	m.deleting = func(name string) {
		if name == images+hexOf(digest) {
			close(begun)
			<-goOn
		}
	}
	collected, put := make(chan error), make(chan error)
	go func() {
		_, err := d.Collect(t.Context(), nil, time.Hour)
		collected <- err
	}()
	<-begun
	short, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := d.Put(short, from, digest); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a copy of an image that Collect deletes, with no time: %v", err)
	}
	if err := errors.Join(d.Put(t.Context(), other, otherDigest), d.Name(t.Context(), "x:1", digest, time.Now())); err != nil {
		t.Error(err)
	}
	go func() { put <- d.Put(t.Context(), from, digest) }()
	close(goOn)
	if err := errors.Join(<-collected, <-put); err != nil {
		t.Error(err)
	}
	for _, digest := range []string{digest, otherDigest} {
		to, err := fetch(t, d, digest)
		if err != nil {
			t.Errorf("an image that was put during Collect: %v", err)
			continue
		}
		complete(t, to, digest)
	}
	if _, _, err := d.Resolve(t.Context(), "x:1"); err != nil {
		t.Errorf("a name that was stored during Collect: %v", err)
	}
	if len(d.uses.now) > 0 || d.uses.since != nil {
		t.Errorf("uses are left: %v, %v", d.uses.now, d.uses.since)
	}
}

// bucket adapts the errors of an object store of NATS.
type bucket struct{ *queue.Objects }

func (b bucket) Get(ctx context.Context, name string) ([]byte, error) {
	out, err := b.Objects.Get(ctx, name)
	return out, none(err)
}

func (b bucket) Stat(ctx context.Context, name string) (Object, error) {
	out, err := b.Objects.Stat(ctx, name)
	return out, none(err)
}

func none(err error) error {
	if errors.Is(err, queue.ErrNotFound) {
		return fmt.Errorf("%w: %w", ErrNone, err)
	}
	return err
}

func open(t testing.TB, of *natstest.Cluster) bucket {
	t.Helper()
	c, err := queue.OpenCluster(t.Context(), queue.ClusterConfig{URLs: of.URLs(), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	nc, err := c.Connect("images")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	o, err := queue.OpenObjects(t.Context(), nc, c.Disk(), "images")
	if err != nil {
		t.Fatal(err)
	}
	return bucket{o}
}

// dying kills a server before the third object is put.
type dying struct {
	bucket

	puts int
	kill func()
}

func (d *dying) Put(ctx context.Context, name string, data []byte) error {
	if d.puts++; d.puts == 3 {
		d.kill()
	}
	return d.bucket.Put(ctx, name, data)
}

// TestServerDies kills a server of a NATS cluster while an image is copied. Another process gets
// the image from the other two servers.
func TestServerDies(t *testing.T) {
	t.Parallel()
	of := natstest.Start(t, 3)
	during := &dying{bucket: open(t, of), kill: func() { of.Kill(0) }}
	d := New(during)
	other := New(open(t, of))
	from, digest := filled(t, 1)
	proctest.Until(t, "the image to be copied", func() bool { return logged(t, d.Put(t.Context(), from, digest)) })
	if during.puts < 3 {
		t.Errorf("no server was killed before the %d objects were put: that proves nothing", during.puts)
	}
	proctest.Until(t, "the image to be fetched", func() bool {
		to, err := fetch(t, other, digest)
		if err == nil {
			complete(t, to, digest)
		}
		return logged(t, err)
	})
	proctest.Until(t, "all to be deleted", func() bool {
		_, err := d.Collect(t.Context(), nil, 0)
		left, listed := d.objects.List(t.Context())
		return logged(t, errors.Join(err, listed)) && len(left) == 0
	})
}

// logged reports whether an attempt has succeeded.
func logged(t testing.TB, err error) bool {
	t.Helper()
	if err != nil {
		t.Log(err)
	}
	return err == nil
}

// BenchmarkPut measures copies of an image into a NATS cluster of three servers, and out of it.
func BenchmarkPut(b *testing.B) {
	of := natstest.Start(b, 3)
	d := New(open(b, of))
	var in, out time.Duration
	for i := range b.N {
		from, digest := filled(b, byte(i))
		begun := time.Now()
		if err := d.Put(b.Context(), from, digest); err != nil {
			b.Fatal(err)
		}
		in += time.Since(begun)
		begun = time.Now()
		if _, err := fetch(b, d, digest); err != nil {
			b.Fatal(err)
		}
		out += time.Since(begun)
	}
	b.ReportMetric(float64(b.N)*modelSize/1e6/in.Seconds(), "in-MB/s")
	b.ReportMetric(float64(b.N)*modelSize/1e6/out.Seconds(), "out-MB/s")
}
