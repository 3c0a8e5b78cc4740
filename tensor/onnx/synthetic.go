package onnx

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"

	"google.golang.org/protobuf/proto"

	"github.com/stagecoach-serving/stagecoach/internal/third_party/onnx/onnxpb"
)

// Encoder is the shape of a synthetic transformer encoder. Input and output have the shape
// [B,S,Width].
type Encoder struct {
	Layers int
	Width  int // a multiple of Heads
	Heads  int
}

// bytesPerLayer returns the size of one layer's float32 parameters in bytes: 12 Width² of matrices
// and 13 Width of biases and norms.
func (e Encoder) bytesPerLayer() int64 {
	w := int64(e.Width)
	return 4 * (12*w*w + 13*w)
}

// EncoderOf returns an encoder whose parameters take about this number of bytes. It has at least
// one layer, and heads of width 64. Its width is 1024, or 512 below 200 MB.
func EncoderOf(bytes int64) Encoder {
	e := Encoder{Width: 1024}
	if bytes < 200<<20 {
		e.Width = 512
	}
	e.Heads = e.Width / 64
	e.Layers = max(1, int((bytes+e.bytesPerLayer()/2)/e.bytesPerLayer()))
	return e
}

// Synthetic writes a model to DIR/model.onnx and its weights, which depend on seed, to
// DIR/weights.bin. It returns the path of the model and the size of the weights in bytes. The
// weights are page-aligned, so that they can be mapped. The input is "x", the output "y".
func Synthetic(dir string, e Encoder, seed uint64) (path string, bytes int64, err error) {
	if e.Layers < 1 || e.Heads < 1 || e.Width < 1 || e.Width%e.Heads != 0 {
		return "", 0, fmt.Errorf("encoder %+v: want at least one layer and a width that is a multiple of the heads", e)
	}
	f, err := os.Create(filepath.Join(dir, weightsFile))
	if err != nil {
		return "", 0, err
	}
	defer func() { _ = f.Close() }() // a second Close after success has no effect
	b := &builder{w: bufio.NewWriterSize(f, 1<<20), rnd: seed*2 + 1, nodes: nodes{&onnxpb.GraphProto{Name: proto.String("encoder")}}}
	b.encoder(e)
	if b.err != nil {
		return "", 0, b.err
	}
	if err := b.w.Flush(); err != nil {
		return "", 0, err
	}
	if err := f.Close(); err != nil {
		return "", 0, err
	}
	path = filepath.Join(dir, "model.onnx")
	return path, b.off, Write(path, model(b.graph))
}

const (
	weightsFile = "weights.bin"
	page        = 4096
)

// builder appends nodes to a graph and weights to a file. It keeps the first error.
type builder struct {
	nodes
	w   *bufio.Writer
	off int64
	rnd uint64 // xorshift64 state (Marsaglia 2003); never 0
	err error
}

func (b *builder) encoder(e Encoder) {
	d, heads := int64(e.Width), int64(e.Heads)
	b.graph.Input = []*onnxpb.ValueInfoProto{activation("x", d)}
	b.graph.Output = []*onnxpb.ValueInfoProto{activation("y", d)}
	b.ints("heads", 0, 0, heads, d/heads)
	b.ints("merge", 0, 0, d)
	b.ints("qkv", d, d, d)
	b.float("scale", float32(1/math.Sqrt(float64(d/heads))))
	x := "x"
	for l := range e.Layers {
		out := fmt.Sprintf("layer%d", l)
		if l == e.Layers-1 {
			out = "y"
		}
		b.layer(fmt.Sprintf("L%d.", l), x, out, d)
		x = out
	}
}

