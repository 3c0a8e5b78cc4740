package wire

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"reflect"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// bytesOnly is a connection without descriptors, whose Reads are short.
type bytesOnly struct {
	net.Conn
	most int
}

func (c bytesOnly) Read(b []byte) (int, error) { return c.Conn.Read(b[:min(len(b), c.most)]) }

// streams returns two Sockets that are connected by bytes only.
func streams(t testing.TB, most int) (Socket, Socket) {
	t.Helper()
	a, b := pair(t)
	return OverStream(bytesOnly{a, most}), OverStream(bytesOnly{b, most})
}

// traffic is what a dispatcher and a replica may send, with a frame of a later version among it.
func traffic(t testing.TB) []Frame {
	t.Helper()
	var files []*os.File
	for _, size := range []int{0, 1, 100 << 10, 3 << 20} {
		f, err := sealed(bytes.Repeat([]byte{byte(size % 251)}, size))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Close() })
		files = append(files, f)
	}
	large := bytes.Repeat([]byte("0123456789abcdef"), 40<<10)
	return []Frame{
		{Type: FrameHello, Payload: []byte("hello")},
		{Type: FrameBatch, Batch: 1, Payload: large[:copyLimit-headerSize]},
		{Type: FrameBatch, Batch: 2, Payload: large},
		{Type: FrameBatch, Batch: 3, Payload: []byte("files"), Files: files},
		{Type: FrameCancel, Batch: 3},
		{Type: FrameResult, Batch: 4, Payload: large[:70<<10], Files: files[1:2]},
		{Type: FrameResult, Batch: 5, Files: files[:1]},
		{Type: FrameDrain},
	}
}

// exchange sends frames at one end and checks them at the other.
func exchange(t *testing.T, to, from Socket, sent []Frame) {
	t.Helper()
	tx, rx := NewConn(to), NewConn(from)
	var wg sync.WaitGroup
	wg.Go(func() {
		for i, f := range sent {
			send := tx.Gather
			if i%3 == 2 {
				send = tx.Write
			}
			if err := send(f); err != nil {
				t.Error(err)
			}
		}
		if err := tx.Flush(); err != nil {
			t.Error(err)
		}
		_ = tx.Close()
	})
	defer wg.Wait()
	for i, want := range sent {
		got, err := rx.Read()
		if err != nil {
			t.Fatalf("frame %d: %v", i, err)
		}
		if got.Type != want.Type || got.Batch != want.Batch || !bytes.Equal(got.Payload, want.Payload) || len(got.Files) != len(want.Files) {
			t.Fatalf("frame %d: got %v batch %d, %d bytes, %d files", i, got.Type, got.Batch, len(got.Payload), len(got.Files))
		}
		for k, f := range got.Files {
			if !bytes.Equal(content(t, f), content(t, want.Files[k])) {
				t.Errorf("frame %d: file %d has another content", i, k)
			}
		}
		closeAll(got.Files)
	}
	if _, err := rx.Read(); !errors.Is(err, io.EOF) {
		t.Errorf("after the last frame: %v, want EOF", err)
	}
	rx.Release()
}

func content(t *testing.T, f *os.File) []byte {
	t.Helper()
	info, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, info.Size())
	if _, err := f.ReadAt(b, 0); err != nil && !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	return b
}

// TestFramesOverStream checks that frames and the contents of their files pass a connection for
// bytes, whatever the sizes of reads.
func TestFramesOverStream(t *testing.T) {
	for _, most := range []int{1 << 20, 4099, 7} {
		a, b := streams(t, most)
		exchange(t, a, b, traffic(t))
	}
}

// TestReceivedFilesAreSealed checks that a received file cannot be changed.
func TestReceivedFilesAreSealed(t *testing.T) {
	a, b := streams(t, 1<<20)
	if _, err := a.SendFiles([]byte{1}, traffic(t)[3].Files[1:2]); err != nil {
		t.Fatal(err)
	}
	n, files, err := b.ReceiveFiles(make([]byte, 8))
	if n != 1 || len(files) != 1 || err != nil {
		t.Fatalf("%d bytes, %d files, %v", n, len(files), err)
	}
	defer closeAll(files)
	if _, err := files[0].WriteAt([]byte{2}, 0); !errors.Is(err, unix.EPERM) {
		t.Errorf("write to a received file: %v, want EPERM", err)
	}
}

