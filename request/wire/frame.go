package wire

import (
	"encoding/binary"
	"fmt"
	"os"
)

// Version is the version of the stage protocol that this package speaks. OldestVersion is the
// oldest one that it supports.
const (
	Version       = 2
	OldestVersion = 1
)

// MaxFrame is the largest payload of a frame in bytes. Larger data goes into a file that comes with
// the frame.
const MaxFrame = 64 << 20

// MaxFiles is the largest number of descriptors per frame.
const MaxFiles = 64

// FrameType is the type of a frame. The numbers are part of the protocol.
type FrameType uint8

// The frames of the stage protocol.
const (
	FrameHello   FrameType = 1
	FrameWelcome FrameType = 2
	FrameBatch   FrameType = 3
	FrameResult  FrameType = 4
	FrameError   FrameType = 5
	FrameChunk   FrameType = 6
	FrameCredit  FrameType = 7
	FrameCancel  FrameType = 8
	FrameDrain   FrameType = 9
	FrameThreads FrameType = 10 // since version 2; an older replica skips it
)

func (t FrameType) known() bool { return t >= FrameHello && t <= FrameThreads }

// String returns the frame's name.
func (t FrameType) String() string {
	names := [...]string{"0", "Hello", "Welcome", "Batch", "Result", "Error", "Chunk", "Credit", "Cancel", "Drain", "Threads"}
	if t.known() {
		return names[t]
	}
	return fmt.Sprintf("type %d", uint8(t))
}

// Frame is one message on a replica's socket.
type Frame struct {
	Type    FrameType
	Batch   uint64 // number of its batch; 0: none
	Payload []byte
	Files   []*os.File // closed by the receiver
	// Between a dispatcher and the daemon of a node on another machine, never to or from a replica:
	// the payload has references to items that nodes keep.
	Kept bool
	// Of a Batch for such a daemon: large outputs of its calls may stay on the node.
	Keep bool
}

const (
	headerSize = 16
	flagFiles  = 1 << 0
	flagKept   = 1 << 1
	flagKeep   = 1 << 2
)

// appendHeader appends the 16-byte header of f.
func appendHeader(b []byte, f Frame) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(len(f.Payload)))
	flags := byte(0)
	if len(f.Files) > 0 {
		flags = flagFiles
	}
	if f.Kept {
		flags |= flagKept
	}
	if f.Keep {
		flags |= flagKeep
	}
	b = append(b, byte(f.Type), flags, byte(len(f.Files)), Version)
	return binary.LittleEndian.AppendUint64(b, f.Batch)
}

// header is a decoded and checked frame header.
type header struct {
	length int
	kind   FrameType
	files  int
	batch  uint64
	skip   bool // a type of a later version
	flags  byte
}

func decodeHeader(b *[headerSize]byte) (header, error) {
	h := header{
		length: int(binary.LittleEndian.Uint32(b[:])), kind: FrameType(b[4]), files: int(b[6]),
		batch: binary.LittleEndian.Uint64(b[8:]), flags: b[5],
	}
	version := b[7]
	switch {
	case version < OldestVersion:
		return h, fmt.Errorf("frame of version %d, want %d or later: %w", version, OldestVersion, ErrVersion)
	case h.length > MaxFrame:
		return h, fmt.Errorf("frame %v of %d bytes, want at most %d", h.kind, h.length, MaxFrame)
	case h.files > MaxFiles || (b[5]&flagFiles != 0) != (h.files > 0):
		return h, fmt.Errorf("frame %v with flags %#x and %d descriptors, want at most %d and bit 0 set when there are any", h.kind, b[5], h.files, MaxFiles)
	case !h.kind.known() && version <= Version:
		return h, fmt.Errorf("frame of type %d in version %d, want %d to %d", h.kind, version, FrameHello, FrameThreads)
	}
	h.skip = !h.kind.known()
	return h, nil
}
