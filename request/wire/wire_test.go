package wire

import (
	"errors"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/stagecoach-serving/stagecoach/internal/pack"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	someKey   = task.Key{Request: "call-1", Task: 7, Attempt: 2}
	someInput = tensor.Input{
		{From: "a", Items: tensor.Activation{{ContentType: "text/plain", Bytes: []byte("hello")}}},
		{From: "b", Items: tensor.Activation{{Tensors: []tensor.Tensor{{Name: "x", Datatype: "FP32", Shape: []int64{1, 2}, Data: make([]byte, 8)}}}, {Ref: &tensor.Ref{Owner: "o", Blob: "b", Size: 9}}}},
	}
	someHeader = []task.Header{{Name: "Accept", Value: "text/plain"}}
)

func TestEnvelopesRoundTrip(t *testing.T) {
	tk := &task.Task{Key: someKey, Function: "f.ns", Pipeline: "p.ns", Stage: "f", ReplyTo: "_INBOX.x", Deadline: time.Unix(5, 6), Traceparent: "00-1", Header: someHeader, Input: someInput, Pins: []task.Pin{{Function: "f.ns", Revision: 300}}, Together: true, Alone: true}
	fill(tk)
	if got, err := DecodeTask(AppendTask(nil, tk)); err != nil || !reflect.DeepEqual(got, tk) {
		t.Errorf("task: %v\n got %+v\nwant %+v", err, got, tk)
	}
	for _, tc := range []struct{ alone, keep bool }{{true, true}, {false, true}, {false, false}} {
		tk.Alone, tk.Keep = tc.alone, tc.keep
		if got, err := DecodeTask(AppendTask(nil, tk)); err != nil || !reflect.DeepEqual(got, tk) {
			t.Errorf("task: %v\n got %+v\nwant %+v", err, got, tk)
		}
	}
	rep := &task.Reply{Key: someKey, Code: task.Failed, Message: "no", Replica: "r", Wait: 3, Service: 4, Batch: 5, BatchSize: 6, Output: someInput[1].Items, Header: someHeader, Revision: 300, Blame: task.BlameCompany, Variant: "small.ns", Reason: task.DropLate}
	if got, err := DecodeReply(AppendReply(nil, rep)); err != nil || !reflect.DeepEqual(got, rep) {
		t.Errorf("reply: %v\n got %+v\nwant %+v", err, got, rep)
	}
	rep.Code = task.Dropped // the last code
	if got, err := DecodeReply(AppendReply(nil, rep)); err != nil || !reflect.DeepEqual(got, rep) {
		t.Errorf("reply: %v\n got %+v\nwant %+v", err, got, rep)
	}
	if request, fn, err := DecodeLeave(AppendLeave(nil, "r", "f.ns")); err != nil || request != "r" || fn != "f.ns" {
		t.Errorf("leave: %q, %q, %v", request, fn, err)
	}
	if k, fn, err := DecodeCancel(AppendCancel(nil, someKey, "f.ns")); err != nil || k != someKey || fn != "f.ns" {
		t.Errorf("cancel: %v %q %v", k, fn, err)
	}
	if k, fn, to, err := DecodeAsk(AppendAsk(nil, someKey, "f.ns", "inbox")); err != nil || k != someKey || fn != "f.ns" || to != "inbox" {
		t.Errorf("ask: %v %q %q %v", k, fn, to, err)
	}
	b := AppendTask(nil, tk)
	b[1] = 99
	if _, err := DecodeTask(b); !errors.Is(err, ErrVersion) {
		t.Errorf("a task of version 99: %v, want ErrVersion", err)
	}
	b = AppendTask(nil, tk)
	b = slices.Replace(b, 2+1+len(someKey.Request), 2+1+len(someKey.Request)+1, pack.Uint(nil, 1<<32)...)
	if _, err := DecodeTask(b); err == nil || !strings.Contains(err.Error(), "task 4294967296 of request") {
		t.Errorf("task 2^32: %v", err)
	}
	if _, err := DecodeReply(AppendTask(nil, tk)); err == nil || !strings.Contains(err.Error(), "kind T, want R") {
		t.Errorf("a task taken for a reply: %v", err)
	}
}