// TestHostileStreams checks what a Socket over a stream refuses to receive and to send.
func TestHostileStreams(t *testing.T) {
	for name, tc := range map[string]struct {
		sent []byte
		want string
	}{
		"unknown kind":    {putHead(nil, 2, 1), "kind 2"},
		"large piece":     {putHead(nil, pieceBytes, pieceMost+1), "kind 0"},
		"empty piece":     {putHead(nil, pieceBytes, 0), "kind 0"},
		"huge file":       {putHead(nil, pieceFile, maxDetached+1), "kind 1"},
		"many files":      {bytes.Repeat(putHead(nil, pieceFile, 0), 2*MaxFiles+1), "after 128 files"},
		"end in a header": {putHead(nil, pieceBytes, 1)[:3], "unexpected EOF"},
		"end in a piece":  {putHead(nil, pieceBytes, 1), "unexpected EOF"},
		"end in a file":   {append(putHead(nil, pieceFile, 5), 1), "file of 5 bytes"},
	} {
		a, b := pair(t)
		if _, err := a.Write(tc.sent); err != nil {
			t.Fatal(err)
		}
		_ = a.Close()
		s := OverStream(b)
		n, files, err := s.ReceiveFiles(make([]byte, 100))
		closeAll(files)
		if n != 0 || err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %d bytes, %v, want an error with %q", name, n, err, tc.want)
		}
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	a, _ := streams(t, 1)
	if _, err := a.SendFiles([]byte{1}, []*os.File{r}); err == nil || !strings.Contains(err.Error(), "want a regular one") {
		t.Errorf("a pipe as a file: %v", err)
	}
}

// relayed returns a dispatcher's Socket and a replica's, with a relay between them as on a remote
// node. ended gets the results of both directions.
func relayed(t *testing.T) (dispatcher, replica Socket, ended chan error) {
	t.Helper()
	dispatcher, far := streams(t, 1<<20)
	a, b := pair(t)
	near := NewSocket(a)
	ended = make(chan error, 2)
	go func() { ended <- Relay(NewOutlet(near), far, nil); _ = near.Close() }()
	go func() { ended <- Relay(NewOutlet(far), near, nil); _ = far.Close() }()
	return dispatcher, NewSocket(b), ended
}

// TestRelay checks that frames and files pass a relay in both directions, and that the end of
// either side reaches the other.
func TestRelay(t *testing.T) {
	dispatcher, replica, ended := relayed(t)
	exchange(t, dispatcher, replica, traffic(t))
	_ = replica.Close()
	for range 2 {
		if err := <-ended; err != nil && !errors.Is(err, net.ErrClosed) && !errors.Is(err, unix.EPIPE) {
			t.Error(err)
		}
	}
	dispatcher, replica, ended = relayed(t)
	exchange(t, replica, dispatcher, traffic(t))
	_ = dispatcher.Close()
	for range 2 {
		<-ended
	}
}

// TestRelaySendsWholeFrames checks that a receiver gets nothing of a frame whose rest is missing,
// and that frames of later versions pass unchanged.
func TestRelaySendsWholeFrames(t *testing.T) {
	a, b := pair(t)
	c, d := pair(t)
	later := appendHeader(nil, Frame{Type: FrameType(200), Payload: []byte("new")})
	later[7] = Version + 1
	later = append(later, "new"...)
	part := appendHeader(nil, Frame{Type: FrameBatch, Payload: make([]byte, 1<<20)})
	part = append(part, make([]byte, 1<<20-1)...)
	go func() {
		_, _ = a.Write(append(bytes.Clone(later), part...))
		_ = a.Close()
	}()
	err := Relay(NewOutlet(NewSocket(c)), NewSocket(b), nil)
	if !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("Relay returns %v, want an unexpected EOF", err)
	}
	_ = c.Close()
	if got, err := io.ReadAll(d); err != nil || !reflect.DeepEqual(got, later) {
		t.Errorf("got %d bytes, %v, want the %d of the whole frame", len(got), err, len(later))
	}
	e, f := pair(t)
	bad := appendHeader(nil, Frame{Type: FrameDrain})
	bad[3] = 0xff
	if _, err := e.Write(bad); err != nil {
		t.Fatal(err)
	}
	if err := Relay(NewOutlet(NewSocket(c)), NewSocket(f), nil); err == nil || !strings.Contains(err.Error(), "want at most") {
		t.Errorf("a bad header: %v", err)
	}
}
