package safetensors_test

import (
	"bytes"
	"encoding/binary"
	"slices"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/safetensors"
)

// file puts a header before data.
func file(header, data string) []byte {
	return append(append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header...), data...)
}

func read(b []byte) (*safetensors.File, error) {
	return safetensors.Read(bytes.NewReader(b), int64(len(b)))
}

const two = `{"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2,1],"data_offsets":[2,10]},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},` +
	`"scalar":{"dtype":"BF16","shape":[],"data_offsets":[10,12]},"none":{"dtype":"I64","shape":[0,3],"data_offsets":[2,2]}}  `

func TestRead(t *testing.T) {
	f, err := read(file(two, "abcdefghijkl"))
	if err != nil {
		t.Fatal(err)
	}
	if names := f.Names(); !slices.Equal(names, []string{"a", "b", "none", "scalar"}) {
		t.Errorf("names %q", names)
	}
	for name, want := range map[string]struct {
		datatype string
		rank     int
		data     string
	}{"a": {"UINT8", 1, "ab"}, "b": {"FP32", 2, "cdefghij"}, "scalar": {"BF16", 0, "kl"}, "none": {"INT64", 2, ""}} {
		got, err := f.Tensor(name)
		if err != nil || got.Name != name || string(got.Datatype) != want.datatype || len(got.Shape) != want.rank || string(got.Data) != want.data {
			t.Errorf("%s: %+v, %v, want %+v", name, got, err, want)
		}
		if err := got.Validate(); err != nil {
			t.Error(err)
		}
	}
	if _, err := f.Tensor("c"); err == nil || !strings.Contains(err.Error(), `"c"`) {
		t.Errorf("a tensor that is not there: error %v, want its name", err)
	}
}

func TestReadRefuses(t *testing.T) {
	long := binary.LittleEndian.AppendUint64(nil, 1<<63+5)
	for name, tc := range map[string]struct {
		file []byte
		want string
	}{
		"nothing":            {nil, "0 bytes"},
		"half a length":      {[]byte("1234567"), "7 bytes"},
		"too long a header":  {append(long, "{}"...), "a header of 9223372036854775813 bytes"},
		"truncated":          {file(two, "")[:30], "a header of "},
		"no object":          {file(`[]`, ""), "want a JSON object"},
		"half an object":     {file(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}`, "x"), "it ends too early"},
		"more behind it":     {file(`{}x`, ""), `"x" behind its end`},
		"twice":              {file(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}`, "xy"), `"a": it is there twice`},
		"unknown dtype":      {file(`{"a":{"dtype":"F8_E4M2","shape":[1],"data_offsets":[0,1]}}`, "x"), `"F8_E4M2"`},
		"unknown field":      {file(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"more":1}}`, "x"), `"more"`},
		"metadata no text":   {file(`{"__metadata__":{"a":1}}`, ""), "__metadata__"},
		"data without owner": {file(`{}`, "abc"), "3 bytes of data belong to no tensor"},
		"hole":               {file(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}`, "xy"), "want a begin of 0"},
		"overlap":            {file(`{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}`, "xyz"), `"b": data_offsets [1,3], want a begin of 2`},
		"beyond the end":     {file(`{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}`, "x"), "an end of at most 1"},
		"backwards":          {file(`{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,-1]}}`, ""), `data_offsets: "-1]`},
		"shape too large":    {file(`{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,2]}}`, "xy"), "shape [3]"},
		"shape too small":    {file(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,2]}}`, "xy"), "2 bytes of data, want what U8 of shape [1] needs"},
		"negative":           {file(`{"a":{"dtype":"U8","shape":[-1,-2],"data_offsets":[0,2]}}`, "xy"), `shape: "-1,`},
		"overflow":           {file(`{"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}}`, ""), "shape"},
	} {
		if _, err := read(tc.file); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: error %v, want %q in it", name, err, tc.want)
		}
	}
}

func FuzzRead(f *testing.F) {
	f.Add(file(two, "abcdefghijkl"))
	f.Add(file(`{}`, ""))
	f.Add(file(`{"a":{"dtype":"F64","shape":[0],"data_offsets":[0,0]}}`, ""))
	f.Fuzz(func(t *testing.T, b []byte) {
		file, err := read(b)
		if err != nil {
			return
		}
		total := 8 + int(binary.LittleEndian.Uint64(b))
		for _, name := range file.Names() {
			got, err := file.Tensor(name)
			if err != nil {
				t.Fatal(err)
			}
			if err := got.Validate(); err != nil {
				t.Fatal(err)
			}
			total += len(got.Data)
		}
		if total != len(b) {
			t.Fatalf("header and tensors have %d bytes, the file %d", total, len(b))
		}
	})
}
