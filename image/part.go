package image

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"sort"
	"strings"
)

// OpenPart opens a part of an image for reading: a manifest, a configuration or a layer. Nothing of
// the store is collected before the part is closed. The error wraps [ErrNoImage] if the store lacks
// the part.
func OpenPart(ctx context.Context, s *Store, digest string) (io.ReadSeekCloser, error) {
	if !digestForm.MatchString(digest) {
		return nil, fmt.Errorf("%w: digest %q, want a SHA-256", ErrNoImage, digest)
	}
	release, err := s.use(ctx)
	if err != nil {
		return nil, err
	}
	p, err := openPart(s, digest)
	if err != nil {
		release()
		return nil, err
	}
	return &part{p, release}, nil
}

func openPart(s *Store, digest string) (io.ReadSeekCloser, error) {
	f, err := os.Open(s.blob(digest))
	if err == nil || !errors.Is(err, fs.ErrNotExist) {
		return f, err
	}
	l, err := s.openLayer(strings.TrimPrefix(digest, "sha256:"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: no part %s in %s", ErrNoImage, digest, s.dir)
	}
	if err != nil {
		return nil, err
	}
	return newArchived(l.of)
}

// part is an open part of a store that is in use.
type part struct {
	io.ReadSeekCloser

	release func()
}

// Close implements io.Closer.
func (p *part) Close() error {
	defer p.release()
	return p.ReadSeekCloser.Close()
}

// block is the unit of archives, in bytes.
const block = 512

// archived reads the archive of a layer from any offset. It generates the bytes that [layer.write]
// writes.
type archived struct {
	of     *layer
	starts []int64 // where the header of each entry begins; the last one is where the end begins
	off    int64

	at     int    // the entry whose header is in head; -1: none
	head   []byte // of the entry
	file   *os.File
	opened int // the entry that file belongs to
}

func newArchived(l *layer) (*archived, error) {
	a := &archived{of: l, at: -1, starts: make([]int64, 1, len(l.entries)+1)}
	for i := range l.entries {
		if err := a.load(i); err != nil {
			return nil, err
		}
		end := a.starts[i] + int64(len(a.head)) + padded(content(&l.entries[i]))
		a.starts = append(a.starts, end)
	}
	return a, nil
}

// content returns the number of bytes of an entry's content.
func content(e *entry) int64 {
	if e.head.Typeflag != tar.TypeReg {
		return 0
	}
	return e.head.Size
}

func padded(n int64) int64 { return (n + block - 1) / block * block }

// load makes the header of entry i.
func (a *archived) load(i int) error {
	if a.at == i {
		return nil
	}
	var b bytes.Buffer
	head := a.of.entries[i].head
	if err := tar.NewWriter(&b).WriteHeader(&head); err != nil {
		return fmt.Errorf("%s: %w", a.of.entries[i].path, err)
	}
	a.at, a.head = i, b.Bytes()
	return nil
}

// size returns the size of the archive, in bytes.
func (a *archived) size() int64 { return a.starts[len(a.starts)-1] + 2*block }

// Read implements io.Reader.
func (a *archived) Read(p []byte) (int, error) {
	last := len(a.starts) - 1
	switch {
	case a.off >= a.size():
		return 0, io.EOF
	case len(p) == 0:
		return 0, nil
	case a.off >= a.starts[last]:
		return a.zeros(p, a.size()-a.off), nil
	}
	i := sort.Search(last, func(i int) bool { return a.starts[i+1] > a.off })
	if err := a.load(i); err != nil {
		return 0, err
	}
	in := a.off - a.starts[i]
	if in < int64(len(a.head)) {
		n := copy(p, a.head[in:])
		a.off += int64(n)
		return n, nil
	}
	in -= int64(len(a.head))
	if left := content(&a.of.entries[i]) - in; left > 0 {
		n, err := a.read(i, p[:min(int64(len(p)), left)], in)
		a.off += int64(n)
		return n, err
	}
	return a.zeros(p, a.starts[i+1]-a.off), nil
}

func (a *archived) zeros(p []byte, most int64) int {
	n := int(min(int64(len(p)), most))
	clear(p[:n])
	a.off += int64(n)
	return n
}

// read reads the content of entry i from an offset.
func (a *archived) read(i int, p []byte, off int64) (int, error) {
	if a.file == nil || a.opened != i {
		if err := a.Close(); err != nil {
			return 0, err
		}
		f, err := os.Open(a.of.entries[i].path)
		if err != nil {
			return 0, err
		}
		a.file, a.opened = f, i
	}
	n, err := a.file.ReadAt(p, off)
	if n > 0 {
		return n, nil
	}
	if errors.Is(err, io.EOF) {
		err = fmt.Errorf("%s ends at byte %d: %w", a.of.entries[i].path, off, io.ErrUnexpectedEOF)
	}
	return 0, err
}

// Seek implements io.Seeker.
func (a *archived) Seek(offset int64, from int) (int64, error) {
	switch from {
	case io.SeekCurrent:
		offset += a.off
	case io.SeekEnd:
		offset += a.size()
	}
	if offset < 0 {
		return 0, fmt.Errorf("offset %d, want 0 or more", offset)
	}
	a.off = offset
	return offset, nil
}

// Close implements io.Closer.
func (a *archived) Close() error {
	if a.file == nil {
		return nil
	}
	err := a.file.Close()
	a.file = nil
	return err
}
