package tensor

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// InferenceHeader is the HTTP header with the number of JSON bytes in a body. The data of tensors
// follows the JSON, as the Open Inference Protocol's binary tensor data extension defines.
const InferenceHeader = "Inference-Header-Content-Length"

// Inference has the fields of a request of the Open Inference Protocol v2 other than its tensors.
type Inference struct {
	ID string `json:"id,omitempty"` // copied to the answer
	// wanted outputs of the answer, in this order; none: all.
	Outputs []Output `json:"outputs,omitempty"`
	// The invoked model, for the answer; empty: none named.
	Model string `json:"model,omitempty"`
	// send the answer's data in binary, if Outputs is empty.
	Binary bool `json:"binary,omitempty"`
}

// Output is an output that a request selects.
type Output struct {
	Name   string `json:"name"`
	Binary bool   `json:"binary,omitempty"` // send its data in binary
}

// FieldError is an error in one field of a body.
type FieldError struct {
	Path string // for example inputs[0].data
	Got  string
	Want string
}

// Error returns the field's path, its value, and what was wanted.
func (e *FieldError) Error() string { return fmt.Sprintf("%s: got %s, want %s", e.Path, e.Got, e.Want) }

// inferenceBody is an object with tensors, as far as its fields have the right types.
type inferenceBody struct {
	ID     json.RawMessage `json:"id"`
	Inputs []tensorBody    `json:"inputs"`
	// In a request: the selected outputs; in an answer: its tensors.
	Outputs    []tensorBody       `json:"outputs"`
	Parameters *requestParameters `json:"parameters"`
}

type tensorBody struct {
	Name       string            `json:"name"`
	Datatype   Datatype          `json:"datatype"`
	Shape      json.RawMessage   `json:"shape"`
	Data       json.RawMessage   `json:"data"`
	Parameters *tensorParameters `json:"parameters"`
}

// tensorParameters and requestParameters are the parameters of the binary data extension. Others
// are ignored.
type tensorParameters struct {
	Size   *int64 `json:"binary_data_size,omitempty"` // size in bytes of the binary data
	Binary *bool  `json:"binary_data,omitempty"`      // whether to send this output in binary
}

type requestParameters struct {
	// whether to send outputs in binary that do not say it themselves.
	Binary *bool `json:"binary_data_output"`
}

// isTensor reports whether an object is a tensor of the protocol: it has a name, a datatype, and a
// shape or data.
func (t *tensorBody) isTensor() bool {
	return t.Name != "" && t.Datatype != "" && (t.Shape != nil || t.Data != nil)
}

// areTensors reports whether a list has tensors and nothing else.
func areTensors(list []tensorBody) bool {
	for i := range list {
		if !list[i].isTensor() {
			return false
		}
	}
	return len(list) > 0
}

// inferenceIn reads the tensors of a JSON object. ok is false for a document of the user, even if
// some of its fields look like the protocol's. inf is nil unless the object is a request.
func inferenceIn(object []byte) (it Item, inf *Inference, ok bool, err error) {
	if object[0] != '{' || !bytes.Contains(object, []byte(`"inputs"`)) && !bytes.Contains(object, []byte(`"outputs"`)) {
		return Item{}, nil, false, nil // decided without reading all of it
	}
	return readInference(object, nil)
}

// readInference is inferenceIn for a body whose binary data is in rest.
func readInference(object, rest []byte) (it Item, inf *Inference, ok bool, err error) {
	var j inferenceBody
	bad := json.Unmarshal(object, &j)
	wrongType := (*json.UnmarshalTypeError)(nil)
	switch request := areTensors(j.Inputs); {
	case bad != nil && !errors.As(bad, &wrongType): // not JSON
		return Item{}, nil, false, nil
	case request && bad != nil:
		return Item{}, nil, true, &FieldError{wrongType.Field, "a JSON " + wrongType.Value, "what the Open Inference Protocol has there: " + inferenceForm}
	case request:
		if inf, err = j.wants(); err == nil {
			it, err = tensorsOf("inputs", j.Inputs, rest)
		}
		return it, inf, true, err
	case bad == nil && len(j.Inputs) == 0 && areTensors(j.Outputs):
		it, err = tensorsOf("outputs", j.Outputs, rest)
		return it, nil, true, err
	}
	return Item{}, nil, false, nil
}

// inferenceForm describes the form of a request in short.
const inferenceForm = `{"id": "…", "inputs": [{"name", "shape", "datatype", "data"}, …], "outputs": [{"name"}, …]}`

// maxOutputs bounds the outputs that a request selects.
const maxOutputs = 1000

