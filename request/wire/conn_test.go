package wire

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/tensor"
)

// pair returns both ends of a socketpair.
func pair(t testing.TB) (*net.UnixConn, *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var out [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		c, err := net.FileConn(f)
		if err != nil {
			t.Fatal(err)
		}
		_ = f.Close()
		out[i] = c.(*net.UnixConn)
		t.Cleanup(func() { _ = c.Close() })
	}
	return out[0], out[1]
}

func TestFramesKeepOrderAndFiles(t *testing.T) {
	a, b := pair(t)
	tx, rx := NewConn(a), NewConn(b)
	file, err := sealed([]byte("in a file"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	large := bytes.Repeat([]byte("x"), 300<<10)
	sent := []Frame{
		{Type: FrameBatch, Batch: 1, Payload: []byte("small")},
		{Type: FrameResult, Batch: 1, Payload: large},
		{Type: FrameBatch, Batch: 2, Payload: []byte("with files"), Files: []*os.File{file, file}},
		{Type: FrameDrain},
		{Type: FrameResult, Batch: 3, Payload: large, Files: []*os.File{file}},
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for _, f := range sent {
			if err := tx.Write(f); err != nil {
				t.Error(err)
			}
		}
		_ = tx.Close()
	})
	defer wg.Wait()
	for i, want := range sent {
		got, err := rx.Read()
		if err != nil {
			t.Fatal(err)
		}
		if got.Type != want.Type || got.Batch != want.Batch || !bytes.Equal(got.Payload, want.Payload) || len(got.Files) != len(want.Files) {
			t.Fatalf("frame %d: got %v batch %d, %d bytes, %d files", i, got.Type, got.Batch, len(got.Payload), len(got.Files))
		}
		for _, f := range got.Files {
			content := make([]byte, 9)
			if _, err := f.ReadAt(content, 0); err != nil || string(content) != "in a file" {
				t.Errorf("frame %d: file holds %q, %v", i, content, err)
			}
		}
		closeAll(got.Files)
	}
	if _, err := rx.Read(); !errors.Is(err, io.EOF) {
		t.Errorf("after the last frame: %v, want EOF", err)
	}
	rx.Release()
}

func TestHostileHeadersAreNamed(t *testing.T) {
	good := appendHeader(nil, Frame{Type: FrameDrain})
	for name, tc := range map[string]struct {
		change func(b []byte)
		want   string
	}{
		"too long":     {func(b []byte) { b[3] = 0xff }, "want at most"},
		"type":         {func(b []byte) { b[4] = 77 }, "type 77"},
		"version":      {func(b []byte) { b[7] = 0 }, "version 0"},
		"files":        {func(b []byte) { b[5], b[6] = 1, 200 }, "200 descriptors"},
		"files denied": {func(b []byte) { b[6] = 1 }, "descriptors"},
		"files absent": {func(b []byte) { b[5], b[6] = 1, 1 }, "came with 0 descriptors"},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := pair(t)
			h := bytes.Clone(good)
			tc.change(h)
			if _, err := a.Write(h); err != nil {
				t.Fatal(err)
			}
			if _, err := NewConn(b).Read(); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want an error with %q", err, tc.want)
			}
		})
	}
}

func TestLaterTypesAreSkipped(t *testing.T) {
	a, b := pair(t)
	h := appendHeader(nil, Frame{Type: FrameType(200), Payload: []byte("new")})
	h[7] = Version + 1
	h = append(h, "new"...)
	if _, err := a.Write(appendHeader(h, Frame{Type: FrameDrain})); err != nil {
		t.Fatal(err)
	}
	if f, err := NewConn(b).Read(); err != nil || f.Type != FrameDrain {
		t.Errorf("got %v, %v, want Drain", f.Type, err)
	}
}

