package tensor

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/pack"
)

var samples = Activation{
	{ContentType: "text/plain", Bytes: []byte("héllo")},
	{ContentType: "application/octet-stream"},
	{Tensors: []Tensor{{Name: "x", Datatype: "FP32", Shape: []int64{2, 1}, Data: make([]byte, 8)}, {Name: "s", Datatype: "BYTES", Shape: []int64{1}, Data: []byte{1, 0, 0, 0, 'a'}}}},
	{Ref: &Ref{Owner: "call/1", Blob: "b", Size: 12}},
	{Tensors: []Tensor{}},
	{Tensors: []Tensor{}}, // the shortest item has two bytes
}

func TestBinaryRoundTrip(t *testing.T) {
	for _, it := range samples {
		if got, err := DecodeItem(AppendItem(nil, it)); err != nil || !reflect.DeepEqual(got, it) {
			t.Errorf("item %+v came back as %+v, %v", it, got, err)
		}
	}
	if got, err := DecodeActivation(AppendActivation(nil, samples)); err != nil || !reflect.DeepEqual(got, samples) {
		t.Errorf("activation came back as %+v, %v", got, err)
	}
	none := Activation{{Tensors: []Tensor{}}, {Tensors: []Tensor{}}, {Tensors: []Tensor{}}}
	if got, err := DecodeActivation(AppendActivation(nil, none)); err != nil || !reflect.DeepEqual(got, none) {
		t.Errorf("empty sets came back as %+v, %v", got, err)
	}
	in := Input{{From: "a", Items: samples}, {From: "b"}}
	if got, err := decodeInput(AppendInput(nil, in)); err != nil || !reflect.DeepEqual(got, in) {
		t.Errorf("input came back as %+v, %v", got, err)
	}
}

// decodeInput decodes all of b, which elsewhere is part of a message.
func decodeInput(b []byte) (Input, error) {
	r := pack.NewReader(b)
	in := ReadInput(r)
	return in, r.End()
}

func FuzzDecodeInput(f *testing.F) {
	f.Add(AppendInput(nil, Input{{From: "a", Items: samples}}))
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, 0x0f})
	f.Fuzz(func(t *testing.T, b []byte) {
		in, err := decodeInput(b)
		if err != nil {
			return
		}
		if again, err := decodeInput(AppendInput(nil, in)); err != nil || !reflect.DeepEqual(again, in) {
			t.Fatalf("%+v came back as %+v, %v", in, again, err)
		}
		for _, p := range in {
			for _, it := range p.Items {
				for _, ts := range it.Tensors {
					_ = ts.Validate() // must not panic
				}
			}
		}
	})
}

func TestValidateNamesTheFault(t *testing.T) {
	for want, ts := range map[string]Tensor{
		"want 8 for FP32[2,1]":     {Name: "x", Datatype: "FP32", Shape: []int64{2, 1}, Data: make([]byte, 7)},
		`datatype "FLOAT"`:         {Name: "x", Datatype: "FLOAT"},
		"shape [-1]":               {Name: "x", Datatype: "INT8", Shape: []int64{-1}},
		"2^40":                     {Name: "x", Datatype: "INT8", Shape: []int64{1 << 39, 1 << 39, 1 << 39}},
		"2 elements of BYTES":      {Name: "x", Datatype: "BYTES", Shape: []int64{1}, Data: []byte{0, 0, 0, 0, 0, 0, 0, 0}},
		"an element of 9 bytes":    {Name: "x", Datatype: "BYTES", Shape: []int64{1}, Data: []byte{9, 0, 0, 0}},
		"want a length of 4 bytes": {Name: "x", Datatype: "BYTES", Shape: []int64{1}, Data: []byte{9}},
	} {
		if err := ts.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want an error with %q", ts, err, want)
		}
	}
}

