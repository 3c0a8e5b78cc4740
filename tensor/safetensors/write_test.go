package safetensors_test

import (
	"bytes"
	"errors"
	"io"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/tensor/safetensors"
)

// sources returns the tensors of f, whose bytes are b, as sources for Write.
func sources(b []byte, f *safetensors.File) []safetensors.Source {
	var all []safetensors.Source
	for _, i := range f.Tensors() {
		all = append(all, safetensors.Source{Name: i.Name, Dtype: i.Dtype, Shape: i.Shape, Data: bytes.NewReader(b[i.Offset : i.Offset+i.Bytes])})
	}
	return all
}

// names returns the names of a file's tensors, sorted.
func names(f *safetensors.File) []string {
	var all []string
	for _, i := range f.Tensors() {
		all = append(all, i.Name)
	}
	slices.Sort(all)
	return all
}

// aligned reports whether a tensor's elements can be used without a copy when the file is mapped.
func aligned(i safetensors.Info) bool {
	size := int64(max(1, i.Dtype.Bits()/8))
	if i.Dtype == "C64" { // two F32
		size = 4
	}
	return i.Offset%size == 0
}

// rewritten writes the tensors of a file again, and checks that the result has the same tensors,
// aligned.
func rewritten(t *testing.T, b []byte, f *safetensors.File) {
	t.Helper()
	var out bytes.Buffer
	if err := safetensors.Write(&out, f.Metadata(), sources(b, f)); err != nil {
		t.Fatal(err)
	}
	again, err := read(out.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(names(again), names(f)) || !maps.Equal(again.Metadata(), f.Metadata()) {
		t.Fatalf("%q with %v, want %q with %v", names(again), again.Metadata(), names(f), f.Metadata())
	}
	for _, i := range f.Tensors() {
		got, err := again.Info(i.Name)
		if err != nil || got.Dtype != i.Dtype || !slices.Equal(got.Shape, i.Shape) || !aligned(got) {
			t.Fatalf("%+v, %v, want %+v aligned", got, err, i)
		}
		if !bytes.Equal(out.Bytes()[got.Offset:got.Offset+got.Bytes], b[i.Offset:i.Offset+i.Bytes]) {
			t.Fatalf("%s: other bytes", i.Name)
		}
	}
}

// TestWrittenFilesAreReadBack writes generated files, reads them, and writes and reads the result
// again.
func TestWrittenFilesAreReadBack(t *testing.T) {
	dtypes := []safetensors.Dtype{"BOOL", "U8", "I16", "BF16", "F32", "F64", "C64", "F8_E4M3", "F4", "F6_E2M3"}
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		var tensors []safetensors.Source
		for i := range rnd.IntN(12) {
			s := safetensors.Source{Name: strconv.Quote(strings.Repeat("é\\", rnd.IntN(3))) + strconv.Itoa(i), Dtype: dtypes[rnd.IntN(len(dtypes))]}
			bits := int64(s.Dtype.Bits())
			for range rnd.IntN(4) {
				s.Shape = append(s.Shape, int64(4*rnd.IntN(4)))
				bits *= s.Shape[len(s.Shape)-1]
			}
			if bits%8 != 0 {
				continue
			}
			data := make([]byte, bits/8)
			for j := range data {
				data[j] = byte(rnd.Uint32())
			}
			s.Data = bytes.NewReader(data)
			tensors = append(tensors, s)
		}
		var out bytes.Buffer
		if err := safetensors.Write(&out, map[string]string{"format": "pt"}, tensors); err != nil {
			t.Fatal(err)
		}
		f, err := read(out.Bytes())
		if err != nil {
			t.Fatal(err)
		}
		if len(names(f)) != len(tensors) {
			t.Fatalf("%q, want %d tensors", names(f), len(tensors))
		}
		if i := f.Tensors(); len(i) > 0 && i[0].Offset%64 != 0 {
			t.Fatalf("the data begin at %d, want a multiple of 64", i[0].Offset)
		}
		rewritten(t, out.Bytes(), f)
	}
}

func TestWriteRefuses(t *testing.T) {
	one := func(name string, dtype safetensors.Dtype, data string, shape ...int64) safetensors.Source {
		return safetensors.Source{Name: name, Dtype: dtype, Shape: shape, Data: strings.NewReader(data)}
	}
	broken := one("a", "U8", "", 1)
	broken.Data = io.MultiReader(strings.NewReader("x"), failing{})
	for name, tc := range map[string]struct {
		tensors []safetensors.Source
		want    string
	}{
		"too little":   {[]safetensors.Source{one("a", "F32", "abcdefg", 2)}, `"a": EOF, want 8 bytes`},
		"too much":     {[]safetensors.Source{one("a", "U8", "abc", 2)}, `"a": more than the 2 bytes`},
		"cannot read":  {[]safetensors.Source{broken}, "no more tape"},
		"no such type": {[]safetensors.Source{one("a", "F128", "")}, `dtype "F128"`},
		"metadata":     {[]safetensors.Source{one("__metadata__", "U8", "a")}, "__metadata__"},
		"twice":        {[]safetensors.Source{one("a", "U8", "a"), one("b", "U8", "a"), one("a", "I16", "ab")}, `"a": it occurs twice`},
		"negative":     {[]safetensors.Source{one("a", "U8", "", -1)}, "shape [-1]"},
		"half bytes":   {[]safetensors.Source{one("a", "F4", "a", 3)}, "whole bytes"},
		"too large":    {[]safetensors.Source{one("a", "U8", "a", 1<<60)}, "at most"},
		"no Unicode":   {[]safetensors.Source{one("\xff", "U8", "a")}, "want Unicode"},
		"65 dims":      {[]safetensors.Source{one("a", "U8", "a", slices.Repeat([]int64{1}, 65)...)}, "more than 64"},
	} {
		if err := safetensors.Write(io.Discard, nil, tc.tensors); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: error %v, want %q in it", name, err, tc.want)
		}
	}
	if err := safetensors.Write(failing{}, nil, nil); !errors.Is(err, errTape) {
		t.Errorf("a failing writer: error %v", err)
	}
}

var errTape = errors.New("no more tape")

type failing struct{}

func (failing) Read([]byte) (int, error)  { return 0, errTape }
func (failing) Write([]byte) (int, error) { return 0, errTape }
