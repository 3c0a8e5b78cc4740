package contained

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/log"

	"github.com/stagecoach-serving/stagecoach/image"
	"github.com/stagecoach-serving/stagecoach/internal/flight"
)

// Defaults of [Config].
const (
	DefaultSnapshotter = "overlayfs"
	DefaultHostsDir    = "/etc/containerd/certs.d"
)

// Config says where a node's images are.
type Config struct {
	Address     string // of containerd's socket
	Namespace   string // of containerd
	Snapshotter string // that unpacks layers; empty: [DefaultSnapshotter]
	// HostsDir is the folder with a hosts.toml per registry, as containerd documents it: mirrors,
	// certificates, registries without TLS. If empty, it is [DefaultHostsDir].
	HostsDir string
	Registry image.Registry // credentials, and which registries need no TLS

	Node  string       // name of the node, for labels
	Dir   string       // folder of the views; nobody else uses it
	Built *image.Store // of `stagecoach build`; its images are imported. nil: none
	Log   *slog.Logger
}

// Store is a node's images in containerd. The methods are safe for concurrent use.
type Store struct {
	*holder

	roots *flight.Group[image.Root]
	pulls *flight.Group[string]

	mu     sync.Mutex
	views  map[string]image.Root    // images that are ready, by digest
	busy   map[string]chan struct{} // digests that are being made ready or removed
	closed bool
}

// Bounds of waiting for containerd.
const (
	openTimeout    = 10 * time.Second // when the daemon starts
	cleanupTimeout = time.Minute      // after a failure
	unpackTimeout  = 10 * time.Minute
)

// Open opens the images of a node, and mounts the views of an earlier process again. It works while
// containerd is away: then only images whose views are still mounted can start. The caller closes
// the store.
func Open(ctx context.Context, c Config) (*Store, error) {
	c.Snapshotter = cmp.Or(c.Snapshotter, DefaultSnapshotter)
	c.HostsDir = cmp.Or(c.HostsDir, DefaultHostsDir)
	dir, err := filepath.Abs(c.Dir)
	if err == nil {
		err = os.MkdirAll(dir, 0o700)
	}
	if err == nil {
		dir, err = filepath.EvalSymlinks(dir) // the kernel lists mounts without links
	}
	if err != nil {
		return nil, fmt.Errorf("images in containerd: %w", err)
	}
	c.Dir = dir
	// The client's own log repeats errors that are returned, too. SetLevel knows this level.
	_ = log.SetLevel("error")
	// The time-out is also the longest pause between attempts to connect again.
	client, err := containerd.New(c.Address, containerd.WithDefaultNamespace(c.Namespace), containerd.WithTimeout(probeTimeout))
	if err != nil {
		return nil, fmt.Errorf("images in containerd: %w", err)
	}
	sum := sha256.Sum256([]byte(dir))
	s := &Store{
		holder: &holder{&fetcher{c, client}, "stagecoach-" + hex.EncodeToString(sum[:6])},
		roots:  flight.New[image.Root](), pulls: flight.New[string](),
		views: map[string]image.Root{}, busy: map[string]chan struct{}{},
	}
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	if err := s.restore(ctx); err != nil {
		c.Log.Warn("images of an earlier run are not all restored; a start or deploy tries again", "error", s.explain(ctx, "", err))
	}
	return s, nil
}

// Close ends the background jobs and unmounts the views. Running containers keep theirs. The images
// stay in containerd.
func (s *Store) Close() error {
	s.pulls.Close()
	s.roots.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	var fault error
	for digest := range s.views {
		if err := unmount(s.fs(digest)); err != nil {
			fault = err
		}
	}
	clear(s.views)
	if err := s.client.Close(); err != nil {
		fault = err
	}
	return fault
}

