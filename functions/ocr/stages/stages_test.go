package stages

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"image"
	"image/png"
	"io"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/functions/ocr/ocr"
	"github.com/stagecoach-serving/stagecoach/functions/ocr/page"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/stage"
	"github.com/stagecoach-serving/stagecoach/stage/join"
	"github.com/stagecoach-serving/stagecoach/stage/zygote"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// travelled returns an activation after encoding and decoding.
func travelled(t *testing.T, a tensor.Activation) tensor.Activation {
	t.Helper()
	got, err := tensor.DecodeActivation(tensor.AppendActivation(nil, a))
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func call(from string, items ...tensor.Item) *stage.Call {
	return &stage.Call{Input: tensor.Input{{From: from, Items: items}}}
}

// alone answers one call for a box.
func alone(m ocr.Model, keys ocr.Keys) hook {
	return func(c *stage.Call) (tensor.Activation, error) {
		work, err := recognise(keys, c)
		if err != nil {
			return nil, err
		}
		var of join.Result
		of.Outputs, of.Err = m.Run(work.Sets[0])
		return work.Answer([]join.Result{of})
	}
}

// TestStagesEqualADirectComputation passes a page through the three stages and compares the result
// with a direct computation.
func TestStagesEqualADirectComputation(t *testing.T) {
	detector, recogniser, keys := model(t, "det.onnx"), model(t, "rec.onnx"), keys(t)
	p, err := page.Draw(page.Options{Seed: 7, Width: 500, Height: 160, Size: 16, Noise: 10})
	if err != nil {
		t.Fatal(err)
	}
	img, err := ocr.Decode(p.PNG)
	if err != nil {
		t.Fatal(err)
	}
	found, err := ocr.Detect(detector, img)
	if err != nil || len(found) == 0 {
		t.Fatalf("%d boxes, %v", len(found), err)
	}
	var lines []ocr.Line
	for _, b := range found {
		l := ocr.Line{Box: ocr.Rect{Rectangle: b.Rect}}
		if l.Text, l.Confidence, err = ocr.Recognise(recogniser, keys, ocr.Crop(img, b.Rect)); err != nil {
			t.Fatal(err)
		}
		lines = append(lines, l)
	}
	want := ocr.Assemble(lines)

	boxes, err := detect(detector)(call("", tensor.Item{ContentType: "image/png", Bytes: p.PNG}))
	if err != nil || len(boxes) != len(found) {
		t.Fatalf("%d items, want %d; error %v", len(boxes), len(found), err)
	}
	var pieces tensor.Activation
	for _, box := range travelled(t, boxes) {
		if n := len(tensor.AppendItem(nil, box)); n > tensor.InlineLimit {
			t.Errorf("an item of %d bytes for a line of 16 pixels, want at most %d", n, tensor.InlineLimit)
		}
		piece, err := alone(recogniser, keys)(call("ocr-detect", box))
		if err != nil {
			t.Fatal(err)
		}
		pieces = append(pieces, piece...)
	}
	slices.Reverse(pieces)
	out, err := text(call("ocr-recognise", travelled(t, pieces)...))
	if err != nil || len(out) != 1 || out[0].ContentType != "text/plain; charset=utf-8" || string(out[0].Bytes) != ocr.Plain(want) {
		t.Errorf("output %v, error %v, want %q", out, err, ocr.Plain(want))
	}
	if cer := ocr.CER(string(out[0].Bytes), p.Text()); cer > 0.02 {
		t.Errorf("character error rate %.4f, want at most 0.02: %q, drawn was %q", cer, out[0].Bytes, p.Text())
	}

	c := call("ocr-recognise", pieces...)
	c.Header = []task.Header{{Name: "Accept", Value: "application/json;q=1"}}
	out, err = text(c)
	if err != nil || len(out) != 1 || out[0].ContentType != "application/json" {
		t.Fatalf("output %v, error %v", out, err)
	}
	var got struct {
		Text  string
		Lines []ocr.Line
	}
	if err := json.Unmarshal(out[0].Bytes, &got); err != nil || got.Text != ocr.Plain(want) || !reflect.DeepEqual(got.Lines, want) {
		t.Errorf("JSON %s, error %v, want %v", out[0].Bytes, err, want)
	}
}

func TestBlankPageIsEmptyText(t *testing.T) {
	blank := tensor.Item{ContentType: "image/png", Bytes: blankPNG(t, 320, 240)}
	if boxes, err := detect(model(t, "det.onnx"))(call("", blank)); err != nil || len(boxes) != 0 {
		t.Errorf("boxes %v, error %v, want none", boxes, err)
	}
	for _, accept := range []struct{ header, want string }{{"*/*", ""}, {"application/json", `{"text":"","lines":[]}`}} {
		for name, in := range map[string]tensor.Input{"one part": {{From: "ocr-recognise"}}, "no part": nil} {
			out, err := text(&stage.Call{Input: in, Header: []task.Header{{Name: "Accept", Value: accept.header}}})
			if err != nil || len(out) != 1 || string(out[0].Bytes) != accept.want {
				t.Errorf("%s, accepting %s: output %v, error %v, want %q", name, accept.header, out, err, accept.want)
			}
		}
	}
}

// broken is a model that bad input must not reach.
type broken struct{ t *testing.T }

func (b broken) Run([]tensor.Tensor, ...string) ([]tensor.Tensor, error) {
	b.t.Error("the model ran")
	return nil, io.ErrUnexpectedEOF
}

func TestInvalidItemsAreBadInput(t *testing.T) {
	find, read := detect(broken{t}), alone(broken{t}, nil)
	box := boxItem(image.NewRGBA(image.Rect(0, 0, 9, 5)), image.Rect(1, 2, 10, 7))
	with := func(change func(crop, box *tensor.Tensor)) []tensor.Item {
		ts := slices.Clone(box.Tensors)
		change(&ts[0], &ts[1])
		return []tensor.Item{{Tensors: ts}}
	}
	for name, tc := range map[string]struct {
		hook  hook
		items []tensor.Item
		want  string
	}{
		"no page":        {find, nil, "0 items, want one"},
		"two pages":      {find, make([]tensor.Item, 2), "2 items, want one"},
		"tensors":        {find, []tensor.Item{box}, "want one, a PNG or JPEG"},
		"text":           {find, []tensor.Item{{Bytes: []byte("hello")}}, `"hello", want a PNG or JPEG`},
		"one pixel":      {find, []tensor.Item{{Bytes: blankPNG(t, 1, 1)}}, "1×1"},
		"truncated":      {find, []tensor.Item{{Bytes: blankPNG(t, 400, 400)[:60]}}, "want a whole file"},
		"no box":         {read, nil, "0 items, want one box"},
		"bytes as a box": {read, []tensor.Item{{Bytes: []byte("x")}}, `no "crop"`},
		"no crop":        {read, with(func(crop, _ *tensor.Tensor) { crop.Name = "x" }), `no "crop"`},
		"crop of floats": {read, with(func(crop, _ *tensor.Tensor) { crop.Datatype = "FP32" }), `"crop": FP32`},
		"crop of planes": {read, with(func(crop, _ *tensor.Tensor) { crop.Shape = []int64{3, 9, 5} }), "want [height, width, 3]"},
		"flat crop":      {read, with(func(crop, _ *tensor.Tensor) { crop.Shape = []int64{45, 3} }), "want UINT8 with 3 dimensions"},
		"no pixels":      {read, with(func(crop, _ *tensor.Tensor) { crop.Shape, crop.Data = []int64{0, 9, 3}, nil }), "[0 9 3]"},
		"missing pixels": {read, with(func(crop, _ *tensor.Tensor) { crop.Data = crop.Data[1:] }), "134 bytes of data, want 135"},
		"box of three":   {read, with(func(_, box *tensor.Tensor) { box.Shape, box.Data = []int64{3}, box.Data[8:] }), "want [4]"},
		"empty box":      {read, with(func(_, box *tensor.Tensor) { box.Data = make([]byte, 32) }), "is empty"},
		"no JSON":        {text, []tensor.Item{{Bytes: []byte("x")}}, "item 0: invalid character 'x'"},
		"no place":       {text, []tensor.Item{{Bytes: []byte(`{"text":"a"}`)}}, `item 0: no box, want {"text", "confidence", "box": [`},
	} {
		out, err := tc.hook(call("x", tc.items...))
		if err == nil || out != nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: output %v, error %v, want %q in it", name, out, err, tc.want)
			continue
		}
		if typ := reflect.TypeOf(err); typ != reflect.TypeOf(stage.BadInput(err)) {
			t.Errorf("%s: the error is a %v, want it marked as bad input", name, typ)
		}
	}
}