func TestBodiesBecomeItems(t *testing.T) {
	for name, tc := range map[string]struct {
		contentType, body string
		want              Activation
	}{
		"text is one item":      {"text/plain", "[1]", Activation{{ContentType: "text/plain", Bytes: []byte("[1]")}}},
		"an object is one":      {"application/json", `{"a":1}`, Activation{{ContentType: "application/json", Bytes: []byte(`{"a":1}`)}}},
		"an array is a list":    {"application/json", ` [1, "two"]`, Activation{{ContentType: "application/json", Bytes: []byte("1")}, {ContentType: "text/plain", Bytes: []byte("two")}}},
		"an empty array":        {"application/json; charset=utf-8", `[]`, Activation{}},
		"bytes in an array":     {"application/json", `[{"contentType":"image/png","base64":"AAE="}]`, Activation{{ContentType: "image/png", Bytes: []byte{0, 1}}}},
		"tensors":               {"application/json", `{"inputs":[{"name":"x","datatype":"INT16","shape":[2,2],"data":[[1,-1],[2,3]]}]}`, Activation{{Tensors: []Tensor{{Name: "x", Datatype: "INT16", Shape: []int64{2, 2}, Data: []byte{1, 0, 255, 255, 2, 0, 3, 0}}}}}},
		"no content type":       {"", "x", Activation{{ContentType: "application/octet-stream", Bytes: []byte("x")}}},
		"an object like ours":   {"application/json", `{"inputs":"mine"}`, Activation{{ContentType: "application/json", Bytes: []byte(`{"inputs":"mine"}`)}}},
		"a base64 of their own": {"application/json", `{"base64":"!"}`, Activation{{ContentType: "application/json", Bytes: []byte(`{"base64":"!"}`)}}},
		"inputs of their own":   {"application/json", `{"inputs":[{"text":"a"}]}`, Activation{{ContentType: "application/json", Bytes: []byte(`{"inputs":[{"text":"a"}]}`)}}},
		"no inputs":             {"application/json", `{"inputs":[]}`, Activation{{ContentType: "application/json", Bytes: []byte(`{"inputs":[]}`)}}},
		"bytes of no type":      {"application/json", `[{"base64":"AA=="}]`, Activation{{ContentType: "application/octet-stream", Bytes: []byte{0}}}},
		"strings and escapes":   {"application/json", `{"inputs":[{"name":"s","datatype":"BYTES","shape":[2],"data":["a\"]", "\u00e9"]}]}`, Activation{{Tensors: []Tensor{{Name: "s", Datatype: "BYTES", Shape: []int64{2}, Data: []byte("\x03\x00\x00\x00a\"]\x02\x00\x00\x00é")}}}}},
		"nested as the shape":   {"application/json", `{"inputs":[{"name":"x","datatype":"INT8","shape":[2,1,2],"data":[[[1,2]],[[3,4]]]}]}`, Activation{{Tensors: []Tensor{{Name: "x", Datatype: "INT8", Shape: []int64{2, 1, 2}, Data: []byte{1, 2, 3, 4}}}}}},
		"flat":                  {"application/json", `{"inputs":[{"name":"x","datatype":"INT8","shape":[2,2],"data":[1,2,3,4]}]}`, Activation{{Tensors: []Tensor{{Name: "x", Datatype: "INT8", Shape: []int64{2, 2}, Data: []byte{1, 2, 3, 4}}}}}},
		"no elements":           {"application/json", `{"inputs":[{"name":"x","datatype":"INT8","shape":[2,0],"data":[[],[]]}]}`, Activation{{Tensors: []Tensor{{Name: "x", Datatype: "INT8", Shape: []int64{2, 0}, Data: []byte{}}}}}},
		"a scalar":              {"application/json", `{"inputs":[{"name":"x","datatype":"INT8","shape":[],"data":[7]}]}`, Activation{{Tensors: []Tensor{{Name: "x", Datatype: "INT8", Shape: []int64{}, Data: []byte{7}}}}}},
		"a schema of their own": {"application/json", `{"inputs":[{"name":"x","datatype":"INT8"}]}`, Activation{{ContentType: "application/json", Bytes: []byte(`{"inputs":[{"name":"x","datatype":"INT8"}]}`)}}},
		"tensors beside others": {"application/json", `{"inputs":[{"name":"x","datatype":"INT8","shape":[0],"data":[]},{"text":"a"}]}`, Activation{{ContentType: "application/json", Bytes: []byte(`{"inputs":[{"name":"x","datatype":"INT8","shape":[0],"data":[]},{"text":"a"}]}`)}}},
		"JSON cut short":        {"application/json", `{"inputs":[{"name":"x","datatype":"INT8","shape":[0],"data":[]`, Activation{{ContentType: "application/json", Bytes: []byte(`{"inputs":[{"name":"x","datatype":"INT8","shape":[0],"data":[]`)}}},
		"booleans":              {"application/json", `{"inputs":[{"name":"b","datatype":"BOOL","shape":[2],"data":[true,false]}]}`, Activation{{Tensors: []Tensor{{Name: "b", Datatype: "BOOL", Shape: []int64{2}, Data: []byte{1, 0}}}}}},
		"no body at all, JSON":  {"application/json", "", Activation{{ContentType: "application/json", Bytes: []byte{}}}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := ItemsFromHTTP(tc.contentType, []byte(tc.body))
			if err != nil || !reflect.DeepEqual(got, tc.want) {
				t.Errorf("got %+v, %v\nwant %+v", got, err, tc.want)
			}
		})
	}
}