// wants returns what the request says about its answer.
func (j *inferenceBody) wants() (*Inference, error) {
	inf := &Inference{}
	if j.ID != nil && json.Unmarshal(j.ID, &inf.ID) != nil {
		return nil, &FieldError{"id", fmt.Sprintf("%.100s", j.ID), "a string"}
	}
	if len(j.Outputs) > maxOutputs {
		return nil, &FieldError{"outputs", fmt.Sprintf("%d", len(j.Outputs)), fmt.Sprintf("at most %d; without any, the answer has all outputs", maxOutputs)}
	}
	inf.Binary = j.Parameters != nil && j.Parameters.Binary != nil && *j.Parameters.Binary
	for i, o := range j.Outputs {
		path := fmt.Sprintf("outputs[%d].name", i)
		if o.Name == "" {
			return nil, &FieldError{path, "none", "the name of an output"}
		}
		for _, before := range inf.Outputs {
			if before.Name == o.Name {
				return nil, &FieldError{path, strconv.Quote(o.Name), "each output once"}
			}
		}
		out := Output{o.Name, inf.Binary}
		if o.Parameters != nil && o.Parameters.Binary != nil {
			out.Binary = *o.Parameters.Binary
		}
		inf.Outputs = append(inf.Outputs, out)
	}
	return inf, nil
}

// tensorsOf makes an item from a list of tensors. Binary data is taken from rest, in the order of
// the tensors.
func tensorsOf(list string, in []tensorBody, rest []byte) (Item, error) {
	it := Item{Tensors: make([]Tensor, len(in))}
	all := len(rest)
	for i := range in {
		t, left, err := in[i].tensor(rest)
		if err != nil {
			err.Path = fmt.Sprintf("%s[%d].%s", list, i, err.Path)
			return Item{}, err
		}
		it.Tensors[i], rest = t, left
	}
	if len(rest) > 0 {
		return Item{}, &FieldError{list, fmt.Sprintf("tensors with %d bytes of binary data", all-len(rest)), fmt.Sprintf("a binary_data_size for each of the %d bytes after the JSON", all)}
	}
	return it, nil
}

// tensor decodes a tensor. It returns the binary data that follows the tensor's.
func (j *tensorBody) tensor(rest []byte) (Tensor, []byte, *FieldError) {
	t := Tensor{Name: j.Name, Datatype: j.Datatype}
	if t.Datatype != "BYTES" && t.Datatype.Size() == 0 {
		return t, nil, &FieldError{"datatype", fmt.Sprintf("%.100q", t.Datatype), "one of " + datatypes}
	}
	if j.Shape == nil || json.Unmarshal(j.Shape, &t.Shape) != nil || t.Shape == nil {
		return t, nil, &FieldError{"shape", fmt.Sprintf("%.100s", orNone(j.Shape)), "a list of dimensions, such as [2,3]"}
	}
	want, ok := elementsIn(t.Shape)
	if !ok {
		return t, nil, &FieldError{"shape", shapeText(t.Shape), shapeWant}
	}
	if j.Parameters != nil && j.Parameters.Size != nil {
		return j.binary(t, want, rest)
	}
	if j.Data == nil {
		return t, nil, &FieldError{"data", "none", fmt.Sprintf("%d %s of shape %s, or parameters.binary_data_size with the header %s", want, elementsOf(t.Datatype, want), shapeText(t.Shape), InferenceHeader)}
	}
	data, err := dataFromJSON(t.Datatype, t.Shape, want, j.Data)
	if err != nil {
		err.Path = "data"
	}
	t.Data = data
	return t, rest, err
}

// binary takes a tensor's data from rest, which follows the JSON. The data has the encoding of
// [Tensor].
func (j *tensorBody) binary(t Tensor, want int64, rest []byte) (Tensor, []byte, *FieldError) {
	const path = "parameters.binary_data_size"
	size := *j.Parameters.Size
	switch n := want * int64(t.Datatype.Size()); {
	case j.Data != nil:
		return t, nil, &FieldError{"data", "data beside " + path, "one of the two"}
	case size < 0 || size > int64(len(rest)):
		return t, nil, &FieldError{path, strconv.FormatInt(size, 10), fmt.Sprintf("at most the %d bytes that are left after the JSON, whose length is in the header %s", len(rest), InferenceHeader)}
	case t.Datatype != "BYTES" && size != n:
		return t, nil, &FieldError{path, strconv.FormatInt(size, 10), fmt.Sprintf("%d, for %d elements of %s in shape %s", n, want, t.Datatype, shapeText(t.Shape))}
	}
	t.Data = rest[:size:size]
	if t.Datatype == "BYTES" {
		if err := t.validateBytes(want); err != nil {
			return t, nil, &FieldError{path, fmt.Sprintf("%d bytes: %v", size, err), "elements with their lengths before them, in 4 bytes, little-endian"}
		}
	}
	return t, rest[size:], nil
}

func orNone(raw json.RawMessage) string {
	if raw == nil {
		return "none"
	}
	return string(raw)
}

