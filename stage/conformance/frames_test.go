package conformance

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// raw returns the bytes of a frame, including frames that package wire would not send.
func raw(length int, kind wire.FrameType, flags, files, version byte, id uint64, payload []byte) []byte {
	b := binary.LittleEndian.AppendUint32(nil, uint32(length))
	b = append(b, byte(kind), flags, files, version)
	return append(binary.LittleEndian.AppendUint64(b, id), payload...)
}

func (r *replica) bytes(b []byte, fds ...int) {
	r.t.Helper()
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	if _, _, err := r.raw.WriteMsgUnix(b, rights, nil); err != nil {
		r.t.Fatal(err)
	}
}

func TestFramesThatAreRefused(t *testing.T) {
	for name, tc := range map[string]struct {
		frame []byte
		want  string
	}{
		"version 0":          {raw(0, wire.FrameDrain, 0, 0, 0, 0, nil), "frame of version 0, want 1 or later"},
		"too large":          {raw(wire.MaxFrame+1, wire.FrameBatch, 0, 0, 2, 1, nil), "of 67108865 bytes, want at most 67108864"},
		"unknown":            {raw(0, 11, 0, 0, 2, 0, nil), "frame of type 11 in version 2, want 1 to 10"},
		"type 0":             {raw(0, 0, 0, 0, 2, 0, nil), "frame of type 0 in version 2"},
		"files, not said":    {raw(0, wire.FrameDrain, 0, 1, 2, 0, nil), "with flags 0x0 and 1 descriptors"},
		"said, no files":     {raw(0, wire.FrameDrain, 1, 0, 2, 0, nil), "with flags 0x1 and 0 descriptors"},
		"too many files":     {raw(0, wire.FrameDrain, 1, 65, 2, 0, nil), "65 descriptors, want at most 64"},
		"files not there":    {raw(0, wire.FrameDrain, 1, 1, 2, 0, nil), "came with 0 descriptors, its header says 1"},
		"half a header":      {[]byte{1, 2, 3}, "frame header: unexpected"},
		"half a payload":     {raw(9, wire.FrameBatch, 0, 0, 2, 1, []byte("half")), "frame Batch of 9 bytes: unexpected"},
		"half a large one":   {raw(1<<20, wire.FrameBatch, 0, 0, 2, 1, make([]byte, 1<<19)), "frame Batch of 1048576 bytes: unexpected"},
		"only its beginning": {raw(1<<20, wire.FrameBatch, 0, 0, 2, 1, nil), "frame Batch of 1048576 bytes: unexpected"},
	} {
		t.Run(name, func(t *testing.T) {
			eachProcess(t, func(t *testing.T, s sdk) {
				r := s.begin(t, "each")
				r.bytes(tc.frame)
				if err := r.raw.CloseWrite(); err != nil {
					t.Fatal(err)
				}
				r.exits(1, tc.want)
			})
		})
	}
}

