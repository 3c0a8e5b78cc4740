package safetensors

import (
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// Mapped is a file that is mapped into memory.
type Mapped struct {
	*File
	all []byte
}

// Open maps a file, read-only, and reads its header. A process that shortens the file while it is mapped ends who looks at what was
// cut off, as with any mapping: files of somebody who may be hostile are for [Inspect], which maps nothing.
func Open(path string) (*Mapped, error) {
	f, size, err := regular(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	file, err := Read(f, size) // not from the mapping, which would end us if the file has shrunk by now
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	all, err := unix.Mmap(int(f.Fd()), 0, int(size), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("%s: mapping its %d bytes: %w", path, size, err)
	}
	m := &Mapped{File: file, all: all}
	file.r = m
	return m, nil
}

// View returns a tensor's bytes without a copy. They must not be written to, and not be read after Close.
func (m *Mapped) View(name string) ([]byte, error) {
	i, err := m.Info(name)
	if err != nil {
		return nil, err
	}
	end := i.Offset + i.Bytes
	return m.all[i.Offset:end:end], nil
}

// ReadAt reads from the file; see [io.ReaderAt].
func (m *Mapped) ReadAt(p []byte, off int64) (int, error) {
	if off < 0 || off > int64(len(m.all)) {
		return 0, fmt.Errorf("byte %d of %d: %w", off, len(m.all), io.EOF)
	}
	n := copy(p, m.all[off:])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

// Close takes the file out of memory.
func (m *Mapped) Close() error { return unix.Munmap(m.all) }

// regular opens a regular file; of anything else, opening would wait or do anything.
func regular(path string) (*os.File, int64, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, 0, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s: %v, want a regular file", path, info.Mode())
	}
	if err != nil {
		_ = f.Close()
		return nil, 0, err
	}
	return f, info.Size(), nil
}