// fill sets the fields that tasks have since version 4.
func fill(t *task.Task) {
	t.App, t.Weight, t.Arrived, t.Due, t.Length, t.Variant = "p.ns", 3, time.Unix(1, 2), time.Unix(4, 5), 128, "tokenize.ns"
	t.Rank, t.RankUntil, t.Prefer = -1.5, time.Unix(3, 4), []string{"node-1", "node-2"}
}

func TestOrdersRoundTrip(t *testing.T) {
	for _, o := range []Order{
		{Kind: OrderFork, ID: 3},
		{Kind: OrderPark, Env: []string{"A=1"}},
		{Kind: ChildParked, Nanos: 9},
		{Kind: OrderBegin, Threads: 2, Env: []string{"A=1", "B="}},
		{Kind: OrderKill, PID: 44, Signal: 9},
		{Kind: ZygoteReady, PID: 4, Threads: 1, Nanos: 1 << 40},
		{Kind: ZygoteReady, PID: 4, Prepacked: true},
		{Kind: ZygoteError, Unforkable: true, Text: "2 threads"},
		{Kind: ChildForked, ID: 3, PID: 5, Nanos: 77},
		{Kind: ChildExited, PID: 5, Status: 9},
		{Kind: OrderList, ID: 8},
		{Kind: ChildLives, ID: 3, PID: 5},
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
		b[1]++
		if _, err := DecodeOrder(b); !errors.Is(err, ErrVersion) {
			t.Errorf("%c of a later version: %v, want ErrVersion", o.Kind, err)
		}
	}
	smuggled := AppendOrder(nil, Order{Kind: OrderBegin, Version: OrderVersion, Env: []string{"A=1\x00B=2", "C=3"}})
	if got, err := DecodeOrder(smuggled); err != nil || !slices.Equal(got.Env, []string{"A=1", "C=3"}) {
		t.Errorf("a variable with a NUL became %q, %v", got.Env, err)
	}
}

func TestPayloadsRoundTrip(t *testing.T) {
	check := func(want, got any, err error) {
		t.Helper()
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("got  %+v, %v\nwant %+v", got, err, want)
		}
	}
	hello := Hello{Oldest: 1, Newest: 3, PID: 7, Function: "f.ns", Replica: "f-1", Slots: 2, MaxBatch: 8, Threads: 2, Load: time.Second, Place: 5}
	h, err := DecodeHello(hello.Append(nil))
	check(hello, h, err)
	w, err := DecodeWelcome(Welcome{Version: 1, Credit: 1 << 40}.Append(nil))
	check(Welcome{Version: 1, Credit: 1 << 40}, w, err)
	batch := Batch{Calls: []Call{{Key: someKey, Deadline: time.Unix(3, 4), Traceparent: "00-1", Header: someHeader, Input: someInput}, {}}}
	b, err := DecodeBatch(batch.Append(nil))
	check(batch, b, err)
	result := Result{Index: 1, Service: 5, Header: someHeader, Output: someInput[1].Items}
	r, err := DecodeResult(result.Append(nil))
	check(result, r, err)
	fault := Error{Index: 2, Service: 6, Code: task.BadInput, Message: "no"}
	e, err := DecodeError(fault.Append(nil))
	check(fault, e, err)
	fault.Code = task.OutOfMemory
	e, err = DecodeError(fault.Append(nil))
	check(fault, e, err)
	fault.Code, fault.Lost = task.InputLost, []string{"x", "y"}
	e, err = DecodeError(fault.Append(nil))
	check(fault, e, err)
	ch, err := DecodeChunk(Chunk{Index: 3, Data: []byte("piece")}.Append(nil))
	check(Chunk{Index: 3, Data: []byte("piece")}, ch, err)
	cr, err := DecodeCredit(Credit{Amount: 9}.Append(nil))
	check(Credit{Amount: 9}, cr, err)
	th, err := DecodeThreads(Threads{Total: 300}.Append(nil))
	check(Threads{Total: 300}, th, err)
	ca, err := DecodeCancelFrame(Cancel{Index: CancelAll}.Append(nil))
	check(Cancel{Index: CancelAll}, ca, err)
}