// TestModelErrorIsNotTheClients checks that an error of the model does not count as bad input.
func TestModelErrorIsNotTheClients(t *testing.T) {
	_, err := detect(failing{})(call("", tensor.Item{Bytes: blankPNG(t, 40, 40)}))
	if err == nil || reflect.TypeOf(err) == reflect.TypeOf(stage.BadInput(err)) {
		t.Errorf("error %v, want one that is not bad input", err)
	}
}

type failing struct{}

func (failing) Run([]tensor.Tensor, ...string) ([]tensor.Tensor, error) {
	return nil, io.ErrUnexpectedEOF
}

// crowded finds text in each cell of 16×16 pixels.
type crowded struct{}

func (crowded) Run(in []tensor.Tensor, _ ...string) ([]tensor.Tensor, error) {
	h, w := in[0].Shape[2], in[0].Shape[3]
	out := tensor.Tensor{Datatype: "FP32", Shape: []int64{1, 1, h, w}}
	for i := range h * w {
		v := float32(0)
		if i%w%16 < 6 && i/w%16 < 6 {
			v = 1
		}
		out.Data = binary.LittleEndian.AppendUint32(out.Data, math.Float32bits(v))
	}
	return []tensor.Tensor{out}, nil
}

// TestFanOutIsBounded checks that a page with too many boxes is bad input.
func TestFanOutIsBounded(t *testing.T) {
	find := detect(crowded{})
	if out, err := find(call("", tensor.Item{Bytes: blankPNG(t, 480, 480)})); err != nil || len(out) != 900 {
		t.Errorf("%d boxes, error %v, want 900", len(out), err)
	}
	_, err := find(call("", tensor.Item{Bytes: blankPNG(t, 512, 512)}))
	if err == nil || !strings.Contains(err.Error(), "1024 text boxes, want at most 1000") || reflect.TypeOf(err) != reflect.TypeOf(stage.BadInput(err)) {
		t.Errorf("error %v, want bad input with both numbers", err)
	}
}

