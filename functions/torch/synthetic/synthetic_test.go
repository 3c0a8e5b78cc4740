package synthetic

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/tensor/safetensors"
)

func TestSizeIsWithinOnePercent(t *testing.T) {
	for _, bytes := range []int64{1 << 20, 4e6, 8e6, 100e6, 700e6, 1e9, 2.7e9, 5.4e9, 40e9} {
		for _, dtype := range []safetensors.Dtype{"F32", "BF16"} {
			shape, err := Of(8, bytes, dtype)
			if err != nil {
				t.Fatal(err)
			}
			got := shape.Bytes(3)
			if far := math.Abs(float64(got)/float64(bytes) - 1); far > 0.01 || shape.Width%head != 0 || shape.Inner < 2*shape.Width || shape.Inner > 6*shape.Width {
				t.Errorf("%d bytes of %s: %+v of %d bytes, want them within 1 %%, and a network about four times as wide", bytes, dtype, shape, got)
			}
		}
	}
	for want, of := range map[string]func() (Transformer, error){
		"0 stages":    func() (Transformer, error) { return Of(0, 8e6, "F32") },
		"of 10 bytes": func() (Transformer, error) { return Of(8, 10, "F32") },
		`dtype "F64"`: func() (Transformer, error) { return Of(8, 8e6, "F64") },
	} {
		if _, err := of(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q in it", err, want)
		}
	}
}

// write writes a transformer and returns its files.
func write(t *testing.T, shape Transformer, seed uint64) [][]byte {
	t.Helper()
	dir := t.TempDir()
	var all [][]byte
	err := shape.Write(t.Context(), dir, seed, func(path string, done int64) {
		b, err := os.ReadFile(path)
		if err != nil || done == 0 {
			t.Fatal(done, err)
		}
		all = append(all, b)
	})
	if err != nil {
		t.Fatal(err)
	}
	m, err := safetensors.Inspect(dir) // together, the files are a model
	if err != nil || len(m.Parts) != shape.Stages {
		t.Fatalf("%+v, %v", m, err)
	}
	return all
}

func TestWriteDependsOnTheSeed(t *testing.T) {
	for _, dtype := range []safetensors.Dtype{"F32", "BF16"} {
		shape, err := Of(2, 1<<20, dtype)
		if err != nil {
			t.Fatal(err)
		}
		files := write(t, shape, 7)
		for i, b := range files {
			f, err := safetensors.Read(bytes.NewReader(b), int64(len(b)))
			if err != nil {
				t.Fatal(err)
			}
			var sum int64
			for _, p := range f.Tensors() {
				sum += p.Bytes
			}
			if sum != shape.Bytes(i) || f.Metadata()["stage"] != fmt.Sprintf("%d of 2", i+1) || !strings.Contains(f.Metadata()["synthetic"], "nothing") {
				t.Errorf("stage %d: %d bytes, metadata %v, want %d bytes", i+1, sum, f.Metadata(), shape.Bytes(i))
			}
			check(t, f, fmt.Sprintf("blocks.%d.attention.weight", i*shape.Blocks), 0, 1/math.Sqrt(float64(shape.Width)))
			check(t, f, fmt.Sprintf("blocks.%d.norm1.weight", i*shape.Blocks), 1, 0)
		}
		if again := write(t, shape, 7); !bytes.Equal(files[1], again[1]) {
			t.Error("the same seed gives other numbers")
		}
		if other := write(t, shape, 8); bytes.Equal(files[1], other[1]) {
			t.Error("another seed gives the same numbers")
		}
	}
}

// check checks the mean and the deviation of a tensor's elements.
func check(t *testing.T, f *safetensors.File, name string, mean, deviation float64) {
	t.Helper()
	p, err := f.Tensor(name)
	if err != nil {
		t.Fatal(err)
	}
	var sum, squares, n float64
	for size := p.Datatype.Size(); len(p.Data) > 0; p.Data = p.Data[size:] {
		bits := uint32(binary.LittleEndian.Uint16(p.Data)) << 16
		if size == 4 {
			bits = binary.LittleEndian.Uint32(p.Data)
		}
		v := float64(math.Float32frombits(bits))
		sum, squares, n = sum+v, squares+v*v, n+1
	}
	got := math.Sqrt(max(0, squares/n-sum/n*sum/n))
	if math.Abs(sum/n-mean) > 0.01*(1+mean) || math.Abs(got-deviation) > 0.02*deviation {
		t.Errorf("%s: mean %g, standard deviation %g, want %g and %g", name, sum/n, got, mean, deviation)
	}
}

func TestWriteKeepsExistingFiles(t *testing.T) {
	dir := t.TempDir()
	shape, err := Of(2, 1<<20, "F32")
	if err != nil {
		t.Fatal(err)
	}
	told := func() (written []int64) {
		t.Helper()
		if err := shape.Write(t.Context(), dir, 1, func(_ string, done int64) { written = append(written, done) }); err != nil {
			t.Fatal(err)
		}
		return written
	}
	if got := told(); got[0] == 0 || got[1] == 0 {
		t.Errorf("the first time %d bytes", got)
	}
	if err := os.Truncate(filepath.Join(dir, "2.safetensors"), 1000); err != nil {
		t.Fatal(err)
	}
	if got := told(); got[0] != 0 || got[1] == 0 {
		t.Errorf("with half a file %d bytes, want only that file written again", got)
	}
	ended, end := context.WithCancel(t.Context())
	end()
	if err := shape.Write(ended, dir, 2, func(string, int64) {}); !errors.Is(err, context.Canceled) {
		t.Errorf("after its end: error %v", err)
	}
	if left, err := filepath.Glob(filepath.Join(dir, "*.part")); len(left) > 0 || err != nil {
		t.Errorf("%v is left, %v", left, err)
	}
}
