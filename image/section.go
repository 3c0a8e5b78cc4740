package image

import (
	"context"
	"errors"
	"io"
	"os"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// section is the position of a large blob in an archive. The blob is read from there and not
// extracted first.
type section struct {
	file         string
	offset, size int64
}

// sectioned is an image in an archive. Some of its layers are sections.
type sectioned struct {
	v1.Image

	at map[string]section // by the digest's hexadecimal digits
}

// Layers implements v1.Image.
func (s sectioned) Layers() ([]v1.Layer, error) {
	layers, err := s.Image.Layers()
	if err != nil {
		return nil, err
	}
	m, err := s.Manifest()
	if err != nil {
		return nil, err
	}
	for i, d := range m.Layers {
		at, ok := s.at[d.Digest.Hex]
		if !ok || i >= len(layers) {
			continue
		}
		if layers[i], err = partial.CompressedToLayer(&sectionLayer{at, d}); err != nil {
			return nil, err
		}
	}
	return layers, nil
}

// sectionLayer is a layer in an archive.
type sectionLayer struct {
	at   section
	desc v1.Descriptor
}

// Digest implements partial.CompressedLayer.
func (l *sectionLayer) Digest() (v1.Hash, error) { return l.desc.Digest, nil }

// Compressed implements partial.CompressedLayer.
func (l *sectionLayer) Compressed() (io.ReadCloser, error) {
	f, err := os.Open(l.at.file)
	if err != nil {
		return nil, err
	}
	return struct {
		io.Reader
		io.Closer
	}{io.NewSectionReader(f, l.at.offset, l.at.size), f}, nil
}

// Size implements partial.CompressedLayer.
func (l *sectionLayer) Size() (int64, error) { return l.desc.Size, nil }

// MediaType implements partial.CompressedLayer.
func (l *sectionLayer) MediaType() (types.MediaType, error) { return l.desc.MediaType, nil }

func extract(ctx context.Context, to string, r io.Reader) error {
	f, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, contextReader{ctx, r})
	return errors.Join(err, f.Close())
}

// contextReader is a reader that fails after its context has ended.
type contextReader struct {
	ctx context.Context
	r   io.Reader
}

func (w contextReader) Read(p []byte) (int, error) {
	if err := w.ctx.Err(); err != nil {
		return 0, err
	}
	return w.r.Read(p)
}
