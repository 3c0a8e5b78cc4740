package tensor

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"mime"
	"strings"
)

// ItemsFromHTTP reads a request's body. A JSON array is a list of items; an object with "inputs" is one item of tensors, as
// the Open Inference Protocol v2 has it; anything else is one item of bytes. Within an array, strings are text items,
// {"contentType","base64"} is bytes, an object with "inputs" or "outputs" is tensors, and other values are JSON items. Bytes
// alias body.
func ItemsFromHTTP(contentType string, body []byte) (Activation, error) {
	if contentType == "" {
		contentType = "application/octet-stream"
	}
	if !isJSON(contentType) {
		return Activation{{ContentType: contentType, Bytes: body}}, nil
	}
	trimmed := bytes.TrimLeft(body, " \t\r\n")
	if len(trimmed) == 0 {
		return Activation{{ContentType: contentType, Bytes: body}}, nil
	}
	if trimmed[0] != '[' {
		it, err := itemFromJSON(trimmed)
		if err != nil || it.Tensors == nil {
			return Activation{{ContentType: contentType, Bytes: body}}, err
		}
		return Activation{it}, nil
	}
	var raw []json.RawMessage
	if err := json.Unmarshal(trimmed, &raw); err != nil {
		return nil, fmt.Errorf("body: %w, want a JSON array of items", err)
	}
	a := make(Activation, len(raw))
	for i, r := range raw {
		it, err := itemFromJSON(r)
		if err != nil {
			return nil, fmt.Errorf("body[%d]: %w", i, err)
		}
		a[i] = it
	}
	return a, nil
}

func isJSON(contentType string) bool {
	if contentType == "application/json" {
		return true
	}
	if !strings.Contains(contentType, "json") {
		return false
	}
	media, _, err := mime.ParseMediaType(contentType)
	return err == nil && (media == "application/json" || strings.HasSuffix(media, "+json"))
}

// jsonItem is an item that is not a plain JSON value.
type jsonItem struct {
	ContentType string       `json:"contentType,omitempty"`
	Base64      *string      `json:"base64,omitempty"`
	Inputs      []jsonTensor `json:"inputs,omitempty"`
	Outputs     []jsonTensor `json:"outputs,omitempty"`
}

type jsonTensor struct {
	Name     string          `json:"name"`
	Datatype Datatype        `json:"datatype"`
	Shape    []int64         `json:"shape"`
	Data     json.RawMessage `json:"data"`
}

func itemFromJSON(raw json.RawMessage) (Item, error) {
	raw = bytes.TrimSpace(raw)
	switch {
	case len(raw) > 0 && raw[0] == '"':
		var s string
		if err := json.Unmarshal(raw, &s); err != nil {
			return Item{}, err
		}
		return Item{ContentType: "text/plain", Bytes: []byte(s)}, nil
	case len(raw) > 0 && raw[0] == '{':
		var j jsonItem
		if json.Unmarshal(raw, &j) != nil {
			break // an object of the user's own, whose fields only look like ours
		}
		if j.Base64 != nil {
			b, err := base64.StdEncoding.DecodeString(*j.Base64)
			if err != nil {
				return Item{}, fmt.Errorf("base64: %w", err)
			}
			return Item{ContentType: j.ContentType, Bytes: b}, nil
		}
		if ts := append(j.Inputs, j.Outputs...); len(ts) > 0 {
			return tensorsFromJSON(ts)
		}
	}
	return Item{ContentType: "application/json", Bytes: raw}, nil
}

func tensorsFromJSON(in []jsonTensor) (Item, error) {
	it := Item{Tensors: make([]Tensor, len(in))}
	for i, j := range in {
		t := Tensor{Name: j.Name, Datatype: j.Datatype, Shape: j.Shape}
		data, err := dataFromJSON(j.Datatype, j.Data)
		if err != nil {
			return Item{}, fmt.Errorf("inputs[%d] %q: data: %w", i, j.Name, err)
		}
		t.Data = data
		if err := t.Validate(); err != nil {
			return Item{}, fmt.Errorf("inputs[%d]: %w", i, err)
		}
		it.Tensors[i] = t
	}
	return it, nil
}

// dataFromJSON reads a flat or nested array of numbers, booleans or strings.
func dataFromJSON(d Datatype, raw json.RawMessage) ([]byte, error) {
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.UseNumber()
	var out []byte
	for dec.More() {
		tok, err := dec.Token()
		if err != nil {
			return nil, err
		}
		if _, ok := tok.(json.Delim); ok {
			continue // nesting repeats what shape says
		}
		if out, err = appendElement(out, d, tok); err != nil {
			return nil, err
		}
		for !dec.More() { // closing brackets
			if _, err := dec.Token(); err != nil {
				return out, nil //nolint:nilerr // the end of the array
			}
		}
	}
	return out, nil
}

func appendElement(b []byte, d Datatype, tok json.Token) ([]byte, error) {
	bad := fmt.Errorf("%v, want %s", tok, d)
	switch v := tok.(type) {
	case bool:
		if d != "BOOL" {
			return nil, bad
		}
		if v {
			return append(b, 1), nil
		}
		return append(b, 0), nil
	case string:
		if d != "BYTES" {
			return nil, bad
		}
		return append(binary.LittleEndian.AppendUint32(b, uint32(len(v))), v...), nil
	case json.Number:
		return appendNumber(b, d, v, bad)
	}
	return nil, bad
}

