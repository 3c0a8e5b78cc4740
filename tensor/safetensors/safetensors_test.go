package safetensors_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/tensor/safetensors"
)

// file returns a file with this header and data.
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
	if names := names(f); !slices.Equal(names, []string{"a", "b", "none", "scalar"}) {
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
	if f, err := read(file(`{"__metadata__": null}`, "")); err != nil || f.Metadata() != nil {
		t.Errorf("no metadata: %v", err)
	}
	if _, err := f.Tensor("c"); err == nil || !strings.Contains(err.Error(), `"c"`) {
		t.Errorf("a tensor that is not there: error %v, want its name", err)
	}
}

// many returns a header with n empty tensors.
func many(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, `%c"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}`, "{,"[min(i, 1)], i)
	}
	return b.String() + "}"
}

// texts returns n further entries for a file's metadata.
func texts(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, `,"%d":""`, i)
	}
	return b.String()
}

// TestAllDatatypesAreRead checks that all datatypes of the format are read, and that those that
// stages know are converted.
func TestAllDatatypesAreRead(t *testing.T) {
	for dtype, want := range map[string]struct {
		bytes    int
		datatype string
	}{
		"BOOL": {8, "BOOL"}, "U8": {8, "UINT8"}, "I16": {16, "INT16"}, "U32": {32, "UINT32"}, "I64": {64, "INT64"}, "F16": {16, "FP16"},
		"BF16": {16, "BF16"}, "F32": {32, "FP32"}, "F64": {64, "FP64"}, "F4": {4, ""}, "F6_E2M3": {6, ""}, "F6_E3M2": {6, ""},
		"F8_E4M3": {8, ""}, "F8_E5M2": {8, ""}, "F8_E8M0": {8, ""}, "F8_E4M3FNUZ": {8, ""}, "F8_E5M2FNUZ": {8, ""}, "C64": {64, ""},
	} {
		header := fmt.Sprintf(`{"a":{"dtype":%q,"shape":[2,4],"data_offsets":[0,%d]}}`, dtype, want.bytes)
		f, err := read(file(header, strings.Repeat("x", want.bytes)))
		if err != nil {
			t.Errorf("%s: %v", dtype, err)
			continue
		}
		switch got, err := f.Tensor("a"); {
		case want.datatype == "" && (err == nil || !strings.Contains(err.Error(), dtype)):
			t.Errorf("%s: %v, %v, want an error with its name", dtype, got.Datatype, err)
		case want.datatype != "" && (err != nil || string(got.Datatype) != want.datatype || got.Validate() != nil):
			t.Errorf("%s: %v, %v, want %s", dtype, got.Datatype, err, want.datatype)
		}
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
		"too long a header":  {append(long, "{}"...), "no header's length"},
		"no such file":       {[]byte("password of somebody else"), "no header's length"},
		"truncated":          {file(two, "")[:30], "a header of "},
		"no object":          {file(`[]`, ""), "want a JSON object"},
		"half an object":     {file(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}`, "x"), "it ends too early"},
		"more behind it":     {file(`{}x`, ""), `"x" after the header's end`},
		"twice":              {file(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}`, "xy"), `"a": it occurs twice`},
		"unknown dtype":      {file(`{"a":{"dtype":"F8_E4M2","shape":[1],"data_offsets":[0,1]}}`, "x"), `"F8_E4M2"`},
		"unknown field":      {file(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"more":1}}`, "x"), `"more"`},
		"metadata no text":   {file(`{"__metadata__":{"a":1}}`, ""), "__metadata__"},
		"data without owner": {file(`{}`, "abc"), "3 bytes of data belong to no tensor"},
		"hole":               {file(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}`, "xy"), "want a begin of 0"},
		"overlap":            {file(`{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}`, "xyz"), `"b": data_offsets [1,3], want a begin of 2`},
		"beyond the end":     {file(`{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}`, "x"), "an end of at most 1"},
		"backwards":          {file(`{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,-1]}}`, ""), `data_offsets: "-1]`},
		"shape too large":    {file(`{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,2]}}`, "xy"), "shape [3]"},
		"shape too small":    {file(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,2]}}`, "xy"), "2 bytes of data, want 1 for U8 of shape [1]"},
		"negative":           {file(`{"a":{"dtype":"U8","shape":[-1,-2],"data_offsets":[0,2]}}`, "xy"), `shape: "-1,`},
		"whole bytes":        {file(`{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}}`, "xy"), "12 bits, want whole bytes"},
		"spaces before":      {file(` {}`, ""), "want a JSON object"},
		"other case":         {file(`{"a":{"Dtype":"U8","shape":[1],"data_offsets":[0,1]}}`, "x"), `"Dtype", want dtype`},
		"field twice":        {file(`{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}`, "x"), "dtype: it occurs twice"},
		"field missing":      {file(`{"a":{"dtype":"U8","data_offsets":[0,1]}}`, "x"), "2 fields"},
		"three offsets":      {file(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}}`, "x"), "more than 2 numbers"},
		"one offset":         {file(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[1]}}`, "x"), "1 numbers, want 2"},
		"no shape":           {file(`{"a":{"dtype":"U8","shape":null,"data_offsets":[0,1]}}`, "x"), `shape: "null`},
		"a point":            {file(`{"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}}`, "x"), `shape: "1.0]`},
		"leading zero":       {file(`{"a":{"dtype":"U8","shape":[01],"data_offsets":[0,1]}}`, "x"), `shape: "01]`},
		"beyond 64 bits":     {file(`{"a":{"dtype":"U8","shape":[9223372036854775808],"data_offsets":[0,1]}}`, "x"), "shape: "},
		"beyond, but empty":  {file(`{"a":{"dtype":"U8","shape":[0,9223372036854775808],"data_offsets":[0,0]}}`, ""), "shape: "},
		"65 dimensions":      {file(`{"a":{"dtype":"U8","shape":[1`+strings.Repeat(",1", 64)+`],"data_offsets":[0,1]}}`, "x"), "more than 64 numbers"},
		"deep":               {file(`{"a":`+strings.Repeat("[", 1<<20), ""), "want '{'"},
		"no UTF-8":           {file("{\"\xff\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", "x"), "want UTF-8"},
		"half a pair":        {file(`{"\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}`, "x"), "want Unicode"},
		"bad escape":         {file(`{"\x41":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}`, "x"), "invalid character"},
		"same by an escape":  {file(`{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"\u0061":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}`, ""), `"a": it occurs twice`},
		"control character":  {file("{\"a\nb\":{}}", ""), "without control characters"},
		"text without end":   {file(`{"a\"`, ""), "within a string"},
		"metadata twice":     {file(`{"__metadata__":{},"__metadata__":{}}`, ""), `"__metadata__": it occurs twice`},
		"same key in it":     {file(`{"__metadata__":{"a":"1","a":"2"}}`, ""), `__metadata__: "a": it occurs twice`},
		"comma at the end":   {file(`{"__metadata__":{},}`, ""), "want a string"},
		"too many":           {file(many(1<<18+1), ""), "more than 262144 tensors"},
		"too much about it":  {file(`{"__metadata__":{"":""`+texts(1<<18)+`}}`, ""), "__metadata__: more than 262144 texts"},
		"a name without end": {file(`{"`+strings.Repeat("a", 1<<16)+`":{"dtype":"U8","shape":[1],"data_offsets":[0,2]}}`, "ab"), "2 bytes of data"},
		"a long wrong one":   {file(`{"`+strings.Repeat("a", 1<<16)+`":{"`+strings.Repeat("b", 1<<16)+`":1}}`, ""), `bbb", want dtype`},
		"overflow":           {file(`{"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}}`, ""), "shape"},
	} {
		if _, err := read(tc.file); err == nil || !strings.Contains(err.Error(), tc.want) || len(err.Error()) > 1000 {
			t.Errorf("%s: error %.400v, want %q in it, and 1000 bytes at most", name, err, tc.want)
		}
	}
}

func FuzzRead(f *testing.F) {
	f.Add(file(two, "abcdefghijkl"))
	f.Add(file(`{}`, ""))
	f.Add(file(`{"a":{"dtype":"F64","shape":[0],"data_offsets":[0,0]}}`, ""))
	f.Add(file(`{"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]},"\u00e9":{"shape":[],"data_offsets":[1,9],"dtype":"C64"}}`, "abcdefghi"))
	f.Fuzz(func(t *testing.T, b []byte) {
		file, err := read(b)
		if err != nil {
			return
		}
		total := 8 + int(binary.LittleEndian.Uint64(b))
		for _, i := range file.Tensors() {
			if int(i.Offset) != total {
				t.Fatalf("%+v, want it at %d", i, total)
			}
			total += int(i.Bytes)
			got, err := file.Tensor(i.Name)
			if _, known := i.Dtype.Datatype(); !known {
				continue
			}
			if err != nil {
				t.Fatal(err)
			}
			if err := got.Validate(); err != nil || len(got.Data) != int(i.Bytes) {
				t.Fatal(len(got.Data), err)
			}
		}
		if total != len(b) {
			t.Fatalf("header and tensors have %d bytes, the file %d", total, len(b))
		}
		rewritten(t, b, file)
	})
}
