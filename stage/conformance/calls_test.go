package conformance

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

func TestHelloDescribesTheReplica(t *testing.T) {
	each(t, func(t *testing.T, s sdk) {
		r := s.launch(t, "each", "max_inflight=5", "greeting=hello")
		h := r.hello()
		if h.Threads < 1 || h.Place < 0 || h.Load < 0 {
			t.Errorf("hello %+v", h)
		}
		h.Threads, h.Load, h.Place = 0, 0, 0
		if s.name == "worker" { // the worker's own pid, which is the stage's
			h.PID = r.cmd.Process.Pid
		}
		want := wire.Hello{Oldest: 1, Newest: 2, PID: r.cmd.Process.Pid, Function: "f.ns", Replica: "f-1", Slots: 5, MaxBatch: maxBatch}
		if h != want {
			t.Errorf("hello %+v, want %+v", h, want)
		}
		r.send(wire.FrameWelcome, 0, welcome.Append(nil))
		if got := r.ask(1, "env greeting"); got != "hello" {
			t.Errorf("the environment's greeting is %q", got)
		}
		r.drained()
	})
}

func TestCallsCarryTheirRequest(t *testing.T) {
	each(t, func(t *testing.T, s sdk) {
		r := s.begin(t, "each")
		c := wire.Call{
			Key: task.Key{Request: "r-1~ä", Task: 4_000_000_000, Attempt: 3}, Deadline: time.Unix(4_000_000_000, 123_000_000),
			Traceparent: "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
			Header:      []task.Header{{Name: "Accept", Value: "x"}, {Name: "X-Bytes", Value: "\xff\xfe"}, {Name: "Long", Value: strings.Repeat("v", 300)}},
			Input: tensor.Input{
				{From: "a", Items: tensor.Activation{{ContentType: "text/plain", Bytes: []byte("show")}, {}, {ContentType: "x", Bytes: make([]byte, 1000)}}},
				{From: "b", Items: tensor.Activation{{Tensors: []tensor.Tensor{{Name: "x", Datatype: "FP32", Shape: []int64{2}, Data: make([]byte, 8)}, {Name: "y", Datatype: "BYTES", Shape: []int64{0}}}}}},
				{From: "c"},
			},
		}
		r.send(wire.FrameBatch, 1, wire.Batch{Calls: []wire.Call{c}}.Append(nil))
		want := "r-1~ä 4000000000 3|" + c.Traceparent + "|4000000000123|Accept=x|X-Bytes=\xff\xfe|Long=" + c.Header[2].Value +
			"|a:0 0,text/plain4 0,x1000 0|b:0 2|c:"
		if got := r.text(); got != want {
			t.Errorf("got  %q\nwant %q", got, want)
		}
	})
}

func TestCallsOfABatchEndIndependently(t *testing.T) {
	each(t, func(t *testing.T, s sdk) {
		r := s.begin(t, "each")
		r.batch(1<<40, never, "a", "bad", "fail", "large")
		if m := r.result(); m.Index != 0 || string(m.Output[0].Bytes) != "A" || m.Output[0].ContentType != "text/plain" || m.Service <= 0 {
			t.Errorf("result %+v", m)
		}
		if id, i := r.failure(task.BadInput, "got bad, want good"); id != 1<<40 || i != 1 {
			t.Errorf("error of call %d of batch %d", i, id)
		}
		r.failure(task.Failed, "broken")
		m := r.result()
		if m.Index != 3 || len(m.Output) != 2 || len(m.Output[0].Bytes) != 1<<20 || m.Output[0].ContentType != "x/y" || string(m.Output[1].Bytes) != "small" {
			t.Errorf("large result of call %d: %d items", m.Index, len(m.Output))
		}
		r.batch(2, never, "crowded", "a")
		r.failure(task.Failed, "want 2 GiB, 1 GiB is free") // another replica would not have more memory
		r.result()
		r.batch(1, never, "nothing")
		if m := r.result(); len(m.Output) != 0 {
			t.Errorf("no items: %+v", m)
		}
		r.drained()
		if s.name != "worker" { // in a worker, the worker has the device
			r = s.launch(t, "each", "CUDA_VISIBLE_DEVICES=GPU-5f").greet(welcome)
			r.batch(1, never, "crowded")
			r.failure(task.OutOfMemory, "want 2 GiB, 1 GiB is free")
			r.drained()
		}
	})
}

