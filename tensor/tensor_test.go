package tensor

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

var samples = Activation{
	{ContentType: "text/plain", Bytes: []byte("héllo")},
	{ContentType: "application/octet-stream"},
	{Tensors: []Tensor{{Name: "x", Datatype: "FP32", Shape: []int64{2, 1}, Data: make([]byte, 8)}, {Name: "s", Datatype: "BYTES", Shape: []int64{1}, Data: []byte{1, 0, 0, 0, 'a'}}}},
	{Ref: &Ref{Owner: "call/1", Blob: "b", Size: 12}},
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
	in := Input{{From: "a", Items: samples}, {From: "b"}}
	if got, err := DecodeInput(AppendInput(nil, in)); err != nil || !reflect.DeepEqual(got, in) {
		t.Errorf("input came back as %+v, %v", got, err)
	}
}

func FuzzDecodeInput(f *testing.F) {
	f.Add(AppendInput(nil, Input{{From: "a", Items: samples}}))
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, 0x0f})
	f.Fuzz(func(t *testing.T, b []byte) {
		in, err := DecodeInput(b)
		if err != nil {
			return
		}
		if again, err := DecodeInput(AppendInput(nil, in)); err != nil || !reflect.DeepEqual(again, in) {
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
		"text is one item":     {"text/plain", "[1]", Activation{{ContentType: "text/plain", Bytes: []byte("[1]")}}},
		"an object is one":     {"application/json", `{"a":1}`, Activation{{ContentType: "application/json", Bytes: []byte(`{"a":1}`)}}},
		"an array is a list":   {"application/json", ` [1, "two"]`, Activation{{ContentType: "application/json", Bytes: []byte("1")}, {ContentType: "text/plain", Bytes: []byte("two")}}},
		"an empty array":       {"application/json; charset=utf-8", `[]`, Activation{}},
		"bytes in an array":    {"application/json", `[{"contentType":"image/png","base64":"AAE="}]`, Activation{{ContentType: "image/png", Bytes: []byte{0, 1}}}},
		"tensors":              {"application/json", `{"inputs":[{"name":"x","datatype":"INT16","shape":[2,2],"data":[[1,-1],[2,3]]}]}`, Activation{{Tensors: []Tensor{{Name: "x", Datatype: "INT16", Shape: []int64{2, 2}, Data: []byte{1, 0, 255, 255, 2, 0, 3, 0}}}}}},
		"no content type":      {"", "x", Activation{{ContentType: "application/octet-stream", Bytes: []byte("x")}}},
		"an object like ours":  {"application/json", `{"inputs":"mine"}`, Activation{{ContentType: "application/json", Bytes: []byte(`{"inputs":"mine"}`)}}},
		"no body at all, JSON": {"application/json", "", Activation{{ContentType: "application/json", Bytes: []byte{}}}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := ItemsFromHTTP(tc.contentType, []byte(tc.body))
			if err != nil || !reflect.DeepEqual(got, tc.want) {
				t.Errorf("got %+v, %v\nwant %+v", got, err, tc.want)
			}
		})
	}
	for _, bad := range []string{`[1`, `[{"base64":"!"}]`, `{"inputs":[{"name":"x","datatype":"INT8","shape":[1],"data":[300]}]}`, `{"inputs":[{"name":"x","datatype":"FP32","shape":[2],"data":[1]}]}`} {
		if got, err := ItemsFromHTTP("application/json", []byte(bad)); err == nil {
			t.Errorf("%s: %+v, want an error", bad, got)
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
	if _, _, err := ToHTTP(Input{{Items: Activation{{Ref: &Ref{}}}}}); err == nil {
		t.Error("a reference became a body")
	}
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
	if used := s.used.Load(); used != 0 {
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