func TestBadBodiesAreRefused(t *testing.T) {
	tensor := func(datatype, shape, data string) string {
		return `{"inputs":[{"name":"x","datatype":"` + datatype + `","shape":` + shape + `,"data":` + data + `}]}`
	}
	for body, want := range map[string]string{
		`[1`:                                                      "JSON array",
		`[{"base64":"!"}]`:                                        "base64",
		tensor("INT8", "[1]", "[300]"):                            `inputs[0].data: got 300 as element 0, want a number of datatype INT8`,
		tensor("UINT8", "[1]", "[-1]"):                            "want a number",
		tensor("INT64", "[2]", "[1, 1.5]"):                        "got 1.5 as element 1",
		tensor("FP32", "[1]", "[1e300]"):                          "1e300",
		tensor("FP32", "[1]", `["1"]`):                            `"1"`,
		tensor("FP32", "[1]", `[{"a":1}]`):                        "want a number",
		tensor("FP32", "[2]", "[1]"):                              "inputs[0].data: got 1 number, want 2 of shape [2]",
		tensor("FP32", "[1]", "null"):                             "null",
		tensor("FP16", "[1]", "[1]"):                              "no JSON form",
		tensor("BOOL", "[1]", "[1]"):                              "true or false",
		tensor("BYTES", "[1]", "[1]"):                             "a string",
		tensor("FLOAT", "[1]", "[1]"):                             "FLOAT",
		tensor("FP32", "[2,3]", "[1,2,3,4,5]"):                    "inputs[0].data: got 5 numbers, want 6 of shape [2 3]",
		tensor("FP32", "[3,2]", "[[1,2,3],[4,5,6]]"):              "inputs[0].data: got 6 numbers in lists of another shape, want one list, or lists nested as shape [3 2]",
		tensor("BYTES", "[2,2]", `[["a","b","c"],["d"]]`):         "inputs[0].data: got 4 strings in lists of another shape",
		tensor("BOOL", "[4]", "[[true,false],[true,false]]"):      "inputs[0].data: got 4 booleans in lists of another shape",
		tensor("INT8", "[2,2]", "[1,2,[3,4]]"):                    "lists of another shape",
		tensor("INT8", "[2,1,2]", "[[1,2],[3,4]]"):                "lists of another shape",
		tensor("INT8", "[1]", "1"):                                "lists of another shape",
		tensor("INT8", "[-1]", "[1]"):                             "inputs[0].shape: got [-1], want dimensions of at least 0",
		tensor("INT8", `["1"]`, "[1]"):                            `inputs[0].shape: got ["1"], want a list of dimensions`,
		tensor("INT8", "null", "[1]"):                             "inputs[0].shape: got null, want a list of dimensions",
		`{"inputs":[{"name":"x","datatype":"INT8","data":[1]}]}`:  "inputs[0].shape: got none",
		`{"inputs":[{"name":"x","datatype":"INT8","shape":[1]}]}`: "inputs[0].data: got none, want 1 number of shape [1], or parameters.binary_data_size",
		"[" + tensor("INT8", "[1]", "[]") + "]":                   "body[0].inputs[0].data: got 0 numbers, want 1 of shape [1]",
		`["a",{"inputs":[{"name":"x","datatype":"INT8","shape":[1],"data":[1]}],"outputs":[{"name":"y"}]}]`: "body[1].outputs: got a selection, want none in a list",
	} {
		if got, err := ItemsFromHTTP("application/json", []byte(body)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %+v, %v, want an error with %q", body, got, err, want)
		}
	}
}