func TestAPanicLeavesTheReplicaAlive(t *testing.T) {
	each(t, func(t *testing.T, s sdk) {
		r := s.begin(t, "each")
		r.batch(1, never, "panic", "a")
		r.failure(task.Failed, "ouch")
		if m := r.result(); m.Index != 1 || string(m.Output[0].Bytes) != "A" {
			t.Errorf("beside the panic: %+v", m)
		}
		if got := r.ask(2, "b"); got != "B" {
			t.Errorf("after the panic: %q", got)
		}
		r.drained()
		if got := r.stderr.String(); !strings.Contains(got, "ouch") || !strings.Contains(got, "call=r") {
			t.Errorf("stderr %q, want the panic and its call", got)
		}
	})
}

// TestABadCallIsFoundByBisection sends a batch with one call for which the whole batch fails.
func TestABadCallIsFoundByBisection(t *testing.T) {
	each(t, func(t *testing.T, s sdk) {
		r := s.begin(t, "broken")
		r.batch(1, never, "a", "b", "c")
		if got := r.text(); got != "a" {
			t.Errorf("the first call: %q", got)
		}
		if _, i := r.failure(task.Failed, "ouch"); i != 1 {
			t.Errorf("the error is of call %d", i)
		}
		if got := r.text(); got != "c" {
			t.Errorf("the last call: %q", got)
		}
		r.drained()
	})
}

func TestCallsThatMayNotRunTwiceFailTogether(t *testing.T) {
	each(t, func(t *testing.T, s sdk) {
		for program, want := range map[string]string{"broken": "ouch", "few": "returned 1 results for 2 calls"} {
			r := s.begin(t, program, wire.EnvIdempotent+"=false")
			r.batch(1, never, "a", "b")
			r.failure(task.Failed, want)
			if _, i := r.failure(task.Failed, want); i != 1 {
				t.Errorf("the second error is of call %d", i)
			}
			r.drained()
		}
	})
}

func TestCancelAndDeadlineEndACall(t *testing.T) {
	each(t, func(t *testing.T, s sdk) {
		r := s.begin(t, "each", "max_inflight=2")
		r.batch(1, never, "wait")
		r.cancel(1, wire.CancelAll)
		r.failure(task.Canceled, "cancel")
		r.batch(2, time.Now().Add(10*time.Millisecond), "wait")
		r.failure(task.Expired, "deadline")
		r.cancel(1, 0) // too late: nothing happens
		r.batch(3, never, "wait", "a", "b")
		r.cancel(3, 2) // the cancel comes before the call starts, or never
		r.cancel(3, 0)
		r.failure(task.Canceled, "cancel")
		r.result()
		r.failure(task.Canceled, "cancel")
		r.batch(4, time.Now().Add(-time.Hour), "a")
		r.failure(task.Expired, "deadline")
		if got := r.ask(5, "c"); got != "C" {
			t.Errorf("then: %q", got)
		}
	})
}

func TestExecTimeoutBoundsACall(t *testing.T) {
	each(t, func(t *testing.T, s sdk) {
		r := s.begin(t, "each", "exec_timeout=50ms")
		r.batch(1, never, "wait")
		r.failure(task.Expired, "it ran for longer than exec_timeout")
		r.batch(2, time.Now().Add(time.Hour), "wait")
		r.failure(task.Expired, "exec_timeout")
		r.batch(3, time.Now().Add(time.Millisecond), "wait")
		r.failure(task.Expired, "deadline")
	})
}

