package conformance

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// decoder is a Python process that decodes batches.
type decoder struct {
	in  io.Writer
	out *bufio.Reader
}

func newDecoder(t testing.TB) *decoder {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), proctest.Python(t), "testdata/decode.py", "../../templates/python3-stage")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = in.Close(), cmd.Wait() })
	return &decoder{in, bufio.NewReader(out)}
}

// decode returns a description of a batch. If the batch is invalid, it returns the error and false.
func (d *decoder) decode(t testing.TB, payload []byte) (text string, ok bool) {
	t.Helper()
	if _, err := d.in.Write(append(binary.LittleEndian.AppendUint32(nil, uint32(len(payload))), payload...)); err != nil {
		t.Fatal(err)
	}
	var head [5]byte
	if _, err := io.ReadFull(d.out, head[:]); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, binary.LittleEndian.Uint32(head[:]))
	if _, err := io.ReadFull(d.out, b); err != nil {
		t.Fatal(err)
	}
	return string(b), head[4] == 1
}

// describe returns the text that decode.py writes for a batch.
func describe(b wire.Batch) string {
	var out [][]byte
	line := func(format string, args ...any) { out = append(out, fmt.Appendf(nil, format, args...)) }
	for _, c := range b.Calls {
		var at int64
		if !c.Deadline.IsZero() {
			at = c.Deadline.Round(time.Second).Unix()
		}
		line("call %s %d %d %d %s", c.Key.Request, c.Key.Task, c.Key.Attempt, at, c.Traceparent)
		for _, h := range c.Header {
			line("header %s %s", h.Name, h.Value)
		}
		for _, p := range c.Input {
			line("part %s", p.From)
			for _, it := range p.Items {
				switch {
				case it.Ref != nil:
					line("ref %s %s %d", it.Ref.Owner, it.Ref.Blob, it.Ref.Size)
				case it.Tensors != nil:
					for _, t := range it.Tensors {
						line("tensor %s %s [%s] %s", t.Name, t.Datatype, strings.Trim(fmt.Sprint(t.Shape), "[]"), t.Data)
					}
				default:
					line("bytes %s %s", it.ContentType, it.Bytes)
				}
			}
		}
	}
	return string(bytes.Join(out, []byte("\n")))
}

// agree checks that Python and Go decode a payload to the same result.
func (d *decoder) agree(t *testing.T, payload []byte) {
	t.Helper()
	want, err := wire.DecodeBatch(payload)
	got, ok := d.decode(t, payload)
	if !ok && strings.Contains(got, "in a file, want at most") {
		return // in Go, Detach reports this later
	}
	if ok != (err == nil) || ok && got != describe(want) {
		t.Fatalf("of % x\nGo makes %q, %v\nPython   %q, %v", payload, describe(want), err, got, ok)
	}
}

func seeds() [][]byte {
	ref := tensor.Item{Ref: &tensor.Ref{Owner: "fd:", Blob: "0", Size: 70_000}}
	all := wire.Call{
		Key: task.Key{Request: "request-1", Task: 1 << 31, Attempt: 255}, Deadline: time.Unix(2_000_000_000, 100_000_000), Traceparent: "00-1-2-01",
		Header: []task.Header{{Name: "Accept", Value: "text/plain"}, {Name: "", Value: strings.Repeat("v", 200)}},
		Input: tensor.Input{
			{From: "a", Items: tensor.Activation{{ContentType: "text/plain", Bytes: []byte("hello")}, ref, {}}},
			{From: strings.Repeat("b", 130), Items: tensor.Activation{
				{Tensors: []tensor.Tensor{{Name: "x", Datatype: "FP32", Shape: []int64{1, 300}, Data: make([]byte, 1200)}, {Name: "y"}}},
				{Tensors: []tensor.Tensor{}},
			}},
		},
	}
	past := wire.Call{Deadline: time.Unix(-5, 0)}
	task32 := append([]byte{1, 1, 'r'}, binary.AppendUvarint(nil, 1<<32)...)
	return [][]byte{
		append(task32, 1, 0, 0, 0, 0), append([]byte{1, 1, 'r', 1, 1, 0, 0, 0, 1, 0, 1, 0, 0}, binary.AppendUvarint(nil, 1<<64-1)...),
		{},
		{0},
		{1},
		{0x80},
		batch(never, "a"), wire.Batch{Calls: []wire.Call{all, past, all}}.Append(nil),
		bytes.Repeat([]byte{0xff}, 12), append([]byte{1, 0, 1, 1, 0, 0, 0}, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 2), append([]byte{1, 0}, bytes.Repeat([]byte{0x80}, 9)...),
	}
}

// TestPythonDecodesAsGoDoes changes valid batches at random, with a fixed seed.
func TestPythonDecodesAsGoDoes(t *testing.T) {
	d := newDecoder(t)
	r := rand.New(rand.NewPCG(1, 2))
	for _, seed := range seeds() {
		d.agree(t, seed)
		for range 2000 {
			b := bytes.Clone(seed)
			for range 1 + r.IntN(3) {
				if len(b) == 0 {
					break
				}
				switch i := r.IntN(len(b)); r.IntN(4) {
				case 0:
					b[i] ^= 1 << r.IntN(8)
				case 1:
					b[i] = [...]byte{0, 1, 0x7f, 0x80, 0xff}[r.IntN(5)]
				case 2:
					b = b[:i]
				case 3:
					b = append(b[:i], append([]byte{byte(r.Uint32())}, b[i:]...)...)
				}
			}
			d.agree(t, b)
		}
	}
}

func FuzzBatch(f *testing.F) {
	for _, s := range seeds() {
		f.Add(s)
	}
	d := newDecoder(f)
	f.Fuzz(func(t *testing.T, b []byte) { d.agree(t, b) })
}
