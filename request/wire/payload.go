package wire

import (
	"encoding/binary"
	"fmt"
	"math"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/pack"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Hello is a replica's first frame. It means that the replica is ready.
type Hello struct {
	Oldest, Newest uint8 // range of protocol versions
	PID            int
	Function       string // pipeline.Key
	Replica        string
	Slots          int           // batches at a time, at least 1
	MaxBatch       int           // largest batch, at least 1
	Threads        int           // number of compute threads
	Load           time.Duration // time to load the parameters in this process; 0 if inherited
	Place          time.Duration // time of the Place hook
}

// Append appends the payload of a FrameHello.
func (h Hello) Append(b []byte) []byte {
	b = append(b, h.Oldest, h.Newest)
	b = pack.Uint(b, uint64(h.PID))
	b = pack.String(b, h.Function)
	b = pack.String(b, h.Replica)
	b = pack.Uint(b, uint64(h.Slots))
	b = pack.Uint(b, uint64(h.MaxBatch))
	b = pack.Uint(b, uint64(h.Threads))
	b = pack.Int(b, int64(h.Load))
	return pack.Int(b, int64(h.Place))
}

// DecodeHello decodes and checks the payload of a FrameHello.
func DecodeHello(b []byte) (Hello, error) {
	r := pack.NewReader(b)
	h := Hello{
		Oldest: r.Byte(), Newest: r.Byte(), PID: small(r), Function: r.String(), Replica: r.String(),
		Slots: small(r), MaxBatch: small(r), Threads: small(r),
		Load: time.Duration(r.Int()), Place: time.Duration(r.Int()),
	}
	if r.Err() == nil && (h.Slots < 1 || h.MaxBatch < 1) {
		r.Fail("%d slots and batches of %d, want at least 1", h.Slots, h.MaxBatch)
	}
	return h, end("hello", r)
}

// Welcome is a dispatcher's answer to a Hello.
type Welcome struct {
	Version uint8  // version that both sides use from now on
	Credit  uint64 // bytes of chunks that the replica may send
}

// Append appends the payload of a FrameWelcome.
func (w Welcome) Append(b []byte) []byte { return pack.Uint(append(b, w.Version), w.Credit) }

// DecodeWelcome decodes the payload of a FrameWelcome.
func DecodeWelcome(b []byte) (Welcome, error) {
	r := pack.NewReader(b)
	w := Welcome{Version: r.Byte(), Credit: r.Uint()}
	return w, end("welcome", r)
}

// Negotiate returns the version to use with a replica that supports h.Oldest to h.Newest, or
// ErrVersion.
func Negotiate(h Hello) (uint8, error) {
	if h.Oldest > Version || h.Newest < OldestVersion || h.Oldest > h.Newest {
		return 0, fmt.Errorf("replica %q speaks versions %d to %d of the stage protocol, want one of %d to %d; rebuild the function: %w",
			h.Replica, h.Oldest, h.Newest, OldestVersion, Version, ErrVersion)
	}
	return min(h.Newest, Version), nil
}

// Call is one call of a batch.
type Call struct {
	Key         task.Key
	Deadline    time.Time // zero: none
	Traceparent string
	Header      []task.Header
	Input       tensor.Input
}

// Batch is a set of calls that run together.
type Batch struct{ Calls []Call }

// Append appends the payload of a FrameBatch.
func (m Batch) Append(b []byte) []byte {
	b = pack.Uint(b, uint64(len(m.Calls)))
	for _, c := range m.Calls {
		b = appendKey(b, c.Key)
		b = appendTime(b, c.Deadline)
		b = pack.String(b, c.Traceparent)
		b = appendHeaders(b, c.Header)
		b = tensor.AppendInput(b, c.Input)
	}
	return b
}

// DecodeBatch decodes the payload of a FrameBatch, which has at least one call. Inputs alias b.
func DecodeBatch(b []byte) (Batch, error) {
	r := pack.NewReader(b)
	m := Batch{Calls: make([]Call, r.Count(7))}
	for i := range m.Calls {
		m.Calls[i] = Call{Key: readKey(r), Deadline: readTime(r), Traceparent: r.String(), Header: readHeaders(r), Input: tensor.ReadInput(r)}
	}
	if len(m.Calls) == 0 {
		r.Fail("no calls, want at least one")
	}
	return m, end("batch", r)
}

// Result is the answer of a successful call.
type Result struct {
	Index   int           // index of the call in its batch
	Service time.Duration // time that the replica worked on it
	Header  []task.Header // for the HTTP response
	Output  tensor.Activation
}

// Append appends the payload of a FrameResult.
func (m Result) Append(b []byte) []byte {
	b = pack.Uint(b, uint64(m.Index))
	b = pack.Int(b, int64(m.Service))
	b = appendHeaders(b, m.Header)
	return tensor.AppendActivation(b, m.Output)
}

// DecodeResult decodes the payload of a FrameResult. The output aliases b.
func DecodeResult(b []byte) (Result, error) {
	r := pack.NewReader(b)
	m := Result{Index: small(r), Service: time.Duration(r.Int()), Header: readHeaders(r), Output: tensor.ReadActivation(r)}
	return m, end("result", r)
}

// Error is the answer of a failed call.
type Error struct {
	Index   int
	Service time.Duration
	Code    task.Code
	Message string
	// With task.InputLost, which a daemon sends in place of a replica: the blobs of the items.
	// None: the call is not to blame, and is tried again.
	Lost []string
}

// Append appends the payload of a FrameError.
func (m Error) Append(b []byte) []byte {
	b = pack.Uint(b, uint64(m.Index))
	b = pack.Int(b, int64(m.Service))
	b = pack.String(append(b, byte(m.Code)), m.Message)
	if m.Code == task.InputLost {
		b = appendStrings(b, m.Lost)
	}
	return b
}

// DecodeError decodes the payload of a FrameError.
func DecodeError(b []byte) (Error, error) {
	r := pack.NewReader(b)
	m := Error{Index: small(r), Service: time.Duration(r.Int()), Code: task.Code(r.Byte()), Message: r.String()}
	switch {
	case m.Code == task.InputLost:
		m.Lost = readStrings(r)
	case m.Code == task.OK || m.Code > task.Unavailable && m.Code != task.OutOfMemory:
		r.Fail("code %d, want 1 to %d, or %d", m.Code, task.Unavailable, task.OutOfMemory)
	}
	return m, end("error", r)
}

// OfDaemon reports whether only a daemon may send it.
func (m Error) OfDaemon() bool { return m.Code == task.InputLost }

// Chunk is a piece of a call's output, sent before its Result.
type Chunk struct {
	Index int
	Data  []byte
}

// Append appends the payload of a FrameChunk.
func (m Chunk) Append(b []byte) []byte { return pack.Bytes(pack.Uint(b, uint64(m.Index)), m.Data) }

// DecodeChunk decodes the payload of a FrameChunk. The data aliases b.
func DecodeChunk(b []byte) (Chunk, error) {
	r := pack.NewReader(b)
	m := Chunk{Index: small(r), Data: r.Bytes()}
	return m, end("chunk", r)
}

// Credit lets the other side send more. From a dispatcher, Amount is a number of additional chunk
// bytes. From a replica, it is the new number of batches that may be in flight.
type Credit struct{ Amount uint64 }

// Append appends the payload of a FrameCredit.
func (m Credit) Append(b []byte) []byte { return pack.Uint(b, m.Amount) }

// DecodeCredit decodes the payload of a FrameCredit.
func DecodeCredit(b []byte) (Credit, error) {
	r := pack.NewReader(b)
	m := Credit{Amount: r.Uint()}
	return m, end("credit", r)
}

// CancelAll is the index in a Cancel of the whole batch.
const CancelAll = math.MaxInt32

// Cancel asks a replica to end a call early. The call still gets its Result or Error.
type Cancel struct{ Index int }

// Append appends the payload of a FrameCancel.
func (m Cancel) Append(b []byte) []byte { return pack.Uint(b, uint64(m.Index)) }

// DecodeCancelFrame decodes the payload of a FrameCancel.
func DecodeCancelFrame(b []byte) (Cancel, error) {
	r := pack.NewReader(b)
	m := Cancel{Index: small(r)}
	return m, end("cancel", r)
}

// Threads asks a replica to compute with Total threads, including the calling thread. The replica
// adds missing threads if it can. It never removes threads, so a smaller number has no effect.
// There is no answer.
type Threads struct{ Total uint16 }

// Append appends the payload of a FrameThreads.
func (m Threads) Append(b []byte) []byte { return binary.LittleEndian.AppendUint16(b, m.Total) }

// DecodeThreads decodes the payload of a FrameThreads.
func DecodeThreads(b []byte) (Threads, error) {
	if len(b) != 2 {
		return Threads{}, fmt.Errorf("threads: %d bytes, want 2", len(b))
	}
	return Threads{Total: binary.LittleEndian.Uint16(b)}, nil
}

// small reads a count or index of at most 31 bits.
func small(r *pack.Reader) int {
	v := r.Uint()
	if v > math.MaxInt32 {
		r.Fail("number %d, want at most %d", v, math.MaxInt32)
		return 0
	}
	return int(v)
}

func end(what string, r *pack.Reader) error {
	if err := r.End(); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}
