package tensor

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"unicode/utf8"
)

// dataFromJSON decodes the elements of a tensor: numbers, booleans or strings, in a flat list or
// nested as the shape says. raw must be valid JSON. want is the number of elements of the shape.
func dataFromJSON(d Datatype, shape []int64, want int64, raw json.RawMessage) ([]byte, *FieldError) {
	r := dataReader{shape: shape, level: -1}
	// Each element takes at least two characters, including its separator.
	room := min(want, int64(len(raw))/2+1)
	size := d.Size()
	if d == "BYTES" {
		size = 8 // a guess
	}
	out := make([]byte, 0, room*int64(size))
	for len(raw) > 0 {
		switch raw[0] {
		case ',', ' ', '\t', '\r', '\n':
			raw = raw[1:]
			continue
		case '[':
			r.open()
			raw = raw[1:]
			continue
		case ']':
			r.close()
			raw = raw[1:]
			continue
		}
		end := elementEnd(raw)
		var ok bool
		if out, ok = appendElement(out, d, raw[:end]); !ok {
			return nil, &FieldError{Got: fmt.Sprintf("%.100s as element %d", raw[:end], r.n), Want: wantInJSON(d)}
		}
		r.element()
		raw = raw[end:]
	}
	switch {
	case r.n != want:
		return nil, &FieldError{Got: fmt.Sprintf("%d %s", r.n, elementsOf(d, r.n)), Want: fmt.Sprintf("%d of shape %s", want, shapeText(shape))}
	case r.misshapen():
		return nil, &FieldError{Got: fmt.Sprintf("%d %s in lists of another shape", r.n, elementsOf(d, r.n)), Want: fmt.Sprintf("one list, or lists nested as shape %s", shapeText(shape))}
	}
	return out, nil
}

// dataReader tracks how the elements of a tensor are nested.
type dataReader struct {
	shape []int64
	n     int64   // number of elements so far
	depth int     // number of open lists
	level int     // depth of the elements; -1: no element yet
	bad   bool    // the lists do not match the shape
	count []int64 // by depth: number of members of the open list
}

func (r *dataReader) open() {
	if r.depth++; r.depth >= 2 && r.count == nil {
		r.count = make([]int64, len(r.shape)+1)
	}
	switch {
	case r.depth > max(1, len(r.shape)):
		r.bad = true
	case r.count != nil:
		r.count[r.depth] = 0
	}
}

func (r *dataReader) close() {
	if r.count != nil && r.depth <= len(r.shape) && r.depth > 0 {
		if r.level >= 0 && r.count[r.depth] != r.shape[r.depth-1] {
			r.bad = true
		}
		r.count[r.depth-1]++
	}
	r.depth--
}

func (r *dataReader) element() {
	r.n++
	if r.level < 0 {
		r.level = r.depth
	}
	if r.level != r.depth {
		r.bad = true
	} else if r.count != nil && r.depth < len(r.count) {
		r.count[r.depth]++
	}
}

// misshapen reports whether the elements were neither in one list nor nested as the shape says.
func (r *dataReader) misshapen() bool {
	return r.bad || r.level >= 0 && r.level != 1 && r.level != len(r.shape)
}

// elementEnd returns the end of the element at the beginning of raw.
func elementEnd(raw []byte) int {
	if raw[0] == '"' {
		if end := stringEnd(raw); end >= 0 {
			return end
		}
		return len(raw)
	}
	for i, c := range raw {
		switch c {
		case ']', ',', ' ', '\t', '\r', '\n':
			return i
		}
	}
	return len(raw)
}

// shapeText returns the beginning of a shape for messages.
func shapeText(shape []int64) string { return fmt.Sprintf("%.100s", fmt.Sprint(shape)) }

// elementsOf returns the word for n elements of a datatype in messages.
func elementsOf(d Datatype, n int64) string {
	word := "number"
	switch d {
	case "BYTES":
		word = "string"
	case "BOOL":
		word = "boolean"
	}
	if n != 1 {
		word += "s"
	}
	return word
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
		return fmt.Sprintf("no %s, which has no JSON form: send FP32, or binary data with the header %s", d, InferenceHeader)
	case "BYTES":
		return "a string"
	case "BOOL":
		return "true or false"
	}
	return "a number of datatype " + string(d)
}

// appendElement appends the element for the JSON value v. It returns false if v is not an element
// of d.
func appendElement(b []byte, d Datatype, v []byte) ([]byte, bool) {
	le, size := binary.LittleEndian, d.Size()
	switch d {
	case "FP32", "FP64":
		f, err := strconv.ParseFloat(string(v), 8*size) // refuses numbers out of range
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

// appendJSON appends one element as JSON. It returns false for infinities and NaN, which JSON does
// not have.
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
