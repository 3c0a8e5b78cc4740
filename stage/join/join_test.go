package join

import (
	"bytes"
	"encoding/binary"
	"errors"
	"log/slog"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/stage/zygote"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// fake is a model of one output. It counts its runs.
type fake struct {
	inputs, outputs []zygote.Info
	compute         func(in []tensor.Tensor) ([]tensor.Tensor, error)
	rows            []int64 // of each run
}

func (f *fake) Inputs() []zygote.Info  { return f.inputs }
func (f *fake) Outputs() []zygote.Info { return f.outputs }
func (f *fake) Run(in []tensor.Tensor, _ ...string) ([]tensor.Tensor, error) {
	in = slices.Clone(in)
	// x comes first.
	slices.SortFunc(in, func(a, b tensor.Tensor) int { return strings.Compare(b.Name, a.Name) })
	if len(in) != len(f.inputs) || in[0].Datatype != "FP32" {
		return nil, errors.New("wrong inputs")
	}
	f.rows = append(f.rows, in[0].Shape[0])
	return f.compute(in)
}

func floats(name string, shape []int64, values ...float32) tensor.Tensor {
	t := tensor.Tensor{Name: name, Datatype: "FP32", Shape: shape}
	for _, v := range values {
		t.Data = binary.LittleEndian.AppendUint32(t.Data, math.Float32bits(v))
	}
	return t
}

func values(t tensor.Tensor) []float32 {
	out := make([]float32, len(t.Data)/4)
	for i := range out {
		out[i] = math.Float32frombits(binary.LittleEndian.Uint32(t.Data[4*i:]))
	}
	return out
}

// column returns inputs x of shape [n, 1].
func column(v ...float32) []tensor.Tensor {
	return []tensor.Tensor{floats("x", []int64{int64(len(v)), 1}, v...)}
}

// columns is a model of columns x to y of the same shape. f gets all rows.
func columns(f func(x []float32) ([]float32, error)) *fake {
	m := &fake{inputs: []zygote.Info{{Name: "x", Datatype: "FP32", Shape: []int64{-1, -1}}}, outputs: []zygote.Info{{Name: "y", Datatype: "FP32", Shape: []int64{-1, -1}}}}
	m.compute = func(in []tensor.Tensor) ([]tensor.Tensor, error) {
		y, err := f(values(in[0]))
		return []tensor.Tensor{floats("y", slices.Clone(in[0].Shape), y...)}, err
	}
	return m
}

func double(x []float32) ([]float32, error) {
	out := slices.Clone(x)
	for i := range out {
		if out[i] *= 2; x[i] < 0 {
			return nil, errors.New("negative")
		}
	}
	return out, nil
}

// got returns the values of each result, and nil for errors.
func got(results []Result) (out [][]float32) {
	for _, r := range results {
		if r.Err != nil {
			out = append(out, nil)
			continue
		}
		out = append(out, values(r.Outputs[0]))
	}
	return out
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func TestSetsRunTogetherInOrder(t *testing.T) {
	m := columns(double)
	r := New(m, quiet())
	for round, want := range [][]int64{{4, 1, 2, 1}, {4}} { // the first joined run is checked
		m.rows = nil
		results := r.Run([][]tensor.Tensor{column(1), column(2, 3), column(4)})
		if want := [][]float32{{2}, {4, 6}, {8}}; !reflect.DeepEqual(got(results), want) {
			t.Errorf("round %d: %v, want %v", round, got(results), want)
		}
		if !slices.Equal(m.rows, want) {
			t.Errorf("round %d: runs of %v rows, want %v", round, m.rows, want)
		}
		if s := results[1].Outputs[0].Shape; !slices.Equal(s, []int64{2, 1}) {
			t.Errorf("round %d: shape %v, want [2 1]", round, s)
		}
	}
}

func TestBadSetsFailAlone(t *testing.T) {
	m := columns(double)
	r := New(m, quiet())
	other := column(5)
	other[0].Datatype = "INT32"
	sets := [][]tensor.Tensor{column(1), column(-1), nil, other, column(4)}
	for round := range 3 {
		m.rows = nil
		results := r.Run(sets)
		if want := [][]float32{{2}, nil, nil, nil, {8}}; !reflect.DeepEqual(got(results), want) {
			t.Errorf("round %d: %v, want %v", round, got(results), want)
		}
		if results[1].Err.Error() != "negative" || !slices.Equal(m.rows, []int64{3, 1, 1, 1}) {
			t.Errorf("round %d: %v and runs of %v rows", round, results[1].Err, m.rows)
		}
	}
	// A bad set is no reason to stop joining.
	r.Run([][]tensor.Tensor{column(1), column(2)})
	m.rows = nil
	if r.Run([][]tensor.Tensor{column(1), column(2)}); !slices.Equal(m.rows, []int64{2}) {
		t.Errorf("after bad sets: runs of %v rows, want [2]", m.rows)
	}
}

// TestABadSetIsFoundByBisection checks the results, and that one bad set among n costs at most
// 2·log2(n) further runs once the model is known to be joinable.
func TestABadSetIsFoundByBisection(t *testing.T) {
	m := columns(double)
	r := New(m, quiet())
	r.Run([][]tensor.Tensor{column(1), column(2)}) // the check
	for _, n := range []int{2, 3, 8, 31, 32} {
		for bad := range n {
			sets := make([][]tensor.Tensor, n)
			want := make([][]float32, n)
			for i := range sets {
				sets[i], want[i] = column(float32(i)), []float32{2 * float32(i)}
			}
			sets[bad], want[bad] = column(-1), nil
			m.rows = nil
			results := r.Run(sets)
			if !reflect.DeepEqual(got(results), want) || results[bad].Err == nil {
				t.Errorf("set %d of %d is bad: %v, want %v", bad, n, got(results), want)
			}
			if most := 1 + 2*int(math.Ceil(math.Log2(float64(n)))); len(m.rows) > most {
				t.Errorf("set %d of %d is bad: %d runs %v, want at most %d", bad, n, len(m.rows), m.rows, most)
			}
		}
	}
}

func TestModelsWithoutABatchAxisRunAlone(t *testing.T) {
	share := func(x []float32) ([]float32, error) { // of the sum over the first axis
		sum, out := float32(0), slices.Clone(x)
		for _, v := range x {
			sum += v
		}
		for i := range out {
			out[i] /= sum
		}
		return out, nil
	}
	limited := func(x []float32) ([]float32, error) {
		if len(x) > 1 {
			return nil, errors.New("reshape: want 1 row")
		}
		return double(x)
	}
	fixed := columns(double)
	fixed.inputs[0].Shape = []int64{1, -1}
	reduced := columns(double)
	run := reduced.compute
	reduced.compute = func(in []tensor.Tensor) ([]tensor.Tensor, error) {
		out, err := run(in)
		out[0].Shape, out[0].Data = []int64{1, 1}, out[0].Data[:4]
		return out, err
	}
	for name, tc := range map[string]struct {
		m    *fake
		want [][]float32
	}{
		"a softmax of rows":   {columns(share), [][]float32{{1}, {1}}},
		"one row":             {columns(limited), [][]float32{{2}, {4}}},
		"an axis of length 1": {fixed, [][]float32{{2}, {4}}},
		"a reduction of rows": {reduced, [][]float32{{2}, {4}}},
	} {
		var log bytes.Buffer
		r := New(tc.m, slog.New(slog.NewTextHandler(&log, nil)))
		for range 3 {
			tc.m.rows = nil
			if results := got(r.Run([][]tensor.Tensor{column(1), column(2)})); !reflect.DeepEqual(results, tc.want) {
				t.Errorf("%s: %v, want %v", name, results, tc.want)
			}
		}
		if !slices.Equal(tc.m.rows, []int64{1, 1}) {
			t.Errorf("%s: at last, runs of %v rows, want [1 1]", name, tc.m.rows)
		}
		if n := strings.Count(log.String(), "not joined"); name != "an axis of length 1" && n != 1 {
			t.Errorf("%s: %d warnings, want one: %s", name, n, log.String())
		}
	}
}

// masked is a model that counts the values of x under the mask, per row, and doubles x.
func masked(leaks bool) *fake {
	m := &fake{
		inputs:  []zygote.Info{{Name: "x", Datatype: "FP32", Shape: []int64{-1, -1, 2}}, {Name: Mask, Datatype: "INT64", Shape: []int64{-1, -1}}},
		outputs: []zygote.Info{{Name: "y", Datatype: "FP32", Shape: []int64{-1, -1, 2}}, {Name: "n", Datatype: "FP32", Shape: []int64{-1, 1}}},
	}
	m.compute = func(in []tensor.Tensor) ([]tensor.Tensor, error) {
		rows, length := in[0].Shape[0], in[0].Shape[1]
		y, _ := double(values(in[0]))
		n := make([]float32, rows)
		for r := range rows {
			for k := range length {
				n[r] += float32(in[1].Data[8*(r*length+k)])
			}
			if leaks {
				n[r] = float32(length)
			}
		}
		return []tensor.Tensor{floats("y", []int64{rows, length, 2}, y...), floats("n", []int64{rows, 1}, n...)}, nil
	}
	return m
}

// tokens returns the inputs of masked: a text of this length.
func tokens(length int, v float32) []tensor.Tensor {
	mask := tensor.Tensor{Name: Mask, Datatype: "INT64", Shape: []int64{1, int64(length)}, Data: bytes.Repeat([]byte{1, 0, 0, 0, 0, 0, 0, 0}, length)}
	return []tensor.Tensor{mask, floats("x", []int64{1, int64(length), 2}, slices.Repeat([]float32{v}, 2*length)...)}
}

func TestShorterTextsArePaddedUnderAMask(t *testing.T) {
	sets := [][]tensor.Tensor{tokens(8, 1), tokens(2, 2), tokens(6, 3), tokens(7, 4), tokens(2, 5)}
	for name, tc := range map[string]struct {
		m    *fake
		want []int64 // rows of the runs once the model is known
	}{
		"a model that heeds the mask": {masked(false), []int64{2, 3}},
		"one that does not":           {masked(true), []int64{2, 1, 1, 1}}, // equal lengths run together
	} {
		m, want := tc.m, tc.want
		r := New(m, quiet())
		for range 3 {
			m.rows = nil
			for i, res := range r.Run(sets) {
				length, v := int(sets[i][0].Shape[1]), float32(i+1)
				if res.Err != nil {
					t.Fatal(res.Err)
				}
				y, n := res.Outputs[0], res.Outputs[1]
				if !slices.Equal(y.Shape, []int64{1, int64(length), 2}) || !slices.Equal(values(y), slices.Repeat([]float32{2 * v}, 2*length)) || values(n)[0] != float32(length) {
					t.Errorf("%s, set %d: %v %v and %v, want %d values of %g", name, i, y.Shape, values(y), values(n), 2*length, 2*v)
				}
			}
		}
		if slices.Sort(m.rows); !slices.Equal(m.rows, slices.Sorted(slices.Values(want))) {
			t.Errorf("%s: runs of %v rows, want %v", name, m.rows, want)
		}
	}
}

func TestJoinedRunsAreBounded(t *testing.T) {
	m := columns(double)
	r := New(m, quiet())
	wide := []tensor.Tensor{{Name: "x", Datatype: "FP32", Shape: []int64{1, maxBytes / 16}, Data: make([]byte, maxBytes/4)}}
	r.Run(slices.Repeat([][]tensor.Tensor{wide}, 2))
	m.rows = nil
	if r.Run(slices.Repeat([][]tensor.Tensor{wide}, 6)); !slices.Equal(m.rows, []int64{4, 2}) {
		t.Errorf("runs of %v rows, want [4 2]", m.rows)
	}
}

func TestDifferenceOfHalves(t *testing.T) {
	for bits, want := range map[uint16]float64{0: 0, 0x3c00: 1, 0xc000: -2, 0x3555: 0.333251953125, 1: math.Ldexp(1, -24), 0x7bff: 65504, 0x7c00: math.Inf(1), 0xfc00: math.Inf(-1)} {
		if v := half(bits); v != want {
			t.Errorf("%#x is %g, want %g", bits, v, want)
		}
	}
	if !math.IsNaN(half(0x7e00)) {
		t.Error("0x7e00 is a number")
	}
	of := func(d tensor.Datatype, data ...byte) []tensor.Tensor {
		return []tensor.Tensor{{Name: "y", Datatype: d, Shape: []int64{1}, Data: data}}
	}
	for name, tc := range map[string]struct {
		got, want []tensor.Tensor
		differ    bool
	}{
		"halves, rounded":   {of("FP16", 0x01, 0x3c), of("FP16", 0, 0x3c), false},
		"halves":            {of("FP16", 0, 0x3d), of("FP16", 0, 0x3c), true},
		"BF16":              {of("BF16", 0x80, 0x3f), of("BF16", 0x90, 0x3f), true},
		"integers":          {of("INT8", 1), of("INT8", 2), true},
		"NaN in both":       {of("FP32", 0, 0, 0xc0, 0x7f), of("FP32", 0, 0, 0xc0, 0x7f), false},
		"NaN in one":        {of("FP32", 0, 0, 0xc0, 0x7f), of("FP32", 0, 0, 0, 0), true},
		"double":            {of("FP64", 0, 0, 0, 0, 0, 0, 0xf0, 0x3f), of("FP64", 1, 0, 0, 0, 0, 0, 0xf0, 0x3f), false},
		"number of outputs": {nil, of("INT8", 2), true},
	} {
		if why := difference(tc.got, tc.want); (why != "") != tc.differ {
			t.Errorf("%s: %q, want a difference: %v", name, why, tc.differ)
		}
	}
}
