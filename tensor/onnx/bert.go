package onnx

import (
	"encoding/binary"
	"fmt"
	"math"

	"google.golang.org/protobuf/proto"

	"github.com/stagecoach-serving/stagecoach/internal/third_party/onnx/onnxpb"
)

// Bert is the shape of a BERT encoder (Devlin et al. 2019). Its fields have the names of the usual
// configuration file.
type Bert struct {
	Layers     int     `json:"num_hidden_layers"`
	Width      int64   `json:"hidden_size"` // a multiple of Heads
	Heads      int64   `json:"num_attention_heads"`
	Inner      int64   `json:"intermediate_size"`
	Vocabulary int64   `json:"vocab_size"`
	Positions  int64   `json:"max_position_embeddings"`
	Types      int64   `json:"type_vocab_size"`
	Epsilon    float32 `json:"layer_norm_eps"`
}

// The names of the tensors of a [Bert.Sentences] model.
const (
	BertIDs       = "input_ids"      // INT64 [B,S]
	BertMask      = "attention_mask" // INT64 [B,S]: 1 for a token, 0 for padding behind the last one
	BertEmbedding = "embedding"      // FP32 [B,Width], of length 1
)

// Hidden returns the name of the tensor after layer l, which counts from 1. Layer 0 means the
// embedded tokens. The tensors are FP32 [B,S,Width]. [Cut] can cut a model at each of them if
// [BertMask] is a carried input.
func (Bert) Hidden(l int) string { return fmt.Sprintf("hidden.%d", l) }

// Sentences makes the model of a sentence encoder: an embedding, layers, the mean over a text's
// tokens, and scaling to length 1. It calls parameter for each trained parameter, with the name and
// shape of the published model.
func (c Bert) Sentences(parameter func(name string, shape ...int64) ([]float32, error)) (*onnxpb.ModelProto, error) {
	if c.Layers < 1 || c.Heads < 1 || c.Width < 1 || c.Width%c.Heads != 0 || c.Inner < 1 || c.Vocabulary < 1 || c.Positions < 1 || c.Types < 1 || c.Epsilon <= 0 {
		return nil, fmt.Errorf("BERT %+v: want every field above 0, and a width that is a multiple of the heads", c)
	}
	b := &bert{Bert: c, nodes: nodes{&onnxpb.GraphProto{Name: proto.String("bert")}}, parameter: parameter}
	batch := shape("B", "S")
	b.graph.Input = []*onnxpb.ValueInfoProto{value(BertIDs, onnxpb.TensorProto_INT64, batch), value(BertMask, onnxpb.TensorProto_INT64, batch)}
	b.graph.Output = []*onnxpb.ValueInfoProto{value(BertEmbedding, onnxpb.TensorProto_FLOAT, shape("B", c.Width))}
	b.constants()
	b.embed()
	for l := range c.Layers {
		b.layer(fmt.Sprintf("encoder.layer.%d.", l), c.Hidden(l), c.Hidden(l+1))
	}
	for l := range c.Layers + 1 {
		b.graph.ValueInfo = append(b.graph.ValueInfo, activation(c.Hidden(l), c.Width))
	}
	b.pool()
	if b.err != nil {
		return nil, b.err
	}
	return model(b.graph), nil
}

// bert builds the graph. It keeps the first error.
type bert struct {
	Bert
	nodes
	parameter func(name string, shape ...int64) ([]float32, error)
	err       error
}

func (b *bert) constants() {
	b.ints("axis1", 1)
	b.ints("axes12", 1, 2)
	b.ints("zero", 0)
	b.ints("heads", 0, 0, b.Heads, b.Width/b.Heads)
	b.ints("merge", 0, 0, b.Width)
	b.ints("qkv", b.Width, b.Width, b.Width)
	b.float("one", 1)
	b.float("far", 1e9)
	b.float("tiny", 1e-12)
	b.float("scale", float32(1/math.Sqrt(float64(b.Width/b.Heads))))
	b.node("Cast", []string{BertMask}, []string{"mask"}, intAttr("to", int64(onnxpb.TensorProto_FLOAT)))
	b.op("Sub", "mask.less", "mask", "one") // 0 for tokens, -1 for padding
	b.op("Mul", "mask.far", "mask.less", "far")
	b.op("Unsqueeze", "mask.bias", "mask.far", "axes12") // [B,1,1,S], added to the attention scores
}

// read returns a parameter. After an error, it returns zeros.
func (b *bert) read(name string, dims ...int64) []float32 {
	n := int64(1)
	for _, d := range dims {
		n *= d
	}
	if b.err == nil {
		var v []float32
		if v, b.err = b.parameter(name, dims...); b.err == nil && int64(len(v)) != n {
			b.err = fmt.Errorf("parameter %q: %d values, want %d for %v", name, len(v), n, dims)
		}
		if b.err == nil {
			return v
		}
	}
	return make([]float32, n)
}

func (b *bert) weights(name string, v []float32, dims ...int64) {
	raw := make([]byte, 0, 4*len(v))
	for _, x := range v {
		raw = binary.LittleEndian.AppendUint32(raw, math.Float32bits(x))
	}
	b.floats(name, raw, dims...)
}

