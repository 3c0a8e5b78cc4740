package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// streamSocket is a [Socket] over a connection that carries bytes only, such as one to another
// machine. The content of files goes inline. What is sent consists of pieces with a header of 8
// bytes: the kind in the first byte, and the length, little-endian, in the other seven.
type streamSocket struct {
	net.Conn

	wmu  sync.Mutex
	wbuf []byte

	head  [pieceHead]byte
	have  int        // bytes of head that were read
	left  int64      // bytes of the current piece that are still to be read
	files []*os.File // received before the bytes that they belong to
	bytes int64      // in files
	gone  error      // of the latest read, if it was within a piece
}

// Kinds of pieces.
const (
	pieceBytes = 0
	pieceFile  = 1 // belongs to the first byte of the next piece of bytes
)

const (
	pieceHead = 8
	// pieceMost bounds a piece of bytes, so that a header is worth it and little is copied.
	pieceMost = 64<<10 - pieceHead
)

// OverStream returns a Socket over c, which it owns from now on. The other end must be one, too.
// Received files are sealed and in memory. Files that are sent must be regular files, and their
// whole content is sent.
func OverStream(c net.Conn) Socket { return &streamSocket{Conn: c} }

func putHead(b []byte, kind byte, length int64) []byte {
	return binary.LittleEndian.AppendUint64(b, uint64(length)<<8|uint64(kind))
}

// Write implements net.Conn.
func (s *streamSocket) Write(b []byte) (int, error) {
	s.wmu.Lock()
	defer s.wmu.Unlock()
	return s.write(b)
}

// write sends pieces of bytes. The caller holds s.wmu.
func (s *streamSocket) write(b []byte) (total int, err error) {
	for len(b) > 0 {
		n := min(len(b), pieceMost)
		s.wbuf = append(putHead(s.wbuf[:0], pieceBytes, int64(n)), b[:n]...)
		if _, err := s.Conn.Write(s.wbuf); err != nil {
			return total, err
		}
		total, b = total+n, b[n:]
	}
	return total, nil
}

// SendFiles implements [Socket].
func (s *streamSocket) SendFiles(b []byte, files []*os.File) (int, error) {
	s.wmu.Lock()
	defer s.wmu.Unlock()
	for i, f := range files {
		if err := s.sendFile(f); err != nil {
			return 0, fmt.Errorf("file %d of %d: %w", i+1, len(files), err)
		}
	}
	return s.write(b)
}

// sendFile sends the content that f has now. The caller holds s.wmu.
func (s *streamSocket) sendFile(f *os.File) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() || info.Size() > maxDetached {
		return fmt.Errorf("a file %v of %d bytes, want a regular one of at most %d", info.Mode(), info.Size(), maxDetached)
	}
	// A file that shrinks meanwhile leaves the receiver within a piece: nothing can follow.
	size := info.Size()
	s.wbuf = putHead(s.wbuf[:0], pieceFile, size)
	for at := int64(0); ; {
		n := min(size-at, int64(pieceMost+pieceHead-len(s.wbuf)))
		from := len(s.wbuf)
		s.wbuf = append(s.wbuf, make([]byte, n)...)
		if _, err := f.ReadAt(s.wbuf[from:], at); err != nil {
			return errors.Join(err, s.Conn.Close())
		}
		if _, err := s.Conn.Write(s.wbuf); err != nil {
			return err
		}
		if at += n; at == size {
			return nil
		}
		s.wbuf = s.wbuf[:0]
	}
}

// Read implements net.Conn. It must not be used while files may come.
func (s *streamSocket) Read(b []byte) (int, error) {
	n, files, err := s.ReceiveFiles(b)
	closeAll(files)
	if n == 0 && err == nil {
		err = io.EOF
	}
	return n, err
}

// ReceiveFiles implements [Socket]. Files that it could not finish before an error or a deadline
// are lost.
func (s *streamSocket) ReceiveFiles(b []byte) (int, []*os.File, error) {
	if s.gone != nil {
		return 0, nil, s.gone
	}
	for s.left == 0 {
		kind, length, err := s.readHead()
		switch {
		case errors.Is(err, io.EOF) && s.have == 0:
			return 0, s.take(), nil
		case err != nil:
			return 0, s.take(), err
		case kind == pieceBytes && length > 0 && length <= pieceMost:
			s.left = length
		case kind == pieceFile && s.bytes+length <= maxDetached && len(s.files) < 2*MaxFiles:
			f, err := s.receiveFile(length)
			if err != nil {
				s.gone = fmt.Errorf("file of %d bytes: %w", length, err)
				return 0, s.take(), s.gone
			}
			s.files, s.bytes = append(s.files, f), s.bytes+length
		default:
			s.gone = fmt.Errorf("a piece of kind %d with %d bytes after %d files with %d bytes", kind, length, len(s.files), s.bytes)
			return 0, s.take(), s.gone
		}
	}
	n, err := s.Conn.Read(b[:min(int64(len(b)), s.left)])
	s.left -= int64(n)
	if n > 0 {
		return n, s.take(), nil // an error comes again
	}
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return 0, s.take(), err
}

// readHead reads a header. After an error, it can be called again to read the rest.
func (s *streamSocket) readHead() (kind byte, length int64, err error) {
	for s.have < pieceHead {
		n, err := s.Conn.Read(s.head[s.have:])
		if s.have += n; err != nil && s.have < pieceHead {
			if errors.Is(err, io.EOF) && s.have > 0 {
				err = io.ErrUnexpectedEOF
			}
			return 0, 0, err
		}
	}
	s.have = 0
	v := binary.LittleEndian.Uint64(s.head[:])
	return byte(v), int64(v >> 8), nil
}

func (s *streamSocket) take() []*os.File {
	out := s.files
	s.files, s.bytes = nil, 0
	return out
}

// receiveFile copies a file's content into a sealed file in memory.
func (s *streamSocket) receiveFile(size int64) (*os.File, error) {
	f, err := NewMemory()
	if err != nil {
		return nil, err
	}
	p, _ := pieces.Get().(*[]byte)
	defer pieces.Put(p)
	for left := size; left > 0 && err == nil; {
		var n int
		n, err = s.Conn.Read((*p)[:min(left, int64(len(*p)))])
		if left -= int64(n); n > 0 {
			_, werr := f.Write((*p)[:n])
			err = errors.Join(werr, err)
		}
		if left == 0 && errors.Is(err, io.EOF) {
			err = nil
		}
	}
	if err == nil {
		err = Seal(f)
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// pieces has buffers for copies.
var pieces = sync.Pool{New: func() any { b := make([]byte, 256<<10); return &b }}

// NewMemory returns an empty file in memory that can be sealed.
func NewMemory() (*os.File, error) {
	fd, err := unix.MemfdCreate("stagecoach-item", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("memfd: %w", err)
	}
	return os.NewFile(uintptr(fd), "item"), nil
}

// Seal makes a file in memory one that nobody can change.
func Seal(f *os.File) error {
	_, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_WRITE|unix.F_SEAL_GROW|unix.F_SEAL_SHRINK|unix.F_SEAL_SEAL)
	return err
}