// Root returns the folder from which an image can run. The name has a digest. If the image is not
// ready, Root imports it from what was built, or else pulls it.
func (s *Store) Root(ctx context.Context, name string) (image.Root, error) {
	ref, err := image.ParseRef(name)
	if err != nil {
		return image.Root{}, err
	}
	if r, ok := s.ready(ref.Digest); ok {
		return r, nil
	}
	return s.ensure(ctx, name, ref.Digest, nil)
}

// Pull asks the registry which image a name stands for, makes that image ready and returns its
// digest.
func (s *Store) Pull(ctx context.Context, name string) (digest string, err error) {
	return s.pulls.Do(ctx, name, s.cfg.Registry.Limit(image.MaxBytes)+unpackTimeout, func(ctx context.Context) (string, error) {
		ask, cancel := context.WithTimeout(ctx, s.cfg.Registry.Limit(0))
		defer cancel()
		from, err := s.ask(ask, name)
		if err != nil {
			return "", s.explain(ask, name, err)
		}
		digest := from.manifest.Digest.String()
		if _, ok := s.ready(digest); ok {
			return digest, nil
		}
		_, err = s.ensure(ctx, name, digest, from)
		return digest, err
	})
}

// Has reports whether an image is ready to run.
func (s *Store) Has(digest string) bool {
	_, ok := s.ready(digest)
	return ok
}

// ready returns an image's root if its view is mounted, and notes that it was used.
func (s *Store) ready(digest string) (image.Root, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, ok := s.views[digest]
	if !ok {
		return r, false
	}
	now := time.Now()
	if err := os.Chtimes(s.folder(digest), now, now); err != nil || !mounted(r.Dir) {
		delete(s.views, digest) // somebody has removed or unmounted it
		return image.Root{}, false
	}
	return r, true
}

// claim waits until nobody else makes ready or removes an image, and keeps others from it until
// release.
func (s *Store) claim(ctx context.Context, digest string) (release func(), err error) {
	for {
		s.mu.Lock()
		other, taken := s.busy[digest]
		if !taken {
			defer s.mu.Unlock()
			return s.take(digest), nil
		}
		s.mu.Unlock()
		select {
		case <-other:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// take marks an image as busy until release. The caller holds s.mu.
func (s *Store) take(digest string) (release func()) {
	done := make(chan struct{})
	s.busy[digest] = done
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.busy, digest)
		close(done)
	}
}

// ensure makes an image ready: its content, its snapshots, its view. from is nil if it is not known
// yet where the image is. After a failure, nothing of the image is left.
func (s *Store) ensure(ctx context.Context, name, digest string, from *source) (image.Root, error) {
	return s.roots.Do(ctx, digest, s.cfg.Registry.Limit(image.MaxBytes)+unpackTimeout, func(ctx context.Context) (image.Root, error) {
		release, err := s.claim(ctx, digest)
		if err != nil {
			return image.Root{}, err
		}
		defer release()
		if r, ok := s.ready(digest); ok {
			return r, nil
		}
		r, err := s.make(ctx, name, digest, from)
		if err != nil {
			err = s.explain(ctx, name, err)
			if left := s.drop(ctx, digest); left != nil {
				s.cfg.Log.Warn("parts of an image may be left in containerd; the next collection removes them", "image", name, "error", left)
			}
			return image.Root{}, err
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		s.views[digest] = r
		return r, nil
	})
}

func (s *Store) make(ctx context.Context, name, digest string, from *source) (image.Root, error) {
	ctx, err := s.lease(ctx, digest)
	if err != nil {
		return image.Root{}, err
	}
	if from == nil {
		if from, err = s.find(ctx, name, digest); err != nil {
			return image.Root{}, err
		}
	}
	defer from.close()
	p, err := s.fetch(ctx, from)
	if err != nil {
		return image.Root{}, err
	}
	unpack, cancel := context.WithTimeout(ctx, unpackTimeout)
	defer cancel()
	if err := s.unpack(unpack, p); err != nil {
		return image.Root{}, err
	}
	return s.show(unpack, name, digest, p)
}