func TestItemsBecomeBodies(t *testing.T) {
	text := Item{ContentType: "text/plain", Bytes: []byte("hi")}
	for name, tc := range map[string]struct {
		out               Input
		contentType, body string
	}{
		"one item is the body": {Input{{From: "a", Items: Activation{{ContentType: "image/png", Bytes: []byte{1}}}}}, "image/png", "\x01"},
		"several are an array": {Input{{From: "a", Items: Activation{text, {ContentType: "application/json", Bytes: []byte(`{"k":1}`)}, {ContentType: "x/y", Bytes: []byte{0}}}}}, "application/json", `["hi",{"k":1},{"contentType":"x/y","base64":"AA=="}]`},
		"no type is binary":    {Input{{Items: Activation{{Bytes: []byte{1}}}}}, "application/octet-stream", "\x01"},
		"text in no UTF-8":     {Input{{Items: Activation{{ContentType: "text/plain", Bytes: []byte{0xff}}, text}}}, "application/json", `[{"contentType":"text/plain","base64":"/w=="},"hi"]`},
		"none is an array":     {Input{{From: "a"}}, "application/json", "[]"},
		"sinks are an object":  {Input{{From: "a", Items: Activation{text}}, {From: "b", Items: Activation{text, text}}}, "application/json", `{"a":"hi","b":["hi","hi"]}`},
		"tensors":              {Input{{Items: Activation{{Tensors: []Tensor{{Name: "y", Datatype: "INT8", Shape: []int64{2}, Data: []byte{255, 2}}}}}}}, "application/json", `{"outputs":[{"name":"y","datatype":"INT8","shape":[2],"data":[-1,2]}]}`},
	} {
		t.Run(name, func(t *testing.T) {
			contentType, body, err := ToHTTP(tc.out)
			if err != nil || contentType != tc.contentType || string(body) != tc.body {
				t.Errorf("got %s %s, %v\nwant %s %s", contentType, body, err, tc.contentType, tc.body)
			}
		})
	}
	tensor := func(d Datatype, data ...byte) Item {
		return Item{Tensors: []Tensor{{Name: "y", Datatype: d, Shape: []int64{1}, Data: data}}}
	}
	for want, it := range map[string]Item{
		"reference":                                      {Ref: &Ref{}},
		`"y", element 0: NaN, which has`:                 tensor("FP32", 0, 0, 0xc0, 0x7f),
		"-Inf, which has no JSON form":                   tensor("FP64", 0, 0, 0, 0, 0, 0, 0xf0, 0xff),
		`"y": FP16, which has no JSON form: return FP32`: tensor("FP16", 0, 0),
		`"y": BF16, which has no JSON form: return FP32`: tensor("BF16", 0, 0),
		"0 bytes of data, want 4":                        tensor("FP32"),
		"want UTF-8":                                     tensor("BYTES", 1, 0, 0, 0, 0xff),
	} {
		if _, body, err := ToHTTP(Input{{Items: Activation{it}}}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s, %v, want an error with %q", body, err, want)
		}
	}
}