func TestHostilePayloadsAreNamed(t *testing.T) {
	var err error
	for want, decode := range map[string]func(){
		"batch: at byte 1 of 1: no calls":       func() { _, err = DecodeBatch(Batch{}.Append(nil)) },
		"want no more than":                     func() { _, err = DecodeBatch([]byte{0xff, 0xff, 0xff, 0x7f, 0}) },
		"hello: ":                               func() { _, err = DecodeHello(nil) },
		"0 slots and batches of 1, want at lea": func() { _, err = DecodeHello(Hello{MaxBatch: 1}.Append(nil)) },
		"code 0, want 1 to":                     func() { _, err = DecodeError(Error{}.Append(nil)) },
		"code 99, want 1 to":                    func() { _, err = DecodeError(Error{Code: 99}.Append(nil)) },
		// A replica must not send this code.
		"code 8, want 1 to":       func() { _, err = DecodeError(Error{Code: task.Redeployed}.Append(nil)) },
		"blame 5, want at most 4": func() { _, err = DecodeReply(AppendReply(nil, &task.Reply{Blame: task.BlameAlone + 1})) },
		"rank NaN":                func() { _, err = DecodeTask(AppendTask(nil, &task.Task{Place: task.Place{Rank: math.NaN()}})) },
		"number 4294967296, want at most 2147483647": func() { _, err = DecodeTask(AppendTask(nil, &task.Task{Length: 1 << 32})) },
		"code 12, want at most 11":                   func() { _, err = DecodeReply(AppendReply(nil, &task.Reply{Code: task.InputLost + 1})) },
		"want at most 2147483647":                    func() { _, err = DecodeChunk(Chunk{Index: 1 << 40}.Append(nil)) },
		"threads: 1 bytes, want 2":                   func() { _, err = DecodeThreads([]byte{1}) },
		"1 bytes left over":                          func() { _, err = DecodeCredit(append(Credit{}.Append(nil), 1)) },
		"item of kind 9":                             func() { _, err = DecodeResult([]byte{0, 0, 0, 1, 9, 9}) },
	} {
		if decode(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error with %q", err, want)
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
	for name := range messages() {
		f.Add(golden(f, name+".v3.hex"))
		f.Add(golden(f, name+".v4.hex"))
	}
	f.Add(AppendTask(nil, &task.Task{Key: someKey, Input: someInput, Header: someHeader}))
	f.Add(AppendReply(nil, &task.Reply{Key: someKey, Output: someInput[1].Items}))
	f.Add(AppendOrder(nil, Order{Kind: OrderBegin, Version: OrderVersion, Env: []string{"A=1"}}))
	f.Add(AppendOrder(nil, Order{Kind: OrderList, Version: OrderVersion, ID: 7}))
	f.Add(AppendOrder(nil, Order{Kind: ChildLives, Version: OrderVersion, ID: 7, PID: 9}))
	f.Add(AppendOrder(nil, Order{Kind: OrderFork, Version: OrderVersion, ID: 7}))
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
		_, _, _ = DecodeLeave(b)
		_, _ = DecodeHello(b)
		_, _ = DecodeWelcome(b)
		_, _ = DecodeResult(b)
		_, _ = DecodeError(b)
		_, _ = DecodeChunk(b)
		_, _ = DecodeCredit(b)
		_, _ = DecodeCancelFrame(b)
		_, _ = DecodeThreads(b)
	})
}

func BenchmarkTaskRoundTrip(b *testing.B) {
	tk := &task.Task{Key: someKey, Function: "f.ns", Pipeline: "p.ns", Stage: "f", ReplyTo: "_INBOX.x", Deadline: time.Unix(5, 6), Input: someInput}
	for i := range 9 { // as many as a request of curl has
		tk.Header = append(tk.Header, task.Header{Name: "X-Some-Name", Value: "value " + strconv.Itoa(i)})
	}
	var buf []byte
	b.ReportAllocs()
	for b.Loop() {
		buf = AppendTask(buf[:0], tk)
		if _, err := DecodeTask(buf); err != nil {
			b.Fatal(err)
		}
	}
}
