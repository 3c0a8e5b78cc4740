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

// Open maps a file, read-only, and reads its header. If another process shortens the file later,
// reading the missing part kills this process, as with any mapping. So use [Inspect], which maps
// nothing, for files of users that may be hostile.
func Open(path string) (*Mapped, error) {
	f, size, err := regular(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	file, err := Read(f, size) // not from the mapping, because the file may have shrunk by now
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	all, err := unix.Mmap(int(f.Fd()), 0, int(size), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("%s: map its %d bytes: %w", path, size, err)
	}
	m := &Mapped{File: file, all: all}
	file.r = m
	return m, nil
}

// View returns a tensor's bytes without a copy. The caller must not write to them, nor read them
// after Close.
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

// Close unmaps the file.
func (m *Mapped) Close() error { return unix.Munmap(m.all) }

// regular opens a regular file. It refuses all other files, because opening one could block or have
// effects.
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
