// Package synthetic makes the parameters of a transformer of a chosen size, cut into stages. The
// parameters are random numbers: the model can only show how long loading, placing and computing
// take. Command weights writes them, and functions/torch/transformer computes with them.
package synthetic

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/stagecoach-serving/stagecoach/tensor/safetensors"
)

// Limits of a transformer.
const (
	head       = 64      // width of a head of attention
	alphabet   = 256     // tokens are bytes
	leastStage = 1 << 20 // bytes
	mostStage  = 1 << 40
	mostStages = 64
)

// Transformer is the shape of a decoder whose tokens are bytes: an embedding, equal blocks, a norm
// and a projection onto the next byte.
type Transformer struct {
	Stages int
	Blocks int // per stage
	Width  int // a multiple of 64, the width of a head
	Inner  int // width of a block's network
	Dtype  safetensors.Dtype
}

// Of returns a transformer with this number of stages, of about stageBytes each. From 4 MB on, the
// size is within 1 % of stageBytes. dtype is F32 or BF16.
func Of(stages int, stageBytes int64, dtype safetensors.Dtype) (Transformer, error) {
	if stages < 1 || stages > mostStages || stageBytes < leastStage || stageBytes > mostStage {
		return Transformer{}, fmt.Errorf("%d stages of %d bytes, want 1 to %d of %d to %d", stages, stageBytes, mostStages, leastStage, int64(mostStage))
	}
	if dtype != "F32" && dtype != "BF16" {
		return Transformer{}, fmt.Errorf("dtype %q, want F32 or BF16", dtype)
	}
	t := Transformer{Stages: stages, Width: 128, Dtype: dtype}
	elements := float64(stageBytes) / float64(dtype.Bits()/8)
	// A stage has at least five blocks.
	for w := 256; w <= 8192 && 60*float64(w)*float64(w) <= elements; w *= 2 {
		t.Width = w
	}
	w := float64(t.Width)
	t.Blocks = max(1, int(math.Round(elements/(12*w*w))))
	perBlock := elements / float64(t.Blocks)
	// A block has (4W+9)W + (2W+1)I elements. I, which is near 4W, is chosen to reach the wanted size.
	t.Inner = max(8, 8*int(math.Round((perBlock-w*(4*w+9))/(2*w+1)/8)))
	return t, nil
}

// tensor is a tensor without its numbers.
type tensor struct {
	name  string
	shape []int64
	value float64 // of all elements if reach is 0
	reach float64 // otherwise, elements are uniform in ±reach
}

// tensors returns the tensors of a stage, counted from 0.
func (t Transformer) tensors(stage int) []tensor {
	w, inner := int64(t.Width), int64(t.Inner)
	var all []tensor
	norm := func(name string) {
		all = append(all, tensor{name: name + ".weight", shape: []int64{w}, value: 1}, tensor{name: name + ".bias", shape: []int64{w}})
	}
	linear := func(name string, from, to int64) {
		// The variance is 1/from, so that the output is as large as the input.
		reach := math.Sqrt(3 / float64(from))
		all = append(all, tensor{name: name + ".weight", shape: []int64{to, from}, reach: reach}, tensor{name: name + ".bias", shape: []int64{to}, reach: 0.1})
	}
	if stage == 0 {
		all = append(all, tensor{name: "embedding.weight", shape: []int64{alphabet, w}, reach: math.Sqrt(3)})
	}
	for b := stage * t.Blocks; b < (stage+1)*t.Blocks; b++ {
		p := "blocks." + strconv.Itoa(b) + "."
		norm(p + "norm1")
		linear(p+"attention", w, 3*w)
		linear(p+"merge", w, w)
		norm(p + "norm2")
		linear(p+"inner", w, inner)
		linear(p+"outer", inner, w)
	}
	if stage == t.Stages-1 {
		norm("norm")
		linear("head", w, alphabet)
	}
	return all
}

// Bytes returns the size of the parameters of a stage, counted from 0, in bytes.
func (t Transformer) Bytes(stage int) int64 {
	var elements int64
	for _, p := range t.tensors(stage) {
		n := int64(1)
		for _, d := range p.shape {
			n *= d
		}
		elements += n
	}
	return elements * int64(t.Dtype.Bits()/8)
}

// Write writes one file per stage, DIR/1.safetensors and so on. Together, the files are the whole
// model. The numbers depend on seed. Write needs only some megabytes of memory, also for large
// files. After each file, it calls told with the file's size in bytes, or with 0 if the file
// existed already and was kept.
func (t Transformer) Write(ctx context.Context, dir string, seed uint64, told func(path string, done int64)) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for stage := range t.Stages {
		path := filepath.Join(dir, strconv.Itoa(stage+1)+".safetensors")
		done := t.Bytes(stage)
		if t.written(path, stage, seed) {
			done = 0
		} else if err := t.write(ctx, path, stage, seed); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		told(path, done)
	}
	return nil
}