// TestNumbersSurviveJSON encodes and decodes the extremes of each datatype.
func TestNumbersSurviveJSON(t *testing.T) {
	for datatype, data := range map[Datatype]string{
		"INT8": "\x80\x7f", "UINT8": "\x00\xff", "INT16": "\x00\x80\xff\x7f", "UINT16": "\xff\xff", "INT32": "\x00\x00\x00\x80", "UINT32": "\xff\xff\xff\xff",
		"INT64": "\x00\x00\x00\x00\x00\x00\x00\x80", "UINT64": "\xff\xff\xff\xff\xff\xff\xff\xff",
		"FP32": "\xff\xff\x7f\x7f\x01\x00\x00\x00\x00\x00\x00\x80", "FP64": "\xff\xff\xff\xff\xff\xff\xef\x7f\x01\x00\x00\x00\x00\x00\x00\x00", "BOOL": "\x00\x01",
	} {
		want := Activation{{Tensors: []Tensor{{Name: "x", Datatype: datatype, Shape: []int64{int64(len(data) / datatype.Size())}, Data: []byte(data)}}}}
		contentType, body, err := ToHTTP(Input{{Items: want}})
		if err != nil {
			t.Fatal(err)
		}
		if got, err := ItemsFromHTTP(contentType, body); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v\nwant %+v", body, got, err, want)
		}
	}
}