// InferenceFromHTTP decodes a body that must be a request of the Open Inference Protocol. header is
// the value of [InferenceHeader], the number of JSON bytes before the binary data. If header is
// empty, all of body is JSON. The tensors alias body.
func InferenceFromHTTP(header string, body []byte) (Activation, *Inference, error) {
	n, err := strconv.ParseUint(header, 10, 31)
	if header == "" {
		n = uint64(len(body))
	} else if err != nil || n == 0 || n > uint64(len(body)) {
		return nil, nil, &FieldError{"header " + InferenceHeader, fmt.Sprintf("%.100q", header), fmt.Sprintf("the length in bytes of the JSON that the body begins with; the body has %d", len(body))}
	}
	object := bytes.TrimLeft(body[:n], space)
	if len(object) > 0 && object[0] == '{' {
		it, inf, ok, err := readInference(object, body[n:])
		if err != nil {
			return nil, nil, err
		}
		if ok && inf != nil {
			return Activation{it}, inf, nil
		}
	}
	return nil, nil, &FieldError{"body", fmt.Sprintf("%.100q", body[:n]), "a request of the Open Inference Protocol: " + inferenceForm}
}

// Answer is the answer to a request of the Open Inference Protocol.
type Answer struct {
	ContentType string
	Body        []byte
	Header      int // number of JSON bytes in Body, for [InferenceHeader]; 0: no binary data
}

// jsonAnswer is the JSON of an answer.
type jsonAnswer struct {
	Model   string       `json:"model_name,omitempty"`
	ID      string       `json:"id,omitempty"`
	Outputs []jsonTensor `json:"outputs"`
}

// InJSON returns inf without its request for binary data, for answers that cannot have binary data.
// inf may be nil.
func (inf *Inference) InJSON() *Inference {
	if inf == nil {
		return nil
	}
	out := &Inference{ID: inf.ID, Model: inf.Model}
	for _, o := range inf.Outputs {
		out.Outputs = append(out.Outputs, Output{Name: o.Name})
	}
	return out
}

// Answer makes the answer to a request from out, the function's output. If out is one item of
// tensors, the answer has the outputs that the request selects. Selecting an output that does not
// exist is a *FieldError. Any other out is encoded by [ToHTTP], or is a *FieldError if the request
// selects outputs or names a model.
func (inf *Inference) Answer(out Input) (Answer, error) {
	if len(out) != 1 || len(out[0].Items) != 1 || out[0].Items[0].Tensors == nil {
		if len(inf.Outputs) > 0 {
			return Answer{}, &FieldError{"outputs", strconv.Quote(inf.Outputs[0].Name), "none: the answer is not one item of tensors, so it has no outputs to select"}
		}
		if inf.Model != "" {
			return Answer{}, &FieldError{"the answer of model " + strconv.Quote(inf.Model), "something else than one item of tensors", "tensors; ask for the answer as it is at /function/NAME"}
		}
		contentType, body, err := ToHTTP(out)
		return Answer{ContentType: contentType, Body: body}, err
	}
	all := out[0].Items[0].Tensors
	j := jsonAnswer{Model: inf.Model, ID: inf.ID, Outputs: make([]jsonTensor, 0, len(all))}
	var rest [][]byte
	add := func(t *Tensor, binary bool) (err error) {
		o := jsonTensor{Name: t.Name, Datatype: t.Datatype, Shape: t.Shape}
		if binary {
			if err = t.Validate(); err == nil {
				n := int64(len(t.Data))
				o.Parameters, rest = &tensorParameters{Size: &n}, append(rest, t.Data)
			}
		} else {
			o.Data, err = dataToJSON(*t)
		}
		j.Outputs = append(j.Outputs, o)
		return err
	}
	if len(inf.Outputs) == 0 {
		for i := range all {
			if err := add(&all[i], inf.Binary); err != nil {
				return Answer{}, err
			}
		}
	}
	for i, o := range inf.Outputs {
		t := tensorNamed(all, o.Name)
		if t == nil {
			return Answer{}, &FieldError{fmt.Sprintf("outputs[%d].name", i), fmt.Sprintf("%.100q", o.Name), "one of " + namesOf(all)}
		}
		if err := add(t, o.Binary); err != nil {
			return Answer{}, err
		}
	}
	body, err := json.Marshal(j)
	if err != nil || len(rest) == 0 {
		return Answer{ContentType: "application/json", Body: body}, err
	}
	return Answer{ContentType: binaryType, Body: bytes.Join(append([][]byte{body}, rest...), nil), Header: len(body)}, nil
}

func tensorNamed(all []Tensor, name string) *Tensor {
	for i := range all {
		if all[i].Name == name {
			return &all[i]
		}
	}
	return nil
}

// namesOf lists the names of tensors for a message.
func namesOf(all []Tensor) string {
	const most = 20
	var names []string
	for i := range all[:min(len(all), most)] {
		names = append(names, strconv.Quote(all[i].Name))
	}
	if more := len(all) - most; more > 0 {
		names = append(names, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(names, ", ")
}
