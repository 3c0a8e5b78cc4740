package tensor

import (
	"bytes"
	"reflect"
	"testing"
)

// noFiles is a Store whose items can only be read as a whole.
type noFiles struct{ Store }

func TestOutlinesOfStoredItems(t *testing.T) {
	dir, err := OpenDir(t.TempDir(), 1<<30)
	if err != nil {
		t.Fatal(err)
	}
	shapes := []Tensor{{Name: "input_ids", Datatype: "INT64", Shape: []int64{1, 200_000}}, {Name: "", Datatype: "FP32", Shape: nil}, {Name: "none", Datatype: "UINT8", Shape: []int64{0, 3}}}
	full := make([]Tensor, len(shapes))
	copy(full, shapes)
	full[0].Data, full[1].Data = make([]byte, 8*200_000), make([]byte, 4)
	a := Activation{
		{ContentType: "image/png", Bytes: make([]byte, 100_000)},
		{Tensors: full},
		{ContentType: "text/plain", Bytes: []byte("small")},
		{Tensors: []Tensor{{Name: "x", Datatype: "UINT8", Shape: []int64{70_000}, Data: make([]byte, 70_000)}}},
	}
	want := []Outline{
		{ContentType: "image/png", Bytes: 100_000},
		{Bytes: 8*200_000 + 4, Tensors: shapes},
		{ContentType: "text/plain", Bytes: 5},
		{Bytes: 70_000, Tensors: []Tensor{{Name: "x", Datatype: "UINT8", Shape: []int64{70_000}}}},
	}
	stored, err := Externalise(dir, "r", a)
	if err != nil || stored[1].Ref == nil {
		t.Fatalf("%+v, %v", stored, err)
	}
	for name, s := range map[string]Store{"a folder": dir, "another store": noFiles{dir}} {
		for kind, items := range map[string]Activation{"stored": stored, "inline": a} {
			got, err := Outlines(s, items)
			for i := range got {
				tensors := append([]Tensor(nil), got[i].Tensors...)
				for k := range tensors {
					tensors[k].Data = nil
				}
				got[i].Tensors = tensors
			}
			if err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("%s, %s: %v\n got %+v\nwant %+v", name, kind, err, got, want)
			}
		}
	}
	if _, err := Outlines(dir, Activation{{Ref: &Ref{Owner: "r", Blob: "gone", Size: 9}}}); err == nil {
		t.Error("a missing item has an outline")
	}
}

// FuzzOutline checks that an outline is that of the decoded item, and that broken items are
// refused.
func FuzzOutline(f *testing.F) {
	f.Add(AppendItem(nil, Item{ContentType: "text/plain", Bytes: []byte("x")}))
	f.Add(AppendItem(nil, Item{Tensors: []Tensor{{Name: "x", Datatype: "FP32", Shape: []int64{1}, Data: make([]byte, 4)}}}))
	f.Add([]byte{kindTensors, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := readOutline(bytes.NewReader(b), int64(len(b)))
		it, bad := DecodeItem(b)
		if bad != nil || it.Ref != nil {
			return // what follows the last tensor is not read
		}
		if want := it.Outline(); err != nil || got.Bytes != want.Bytes || got.ContentType != want.ContentType || len(got.Tensors) != len(want.Tensors) {
			t.Fatalf("%+v, %v, want %+v", got, err, want)
		}
		for i, tn := range it.Tensors {
			if g := got.Tensors[i]; g.Name != tn.Name || g.Datatype != tn.Datatype || !reflect.DeepEqual(g.Shape, tn.Shape) {
				t.Fatalf("tensor %d: %+v, want %+v", i, g, tn)
			}
		}
	})
}
