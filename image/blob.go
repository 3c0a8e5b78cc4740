package image

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// Limits of a manifest.
const (
	maxLayers = 512
	maxConfig = 8 << 20 // bytes
)

// write stores all blobs of an image, the manifest last, and returns the manifest's descriptor. If
// files is true, the store keeps only the files of all layers that `stagecoach build` has made.
func (s *Store) write(ctx context.Context, img *Image, files bool) (*v1.Descriptor, error) {
	m, err := img.of.Manifest()
	if err != nil {
		return nil, err
	}
	if len(m.Layers) > maxLayers || m.Config.Size > maxConfig {
		return nil, fmt.Errorf("%w: %d layers and a configuration of %d bytes, want at most %d and %d", ErrNoImage, len(m.Layers), m.Config.Size, maxLayers, maxConfig)
	}
	var all int64
	for _, l := range m.Layers {
		if l.Size < 0 || l.Size > s.limits.bytes-all {
			return nil, fmt.Errorf("%w: layers of more than %d bytes", ErrNoImage, s.limits.bytes)
		}
		all += l.Size
	}
	layers, err := img.of.Layers()
	if err != nil {
		return nil, err
	}
	if len(layers) != len(m.Layers) {
		return nil, fmt.Errorf("%w: %d layers, its manifest has %d", ErrNoImage, len(layers), len(m.Layers))
	}
	file, err := img.of.ConfigFile()
	if err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	shared, left := sharable(m, file, files), s.limits
	for i, l := range layers {
		if err := s.writeLayer(ctx, m.Layers[i], l.Compressed, shared[i], &left); err != nil {
			return nil, fmt.Errorf("layer %d of %d: %w", i+1, len(layers), err)
		}
	}
	memory := func(f func() ([]byte, error)) func() (io.ReadCloser, error) {
		return func() (io.ReadCloser, error) {
			b, err := f()
			return io.NopCloser(bytes.NewReader(b)), err
		}
	}
	if err := s.writeBlob(ctx, m.Config, memory(img.of.RawConfigFile)); err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	d, err := partial.Descriptor(img.of)
	if err != nil {
		return nil, err
	}
	d = &v1.Descriptor{MediaType: d.MediaType, Digest: d.Digest, Size: d.Size}
	return d, s.writeBlob(ctx, *d, memory(img.of.RawManifest))
}

// writeLayer stores the files of a shared layer, or the archive of any other layer.
func (s *Store) writeLayer(ctx context.Context, d v1.Descriptor, open func() (io.ReadCloser, error), shared bool, left *limits) error {
	if digestForm.MatchString(d.Digest.String()) && touch(s.path("layers", d.Digest.Hex)) == nil {
		if l, err := s.openLayer(d.Digest.Hex); err == nil && l.of.size == d.Size {
			return nil
		}
	}
	if info, err := os.Stat(s.blob(d.Digest.String())); shared && (err != nil || info.Size() != d.Size) {
		if err := s.takeLayer(ctx, d, open, left); !errors.Is(err, errOther) {
			return err
		}
	}
	return s.writeBlob(ctx, d, open)
}

// writeBlob stores a blob unless the store has it.
func (s *Store) writeBlob(ctx context.Context, d v1.Descriptor, open func() (io.ReadCloser, error)) error {
	if !digestForm.MatchString(d.Digest.String()) {
		return fmt.Errorf("%w: digest %q, want a SHA-256", ErrNoImage, d.Digest)
	}
	at := s.blob(d.Digest.String())
	if info, err := os.Stat(at); err == nil && info.Size() == d.Size {
		return touch(at)
	}
	r, err := open()
	if err != nil {
		return err
	}
	defer r.Close()
	defer context.AfterFunc(ctx, func() { _ = r.Close() })() // ends a read that hangs
	f, err := os.CreateTemp(s.path("tmp"), "blob")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // if it has not become the blob
	in := readAhead(limited(r, d.Size+1), d.Size)
	defer in.Close()
	n, err := io.Copy(&early{file: f}, in)
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("%s: after %d of %d bytes: %w", d.Digest, n, d.Size, err)
	}
	if got, _ := in.digest(); n != d.Size || got != d.Digest.String() {
		return mismatch(n, got, d)
	}
	return os.Rename(f.Name(), at)
}

// errCorrupt means that something does not match its digest.
var errCorrupt = errors.New("corrupt")

// oneImage is an image of a layout whose index does not list it.
type oneImage struct {
	store *Store
	desc  v1.Descriptor
	raw   []byte
}

func (o *oneImage) image() (v1.Image, error) { return partial.CompressedToImage(o) }

// MediaType implements partial.CompressedImageCore.
func (o *oneImage) MediaType() (types.MediaType, error) { return o.desc.MediaType, nil }

// RawManifest implements partial.CompressedImageCore.
func (o *oneImage) RawManifest() ([]byte, error) { return o.raw, nil }

// RawConfigFile implements partial.CompressedImageCore.
func (o *oneImage) RawConfigFile() ([]byte, error) {
	m, err := partial.Manifest(o)
	if err != nil {
		return nil, err
	}
	return layout.Path(o.store.dir).Bytes(m.Config.Digest)
}

// LayerByDigest implements partial.CompressedImageCore.
func (o *oneImage) LayerByDigest(h v1.Hash) (partial.CompressedLayer, error) {
	m, err := partial.Manifest(o)
	if err != nil {
		return nil, err
	}
	for _, d := range append(m.Layers, m.Config) {
		if d.Digest == h {
			return &storedLayer{o.store, d}, nil
		}
	}
	return nil, fmt.Errorf("no layer %s", h)
}

// storedLayer is a layer in a store.
type storedLayer struct {
	store *Store
	desc  v1.Descriptor
}

// Digest implements partial.CompressedLayer.
func (l *storedLayer) Digest() (v1.Hash, error) { return l.desc.Digest, nil }

// Compressed implements partial.CompressedLayer.
func (l *storedLayer) Compressed() (io.ReadCloser, error) {
	return l.store.openBlob(l.desc.Digest.String())
}

// Size implements partial.CompressedLayer.
func (l *storedLayer) Size() (int64, error) { return l.desc.Size, nil }

// MediaType implements partial.CompressedLayer.
func (l *storedLayer) MediaType() (types.MediaType, error) { return l.desc.MediaType, nil }