func FuzzItemsFromHTTP(f *testing.F) {
	f.Add([]byte(`[1,"a",{"contentType":"x/y","base64":"AA=="},{"a":[1]}]`))
	f.Add([]byte(`{"inputs":[{"name":"x","datatype":"FP32","shape":[1,2],"data":[[1,2e3]]}]}`))
	f.Add([]byte(`{"outputs":[{"name":"s","datatype":"BYTES","shape":[1],"data":["\u00e9"]}]}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		a, err := ItemsFromHTTP("application/json", body)
		if err != nil {
			return
		}
		for _, it := range a {
			for _, ts := range it.Tensors {
				if err := ts.Validate(); err != nil {
					t.Fatalf("accepted: %v", err)
				}
			}
		}
		if _, _, err := ToHTTP(Input{{Items: a}}); err != nil && !strings.Contains(err.Error(), "UTF-8") {
			t.Fatalf("%+v: %v", a, err)
		}
	})
}

func TestStoreKeepsLargeItemsApart(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "blobs")
	s, err := OpenDir(dir, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	big := Item{ContentType: "x", Bytes: bytes.Repeat([]byte("b"), InlineLimit+1)}
	in := Activation{samples[0], big}
	out, err := Externalise(s, "../call 1", in)
	if err != nil {
		t.Fatal(err)
	}
	if out[0].Ref != nil || out[1].Ref == nil || in[1].Ref != nil {
		t.Fatalf("refs: %v %v, the original %v", out[0].Ref, out[1].Ref, in[1].Ref)
	}
	if _, err := os.Stat(filepath.Join(dir, "..", "call 1")); err == nil {
		t.Error("an owner's name left the folder")
	}
	back, err := Resolve(s, out)
	if err != nil || !reflect.DeepEqual(back, in) {
		t.Errorf("resolved: %v", err)
	}
	if err := s.Drop("../call 1"); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Get(*out[1].Ref); err == nil {
		t.Error("a dropped blob is still there")
	}
	if used := s.used; used != 0 {
		t.Errorf("%d bytes in use after the drop", used)
	}
	if _, err := s.Put("o", make([]byte, 2<<20)); !errors.Is(err, ErrFull) {
		t.Errorf("2 MiB into a store of 1 MiB: %v, want ErrFull", err)
	}
}

func TestManySmallItemsLeaveTheMessageToo(t *testing.T) {
	s, err := OpenDir(filepath.Join(t.TempDir(), "blobs"), 1<<30)
	if err != nil {
		t.Fatal(err)
	}
	a := make(Activation, 40)
	for i := range a {
		a[i] = Item{Bytes: make([]byte, InlineLimit/2)}
	}
	out, err := Externalise(s, "o", a)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(AppendActivation(nil, out)); n > messageLimit+4096 {
		t.Errorf("40 items of 32 KiB make a message of %d bytes, want about %d at most", n, messageLimit)
	}
}

func TestLargeItemsDoNotPushSmallOnesOut(t *testing.T) {
	s, err := OpenDir(filepath.Join(t.TempDir(), "blobs"), 1<<30)
	if err != nil {
		t.Fatal(err)
	}
	small, large := Item{Bytes: make([]byte, InlineLimit)}, Item{Bytes: make([]byte, 2*messageLimit)}
	out, err := Externalise(s, "o", Activation{small, small, large, small})
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []bool{false, false, true, false} {
		if got := out[i].Ref != nil; got != want {
			t.Errorf("item %d is a reference: %v, want %v", i, got, want)
		}
	}
}

func TestAStoreCountsWhatItHas(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "blobs")
	s, err := OpenDir(dir, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	// So that no folder can be created there.
	if err := os.WriteFile(s.folder("blocked"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if ref, err := s.Put("blocked", make([]byte, 9)); err == nil {
		t.Errorf("put without a folder: %+v", ref)
	}
	var wg sync.WaitGroup
	for i := range 8 {
		owner := strconv.Itoa(i % 4)
		wg.Go(func() {
			for range 20 {
				ref, err := s.Put(owner, []byte("item"))
				if err != nil {
					t.Error(err)
				}
				if b, err := s.Get(ref); err != nil || string(b) != "item" {
					t.Errorf("got %q, %v", b, err)
				}
			}
		})
	}
	wg.Wait()
	if s.used != 8*20*4 {
		t.Errorf("%d bytes in use, want %d", s.used, 8*20*4)
	}
	for _, owner := range []string{"0", "1", "2", "3", "blocked", "nobody", "0"} {
		if err := s.Drop(owner); err != nil {
			t.Error(err)
		}
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) > 0 || s.used != 0 || len(s.owners) > 0 {
		t.Errorf("after all drops: files %v, %v, %d bytes in use, owners %v", left, err, s.used, s.owners)
	}
	if _, err := s.Put("o", make([]byte, 9)); err != nil {
		t.Fatal(err)
	}
	if s, err = OpenDir(dir, 1<<20); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 || s.used != 0 {
		t.Errorf("a crash left %v, %v", left, err)
	}
}

func BenchmarkActivation(b *testing.B) {
	image := Activation{{Tensors: []Tensor{{Name: "x", Datatype: "FP32", Shape: []int64{1, 3, 224, 224}, Data: make([]byte, 4*3*224*224)}}}}
	for name, a := range map[string]Activation{"small": samples, "image": image} {
		b.Run("binary/"+name, func(b *testing.B) {
			b.ReportAllocs()
			var buf []byte
			for b.Loop() {
				buf = AppendActivation(buf[:0], a)
				if _, err := DecodeActivation(buf); err != nil {
					b.Fatal(err)
				}
			}
			b.SetBytes(int64(len(buf)))
		})
	}
	_, body, err := ToHTTP(Input{{Items: image}})
	if err != nil {
		b.Fatal(err)
	}
	b.Run("json/in", func(b *testing.B) {
		b.SetBytes(int64(len(body)))
		for b.Loop() {
			if _, err := ItemsFromHTTP("application/json", body); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("json/out", func(b *testing.B) {
		b.SetBytes(int64(len(body)))
		for b.Loop() {
			if _, _, err := ToHTTP(Input{{Items: image}}); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// TestPutDuringDropLeavesNothing drops an owner while others put items into it, and once more after
// the last Put, as a coordinator does for late replies.
func TestPutDuringDropLeavesNothing(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "blobs")
	s, err := OpenDir(dir, 1<<30)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for round := range 20 {
		owner := strconv.Itoa(round)
		for range 4 {
			wg.Go(func() {
				for range 5 {
					// fails if the owner is dropped meanwhile.
					_, _ = s.Put(owner, make([]byte, 1000))
				}
			})
		}
		if err := s.Drop(owner); err != nil {
			t.Error(err)
		}
	}
	wg.Wait()
	for round := range 20 {
		if err := s.Drop(strconv.Itoa(round)); err != nil {
			t.Error(err)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 || s.used != 0 || len(s.owners) > 0 {
		t.Errorf("after all drops: %d folders, %v, %d bytes in use, %d owners", len(left), err, s.used, len(s.owners))
	}
}
