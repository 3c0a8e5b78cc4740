package tensor

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"unicode/utf8"
)

// dataFromJSON reads an array of numbers, booleans or strings. Nested arrays only repeat what the shape says, so brackets are
// passed over. raw is valid JSON.
func dataFromJSON(d Datatype, raw json.RawMessage) ([]byte, error) {
	out := make([]byte, 0, len(raw)/8*d.Size())
	for n := 0; ; n++ {
		raw = bytes.TrimLeft(raw, "[], \t\r\n")
		if len(raw) == 0 {
			return out, nil
		}
		end := bytes.IndexAny(raw, "], \t\r\n")
		if raw[0] == '"' {
			end = stringEnd(raw)
		}
		if end < 0 {
			end = len(raw)
		}
		var ok bool
		if out, ok = appendElement(out, d, raw[:end]); !ok {
			return nil, fmt.Errorf("element %d: %.100s, want %s", n, raw[:end], wantInJSON(d))
		}
		raw = raw[end:]
	}
}

// stringEnd returns the index after the closing quote of the string that b begins with, or -1.
func stringEnd(b []byte) int {
	for i := 1; i < len(b); i++ {
		switch b[i] {
		case '\\':
			i++
		case '"':
			return i + 1
		}
	}
	return -1
}

func wantInJSON(d Datatype) string {
	switch d {
	case "FP16", "BF16":
		return fmt.Sprintf("no %s, which has no JSON form: send FP32", d)
	case "BYTES":
		return "a string"
	case "BOOL":
		return "true or false"
	}
	return "a number of datatype " + string(d)
}

// appendElement appends the element that the JSON value v stands for, if it is one of d.
func appendElement(b []byte, d Datatype, v []byte) ([]byte, bool) {
	le, size := binary.LittleEndian, d.Size()
	switch d {
	case "FP32", "FP64":
		f, err := strconv.ParseFloat(string(v), 8*size) // refuses what is out of range
		if c := v[0]; err != nil || c != '-' && (c < '0' || c > '9') {
			return b, false
		}
		if size == 4 {
			return le.AppendUint32(b, math.Float32bits(float32(f))), true
		}
		return le.AppendUint64(b, math.Float64bits(f)), true
	case "INT8", "INT16", "INT32", "INT64":
		i, err := strconv.ParseInt(string(v), 10, 8*size)
		return append(b, le.AppendUint64(nil, uint64(i))[:size]...), err == nil
	case "UINT8", "UINT16", "UINT32", "UINT64":
		u, err := strconv.ParseUint(string(v), 10, 8*size)
		return append(b, le.AppendUint64(nil, u)[:size]...), err == nil
	case "BOOL":
		if string(v) == "true" {
			return append(b, 1), true
		}
		return append(b, 0), string(v) == "false"
	case "BYTES":
		var s string
		if v[0] != '"' || json.Unmarshal(v, &s) != nil {
			return b, false
		}
		return append(le.AppendUint32(b, uint32(len(s))), s...), true
	}
	return b, false
}

// dataToJSON returns the elements of t as a flat array.
func dataToJSON(t Tensor) (json.RawMessage, error) {
	if err := t.Validate(); err != nil {
		return nil, err
	}
	if t.Datatype == "BYTES" {
		elements, err := t.elements()
		if err != nil {
			return nil, err
		}
		out := make([]string, len(elements))
		for i, e := range elements {
			if out[i] = string(e); !utf8.Valid(e) {
				return nil, fmt.Errorf("tensor %q, element %d: %.20q, want UTF-8: return other bytes as an item of bytes", t.Name, i, e)
			}
		}
		return json.Marshal(out)
	}
	size := t.Datatype.Size()
	if d := t.Datatype; len(t.Data) > 0 && (d == "FP16" || d == "BF16") {
		return nil, fmt.Errorf("tensor %q: %s, which has no JSON form: return FP32", t.Name, d)
	}
	b := append(make([]byte, 0, 2+len(t.Data)/size*8), '[')
	for i := 0; i < len(t.Data); i += size {
		if i > 0 {
			b = append(b, ',')
		}
		last, ok := len(b), false
		if b, ok = appendJSON(b, t.Datatype, t.Data[i:i+size]); !ok {
			return nil, fmt.Errorf("tensor %q, element %d: %s, which has no JSON form: want a finite number", t.Name, i/size, b[last:])
		}
	}
	return append(b, ']'), nil
}

// appendJSON appends one element as JSON, if it has such a form: infinities and NaN have none.
func appendJSON(b []byte, d Datatype, e []byte) ([]byte, bool) {
	var word [8]byte
	copy(word[:], e)
	u := binary.LittleEndian.Uint64(word[:])
	switch d {
	case "BOOL":
		return strconv.AppendBool(b, u != 0), true
	case "FP32":
		f := float64(math.Float32frombits(uint32(u)))
		return strconv.AppendFloat(b, f, 'g', -1, 32), !math.IsNaN(f) && !math.IsInf(f, 0)
	case "FP64":
		f := math.Float64frombits(u)
		return strconv.AppendFloat(b, f, 'g', -1, 64), !math.IsNaN(f) && !math.IsInf(f, 0)
	case "INT8", "INT16", "INT32", "INT64":
		shift := 64 - 8*len(e)
		return strconv.AppendInt(b, int64(u)<<shift>>shift, 10), true
	case "UINT8", "UINT16", "UINT32", "UINT64":
		return strconv.AppendUint(b, u, 10), true
	}
	return b, false
}