func TestLargeItemsTravelInSealedFiles(t *testing.T) {
	big := tensor.Item{ContentType: "x", Bytes: bytes.Repeat([]byte("y"), tensor.InlineLimit+1)}
	in := tensor.Activation{{Bytes: []byte("s")}, big}
	out, files, err := Attach(in, 0, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer closeAll(files)
	if len(files) != 1 || out[1].Ref == nil || in[1].Ref != nil {
		t.Fatalf("%d files, item %+v", len(files), out[1].Ref)
	}
	if _, err := files[0].WriteAt([]byte("z"), 0); err == nil {
		t.Error("the file can be changed after it was sealed")
	}
	back, err := Detach(out, files)
	if err != nil || !reflect.DeepEqual(back[1], big) {
		t.Errorf("detached: %v", err)
	}
	full := tensor.Item{Ref: &tensor.Ref{Size: maxDetached}}
	_, files2, err := Attach(tensor.Activation{full, big}, 0, func(tensor.Ref) (*os.File, error) { return os.Open(os.DevNull) })
	defer closeAll(files2)
	if err == nil || len(files2) != 1 || !strings.Contains(err.Error(), "item 1: 10738") {
		t.Errorf("more than can be detached: %d files, %v", len(files2), err)
	}
	for _, ref := range []tensor.Ref{{Owner: "x", Blob: "0"}, {Owner: fileOwner, Blob: "1"}, {Owner: fileOwner, Blob: "0", Size: 1 << 20}, {Owner: fileOwner, Blob: "-1"}} {
		if _, err := Detach(tensor.Activation{{Ref: &ref}}, files); err == nil {
			t.Errorf("reference %+v: no error", ref)
		}
	}
}

// TestHostileFilesAreRefused sends references to files that would take much memory or block for
// ever.
func TestHostileFilesAreRefused(t *testing.T) {
	sparse, err := os.Create(t.TempDir() + "/sparse")
	if err != nil {
		t.Fatal(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	files := []*os.File{sparse, r, w}
	defer closeAll(files)
	if err := sparse.Truncate(1 << 40); err != nil {
		t.Fatal(err)
	}
	ref := func(blob string, size int64) tensor.Item {
		return tensor.Item{Ref: &tensor.Ref{Owner: fileOwner, Blob: blob, Size: size}}
	}
	for want, a := range map[string]tensor.Activation{
		"item 0: 1099511627776 bytes": {ref("0", 1<<40)},
		"item 1: 1073741824 bytes":    {ref("0", 1), ref("0", 1<<30)},
		"want a regular one":          {ref("1", 0)},
	} {
		if a[0].Ref.Size == 1 { // one zero byte is not an item, but two are an empty one
			if _, err := sparse.WriteAt(tensor.AppendItem(nil, tensor.Item{Tensors: []tensor.Tensor{}}), 0); err != nil {
				t.Fatal(err)
			}
			a[0].Ref.Size = 2
		}
		if _, err := Detach(a, files); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error with %q", err, want)
		}
	}
}

func TestReceivedFilesAreClosedOnExecAndByRelease(t *testing.T) {
	a, b := pair(t)
	rx := NewConn(b)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	// A descriptor whose frame does not announce it: nobody will claim it.
	if _, _, err := a.WriteMsgUnix(appendHeader(nil, Frame{Type: FrameDrain}), unix.UnixRights(int(w.Fd())), nil); err != nil {
		t.Fatal(err)
	}
	closeAll([]*os.File{w})
	if f, err := rx.Read(); err != nil || len(f.Files) != 0 {
		t.Fatalf("%+v, %v", f, err)
	}
	if len(rx.files) != 1 {
		t.Fatalf("%d descriptors kept, want 1", len(rx.files))
	}
	if flags, err := unix.FcntlInt(rx.files[0].Fd(), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
		t.Errorf("flags %#x, %v, want close-on-exec", flags, err)
	}
	rx.Release()
	if err := r.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("the pipe's other end is still open: %v", err)
	}
}

func TestGatheredFramesGoTogetherAndInOrder(t *testing.T) {
	a, b := pair(t)
	tx, rx := NewConn(a), NewConn(b)
	file, err := sealed([]byte("in a file"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	gather := func(n uint64, size int, files ...*os.File) {
		t.Helper()
		if err := tx.Gather(Frame{Type: FrameResult, Batch: n, Payload: bytes.Repeat([]byte{byte(n)}, size), Files: files}); err != nil {
			t.Fatal(err)
		}
	}
	silent := func(what string) {
		t.Helper()
		raw, err := b.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		var n int
		if cerr := raw.Control(func(fd uintptr) { n, err = unix.IoctlGetInt(int(fd), unix.TIOCINQ) }); n != 0 || err != nil || cerr != nil {
			t.Fatalf("after %s: %d bytes, %v, %v, want none yet", what, n, err, cerr)
		}
	}
	gather(1, 10)
	gather(2, 10)
	if err := tx.Gather(Frame{Type: FrameResult, Payload: make([]byte, MaxFrame+1)}); err == nil {
		t.Error("a frame over the limit was gathered")
	}
	silent("two small frames")
	if err := tx.Flush(); err != nil {
		t.Fatal(err)
	}
	want := uint64(0)
	read := func(files int) {
		t.Helper()
		f, err := rx.Read()
		closeAll(f.Files)
		if want++; err != nil || f.Batch != want || len(f.Files) != files || bytes.Count(f.Payload, []byte{byte(want)}) != len(f.Payload) {
			t.Fatalf("frame of batch %d, %d bytes, %d files, %v, want batch %d and %d files", f.Batch, len(f.Payload), len(f.Files), err, want, files)
		}
	}
	read(0)
	if rx.roff == rx.rend {
		t.Error("the second frame came with another system call")
	}
	read(0)
	gather(3, 10)
	gather(4, 10, file) // frames with files do not wait
	read(0)
	read(1)
	gather(5, 10)
	gather(6, copyLimit) // sends the fifth too
	read(0)
	silent("one that fits alone")
	gather(7, copyLimit+1) // sends itself
	read(0)
	read(0)
	gather(8, 10)
	if err := tx.Write(Frame{Type: FrameResult, Batch: 9, Payload: []byte{9}}); err != nil {
		t.Fatal(err)
	}
	read(0)
	read(0)
}

func TestWritersDoNotMixTheirFrames(t *testing.T) {
	a, b := pair(t)
	tx, rx := NewConn(a), NewConn(b)
	const writers, each = 8, 50
	var wg sync.WaitGroup
	for i := range writers {
		wg.Go(func() {
			for range each {
				f := Frame{Type: FrameChunk, Batch: uint64(i), Payload: bytes.Repeat([]byte{byte(i)}, 1000*i)}
				if err := []func(Frame) error{tx.Write, tx.Gather}[i%2](f); err != nil {
					t.Error(err)
				}
			}
			if err := tx.Flush(); err != nil {
				t.Error(err)
			}
		})
	}
	defer wg.Wait()
	for range writers * each {
		f, err := rx.Read()
		if err != nil {
			t.Fatal(err)
		}
		if n := 1000 * int(f.Batch); len(f.Payload) != n || bytes.Count(f.Payload, []byte{byte(f.Batch)}) != n {
			t.Fatalf("writer %d's frame has %d bytes, want %d of its own", f.Batch, len(f.Payload), n)
		}
	}
}

func TestNoFrameFollowsAnIncompleteOne(t *testing.T) {
	a, b := pair(t)
	tx := NewConn(a)
	if err := tx.SetWriteDeadline(time.Now().Add(20 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if err := tx.Write(Frame{Type: FrameResult, Payload: make([]byte, 16<<20)}); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("16 MiB that nobody reads: %v", err)
	}
	if err := tx.SetWriteDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	drained := make(chan struct{})
	go func() { defer close(drained); _, _ = io.Copy(io.Discard, b) }()
	if err := tx.Write(Frame{Type: FrameDrain}); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a frame after half a frame: %v, want the first error", err)
	}
	_ = tx.Close()
	<-drained
}

// FuzzRead feeds a Conn random bytes.
func FuzzRead(f *testing.F) {
	f.Add(append(appendHeader(nil, Frame{Type: FrameBatch, Payload: []byte("x")}), 'x'))
	f.Add(appendHeader(appendHeader(nil, Frame{Type: FrameDrain}), Frame{Type: 99}))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > 64<<10 {
			return // all of it must fit into the socket
		}
		x, y := pair(t)
		if _, err := x.Write(b); err != nil {
			t.Fatal(err)
		}
		_ = x.Close()
		rx := NewConn(y)
		for {
			f, err := rx.Read()
			if err != nil {
				break
			}
			if !f.Type.known() || len(f.Payload) > len(b) {
				t.Fatalf("frame %v of %d bytes out of %d", f.Type, len(f.Payload), len(b))
			}
			closeAll(f.Files)
		}
		rx.Release()
		_ = y.Close()
	})
}

// BenchmarkFrames sends small and large frames in one direction, and in both.
func BenchmarkFrames(b *testing.B) {
	for _, size := range []int{200, 1 << 20} {
		b.Run(fmt.Sprintf("one way/%d", size), func(b *testing.B) {
			x, y := pair(b)
			tx, rx := NewConn(x), NewConn(y)
			read := make(chan struct{})
			go func() {
				defer close(read)
				for {
					if _, err := rx.Read(); err != nil {
						return
					}
				}
			}()
			f := Frame{Type: FrameBatch, Batch: 1, Payload: make([]byte, size)}
			b.SetBytes(int64(size))
			b.ReportAllocs()
			for b.Loop() {
				if err := tx.Write(f); err != nil {
					b.Fatal(err)
				}
			}
			_ = x.Close()
			<-read
		})
	}
	b.Run("round trip/200", func(b *testing.B) {
		x, y := pair(b)
		tx, rx := NewConn(x), NewConn(y)
		f := Frame{Type: FrameBatch, Batch: 1, Payload: make([]byte, 200)}
		b.ReportAllocs()
		for b.Loop() {
			if err := tx.Write(f); err != nil {
				b.Fatal(err)
			}
			if _, err := rx.Read(); err != nil {
				b.Fatal(err)
			}
		}
	})
}
