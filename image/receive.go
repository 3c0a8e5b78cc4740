package image

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/stagecoach-serving/stagecoach/internal/disk"
)

// ErrCorrupt means that something does not match its digest.
var ErrCorrupt = errCorrupt

// Dir returns the folder of a store.
func Dir(s *Store) string { return s.dir }

// MaxManifest bounds a manifest, in bytes. Registries allow 4 MiB.
const MaxManifest = 4 << 20

// Part is the configuration or a layer of an image.
type Part struct {
	Digest string
	Size   int64 // in bytes, as it is sent
}

// Receive stores the image with this manifest. It calls open for each part that the store lacks,
// one after the other. Each part is checked against its digest while it is read. If a part has
// other bytes, the error wraps [ErrCorrupt], and the parts before it stay in the store.
//
// Layers that `stagecoach build` has made are unpacked while they arrive, and the store keeps only
// their files, so the disk gets each byte once.
func Receive(ctx context.Context, s *Store, manifest []byte, open func(Part) (io.ReadCloser, error)) error {
	var m v1.Manifest
	if err := json.Unmarshal(manifest, &m); err != nil {
		return fmt.Errorf("%w: its manifest: %w", ErrNoImage, err)
	}
	img, err := partial.CompressedToImage(&received{store: s, of: m, raw: manifest, open: open})
	if err != nil {
		return err
	}
	release, err := s.use(ctx)
	if err != nil {
		return err
	}
	defer release()
	if err := checkRoom(s, &m); err != nil {
		return err
	}
	if m.Config.Size > maxConfig {
		return fmt.Errorf("%w: a configuration of %d bytes, want at most %d", ErrNoImage, m.Config.Size, maxConfig)
	}
	if err := runsHere(img, Platform); err != nil {
		return err
	}
	d, err := s.write(ctx, &Image{img}, true)
	if err != nil {
		return err
	}
	return s.replace(filepath.Join("received", d.Digest.Hex), nil) // for Complete
}

// Parts returns the configuration and the layers of the image with this manifest.
func Parts(manifest []byte) ([]Part, error) {
	var m v1.Manifest
	if err := json.Unmarshal(manifest, &m); err != nil {
		return nil, fmt.Errorf("%w: its manifest: %w", ErrNoImage, err)
	}
	var out []Part
	for _, d := range append([]v1.Descriptor{m.Config}, m.Layers...) {
		if d.Size < 0 || !digestForm.MatchString(d.Digest.String()) {
			return nil, fmt.Errorf("%w: a part of %d bytes with digest %q", ErrNoImage, d.Size, d.Digest)
		}
		out = append(out, Part{d.Digest.String(), d.Size})
	}
	return out, nil
}

// Missing returns the parts of an image that a store lacks, and the size of all parts in bytes.
func Missing(s *Store, manifest []byte) (parts []Part, all int64, err error) {
	var m v1.Manifest
	if err := json.Unmarshal(manifest, &m); err != nil {
		return nil, 0, fmt.Errorf("%w: its manifest: %w", ErrNoImage, err)
	}
	parts, all = missing(s, &m)
	return parts, all, nil
}

func missing(s *Store, m *v1.Manifest) (parts []Part, all int64) {
	for _, d := range append([]v1.Descriptor{m.Config}, m.Layers...) {
		all += d.Size
		if !hasPart(s, d) {
			parts = append(parts, Part{d.Digest.String(), d.Size})
		}
	}
	return parts, all
}

// hasPart reports whether a store has a blob, or the files of a layer. It does not read the files.
func hasPart(s *Store, d v1.Descriptor) bool {
	if info, err := os.Stat(s.blob(d.Digest.String())); err == nil && info.Size() == d.Size {
		return true
	}
	_, err := os.Stat(s.path("layers", d.Digest.Hex, "list"))
	return err == nil && hexForm.MatchString(d.Digest.Hex)
}

// checkRoom returns a *disk.FullError if the parts that a store lacks do not fit on its disk.
func checkRoom(s *Store, m *v1.Manifest) error {
	parts, _ := missing(s, m)
	var want int64
	for _, p := range parts {
		if p.Size < 0 || p.Size > s.limits.bytes-want {
			return fmt.Errorf("%w: layers of more than %d bytes", ErrNoImage, s.limits.bytes)
		}
		want += p.Size
	}
	if want == 0 {
		return nil
	}
	return disk.Room(s.dir, want)
}

