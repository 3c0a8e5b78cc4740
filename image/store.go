package image

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/disk"
	"github.com/stagecoach-serving/stagecoach/internal/flight"
)

// refName is the annotation that holds an image's name in an index.
const refName = "org.opencontainers.image.ref.name"

// Store is a folder with images. Several processes may use one folder at the same time. The methods
// are safe for concurrent use.
//
//	index.json, oci-layout, blobs/    an OCI layout
//	roots/HEX/fs                      the unpacked image of the manifest sha256:HEX
//	received/HEX                      the image of the manifest sha256:HEX has come by Receive
//	layers/HEX/fs                     the files of the layer sha256:HEX, linked into all roots
//	                                  that have it; blobs/ lacks it
//	keys/                             one file per key of MakeLayer: the HEX of its layer
//	files/                            big files, linked into all roots that have them
//	tmp/                              unfinished files
type Store struct {
	dir    string
	limits limits
	roots  *flight.Group[Root]
	pulls  *flight.Group[string]
}

// OpenStore opens the store in a folder. It creates the folder if it does not exist. The caller
// closes the store.
func OpenStore(dir string) (*Store, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("image store: %w", err)
	}
	s := &Store{dir: dir, limits: defaultLimits, roots: flight.New[Root](), pulls: flight.New[string]()}
	for _, d := range []string{"", "blobs/sha256", "roots", "received", "layers", "keys", "files", "tmp"} {
		if err := os.MkdirAll(s.path(d), 0o700); err != nil {
			return nil, fmt.Errorf("image store: %w", err)
		}
	}
	if _, err := os.Stat(s.path("oci-layout")); errors.Is(err, fs.ErrNotExist) {
		if err := s.replace("oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)); err != nil {
			return nil, fmt.Errorf("image store: %w", err)
		}
	}
	return s, nil
}

// Close ends the background jobs and waits for them.
func (s *Store) Close() {
	s.pulls.Close()
	s.roots.Close()
}

func (s *Store) path(parts ...string) string {
	return filepath.Join(append([]string{s.dir}, parts...)...)
}

// lock locks a file, shared or exclusively.
func (s *Store) lock(ctx context.Context, file string, how int) (release func(), err error) {
	f, err := os.OpenFile(s.path(file), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("image store: %w", err)
	}
	// Another process sends no event when it unlocks the file.
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		err := unix.Flock(int(f.Fd()), how|unix.LOCK_NB)
		if err == nil {
			return func() { _ = f.Close() }, nil // which also releases the lock
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			_ = f.Close()
			return nil, fmt.Errorf("image store: lock %s: %w", f.Name(), err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			_ = f.Close()
			return nil, fmt.Errorf("image store: another process uses %s: %w", s.dir, ctx.Err())
		}
	}
}

// use prevents collection until release is called.
func (s *Store) use(ctx context.Context) (release func(), err error) {
	return s.lock(ctx, "lock", unix.LOCK_SH)
}

// replace writes a file completely or not at all.
func (s *Store) replace(file string, b []byte) error {
	f, err := os.CreateTemp(s.path("tmp"), "file")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // if it has not become the file
	_, err = f.Write(b)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), s.path(file))
}

