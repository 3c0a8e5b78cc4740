package wire

import (
	"errors"
	"fmt"
	"io"
	"os"
)

// relayRoom is how much of small frames is passed on at once, in bytes.
const relayRoom = 64 << 10

// frames reads whole frames from a Socket, several at a time.
type frames struct {
	from    Socket
	buf     []byte // buf[at:end] was read and not taken
	at, end int
	need    int        // size of the frame at buf[at:], if only a part of it was read; 0: unknown
	files   []*os.File // received and not taken
}

// span is a whole frame in the buffer of a [frames]: buf[begin:end]. It is valid until the next
// read.
type span struct {
	header

	begin, end int
}

func newFrames(from Socket) *frames { return &frames{from: from, buf: make([]byte, relayRoom)} }

// read receives more bytes. All whole frames have been taken. It returns io.EOF at an end between
// two frames.
func (r *frames) read() error {
	r.makeRoom()
	n, files, err := r.from.ReceiveFiles(r.buf[r.end:])
	r.files = append(r.files, files...)
	r.end += n
	over := n == 0 && err == nil || errors.Is(err, io.EOF)
	switch {
	case over && r.end > 0:
		return fmt.Errorf("read: %w within a frame", io.ErrUnexpectedEOF)
	case over:
		return io.EOF
	case err != nil:
		return fmt.Errorf("read: %w", err)
	case len(r.files) > 2*MaxFiles:
		return fmt.Errorf("%d descriptors that no frame has claimed, want at most %d", len(r.files), 2*MaxFiles)
	}
	return nil
}

// makeRoom moves what was not taken to the begin of the buffer, and makes room for the rest of the
// next frame.
func (r *frames) makeRoom() {
	rest := r.buf[r.at:r.end]
	switch {
	case r.need > len(r.buf) || r.need == 0 && len(r.buf) > relayRoom:
		r.buf = make([]byte, max(r.need, relayRoom))
	case r.at == 0:
		return // a large frame would be moved with each of its parts
	}
	r.at, r.end, r.need = 0, copy(r.buf, rest), 0
}

// whole takes a whole frame. It returns false if there is none. The frame's files may be missing.
func (r *frames) whole() (f span, ok bool, err error) {
	r.need = 0
	if r.end-r.at < headerSize {
		return span{}, false, nil
	}
	h, err := decodeHeader((*[headerSize]byte)(r.buf[r.at:]))
	if err != nil {
		return span{}, false, err
	}
	f = span{h, r.at, r.at + headerSize + h.length}
	if f.end > r.end {
		r.need = f.end - f.begin
		return span{}, false, nil
	}
	r.at = f.end
	return f, true, nil
}

// raw returns the bytes of a frame.
func (r *frames) raw(f span) []byte { return r.buf[f.begin:f.end] }

// payload returns the payload of a frame.
func (r *frames) payload(f span) []byte { return r.buf[f.begin+headerSize : f.end] }

// take returns the next n files; the caller closes them.
func (r *frames) take(n int) []*os.File {
	files := r.files[:n:n]
	r.files = r.files[n:]
	return files
}

// release closes the files that were not taken.
func (r *frames) release() {
	closeAll(r.files)
	r.files = nil
}

// run gathers frames that follow each other, to send them in one system call.
type run struct {
	*frames

	send       func(b []byte, files []*os.File) error
	begin, end int
	files      int // of the first frame; the others have none
}

// next takes a whole frame, whose files have come. It returns false if there is none.
func (r *run) next() (f span, ok bool, err error) {
	f, ok, err = r.whole()
	if ok && f.files > len(r.frames.files)-r.files {
		return span{}, false, errors.New("a frame came without its files")
	}
	return f, ok, err
}

// add appends a frame. Frames before it are sent first if it has files, because files go with the
// first byte of what is sent, or if frames between them were left out.
func (r *run) add(f span) error {
	if f.files > 0 || f.begin != r.end {
		if err := r.flush(); err != nil {
			return err
		}
		r.begin, r.files = f.begin, f.files
	}
	r.end = f.end
	return nil
}

// flush sends the gathered frames.
func (r *run) flush() error {
	b, files := r.buf[r.begin:r.end], r.take(r.files)
	r.begin, r.files = r.end, 0
	defer closeAll(files)
	if len(b) == 0 {
		return nil
	}
	return r.send(b, files)
}

// drop leaves out a frame. Frames before it are sent first, because their files come first.
func (r *run) drop(f span) error {
	err := r.flush()
	closeAll(r.take(f.files))
	return err
}

// put writes b with files at its first byte.
func put(to Socket, b []byte, files []*os.File) error {
	if len(files) > 0 {
		n, err := to.SendFiles(b, files)
		if err != nil {
			return err
		}
		b = b[n:]
	}
	if len(b) == 0 {
		return nil
	}
	_, err := to.Write(b)
	return err
}