func appendNumber(b []byte, d Datatype, v json.Number, bad error) ([]byte, error) {
	switch d {
	case "FP32", "FP64":
		f, err := v.Float64()
		if err != nil {
			return nil, bad
		}
		if d == "FP32" {
			return binary.LittleEndian.AppendUint32(b, math.Float32bits(float32(f))), nil
		}
		return binary.LittleEndian.AppendUint64(b, math.Float64bits(f)), nil
	case "UINT64":
		var u uint64
		if _, err := fmt.Sscan(v.String(), &u); err != nil {
			return nil, bad
		}
		return binary.LittleEndian.AppendUint64(b, u), nil
	}
	i, err := v.Int64()
	if err != nil {
		return nil, bad
	}
	size := d.Size()
	if size == 0 || strings.HasPrefix(string(d), "FP") || d == "BF16" || d == "BOOL" {
		return nil, fmt.Errorf("%w, which has no JSON form here: send binary", bad)
	}
	low, high := int64(-1)<<(8*size-1), int64(1)<<(8*size-1)-1
	if d[0] == 'U' {
		low, high = 0, int64(1)<<(8*size)-1
	}
	if i < low || i > high {
		return nil, bad
	}
	return append(b, binary.LittleEndian.AppendUint64(nil, uint64(i))[:size]...), nil
}

// ToHTTP makes a response's body. One part with one byte item is that body with its content type. Several items are a JSON
// array, several parts an object by the parts' names; in them JSON stays JSON, text becomes a string, other bytes become
// {"contentType","base64"} and tensors {"outputs":[…]}. Items must not be references.
func ToHTTP(out Input) (contentType string, body []byte, err error) {
	if len(out) == 1 && len(out[0].Items) == 1 && out[0].Items[0].Tensors == nil && out[0].Items[0].Ref == nil {
		it := out[0].Items[0]
		return it.ContentType, it.Bytes, nil
	}
	var v any
	if len(out) == 1 {
		v, err = itemsToJSON(out[0].Items)
	} else {
		parts := make(map[string]any, len(out))
		for _, p := range out {
			if parts[p.From], err = itemsToJSON(p.Items); err != nil {
				return "", nil, fmt.Errorf("output of %q: %w", p.From, err)
			}
		}
		v = parts
	}
	if err != nil {
		return "", nil, err
	}
	body, err = json.Marshal(v)
	return "application/json", body, err
}

// itemsToJSON returns an array, or the bare object when there is one item of tensors.
func itemsToJSON(a Activation) (any, error) {
	out := make([]any, len(a))
	for i, it := range a {
		v, err := itemToJSON(it)
		if err != nil {
			return nil, fmt.Errorf("item %d: %w", i, err)
		}
		out[i] = v
	}
	if len(a) == 1 {
		return out[0], nil
	}
	return out, nil
}

func itemToJSON(it Item) (any, error) {
	switch {
	case it.Ref != nil:
		return nil, fmt.Errorf("reference to blob %q of %d bytes, want it resolved", it.Ref.Blob, it.Ref.Size)
	case it.Tensors != nil:
		j := jsonItem{Outputs: make([]jsonTensor, len(it.Tensors))}
		for i, t := range it.Tensors {
			data, err := dataToJSON(t)
			if err != nil {
				return nil, err
			}
			j.Outputs[i] = jsonTensor{t.Name, t.Datatype, t.Shape, data}
		}
		return j, nil
	case isJSON(it.ContentType) && json.Valid(it.Bytes):
		return json.RawMessage(it.Bytes), nil
	case strings.HasPrefix(it.ContentType, "text/"):
		return string(it.Bytes), nil
	}
	s := base64.StdEncoding.EncodeToString(it.Bytes)
	return jsonItem{ContentType: it.ContentType, Base64: &s}, nil
}

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
			out[i] = string(e)
		}
		return json.Marshal(out)
	}
	size := t.Datatype.Size()
	b := []byte{'['}
	for i := 0; i < len(t.Data); i += size {
		if i > 0 {
			b = append(b, ',')
		}
		var err error
		if b, err = appendJSONNumber(b, t.Datatype, t.Data[i:i+size]); err != nil {
			return nil, fmt.Errorf("tensor %q, element %d: %w", t.Name, i/size, err)
		}
	}
	return append(b, ']'), nil
}

func appendJSONNumber(b []byte, d Datatype, e []byte) ([]byte, error) {
	var word [8]byte
	copy(word[:], e)
	u := binary.LittleEndian.Uint64(word[:])
	var v any
	switch d {
	case "BOOL":
		v = u != 0
	case "FP32":
		v = math.Float32frombits(uint32(u))
	case "FP64":
		v = math.Float64frombits(u)
	case "FP16", "BF16":
		return nil, fmt.Errorf("%s has no JSON form: ask for FP32", d)
	case "INT8", "INT16", "INT32", "INT64":
		shift := 64 - 8*len(e)
		v = int64(u) << shift >> shift
	default:
		v = u
	}
	j, err := json.Marshal(v) // refuses NaN and infinities
	return append(b, j...), err
}