func TestPlaceWantsAModel(t *testing.T) {
	for _, h := range []stage.Hooks{Detect(), Recognise()} {
		if err := h.Place(t.Context(), &stage.Replica{}); err == nil || !strings.Contains(err.Error(), "STAGECOACH_MODEL") {
			t.Errorf("error %v, want STAGECOACH_MODEL in it", err)
		}
	}
}

func blankPNG(t *testing.T, w, h int) []byte {
	t.Helper()
	img := image.NewGray(image.Rect(0, 0, w, h))
	for i := range img.Pix {
		img.Pix[i] = 255
	}
	var b bytes.Buffer
	if err := png.Encode(&b, img); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func model(t *testing.T, name string) *zygote.Session {
	t.Helper()
	s, err := zygote.Open(zygote.Options{Library: built(t, "ort/libonnxruntime.so.1"), Model: built(t, "models/ocr/"+name), Threads: 1, Start: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

func keys(t *testing.T) ocr.Keys {
	t.Helper()
	b, err := os.ReadFile(built(t, "models/ocr/keys.txt"))
	if err != nil {
		t.Fatal(err)
	}
	k, err := ocr.ParseKeys(b)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func built(t *testing.T, name string) string {
	t.Helper()
	path, err := filepath.Abs("../../../build/" + name)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("%v: run make fetch", err)
		}
		t.Skipf("%v: run make fetch", err)
	}
	return path
}
