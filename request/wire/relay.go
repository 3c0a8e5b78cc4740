package wire

import (
	"errors"
	"fmt"
	"io"
	"os"
)

// Relay copies frames from one Socket to another until the first one ends, and returns nil then. It
// sends whole frames only, so that the receiver never has a part of a frame when either end is
// lost. It changes nothing in them: frames of later versions pass as they are.
func Relay(to, from Socket) error {
	r := relay{from: from, to: to, buf: make([]byte, relayRoom)}
	defer func() { closeAll(r.files) }()
	for {
		n, files, err := from.ReceiveFiles(r.buf[r.end:])
		r.files = append(r.files, files...)
		r.end += n
		over := n == 0 && err == nil || errors.Is(err, io.EOF)
		switch {
		case over && r.end > 0:
			return fmt.Errorf("relay: read: %w within a frame", io.ErrUnexpectedEOF)
		case over:
			return nil
		case err != nil:
			return fmt.Errorf("relay: read: %w", err)
		}
		if err := r.pass(); err != nil {
			return fmt.Errorf("relay: %w", err)
		}
	}
}

// relayRoom is how much of small frames is passed on at once, in bytes.
const relayRoom = 64 << 10

type relay struct {
	from, to Socket
	buf      []byte // buf[:end] was read and not passed on
	end      int
	files    []*os.File // received with it
}

// pass sends the whole frames in buf, and makes room for the rest of the next one.
func (r *relay) pass() error {
	sent, at, files, need := 0, 0, 0, 0
	for r.end-at >= headerSize {
		h, err := decodeHeader((*[headerSize]byte)(r.buf[at:]))
		if err != nil {
			return err
		}
		size := headerSize + h.length
		if r.end-at < size {
			need = size
			break
		}
		if h.files > 0 { // they go with the first byte of what is sent
			if err := r.send(sent, at, files); err != nil {
				return err
			}
			sent, files = at, h.files
		}
		at += size
	}
	if err := r.send(sent, at, files); err != nil {
		return err
	}
	rest := r.buf[at:r.end]
	switch {
	case need > len(r.buf) || need == 0 && len(r.buf) > relayRoom:
		buf := make([]byte, max(need, relayRoom))
		r.end = copy(buf, rest)
		r.buf = buf
	default:
		r.end = copy(r.buf, rest)
	}
	return nil
}

// send sends buf[begin:end] with the next files.
func (r *relay) send(begin, end, files int) error {
	b := r.buf[begin:end]
	if len(b) == 0 {
		return nil
	}
	if len(r.files) < files {
		return errors.New("a frame came without its files")
	}
	var err error
	if files > 0 {
		n := 0
		n, err = r.to.SendFiles(b, r.files[:files])
		b = b[n:]
		closeAll(r.files[:files])
		r.files = r.files[files:]
	}
	if err == nil && len(b) > 0 {
		_, err = r.to.Write(b)
	}
	return err
}
