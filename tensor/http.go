package tensor

import (
	"bytes"
	"cmp"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"mime"
	"strings"
	"unicode/utf8"
)

const binaryType = "application/octet-stream"

// ItemsFromHTTP turns a body into items. A JSON array is a list of items. An object with tensors in
// "inputs" or "outputs", as in the Open Inference Protocol v2, is one item of tensors. Any other
// body is one item of bytes.
//
// An element of an array becomes one item. A string is text, {"contentType","base64"} is bytes, an
// object with tensors as above is tensors, and any other value is JSON. Bytes alias body.
func ItemsFromHTTP(contentType string, body []byte) (Activation, error) {
	a, _, err := FromHTTP(contentType, body)
	return a, err
}

// FromHTTP works like [ItemsFromHTTP]. It also returns what a request of the Open Inference
// Protocol says about its answer, or nil if the body is no such request.
func FromHTTP(contentType string, body []byte) (Activation, *Inference, error) {
	trimmed := bytes.TrimLeft(body, space)
	if !isJSON(contentType) || len(trimmed) == 0 {
		return Document(contentType, body), nil, nil
	}
	if trimmed[0] != '[' {
		it, inf, ok, err := inferenceIn(trimmed)
		switch {
		case err != nil:
			return nil, nil, err
		case ok:
			return Activation{it}, inf, nil
		}
		return Document(contentType, body), nil, nil
	}
	var raw []json.RawMessage
	if err := json.Unmarshal(trimmed, &raw); err != nil {
		return nil, nil, fmt.Errorf("body: %w, want a JSON array of items", err)
	}
	a := make(Activation, len(raw))
	for i, r := range raw {
		it, err := itemFromJSON(r)
		if field := (*FieldError)(nil); errors.As(err, &field) {
			field.Path = fmt.Sprintf("body[%d].%s", i, field.Path)
			return nil, nil, err
		} else if err != nil {
			return nil, nil, fmt.Errorf("body[%d]: %w", i, err)
		}
		a[i] = it
	}
	return a, nil, nil
}

// Document returns a body as one item of bytes, whatever its content is. The bytes alias body.
func Document(contentType string, body []byte) Activation {
	return Activation{{ContentType: cmp.Or(contentType, binaryType), Bytes: body}}
}

// IsArray reports whether [ItemsFromHTTP] treats a body as a list of items.
func IsArray(contentType string, body []byte) bool {
	if !isJSON(contentType) {
		return false
	}
	trimmed := bytes.TrimLeft(body, space)
	return len(trimmed) > 0 && trimmed[0] == '['
}

// space has the white space of JSON.
const space = " \t\r\n"

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
	Outputs     []jsonTensor `json:"outputs,omitempty"`
}

// jsonTensor is a tensor of an answer. Its data may follow the JSON instead.
type jsonTensor struct {
	Name       string            `json:"name"`
	Datatype   Datatype          `json:"datatype"`
	Shape      []int64           `json:"shape"`
	Parameters *tensorParameters `json:"parameters,omitempty"`
	Data       json.RawMessage   `json:"data,omitempty"`
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
		it, inf, ok, err := inferenceIn(raw)
		switch {
		case err != nil:
			return Item{}, err
		case inf != nil && len(inf.Outputs) > 0:
			return Item{}, &FieldError{"outputs", "a selection", "none in a list of items: a request that selects outputs is an object by itself"}
		case ok:
			return it, nil
		}
		var j jsonItem
		if json.Unmarshal(raw, &j) != nil || j.Base64 == nil {
			break // an object of the user
		}
		b, err := base64.StdEncoding.DecodeString(*j.Base64)
		if err != nil {
			return Item{}, fmt.Errorf("base64: %w", err)
		}
		return Item{ContentType: cmp.Or(j.ContentType, binaryType), Bytes: b}, nil
	}
	return Item{ContentType: "application/json", Bytes: raw}, nil
}

// ToHTTP makes the body of a response. If out is one part with one byte item, that item is the
// body, with its own content type. Otherwise the body is JSON:
//   - Several items are an array. Several parts are an object, by the parts' names.
//   - An item of JSON stays JSON, and UTF-8 text is a string. Other bytes are
//     {"contentType","base64"}, and tensors are {"outputs":[…]}.
//
// Items must not be references.
func ToHTTP(out Input) (contentType string, body []byte, err error) {
	if len(out) == 1 && len(out[0].Items) == 1 && out[0].Items[0].Tensors == nil && out[0].Items[0].Ref == nil {
		it := out[0].Items[0]
		return cmp.Or(it.ContentType, binaryType), it.Bytes, nil
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

// itemsToJSON returns an array, or the bare object if there is one item of tensors.
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
			j.Outputs[i] = jsonTensor{Name: t.Name, Datatype: t.Datatype, Shape: t.Shape, Data: data}
		}
		return j, nil
	case isJSON(it.ContentType) && json.Valid(it.Bytes):
		return json.RawMessage(it.Bytes), nil
	case strings.HasPrefix(it.ContentType, "text/") && utf8.Valid(it.Bytes):
		return string(it.Bytes), nil
	}
	s := base64.StdEncoding.EncodeToString(it.Bytes)
	return jsonItem{ContentType: it.ContentType, Base64: &s}, nil
}
