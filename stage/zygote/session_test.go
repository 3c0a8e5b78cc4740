package zygote_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/internal/third_party/onnx/onnxpb"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/stage/zygote"
	"github.com/stagecoach-serving/stagecoach/tensor"
	"github.com/stagecoach-serving/stagecoach/tensor/onnx"
)

// encoder writes a small model. Its matrix products are large enough for several threads.
func encoder(t *testing.T) string {
	t.Helper()
	path, _, err := onnx.Synthetic(t.TempDir(), onnx.Encoder{Layers: 2, Width: 320, Heads: 5}, 1)
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// sequence returns an input of the encoder with n positions.
func sequence(n int64) tensor.Tensor {
	t := tensor.Tensor{Name: "x", Datatype: "FP32", Shape: []int64{1, n, 320}}
	for i := range n * 320 {
		t.Data = binary.LittleEndian.AppendUint32(t.Data, math.Float32bits(float32(i*2654435761%1000)/500-1))
	}
	return t
}

// cold computes with an ordinary session.
func cold(t *testing.T, model string, threads int, in tensor.Tensor) tensor.Tensor {
	t.Helper()
	s, err := zygote.Open(zygote.Options{Library: library(t), Model: model, Threads: threads, Start: threads})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	out, err := s.Run([]tensor.Tensor{in})
	if err != nil {
		t.Fatal(err)
	}
	return out[0]
}

func same(t *testing.T, got []tensor.Tensor, want tensor.Tensor) {
	t.Helper()
	if len(got) != 1 || got[0].Name != want.Name || got[0].Datatype != want.Datatype || !slices.Equal(got[0].Shape, want.Shape) {
		t.Fatalf("%d outputs %.200v, want %s %s %v", len(got), got, want.Name, want.Datatype, want.Shape)
	}
	for i := 0; i < len(want.Data); i += 4 {
		g, w := number(got[0].Data[i:]), number(want.Data[i:])
		if math.Abs(float64(g-w)) > 1e-5 || w != w {
			t.Fatalf("value %d is %g, want %g as from a cold start", i/4, g, w)
		}
	}
}

func number(b []byte) float32 { return math.Float32frombits(binary.LittleEndian.Uint32(b)) }

// TestForkedEqualsCold compares a forked replica with an ordinary process, for several numbers of
// threads.
func TestForkedEqualsCold(t *testing.T) {
	model, in := encoder(t), sequence(512)
	want := cold(t, model, 1, in)
	same(t, []tensor.Tensor{cold(t, model, 3, in)}, want)
	k := start(t, wire.EnvORT+"="+library(t), wire.EnvModel+"="+model, wire.EnvPoolThreads+"=3")
	if ready := k.Want(wire.ZygoteReady); ready.Threads != 2 {
		t.Errorf("%d recorded threads, want 2: the third is the caller", ready.Threads)
	}
	for _, tc := range []struct {
		threads uint16
		pool    int
	}{{0, 0}, {1, 0}, {2, 1}, {3, 2}, {9, 2}} {
		r := k.fork(tc.threads)
		a := r.do(question{Do: "run", Inputs: []tensor.Tensor{in}})
		if a.Error != "" {
			t.Fatalf("%d threads: %s", tc.threads, a.Error)
		}
		same(t, a.Tensors, want)
		if a.Pool != tc.pool {
			t.Errorf("%d threads ordered of 3: %d in the pool beside the caller, want %d", tc.threads, a.Pool, tc.pool)
		}
		for range 100 { // on a loaded machine, a thread may come too late for a run
			if a.Busy == tc.pool {
				break
			}
			a = r.do(question{Do: "run", Inputs: []tensor.Tensor{in}})
		}
		if a.Busy != tc.pool {
			t.Errorf("%d threads ordered of 3: %d of the pool computed, want %d", tc.threads, a.Busy, tc.pool)
		}
	}
}

// TestThreadsAreAdded adds threads to a forked replica, and to one that has opened the model
// itself.
func TestThreadsAreAdded(t *testing.T) {
	model, in := encoder(t), sequence(512)
	want := cold(t, model, 1, in)
	k := start(t, wire.EnvORT+"="+library(t), wire.EnvModel+"="+model, wire.EnvPoolThreads+"=3")
	k.Want(wire.ZygoteReady)
	for name, r := range map[string]*replica{
		"forked":  k.fork(1),
		"process": process(t, zygote.Options{Library: library(t), Model: model, Threads: 3, Start: 1}),
	} {
		t.Run(name, func(t *testing.T) {
			for _, tc := range []struct{ total, threads int }{{1, 1}, {2, 2}, {2, 2}, {1, 2}, {0, 2}, {9, 3}, {65535, 3}} {
				a := r.do(question{Do: "add threads", Total: tc.total})
				if a.Error != "" || a.Threads != tc.threads {
					t.Errorf("asked for %d threads: %d and %q, want %d", tc.total, a.Threads, a.Error, tc.threads)
				}
				a = r.do(question{Do: "run", Inputs: []tensor.Tensor{in}})
				same(t, a.Tensors, want)
				for range 100 { // on a loaded machine, a thread may come too late for a run
					if a.Busy == tc.threads-1 {
						break
					}
					a = r.do(question{Do: "run", Inputs: []tensor.Tensor{in}})
				}
				if a.Pool != tc.threads-1 || a.Busy != tc.threads-1 {
					t.Errorf("asked for %d threads: %d in the pool beside the caller, %d computed, want %d", tc.total, a.Pool, a.Busy, tc.threads-1)
				}
			}
		})
	}
}

func TestSessionsOfAChild(t *testing.T) {
	model := encoder(t)
	k := start(t, wire.EnvORT+"="+library(t), wire.EnvModel+"="+model, wire.EnvPoolThreads+"=2")
	k.Want(wire.ZygoteReady)
	for _, threads := range []uint16{1, 2} {
		r := k.fork(threads)
		in := []tensor.Tensor{sequence(32)}
		if a := r.do(question{Do: "run in parallel", Inputs: in}); a.Error != "" {
			t.Errorf("%d threads, from several goroutines: %s", threads, a.Error)
		}
		a := r.do(question{Do: "run", Inputs: []tensor.Tensor{{Name: "x", Datatype: "FP32", Shape: []int64{1, 2, 3}}}})
		if want := "input \"x\": got FP32 [1,2,3], want FP32 [-1,-1,320]"; !strings.Contains(a.Error, want) || !strings.Contains(a.Error, model) {
			t.Errorf("%d threads, wrong shape: error %q, want %q and the model in it", threads, a.Error, want)
		}
		if a := r.do(question{Do: "close", Inputs: in}); !strings.Contains(a.Error, zygote.ErrClosed.Error()) {
			t.Errorf("%d threads, after Close: error %q", threads, a.Error)
		}
	}
}

// TestPrepackedRealModelsCompute runs real models from their pre-packed form. These have many small
// weights, which must stay aligned.
func TestPrepackedRealModelsCompute(t *testing.T) {
	for _, name := range []string{"rec.onnx", "det.onnx"} {
		model := proctest.Built(t, "models", "ocr", name)
		in := tensor.Tensor{Name: "x", Datatype: "FP32", Shape: []int64{1, 3, 64, 320}, Data: make([]byte, 4*3*64*320)}
		if name == "rec.onnx" {
			in.Shape[2], in.Data = 48, in.Data[:4*3*48*320]
		}
		want := cold(t, model, 1, in)
		k := start(t, wire.EnvORT+"="+library(t), wire.EnvModel+"="+model, wire.EnvPoolThreads+"=2", wire.EnvPrepacked+"="+t.TempDir())
		k.Want(wire.ZygoteReady)
		a := k.fork(2).do(question{Do: "run", Inputs: []tensor.Tensor{in}})
		if a.Error != "" {
			t.Fatalf("%s: %s", name, a.Error)
		}
		same(t, a.Tensors, want)
	}
}

// TestSecondStartMapsPrepackedFiles starts twice with the same folder. The first start writes the
// files, and the second only maps them.
func TestSecondStartMapsPrepackedFiles(t *testing.T) {
	model, in, dir := encoder(t), sequence(64), t.TempDir()
	want := cold(t, model, 1, in)
	env := []string{wire.EnvORT + "=" + library(t), wire.EnvModel + "=" + model, wire.EnvPoolThreads + "=2", wire.EnvPrepacked + "=" + dir}
	var written time.Time
	for try := range 2 {
		k := start(t, env...)
		if ready := k.Want(wire.ZygoteReady); ready.Threads != 1 {
			t.Errorf("%d recorded threads, want 1", ready.Threads)
		}
		a := k.fork(2).do(question{Do: "run", Inputs: []tensor.Tensor{in}})
		same(t, a.Tensors, want)
		if !slices.EqualFunc(a.Inputs, []string{"FP32 [-1,-1,320]"}, func(i zygote.Info, s string) bool { return i.String() == s }) {
			t.Errorf("inputs %v", a.Inputs)
		}
		files, err := filepath.Glob(dir + "/model.onnx.ort-1.24.*.prepacked/*")
		all, _ := filepath.Glob(dir + "/*")
		if err != nil || len(files) != 2 || len(all) != 1 {
			t.Fatalf("start %d: files %q of %q, want model.onnx and weights.bin in one folder", try+1, files, all)
		}
		maps, err := os.ReadFile("/proc/" + strconv.Itoa(a.PID) + "/maps")
		if err != nil || !strings.Contains(string(maps), files[1]) {
			t.Errorf("start %d: the child does not map %s (error %v)", try+1, files[1], err)
		}
		info, err := os.Stat(dir)
		if err != nil {
			t.Fatal(err)
		}
		if try == 1 && !info.ModTime().Equal(written) {
			t.Error("the second start wrote into the folder")
		}
		written = info.ModTime()
		if s := k.Stderr.String(); s != "" {
			t.Errorf("start %d: stderr %q", try+1, s)
		}
	}
}

// TestZygoteStartsWithoutPrepackedWeights checks that a zygote also starts if pre-packed weights
// cannot be read or written.
func TestZygoteStartsWithoutPrepackedWeights(t *testing.T) {
	model, in := encoder(t), sequence(16)
	want := cold(t, model, 1, in)
	broken := t.TempDir()
	for name, dir := range map[string]string{"no such folder": "/nosuch", "broken file": broken} {
		t.Run(name, func(t *testing.T) {
			env := []string{wire.EnvORT + "=" + library(t), wire.EnvModel + "=" + model, wire.EnvPrepacked + "=" + dir}
			if dir == broken {
				first := start(t, env...)
				first.Want(wire.ZygoteReady)
				files, err := filepath.Glob(broken + "/*/model.onnx")
				if err != nil || len(files) != 1 {
					t.Fatalf("files %q, error %v", files, err)
				}
				if err := os.WriteFile(files[0], []byte("broken"), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			k := start(t, env...)
			k.Want(wire.ZygoteReady)
			same(t, k.fork(1).do(question{Do: "run", Inputs: []tensor.Tensor{in}}).Tensors, want)
			if s := k.Stderr.String(); !strings.Contains(s, "pre-packed weights") || !strings.Contains(s, dir) {
				t.Errorf("stderr %q, want a line that says why", s)
			}
			if left, _ := filepath.Glob(dir + "/*"); len(left) != 0 {
				t.Errorf("left behind: %q", left)
			}
		})
	}
}

// identity writes a model that returns an input of each datatype under the name out-NAME.
func identity(t *testing.T, types map[string]onnxpb.TensorProto_DataType) string {
	t.Helper()
	g := &onnxpb.GraphProto{Name: proto.String("identity")}
	for name, elem := range types {
		value := func(name string) *onnxpb.ValueInfoProto {
			return &onnxpb.ValueInfoProto{Name: &name, Type: &onnxpb.TypeProto{Value: &onnxpb.TypeProto_TensorType{TensorType: &onnxpb.TypeProto_Tensor{
				ElemType: proto.Int32(int32(elem)),
				Shape: &onnxpb.TensorShapeProto{Dim: []*onnxpb.TensorShapeProto_Dimension{
					{Value: &onnxpb.TensorShapeProto_Dimension_DimParam{DimParam: "n"}}, {Value: &onnxpb.TensorShapeProto_Dimension_DimValue{DimValue: 2}},
				}},
			}}}}
		}
		g.Input = append(g.Input, value(name))
		g.Output = append(g.Output, value("out-"+name))
		g.Node = append(g.Node, &onnxpb.NodeProto{OpType: proto.String("Identity"), Input: []string{name}, Output: []string{"out-" + name}})
	}
	path := filepath.Join(t.TempDir(), "identity.onnx")
	if err := onnx.Write(path, &onnxpb.ModelProto{IrVersion: proto.Int64(8), Graph: g, OpsetImport: []*onnxpb.OperatorSetIdProto{{Domain: proto.String(""), Version: proto.Int64(17)}}}); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestTensorsOfEachDatatypeComeBack(t *testing.T) {
	types := map[string]onnxpb.TensorProto_DataType{
		"BOOL": onnxpb.TensorProto_BOOL, "UINT8": onnxpb.TensorProto_UINT8, "UINT16": onnxpb.TensorProto_UINT16, "UINT32": onnxpb.TensorProto_UINT32,
		"UINT64": onnxpb.TensorProto_UINT64, "INT8": onnxpb.TensorProto_INT8, "INT16": onnxpb.TensorProto_INT16, "INT32": onnxpb.TensorProto_INT32,
		"INT64": onnxpb.TensorProto_INT64, "FP16": onnxpb.TensorProto_FLOAT16, "FP32": onnxpb.TensorProto_FLOAT, "FP64": onnxpb.TensorProto_DOUBLE,
		"BF16": onnxpb.TensorProto_BFLOAT16,
	}
	sizes := map[string]int{"BOOL": 1, "UINT8": 1, "INT8": 1, "UINT16": 2, "INT16": 2, "FP16": 2, "BF16": 2, "UINT32": 4, "INT32": 4, "FP32": 4, "UINT64": 8, "INT64": 8, "FP64": 8}
	model := identity(t, types)
	b, err := os.ReadFile(model)
	if err != nil {
		t.Fatal(err)
	}
	in, out, err := onnx.Signature(bytes.NewReader(b), int64(len(b)))
	if all := slices.Concat(in, out); err != nil || len(all) != 2*len(types) || slices.ContainsFunc(all, func(v onnx.Value) bool { return !v.Served() }) {
		t.Errorf("package onnx says %+v, %v, want all to be served", all, err)
	}
	s, err := zygote.Open(zygote.Options{Library: library(t), Model: model, Threads: 1, Start: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := s.Served(); err != nil {
		t.Error(err)
	}
	for _, rows := range []int{0, 1, 3} {
		var in []tensor.Tensor
		var names []string
		for name := range types {
			data := make([]byte, rows*2*sizes[name]+1)[1:] // at an odd address, as within a message
			for i := range data {
				data[i] = byte(i % 2)
			}
			in = append(in, tensor.Tensor{Name: name, Datatype: tensor.Datatype(name), Shape: []int64{int64(rows), 2}, Data: data})
			names = append(names, "out-"+name)
		}
		out, err := s.Run(in, names...)
		if err != nil {
			t.Fatal(err)
		}
		for i, o := range out {
			if o.Name != names[i] || o.Datatype != in[i].Datatype || !slices.Equal(o.Shape, in[i].Shape) || string(o.Data) != string(in[i].Data) {
				t.Errorf("output %+v, want %s as %+v", o, names[i], in[i])
			}
		}
	}
}

func TestStringTensorsAreRefused(t *testing.T) {
	s, err := zygote.Open(zygote.Options{Library: library(t), Model: identity(t, map[string]onnxpb.TensorProto_DataType{"text": onnxpb.TensorProto_STRING}), Threads: 1, Start: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if got := s.Inputs()[0].String(); got != "BYTES [-1,2]" {
		t.Errorf("input %s, want BYTES [-1,2]", got)
	}
	_, err = s.Run([]tensor.Tensor{{Name: "text", Datatype: "BYTES", Shape: []int64{0, 2}}})
	if err == nil || !strings.Contains(err.Error(), "BYTES") {
		t.Errorf("error %v, want one that names the datatype", err)
	}
}

// TestClassifiersWithMapsAreRefused checks two kinds of classifiers that skl2onnx makes. A model
// with outputs that are not tensors is refused, and the error says how to convert it. A model with
// strings as labels is loaded, and can compute its other outputs.
func TestClassifiersWithMapsAreRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "classifier.onnx")
	open := func(text, zipMap bool) (*zygote.Session, error) {
		proctest.Classifier(t, path, text, zipMap)
		return zygote.Open(zygote.Options{Library: library(t), Model: path, Threads: 1, Start: 1})
	}
	for _, text := range []bool{true, false} {
		_, err := open(text, true)
		for _, want := range []string{"classifier.onnx: output_probability is a sequence, want a tensor", `options={"zipmap": False}`} {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("ZipMap: %v, want %q", err, want)
			}
		}
		s, err := open(text, false)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		if err := s.Served(); (err != nil) != text || text && !strings.Contains(err.Error(), `output "label" is BYTES [`) {
			t.Errorf("labels as strings: %t: %v", text, err)
		}
		x := []tensor.Tensor{{Name: "X", Datatype: "FP32", Shape: []int64{1, 3}, Data: make([]byte, 12)}}
		if out, err := s.Run(x, "probabilities"); err != nil || len(out) != 1 || !slices.Equal(out[0].Shape, []int64{1, 2}) {
			t.Errorf("probabilities %+v, %v", out, err)
		}
	}
}

func TestRunRefusesInvalidInputs(t *testing.T) {
	s, err := zygote.Open(zygote.Options{Library: library(t), Model: identity(t, map[string]onnxpb.TensorProto_DataType{"x": onnxpb.TensorProto_FLOAT}), Threads: 1, Start: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	x := func(shape []int64, bytes int) tensor.Tensor {
		return tensor.Tensor{Name: "x", Datatype: "FP32", Shape: shape, Data: make([]byte, bytes)}
	}
	good := x([]int64{1, 2}, 8)
	for name, tc := range map[string]struct {
		in   []tensor.Tensor
		out  []string
		want string
	}{
		"missing":         {nil, nil, `input "x" is missing, want FP32 [-1,2]`},
		"unknown":         {[]tensor.Tensor{{Name: "z"}}, nil, `input "z" is unknown, want x FP32 [-1,2]`},
		"twice":           {[]tensor.Tensor{good, good}, nil, `input "x" is given twice`},
		"datatype":        {[]tensor.Tensor{{Name: "x", Datatype: "FP64", Shape: []int64{1, 2}}}, nil, "got FP64 [1,2], want FP32 [-1,2]"},
		"rank":            {[]tensor.Tensor{x([]int64{2}, 8)}, nil, "got FP32 [2], want FP32 [-1,2]"},
		"dimension":       {[]tensor.Tensor{x([]int64{1, 3}, 12)}, nil, "got FP32 [1,3], want FP32 [-1,2]"},
		"negative":        {[]tensor.Tensor{x([]int64{-1, 2}, 8)}, nil, "got FP32 [-1,2]"},
		"too little data": {[]tensor.Tensor{x([]int64{1, 2}, 7)}, nil, "7 bytes of data, want 8 for FP32 [1,2]"},
		"overflow":        {[]tensor.Tensor{x([]int64{1 << 62, 2}, 0)}, nil, "0 bytes of data, want"},
		"unknown output":  {[]tensor.Tensor{good}, []string{"y"}, `output "y" is unknown, want out-x FP32 [-1,2]`},
	} {
		_, err := s.Run(tc.in, tc.out...)
		if err == nil || !strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), "identity.onnx") {
			t.Errorf("%s: error %v, want %q and the model in it", name, err, tc.want)
		}
	}
	s.Close()
	s.Close()
	if _, err := s.Run([]tensor.Tensor{good}); !errors.Is(err, zygote.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

func TestOpenRefusesInvalidOptions(t *testing.T) {
	lib := library(t)
	for _, tc := range []struct {
		lib, model string
		threads    int
		want       string
	}{
		{lib, "nosuch.onnx", 1, "nosuch.onnx"},
		{lib, "m.onnx", 0, "want 1..256"},
		{"/nosuch.so", "m.onnx", 1, "one library a process"},
	} {
		if _, err := zygote.Open(zygote.Options{Library: tc.lib, Model: tc.model, Threads: tc.threads, Start: tc.threads}); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s of %s, %d threads: error %v, want %q in it", tc.model, tc.lib, tc.threads, err, tc.want)
		}
	}
	if zygote.Inherited() != nil {
		t.Error("an ordinary process inherited a session")
	}
	if _, _, ok := zygote.Child(); ok {
		t.Error("an ordinary process is a child")
	}
}