func (s *Store) index() (*v1.IndexManifest, error) {
	b, err := os.ReadFile(s.path("index.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return &v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("image store: %w", err)
	}
	var m v1.IndexManifest
	if err := json.Unmarshal(b, &m); err != nil {
		return nil, fmt.Errorf("image store: %s: %w", s.path("index.json"), err)
	}
	return &m, nil
}

// change changes the index while no other process does. The caller keeps the store in use.
func (s *Store) change(ctx context.Context, f func(*v1.IndexManifest)) error {
	release, err := s.lock(ctx, "index.lock", unix.LOCK_EX)
	if err != nil {
		return err
	}
	defer release()
	m, err := s.index()
	if err != nil {
		return err
	}
	f(m)
	b, err := json.MarshalIndent(m, "", " ")
	if err == nil {
		err = s.replace("index.json", b)
	}
	return s.explain("index", err)
}

// Scratch creates a temporary folder on the disk of the store, for files that become a layer or an
// image. Nothing is collected before release, which removes the folder.
func (s *Store) Scratch(ctx context.Context) (dir string, release func() error, err error) {
	done, err := s.use(ctx)
	if err != nil {
		return "", nil, err
	}
	if dir, err = os.MkdirTemp(s.path("tmp"), "scratch-"); err != nil {
		done()
		return "", nil, fmt.Errorf("image store: %w", err)
	}
	return dir, func() error {
		defer done()
		return os.RemoveAll(dir)
	}, nil
}

// Add stores an image under a name, [registry/]repository:tag, which then names this image. If name
// is empty, the image has no name.
func (s *Store) Add(ctx context.Context, img *Image, name string) (digest string, err error) {
	var ref Ref
	if name != "" {
		if ref, err = ParseRef(name); err != nil {
			return "", err
		}
	}
	release, err := s.use(ctx)
	if err != nil {
		return "", err
	}
	defer release()
	d, err := s.write(ctx, img, false)
	if err != nil {
		return "", s.explain(name, err)
	}
	if name == "" {
		return d.Digest.String(), nil
	}
	d.Annotations = map[string]string{refName: ref.Name}
	return d.Digest.String(), s.change(ctx, func(m *v1.IndexManifest) {
		m.Manifests = slices.DeleteFunc(m.Manifests, named(ref.Name))
		m.Manifests = append(m.Manifests, *d)
	})
}

func named(name string) func(v1.Descriptor) bool {
	// An earlier version stored names unchanged.
	return func(d v1.Descriptor) bool { return Familiar(d.Annotations[refName]) == name }
}

// Resolve returns the digest of an image in the store: the digest that the name is pinned to, or
// else the one that it names now.
func (s *Store) Resolve(name string) (digest string, err error) {
	ref, err := ParseRef(name)
	if err != nil {
		return "", err
	}
	if ref.Digest != "" {
		if _, err := os.Stat(s.blob(ref.Digest)); err != nil {
			return "", fmt.Errorf("image %q: %w in %s", name, ErrNoImage, s.dir)
		}
		return ref.Digest, nil
	}
	m, err := s.index()
	if err != nil {
		return "", err
	}
	i := slices.IndexFunc(m.Manifests, named(ref.Name))
	if i < 0 {
		return "", fmt.Errorf("image %q: %w in %s", name, ErrNoImage, s.dir)
	}
	return m.Manifests[i].Digest.String(), nil
}

// Image returns the image with a digest.
func (s *Store) Image(digest string) (*Image, error) {
	h, err := v1.NewHash(digest)
	if err != nil {
		return nil, fmt.Errorf("image digest %q: %w", digest, err)
	}
	raw, err := os.ReadFile(s.blob(digest))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("image %s: %w in %s", digest, ErrNoImage, s.dir)
	}
	if err != nil {
		return nil, fmt.Errorf("image %s: %w", digest, err)
	}
	var m v1.Manifest
	if err := json.Unmarshal(raw, &m); err != nil {
		return nil, fmt.Errorf("image %s: %w", digest, err)
	}
	// Use a separate layout with only this image: the index of the store does not list images without
	// names.
	ix := &oneImage{s, v1.Descriptor{MediaType: m.MediaType, Digest: h, Size: int64(len(raw))}, raw}
	img, err := ix.image()
	if err != nil {
		return nil, fmt.Errorf("image %s: %w", digest, err)
	}
	return &Image{img}, nil
}

func (s *Store) blob(digest string) string {
	return s.path("blobs", "sha256", strings.TrimPrefix(digest, "sha256:"))
}

// Entry is an image in a store that has a name.
type Entry struct {
	Name   string
	Digest string
	Size   int64     // total size of its layers as they are stored, in bytes
	Added  time.Time // when a build, an archive or a registry last added it
}

// List returns the images that have names, sorted by name.
func (s *Store) List() ([]Entry, error) {
	m, err := s.index()
	if err != nil {
		return nil, err
	}
	var out []Entry
	for _, d := range m.Manifests {
		img, err := s.Image(d.Digest.String())
		if err != nil {
			return nil, err
		}
		manifest, err := img.of.Manifest()
		if err != nil {
			return nil, fmt.Errorf("image %s: %w", d.Digest, err)
		}
		info, err := os.Stat(s.blob(d.Digest.String()))
		if err != nil {
			return nil, fmt.Errorf("image %s: %w", d.Digest, err)
		}
		e := Entry{Name: Familiar(d.Annotations[refName]), Digest: d.Digest.String(), Added: info.ModTime()}
		for _, l := range manifest.Layers {
			e.Size += l.Size
		}
		out = append(out, e)
	}
	slices.SortFunc(out, func(a, b Entry) int { return strings.Compare(a.Name, b.Name) })
	return out, nil
}

// Remove removes a name. The next [Store.Collect] removes the image, unless it is used.
func (s *Store) Remove(ctx context.Context, name string) error {
	ref, err := ParseRef(name)
	if err != nil {
		return err
	}
	release, err := s.use(ctx)
	if err != nil {
		return err
	}
	defer release()
	if _, err := s.Resolve(ref.Name); err != nil {
		return err
	}
	return s.change(ctx, func(m *v1.IndexManifest) { m.Manifests = slices.DeleteFunc(m.Manifests, named(ref.Name)) })
}

// explain adds the remedy to an error of the disk.
func (s *Store) explain(name string, err error) error {
	switch {
	case err == nil:
		return nil
	case disk.IsFull(err):
		return fmt.Errorf("image %q: nothing of it was stored; free some space or choose another folder: %w", name, disk.Explain(s.dir, 0, err))
	}
	return fmt.Errorf("image %q: %w", name, err)
}