// TestLargeItemsTravelInFiles sends more large items than fit beside one frame, and gets the same
// number back.
func TestLargeItemsTravelInFiles(t *testing.T) {
	each(t, func(t *testing.T, s sdk) {
		r := s.begin(t, "each")
		large := tensor.Item{ContentType: "x", Bytes: make([]byte, 1<<20)}
		in := tensor.Input{
			{From: "a", Items: tensor.Activation{{Bytes: []byte("sizes")}, large}},
			{From: "b", Items: tensor.Activation{{Bytes: make([]byte, tensor.InlineLimit)}, {ContentType: strings.Repeat("long", 300), Bytes: large.Bytes}}},
		}
		r.files(1, in)
		want := fmt.Sprint(" 5 x 1048576  65536 ", strings.Repeat("long", 300), " 1048576 ")
		if got := r.text(); got != want {
			t.Errorf("items %s, want %s", got, want)
		}
		r.batch(2, never, "many")
		f := r.read(wire.FrameResult)
		if len(f.Files) != wire.MaxFiles {
			t.Fatalf("%d files, want %d", len(f.Files), wire.MaxFiles)
		}
		if _, err := f.Files[0].WriteAt([]byte("x"), 0); !errors.Is(err, unix.EPERM) {
			t.Errorf("writing to a file of the replica: %v, want an error, because it is sealed", err)
		}
		m, err := wire.DecodeResult(f.Payload)
		if err != nil {
			t.Fatal(err)
		}
		if m.Output, err = wire.Detach(m.Output, f.Files); err != nil || len(m.Output) != 70 {
			t.Fatalf("%d items, %v", len(m.Output), err)
		}
		for i, it := range m.Output {
			if !bytes.Equal(it.Bytes, bytes.Repeat([]byte{byte(i)}, tensor.InlineLimit+1)) {
				t.Errorf("item %d is another", i)
			}
		}
		for _, file := range f.Files {
			_ = file.Close()
		}
	})
}

// files sends a batch of one call, whose large items are in files.
func (r *replica) files(id uint64, in tensor.Input) {
	r.t.Helper()
	var files []*os.File
	for i := range in {
		var more []*os.File
		var err error
		if in[i].Items, more, err = wire.Attach(in[i].Items, len(files), nil); err != nil {
			r.t.Fatal(err)
		}
		files = append(files, more...)
	}
	err := r.conn.Write(wire.Frame{Type: wire.FrameBatch, Batch: id, Payload: wire.Batch{Calls: []wire.Call{{Input: in}}}.Append(nil), Files: files})
	for _, f := range files {
		_ = f.Close()
	}
	if err != nil {
		r.t.Fatal(err)
	}
}

// TestTensorsComeBackUnchanged sends tensors to a stage that returns them: small ones, and one in a
// file.
func TestTensorsComeBackUnchanged(t *testing.T) {
	of := func(name, datatype string, data []byte, shape ...int64) tensor.Tensor {
		return tensor.Tensor{Name: name, Datatype: tensor.Datatype(datatype), Shape: shape, Data: data}
	}
	each(t, func(t *testing.T, s sdk) {
		r := s.begin(t, "each")
		sizes := map[string]int{"BOOL": 1, "UINT8": 1, "INT8": 1, "UINT16": 2, "INT16": 2, "FP16": 2, "UINT32": 4, "INT32": 4, "FP32": 4, "UINT64": 8, "INT64": 8, "FP64": 8}
		var want []tensor.Tensor
		for _, d := range []string{"BOOL", "UINT8", "INT8", "UINT16", "INT16", "FP16", "UINT32", "INT32", "FP32", "UINT64", "INT64", "FP64"} {
			data := make([]byte, 6*sizes[d])
			for i := range data {
				data[i] = byte(i % 2)
			}
			want = append(want, of(d, d, data, 2, 3))
		}
		want = append(want, of("scalar", "FP32", []byte{0, 0, 128, 63}), of("none", "INT64", nil, 0, 4),
			of("bytes", "BYTES", []byte("\x02\x00\x00\x00ab\x00\x00\x00\x00\x01\x00\x00\x00\xff"), 3))
		r.files(1, tensor.Input{{Items: tensor.Activation{{Tensors: want}}}})
		if got := r.result().Output; len(got) != 1 || !reflect.DeepEqual(got[0].Tensors, want) {
			t.Errorf("got  %+v\nwant %+v", got, want)
		}
		large := []tensor.Tensor{of("large", "FP32", bytes.Repeat([]byte{0, 0, 128, 63}, 100_000), 10, 10_000)}
		r.files(2, tensor.Input{{Items: tensor.Activation{{Tensors: large}}}})
		if got := r.result().Output; len(got) != 1 || !reflect.DeepEqual(got[0].Tensors, large) {
			t.Error("the large tensor has changed")
		}
	})
}