// layer adds a pre-norm transformer layer: attention and a ReLU network. The output of each is
// added to its input.
func (b *builder) layer(p, x, out string, d int64) {
	b.norm(p+"n1", x, d)
	b.linear(p+"a", p+"n1", d, 3*d)
	b.node("Split", []string{p + "a", "qkv"}, []string{p + "q0", p + "k0", p + "v0"}, intAttr("axis", 2))
	for _, c := range []string{"q", "k", "v"} {
		perm := []int64{0, 2, 1, 3}
		if c == "k" {
			perm = []int64{0, 2, 3, 1}
		}
		b.node("Reshape", []string{p + c + "0", "heads"}, []string{p + c + "1"})
		b.node("Transpose", []string{p + c + "1"}, []string{p + c}, permAttr(perm...))
	}
	b.node("Mul", []string{p + "q", "scale"}, []string{p + "qs"})
	b.node("MatMul", []string{p + "qs", p + "k"}, []string{p + "logits"})
	b.node("Softmax", []string{p + "logits"}, []string{p + "weights"}, intAttr("axis", -1))
	b.node("MatMul", []string{p + "weights", p + "v"}, []string{p + "c0"})
	b.node("Transpose", []string{p + "c0"}, []string{p + "c1"}, permAttr(0, 2, 1, 3))
	b.node("Reshape", []string{p + "c1", "merge"}, []string{p + "c2"})
	b.linear(p+"o", p+"c2", d, d)
	b.node("Add", []string{p + "o", x}, []string{p + "r"})
	b.norm(p+"n2", p+"r", d)
	b.linear(p+"f1", p+"n2", d, 4*d)
	b.node("Relu", []string{p + "f1"}, []string{p + "f2"})
	b.linear(p+"f3", p+"f2", 4*d, d)
	b.node("Add", []string{p + "f3", p + "r"}, []string{out})
}

func (b *builder) norm(out, x string, d int64) {
	b.weights(out+".s", 1, false, d)
	b.weights(out+".b", 0, false, d)
	b.node("LayerNormalization", []string{x, out + ".s", out + ".b"}, []string{out}, intAttr("axis", -1))
}

func (b *builder) linear(out, x string, from, to int64) {
	b.weights(out+".w", 0, true, from, to)
	b.weights(out+".b", 0, true, to)
	b.node("MatMul", []string{x, out + ".w"}, []string{out + ".m"})
	b.node("Add", []string{out + ".m", out + ".b"}, []string{out})
}

// weights appends a float32 tensor to the file and adds it to the graph. Its values are constant,
// or drawn uniformly from ±0.035.
func (b *builder) weights(name string, constant float32, draw bool, dims ...int64) {
	if pad := (page - b.off%page) % page; pad > 0 {
		b.put(make([]byte, pad))
	}
	n := int64(1)
	for _, d := range dims {
		n *= d
	}
	at, buf := b.off, make([]byte, 0, 64<<10)
	for i := range n {
		v := constant
		if draw {
			b.rnd ^= b.rnd << 13
			b.rnd ^= b.rnd >> 7
			b.rnd ^= b.rnd << 17
			v = float32(int32(b.rnd>>32)) / math.MaxInt32 * 0.035
		}
		buf = binary.LittleEndian.AppendUint32(buf, math.Float32bits(v))
		if len(buf) == cap(buf) || i == n-1 {
			b.put(buf)
			buf = buf[:0]
		}
	}
	entry := func(k, v string) *onnxpb.StringStringEntryProto {
		return &onnxpb.StringStringEntryProto{Key: proto.String(k), Value: proto.String(v)}
	}
	b.graph.Initializer = append(b.graph.Initializer, &onnxpb.TensorProto{
		Name: proto.String(name), Dims: dims, DataType: proto.Int32(int32(onnxpb.TensorProto_FLOAT)),
		DataLocation: onnxpb.TensorProto_EXTERNAL.Enum(),
		ExternalData: []*onnxpb.StringStringEntryProto{
			entry("location", weightsFile), entry("offset", strconv.FormatInt(at, 10)), entry("length", strconv.FormatInt(4*n, 10)),
		},
	})
}

func (b *builder) put(p []byte) {
	if b.err == nil {
		_, b.err = b.w.Write(p)
	}
	b.off += int64(len(p))
}