// metadata returns a file's metadata. Two files with the same metadata have the same numbers.
func (t Transformer) metadata(stage int, seed uint64) map[string]string {
	return map[string]string{
		"format":    "pt",
		"synthetic": "random numbers: this model has learnt nothing",
		"stage":     fmt.Sprintf("%d of %d", stage+1, t.Stages),
		"shape":     fmt.Sprintf("%+v", t),
		"seed":      strconv.FormatUint(seed, 10),
	}
}

func (t Transformer) written(path string, stage int, seed uint64) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return false
	}
	file, err := safetensors.Read(f, info.Size())
	return err == nil && maps.Equal(file.Metadata(), t.metadata(stage, seed))
}

// write writes a stage's file, under another name until it is complete.
func (t Transformer) write(ctx context.Context, path string, stage int, seed uint64) error {
	f, err := os.Create(path + ".part")
	if err != nil {
		return err
	}
	var sources []safetensors.Source
	for _, p := range t.tensors(stage) {
		sources = append(sources, safetensors.Source{Name: p.name, Dtype: t.Dtype, Shape: p.shape, Data: newNumbers(ctx, p, t.Dtype, seed)})
	}
	w := bufio.NewWriterSize(f, 1<<20)
	err = safetensors.Write(w, t.metadata(stage, seed), sources)
	if err == nil {
		err = w.Flush()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return errors.Join(err, os.Remove(path+".part"))
	}
	return os.Rename(path+".part", path)
}

// numbers is a reader of a tensor's elements, which depend only on its name and on seed.
type numbers struct {
	ctx   context.Context // Read has no other way to get a context
	t     tensor
	dtype safetensors.Dtype
	left  int64 // bytes
	rnd   *rand.ChaCha8
}

func newNumbers(ctx context.Context, t tensor, dtype safetensors.Dtype, seed uint64) *numbers {
	left := int64(dtype.Bits() / 8)
	for _, d := range t.shape {
		left *= d
	}
	key := sha256.Sum256(binary.LittleEndian.AppendUint64([]byte(t.name), seed))
	return &numbers{ctx, t, dtype, left, rand.NewChaCha8(key)}
}

// Read fills p with complete elements.
func (n *numbers) Read(p []byte) (int, error) {
	if n.left == 0 {
		return 0, io.EOF
	}
	if err := n.ctx.Err(); err != nil {
		return 0, err
	}
	p = p[:min(n.left, int64(len(p)&^3))]
	if len(p) == 0 {
		return 0, io.ErrShortBuffer
	}
	n.left -= int64(len(p))
	_, _ = n.rnd.Read(p) // it never fails
	switch n.dtype {
	case "F32":
		reach := float32(n.t.reach / math.MaxInt32)
		for i := 0; i+4 <= len(p); i += 4 {
			v := float32(int32(binary.LittleEndian.Uint32(p[i:]))) * reach
			binary.LittleEndian.PutUint32(p[i:], math.Float32bits(v+float32(n.t.value)))
		}
	case "BF16": // the upper half of an F32
		reach := float32(n.t.reach / math.MaxInt16)
		for i := 0; i+2 <= len(p); i += 2 {
			v := float32(int16(binary.LittleEndian.Uint16(p[i:]))) * reach
			binary.LittleEndian.PutUint16(p[i:], uint16(math.Float32bits(v+float32(n.t.value))>>16))
		}
	}
	return len(p), nil
}

// Sizes returns the size of all stages' parameters, and those of the smallest and the largest
// stage, in bytes.
func (t Transformer) Sizes() (all, least, most int64) {
	var sizes []int64
	for stage := range t.Stages {
		sizes = append(sizes, t.Bytes(stage))
		all += sizes[stage]
	}
	return all, slices.Min(sizes), slices.Max(sizes)
}

// ParseSize parses a number of bytes, such as 5.4G. Units are powers of 1000, as for disks.
func ParseSize(s string) (int64, error) {
	number, unit := strings.TrimSuffix(s, "B"), 1.0
	switch {
	case strings.HasSuffix(number, "M"):
		number, unit = number[:len(number)-1], 1e6
	case strings.HasSuffix(number, "G"):
		number, unit = number[:len(number)-1], 1e9
	}
	v, err := strconv.ParseFloat(number, 64)
	if err != nil || !(v > 0 && v*unit < math.MaxInt64) {
		return 0, fmt.Errorf("%q, want bytes, such as 700M or 5.4G", s)
	}
	return int64(v * unit), nil
}
