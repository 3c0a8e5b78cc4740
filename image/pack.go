package image

import (
	"archive/tar"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// A file of at least bigFile bytes, such as a model, gets its own layer, which images share. maxBig
// bounds the number of these layers.
const (
	bigFile = 4 << 20
	maxBig  = 64
)

// entry is a file of a layer.
type entry struct {
	path    string // on disk
	head    tar.Header
	changed time.Time // on disk
}

// layer is an archive that is generated from the files on disk each time it is read. It is not
// compressed: parameters hardly shrink, and digests must not depend on a compressor's version.
type layer struct {
	what    string
	entries []entry
	hash    v1.Hash
	size    int64
}

// Pack makes an image of the files of a folder, on top of the shared layers. The files are sorted
// by name and owned by root, without times, with mode 0755 or 0644. They replace files of the
// shared layers with the same names. The folder must not change before the image is in a store.
func Pack(folder string, c Config, shared ...*Layer) (*Image, error) {
	small := &layer{what: "files"}
	var layers []*layer
	err := walkTree(folder, func(e entry) error {
		if e.head.Size >= bigFile && len(layers) < maxBig {
			layers = append(layers, &layer{what: e.head.Name, entries: []entry{e}})
		} else {
			small.entries = append(small.entries, e)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("pack %s: %w", folder, err)
	}
	layers = append([]*layer{small}, layers...) // the small layer has the folders, so it comes first
	for _, l := range layers {
		if err := l.measure(); err != nil {
			return nil, fmt.Errorf("pack %s: %w", folder, err)
		}
	}
	below := make([]*layer, len(shared))
	for i, l := range shared {
		below[i] = l.of
	}
	img, err := compose(c, append(below, layers...))
	if err != nil {
		return nil, fmt.Errorf("pack %s: %w", folder, err)
	}
	return img, nil
}

// walkTree calls f for each entry of a folder, sorted by name.
func walkTree(folder string, f func(entry) error) error {
	return filepath.WalkDir(folder, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == folder {
			return err
		}
		rel, err := filepath.Rel(folder, path)
		if err != nil {
			return err
		}
		e, err := describe(path, filepath.ToSlash(rel), d)
		if err != nil {
			return err
		}
		return f(e)
	})
}

func describe(path, name string, d fs.DirEntry) (entry, error) {
	info, err := d.Info()
	if err != nil {
		return entry{}, err
	}
	h := tar.Header{Name: name, ModTime: time.Unix(0, 0)}
	switch mode := info.Mode(); {
	case mode.IsDir():
		h.Typeflag, h.Name, h.Mode = tar.TypeDir, name+"/", 0o755
	case mode.IsRegular():
		h.Typeflag, h.Size, h.Mode = tar.TypeReg, info.Size(), 0o644
		if mode&0o111 != 0 {
			h.Mode = 0o755
		}
	case mode&fs.ModeSymlink != 0:
		h.Typeflag, h.Mode = tar.TypeSymlink, 0o777
		if h.Linkname, err = os.Readlink(path); err != nil {
			return entry{}, err
		}
	default:
		return entry{}, fmt.Errorf("%s is a %v, want files, folders and links", path, mode.Type())
	}
	return entry{path, h, info.ModTime()}, nil
}

// measure sets the digest and the size.
func (l *layer) measure() error {
	h := sha256.New()
	n := &counter{w: h}
	if err := l.write(n); err != nil {
		return err
	}
	l.hash, l.size = v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(h.Sum(nil))}, n.n
	return nil
}

type counter struct {
	w io.Writer
	n int64
}

func (c *counter) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	c.n += int64(n)
	return n, err
}

func (l *layer) write(w io.Writer) error {
	t := tar.NewWriter(w)
	for _, e := range l.entries {
		if err := e.write(t); err != nil {
			return err
		}
	}
	return t.Close()
}

func (e entry) write(t *tar.Writer) error {
	if err := t.WriteHeader(&e.head); err != nil {
		return fmt.Errorf("%s: %w", e.path, err)
	}
	if e.head.Typeflag != tar.TypeReg {
		return nil
	}
	f, err := os.Open(e.path)
	if err != nil {
		return err
	}
	defer f.Close()
	n, err := io.CopyN(t, f, e.head.Size)
	if err == nil {
		if more, _ := f.Read(make([]byte, 1)); more > 0 {
			err = fmt.Errorf("it has grown beyond %d bytes", e.head.Size)
		}
	}
	if err != nil {
		return fmt.Errorf("%s: after %d of %d bytes: %w", e.path, n, e.head.Size, err)
	}
	return nil
}

// Compressed implements v1.Layer.
func (l *layer) Compressed() (io.ReadCloser, error) {
	r, w := io.Pipe()
	go func() { w.CloseWithError(l.write(w)) }() // ends when the reader is closed
	return r, nil
}

// Uncompressed implements v1.Layer.
func (l *layer) Uncompressed() (io.ReadCloser, error) { return l.Compressed() }

// Digest implements v1.Layer.
func (l *layer) Digest() (v1.Hash, error) { return l.hash, nil }

// DiffID implements v1.Layer.
func (l *layer) DiffID() (v1.Hash, error) { return l.hash, nil }

// Size implements v1.Layer.
func (l *layer) Size() (int64, error) { return l.size, nil }

// MediaType implements v1.Layer.
func (l *layer) MediaType() (types.MediaType, error) { return types.OCIUncompressedLayer, nil }