func TestChunksWaitForCredit(t *testing.T) {
	each(t, func(t *testing.T, s sdk) {
		r := s.launch(t, "each").greet(wire.Welcome{Version: wire.Version, Credit: 4})
		r.batch(7, never, "stream")
		if got := r.chunk(); got != "0123" {
			t.Fatalf("with a credit of 4 came %q", got)
		}
		r.send(wire.FrameCredit, 0, wire.Credit{Amount: 100}.Append(nil))
		if got := r.chunk(); got != "456789" {
			t.Errorf("then came %q", got)
		}
		r.result()

		r.send(wire.FrameCredit, 0, wire.Credit{Amount: 1<<20 - 94}.Append(nil))
		r.batch(8, never, "a", "pour")
		for left := 1 << 20; left > 0; {
			n := len(r.chunk())
			if left -= n; n > 64<<10 {
				t.Fatalf("a chunk of %d bytes, want at most 64 KiB", n)
			}
		}
		r.result()
		r.result()
		r.batch(9, time.Now().Add(10*time.Millisecond), "stream")
		r.failure(task.Expired, "deadline")
		r.batch(10, never, "stream")
		r.cancel(10, 0)
		r.failure(task.Canceled, "cancel")
	})
}

func (r *replica) chunk() string {
	r.t.Helper()
	f := r.read(wire.FrameChunk)
	m, err := wire.DecodeChunk(f.Payload)
	if err != nil || f.Batch < 7 {
		r.t.Fatalf("chunk of batch %d: %v", f.Batch, err)
	}
	return string(m.Data)
}

func TestFinishedCallsDoNotStream(t *testing.T) {
	each(t, func(t *testing.T, s sdk) {
		r := s.begin(t, "each")
		r.batch(1, never, "keep")
		r.result()
		if got := r.ask(2, "late"); got != "canceled" {
			t.Errorf("a chunk after the result: %s", got)
		}
	})
}

// TestManyBatchesAtATime runs more batches at a time than there are cores.
func TestManyBatchesAtATime(t *testing.T) {
	each(t, func(t *testing.T, s sdk) {
		r := s.begin(t, "each", "max_inflight=16")
		const waiting = 15
		for i := range uint64(waiting) {
			r.batch(i+1, never, "wait")
		}
		for i := range uint64(200) { // in the slot that is free
			if got, want := r.ask(100+i, "n"+strconv.FormatUint(i, 10)), "N"+strconv.FormatUint(i, 10); got != want {
				t.Fatalf("got %q, want %q", got, want)
			}
		}
		for i := range uint64(waiting) {
			r.cancel(waiting-i, wire.CancelAll)
			if id, _ := r.failure(task.Canceled, "cancel"); id != waiting-i {
				t.Errorf("batch %d ended, want %d", id, waiting-i)
			}
		}
		for i := range uint64(16) {
			r.batch(1000+i, never, "x")
		}
		for range 16 {
			r.text()
		}
		r.drained()
	})
}

// TestDescriptorsOfFramesAreClosed counts a replica's descriptors before and after many files have
// travelled both ways.
func TestDescriptorsOfFramesAreClosed(t *testing.T) {
	each(t, func(t *testing.T, s sdk) {
		r := s.begin(t, "noop")
		count := func() int {
			open, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", r.cmd.Process.Pid))
			if err != nil {
				t.Fatal(err)
			}
			return len(open)
		}
		item := tensor.Item{Bytes: make([]byte, tensor.InlineLimit+1)}
		var before int
		for i := range 100 {
			r.files(uint64(i), tensor.Input{{Items: tensor.Activation{item, item}}})
			if m := r.result(); len(m.Output) != 2 || len(m.Output[0].Bytes) != len(item.Bytes) {
				t.Fatalf("%d items", len(m.Output))
			}
			if i == 1 {
				before = count()
			}
		}
		r.ask(1000, "what was before is over")
		// The last one may be closed a moment later.
		proctest.Until(t, "as few descriptors as before", func() bool { return count() <= before })
		r.drained()
	})
}