// TestFramesMayArriveInPieces sends frames byte by byte, several at a time, and of types that a
// later version may add.
func TestFramesMayArriveInPieces(t *testing.T) {
	each(t, func(t *testing.T, s sdk) {
		r := s.begin(t, "each", "max_inflight=3")
		b := batch(never, "piece")
		for _, c := range raw(len(b), wire.FrameBatch, 0, 0, 1, 1, b) {
			r.bytes([]byte{c})
		}
		if got := r.text(); got != "PIECE" {
			t.Errorf("byte by byte: %q", got)
		}
		null, err := os.Open(os.DevNull)
		if err != nil {
			t.Fatal(err)
		}
		defer null.Close()
		r.bytes(raw(3, 77, 1, 1, 3, 0, []byte("new")), int(null.Fd()))
		var all []byte
		for id := range uint64(3) {
			all = append(all, raw(2, 99, 0, 0, 200, id, []byte("??"))...)
			all = append(all, raw(len(b), wire.FrameBatch, 0, 0, 3, id+1, b)...)
		}
		r.bytes(all)
		for range 3 {
			if got := r.text(); got != "PIECE" {
				t.Errorf("several at a time: %q", got)
			}
		}
		// The payload is larger than any buffer, with frames before and after it.
		var items tensor.Activation
		items = append(items, tensor.Item{Bytes: []byte("sizes")})
		want := " 5 "
		for range 40 {
			items = append(items, tensor.Item{Bytes: make([]byte, 60_000)})
			want += " 60000 "
		}
		large := wire.Batch{Calls: []wire.Call{{Input: tensor.Input{{Items: items}}}}}.Append(nil)
		all = append(raw(len(large), wire.FrameBatch, 0, 0, 2, 1, large), raw(len(b), wire.FrameBatch, 0, 0, 2, 2, b)...)
		for len(all) > 0 {
			n := min(len(all), 70_001)
			if _, err := r.raw.Write(all[:n]); err != nil {
				t.Fatal(err)
			}
			all = all[n:]
		}
		got := map[string]bool{r.text(): true, r.text(): true}
		if !got[want] || !got["PIECE"] {
			t.Errorf("a large frame and a small one: %v", got)
		}
		r.drained()
	})
}

// TestFilesThatAreRefused sends descriptors that cannot be read, or whose content is not an item.
func TestFilesThatAreRefused(t *testing.T) {
	ref := func(size int64) []byte {
		it := tensor.Item{Ref: &tensor.Ref{Owner: "fd:", Blob: "0", Size: size}}
		return wire.Batch{Calls: []wire.Call{{Input: tensor.Input{{Items: tensor.Activation{it}}}}}}.Append(nil)
	}
	file := func(t *testing.T, content string) int {
		path := filepath.Join(t.TempDir(), "item")
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Close() })
		return int(f.Fd())
	}
	for name, tc := range map[string]struct {
		content string
		size    int64
		want    string
	}{
		"shorter than said": {"\x00\x00\x01x", 9, "want a regular one of 9"},
		"empty":             {"", 0, "item 0: "},
		"no item":           {"\x07junk", 5, "item of kind 7"},
		"a reference":       {"\x02\x03fd:\x010\x01", 8, "item 0: "},
		"more behind it":    {"\x00\x00\x01xy", 5, "item 0: "},
		"less than said":    {"\x00\x00\x09xy", 5, "item 0: "},
		"half a type":       {"\x00\x7fxy", 4, "item 0: "},
		"half a tensor":     {"\x01\x01\x01x", 4, "item 0: "},
	} {
		t.Run(name, func(t *testing.T) {
			eachProcess(t, func(t *testing.T, s sdk) {
				r := s.begin(t, "each")
				b := ref(tc.size)
				r.bytes(raw(len(b), wire.FrameBatch, 1, 1, 2, 1, b), file(t, tc.content))
				r.exits(1, tc.want)
			})
		})
	}
	eachProcess(t, func(t *testing.T, s sdk) {
		fds := make([]int, 2)
		if err := unix.Pipe2(fds, unix.O_CLOEXEC); err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fds[0])
		defer unix.Close(fds[1])
		r := s.begin(t, "each")
		b := ref(0)
		r.bytes(raw(len(b), wire.FrameBatch, 1, 1, 2, 1, b), fds[0])
		r.exits(1, "want a regular one of 0")

		// More descriptors than any frame may have, and no frame for them.
		r = s.begin(t, "each")
		many := make([]int, 50)
		for i := range many {
			many[i] = fds[1]
		}
		for range 3 {
			r.bytes(raw(0, wire.FrameCancel, 0, 0, 2, 1, nil)[:5], many...)
		}
		r.exits(1, "descriptors that no frame has claimed, want at most 128")

		r = s.begin(t, "each")
		r.bytes(raw(0, wire.FrameCancel, 0, 0, 2, 1, nil)[:5], append(many, many...)...)
		r.exits(1, "more than 64 descriptors at a time")
	})
}
