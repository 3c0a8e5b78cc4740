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
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

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

var (
	someKey   = task.Key{Request: "call-1", Task: 7, Attempt: 2}
	someInput = tensor.Input{
		{From: "a", Items: tensor.Activation{{ContentType: "text/plain", Bytes: []byte("hello")}}},
		{From: "b", Items: tensor.Activation{{Tensors: []tensor.Tensor{{Name: "x", Datatype: "FP32", Shape: []int64{1, 2}, Data: make([]byte, 8)}}}, {Ref: &tensor.Ref{Owner: "o", Blob: "b", Size: 9}}}},
	}
	someHeader = []task.Header{{Name: "Accept", Value: "text/plain"}}
)

func TestEnvelopesRoundTrip(t *testing.T) {
	tk := &task.Task{Key: someKey, Function: "f.ns", Pipeline: "p.ns", Stage: "f", ReplyTo: "_INBOX.x", Deadline: time.Unix(5, 6), Traceparent: "00-1", Header: someHeader, Input: someInput}
	if got, err := DecodeTask(AppendTask(nil, tk)); err != nil || !reflect.DeepEqual(got, tk) {
		t.Errorf("task: %v\n got %+v\nwant %+v", err, got, tk)
	}
	rep := &task.Reply{Key: someKey, Code: task.Failed, Message: "no", Replica: "r", Wait: 3, Service: 4, Output: someInput[1].Items, Header: someHeader}
	if got, err := DecodeReply(AppendReply(nil, rep)); err != nil || !reflect.DeepEqual(got, rep) {
		t.Errorf("reply: %v\n got %+v\nwant %+v", err, got, rep)
	}
	if k, fn, err := DecodeCancel(AppendCancel(nil, someKey, "f.ns")); err != nil || k != someKey || fn != "f.ns" {
		t.Errorf("cancel: %v %q %v", k, fn, err)
	}
	b := AppendTask(nil, tk)
	b[1] = 99
	if _, err := DecodeTask(b); !errors.Is(err, ErrVersion) {
		t.Errorf("a task of version 99: %v, want ErrVersion", err)
	}
	if _, err := DecodeReply(AppendTask(nil, tk)); err == nil || !strings.Contains(err.Error(), "kind T, want R") {
		t.Errorf("a task taken for a reply: %v", err)
	}
}

func TestOrdersRoundTrip(t *testing.T) {
	for _, o := range []Order{
		{Kind: OrderFork, ID: 3, Threads: 2, Env: []string{"A=1", "B="}},
		{Kind: OrderKill, PID: 44, Signal: 9},
		{Kind: ZygoteReady, PID: 4, Threads: 1, Nanos: 1 << 40},
		{Kind: ChildForked, ID: 3, PID: 5, Nanos: 77},
		{Kind: ChildExited, PID: 5, Status: 9},
		{Kind: ZygoteError, ID: 0, Text: "no model"},
	} {
		o.Version = OrderVersion
		b := AppendOrder(nil, o)
		if got, err := DecodeOrder(b); err != nil || !reflect.DeepEqual(got, o) {
			t.Errorf("%c: %v\n got %+v\nwant %+v", o.Kind, err, got, o)
		}
		if _, err := DecodeOrder(b[:3]); err == nil {
			t.Errorf("%c cut to 3 bytes: no error", o.Kind)
		}
	}
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

func TestLargeItemsRideInSealedFiles(t *testing.T) {
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
	for _, ref := range []tensor.Ref{{Owner: "x", Blob: "0"}, {Owner: fileOwner, Blob: "1"}, {Owner: fileOwner, Blob: "0", Size: 1 << 20}, {Owner: fileOwner, Blob: "-1"}} {
		if _, err := Detach(tensor.Activation{{Ref: &ref}}, files); err == nil {
			t.Errorf("reference %+v: no error", ref)
		}
	}
}

func TestNegotiate(t *testing.T) {
	if v, err := Negotiate(Hello{Oldest: 1, Newest: 9}); err != nil || v != Version {
		t.Errorf("1..9: %d, %v", v, err)
	}
	if _, err := Negotiate(Hello{Oldest: 8, Newest: 9}); !errors.Is(err, ErrVersion) {
		t.Errorf("8..9: %v, want ErrVersion", err)
	}
}

func FuzzDecoders(f *testing.F) {
	f.Add(AppendTask(nil, &task.Task{Key: someKey, Input: someInput, Header: someHeader}))
	f.Add(AppendReply(nil, &task.Reply{Key: someKey, Output: someInput[1].Items}))
	f.Add(AppendOrder(nil, Order{Kind: OrderFork, Version: 1, Env: []string{"A=1"}}))
	f.Add(Hello{Oldest: 1, Newest: 1, Slots: 1, MaxBatch: 1}.Append(nil))
	f.Add(Batch{Calls: []Call{{Key: someKey, Input: someInput}}}.Append(nil))
	f.Add(Result{Index: 1, Output: someInput[0].Items}.Append(nil))
	f.Add(Error{Code: task.Failed, Message: "x"}.Append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		if tk, err := DecodeTask(b); err == nil {
			if again, err := DecodeTask(AppendTask(nil, tk)); err != nil || !reflect.DeepEqual(again, tk) {
				t.Fatalf("task does not round-trip: %v", err)
			}
		}
		if r, err := DecodeReply(b); err == nil {
			if again, err := DecodeReply(AppendReply(nil, r)); err != nil || !reflect.DeepEqual(again, r) {
				t.Fatalf("reply does not round-trip: %v", err)
			}
		}
		if o, err := DecodeOrder(b); err == nil {
			if again, err := DecodeOrder(AppendOrder(nil, o)); err != nil || !reflect.DeepEqual(again, o) {
				t.Fatalf("order does not round-trip: %+v, %v", o, err)
			}
		}
		if m, err := DecodeBatch(b); err == nil {
			if again, err := DecodeBatch(m.Append(nil)); err != nil || !reflect.DeepEqual(again, m) {
				t.Fatalf("batch does not round-trip: %v", err)
			}
		}
		_, _, _ = DecodeCancel(b)
		_, _ = DecodeHello(b)
		_, _ = DecodeWelcome(b)
		_, _ = DecodeResult(b)
		_, _ = DecodeError(b)
		_, _ = DecodeChunk(b)
		_, _ = DecodeCredit(b)
		_, _ = DecodeCancelFrame(b)
	})
}

func BenchmarkTaskRoundTrip(b *testing.B) {
	tk := &task.Task{Key: someKey, Function: "f.ns", Pipeline: "p.ns", Stage: "f", ReplyTo: "_INBOX.x", Deadline: time.Unix(5, 6), Input: someInput}
	var buf []byte
	b.ReportAllocs()
	for b.Loop() {
		buf = AppendTask(buf[:0], tk)
		if _, err := DecodeTask(buf); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkFrameRoundTrip(b *testing.B) {
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
}