// embed adds the embeddings of tokens, of positions, and of type 0, because a single text has no
// other type.
func (b *bert) embed() {
	const p = "embeddings."
	b.weights("words", b.read(p+"word_embeddings.weight", b.Vocabulary, b.Width), b.Vocabulary, b.Width)
	places := b.read(p+"position_embeddings.weight", b.Positions, b.Width)
	kind := b.read(p+"token_type_embeddings.weight", b.Types, b.Width)[:b.Width]
	sum := make([]float32, len(places))
	for i, v := range places {
		sum[i] = v + kind[i%len(kind)]
	}
	b.weights("places", sum, b.Positions, b.Width)
	b.op("Gather", "embed.words", "words", BertIDs)
	b.node("Shape", []string{BertIDs}, []string{"length"}, intAttr("start", 1), intAttr("end", 2))
	b.op("Slice", "embed.places", "places", "zero", "length", "zero")
	b.op("Add", "embed.sum", "embed.words", "embed.places")
	b.norm(b.Hidden(0), "embed.sum", p+"LayerNorm")
}

// layer adds a post-norm transformer layer: attention and a GELU network. The output of each is
// added to its input and then normalised.
func (b *bert) layer(p, x, out string) {
	b.attention(p+"attention.", x)
	b.linear(p+"attention.output.dense", p+"attention.all", b.Width, b.Width)
	b.op("Add", p+"sum1", p+"attention.output.dense", x)
	b.norm(p+"norm1", p+"sum1", p+"attention.output.LayerNorm")
	b.linear(p+"intermediate.dense", p+"norm1", b.Width, b.Inner)
	b.op("Gelu", p+"gelu", p+"intermediate.dense")
	b.linear(p+"output.dense", p+"gelu", b.Inner, b.Width)
	b.op("Add", p+"sum2", p+"output.dense", p+"norm1")
	b.norm(out, p+"sum2", p+"output.LayerNorm")
}

// attention computes p+"all" from x. One matrix product computes query, key and value.
func (b *bert) attention(p, x string) {
	var w, bias []float32
	for _, c := range []string{"query", "key", "value"} {
		w = append(w, b.read(p+"self."+c+".weight", b.Width, b.Width)...)
		bias = append(bias, b.read(p+"self."+c+".bias", b.Width)...)
	}
	b.product(p+"self", x, w, bias, b.Width, 3*b.Width)
	b.node("Split", []string{p + "self", "qkv"}, []string{p + "q0", p + "k0", p + "v0"}, intAttr("axis", 2))
	for _, c := range []string{"q", "k", "v"} {
		perm := []int64{0, 2, 1, 3}
		if c == "k" {
			perm = []int64{0, 2, 3, 1}
		}
		b.op("Reshape", p+c+"1", p+c+"0", "heads")
		b.node("Transpose", []string{p + c + "1"}, []string{p + c}, permAttr(perm...))
	}
	b.op("Mul", p+"q.scaled", p+"q", "scale")
	b.op("MatMul", p+"products", p+"q.scaled", p+"k")
	b.op("Add", p+"logits", p+"products", "mask.bias")
	b.node("Softmax", []string{p + "logits"}, []string{p + "weights"}, intAttr("axis", -1))
	b.op("MatMul", p+"heads", p+"weights", p+"v")
	b.node("Transpose", []string{p + "heads"}, []string{p + "side"}, permAttr(0, 2, 1, 3))
	b.op("Reshape", p+"all", p+"side", "merge")
}

// pool computes the mean over each text's tokens and scales it to length 1.
func (b *bert) pool() {
	b.op("Unsqueeze", "mask.row", "mask", "axis1")
	b.op("MatMul", "pool.sum", "mask.row", b.Hidden(b.Layers)) // [B,1,Width]
	b.op("Squeeze", "pool.sums", "pool.sum", "axis1")
	b.node("ReduceSum", []string{"mask", "axis1"}, []string{"pool.tokens"}, intAttr("keepdims", 1))
	b.op("Max", "pool.count", "pool.tokens", "tiny")
	b.op("Div", "pool.mean", "pool.sums", "pool.count")
	b.node("ReduceL2", []string{"pool.mean", "axis1"}, []string{"pool.norm"}, intAttr("keepdims", 1))
	b.op("Max", "pool.length", "pool.norm", "tiny")
	b.op("Div", BertEmbedding, "pool.mean", "pool.length")
}

func (b *bert) norm(out, x, parameter string) {
	b.weights(parameter+".weight", b.read(parameter+".weight", b.Width), b.Width)
	b.weights(parameter+".bias", b.read(parameter+".bias", b.Width), b.Width)
	b.node("LayerNormalization", []string{x, parameter + ".weight", parameter + ".bias"}, []string{out},
		intAttr("axis", -1), floatAttr("epsilon", b.Epsilon))
}

// linear adds the product with a parameter and gives the product the parameter's name.
func (b *bert) linear(name, x string, from, to int64) {
	b.product(name, x, b.read(name+".weight", to, from), b.read(name+".bias", to), from, to)
}

// product adds the product with a matrix w that is stored transposed, [to,from], as in PyTorch.
func (b *bert) product(out, x string, w, bias []float32, from, to int64) {
	turned := make([]float32, len(w))
	for i := range to {
		for j := range from {
			turned[j*to+i] = w[i*from+j]
		}
	}
	b.weights(out+".w", turned, from, to)
	b.weights(out+".b", bias, to)
	b.op("MatMul", out+".product", x, out+".w")
	b.op("Add", out, out+".product", out+".b")
}