// Has reports whether a store has all parts of an image.
func Has(s *Store, digest string) bool {
	if !digestForm.MatchString(digest) {
		return false
	}
	raw, err := os.ReadFile(s.blob(digest))
	if err != nil {
		return false
	}
	lacks, _, err := Missing(s, raw)
	return err == nil && len(lacks) == 0
}

// Added returns when a build, an archive or a registry has added an image to a store last. It is
// the zero time if the store lacks the image.
func Added(s *Store, digest string) time.Time {
	info, err := os.Stat(s.blob(digest))
	if err != nil {
		return time.Time{}
	}
	return info.ModTime()
}

// Complete returns at most n digests of images that a store has completely and that were unpacked
// or received, the latest used first.
func Complete(s *Store, n int) []string {
	used := map[string]time.Time{}
	for _, kind := range []string{"roots", "received"} {
		entries, err := os.ReadDir(s.path(kind))
		if err != nil {
			return nil
		}
		for _, e := range entries {
			info, err := e.Info()
			if err == nil && hexForm.MatchString(e.Name()) && info.ModTime().After(used[e.Name()]) {
				used[e.Name()] = info.ModTime()
			}
		}
	}
	names := slices.SortedFunc(maps.Keys(used), func(a, b string) int {
		return cmp.Or(used[b].Compare(used[a]), cmp.Compare(a, b))
	})
	var out []string
	for _, name := range names {
		if len(out) == n {
			break
		}
		if digest := "sha256:" + name; Has(s, digest) {
			out = append(out, digest)
		}
	}
	return out
}

// received is an image whose parts come from somewhere else, unless the store has them.
type received struct {
	store *Store
	of    v1.Manifest
	raw   []byte
	open  func(Part) (io.ReadCloser, error)

	config []byte // nil: not read yet
}

// MediaType implements partial.CompressedImageCore.
func (r *received) MediaType() (types.MediaType, error) {
	if r.of.MediaType == "" {
		return types.OCIManifestSchema1, nil // whose field is optional
	}
	return r.of.MediaType, nil
}

// RawManifest implements partial.CompressedImageCore.
func (r *received) RawManifest() ([]byte, error) { return r.raw, nil }

// RawConfigFile implements partial.CompressedImageCore. It checks the digest.
func (r *received) RawConfigFile() ([]byte, error) {
	if r.config != nil {
		return r.config, nil
	}
	d := r.of.Config
	if !digestForm.MatchString(d.Digest.String()) || d.Size < 0 || d.Size > maxConfig {
		return nil, fmt.Errorf("%w: a configuration of %d bytes with digest %q", ErrNoImage, d.Size, d.Digest)
	}
	if b, err := os.ReadFile(r.store.blob(d.Digest.String())); err == nil && int64(len(b)) == d.Size {
		r.config = b
		return b, nil
	}
	in, err := r.open(Part{d.Digest.String(), d.Size})
	if err != nil {
		return nil, err
	}
	defer in.Close()
	b, err := io.ReadAll(io.LimitReader(in, d.Size+1))
	if err != nil {
		return nil, err
	}
	got, size, err := v1.SHA256(bytes.NewReader(b))
	if err != nil {
		return nil, err
	}
	if got != d.Digest {
		return nil, fmt.Errorf("configuration: %w", mismatch(size, got.String(), d))
	}
	r.config = b
	return b, nil
}

// LayerByDigest implements partial.CompressedImageCore.
func (r *received) LayerByDigest(h v1.Hash) (partial.CompressedLayer, error) {
	for _, d := range append(r.of.Layers, r.of.Config) {
		if d.Digest == h {
			return &receivedLayer{storedLayer{r.store, d}, r.open}, nil
		}
	}
	return nil, fmt.Errorf("no layer %s", h)
}

// receivedLayer is a layer that comes from somewhere else.
type receivedLayer struct {
	storedLayer

	open func(Part) (io.ReadCloser, error)
}

// Compressed implements partial.CompressedLayer.
func (l *receivedLayer) Compressed() (io.ReadCloser, error) {
	return l.open(Part{l.desc.Digest.String(), l.desc.Size})
}

// mismatch is the error of a part that does not have the digest or the size that was wanted.
func mismatch(n int64, got string, want v1.Descriptor) error {
	return fmt.Errorf("%w: %d bytes with digest %s, want %d with %s", errCorrupt, n, got, want.Size, want.Digest)
}
