package tensor

import (
	"errors"
	"reflect"
	"strconv"
	"strings"
	"testing"
)

// request returns a request of the protocol with one input, followed by the text more, which has
// further fields.
func request(more string) string {
	return `{"inputs":[{"name":"x","datatype":"INT16","shape":[2],"data":[1,2],"parameters":{"any":"thing"}}]` + more + `}`
}

func TestInferenceRequests(t *testing.T) {
	for name, tc := range map[string]struct {
		body string
		want *Inference
	}{
		"nothing":                  {request(""), &Inference{}},
		"an id":                    {request(`,"id":"7"`), &Inference{ID: "7"}},
		"outputs in their order":   {request(`,"outputs":[{"name":"b"},{"name":"a","parameters":{"classification":2}}]`), &Inference{Outputs: []Output{{Name: "b"}, {Name: "a"}}}},
		"no outputs, which is all": {request(`,"outputs":[]`), &Inference{}},
		"binary data of all":       {request(`,"parameters":{"binary_data_output":true}`), &Inference{Binary: true}},
		"binary data of some":      {request(`,"parameters":{"binary_data_output":true},"outputs":[{"name":"a","parameters":{"binary_data":false}},{"name":"b"}]`), &Inference{Binary: true, Outputs: []Output{{Name: "a"}, {Name: "b", Binary: true}}}},
		"an answer asks nothing":   {`{"id":"7","outputs":[{"name":"x","datatype":"INT16","shape":[1],"data":[1]}]}`, nil},
		"nor does a document":      {`{"id":7,"inputs":"mine"}`, nil},
	} {
		t.Run(name, func(t *testing.T) {
			_, got, err := FromHTTP("application/json", []byte(tc.body))
			if err != nil || !reflect.DeepEqual(got, tc.want) {
				t.Errorf("got %+v, %v, want %+v", got, err, tc.want)
			}
		})
	}
	for more, want := range map[string]string{
		`,"id":7`:                                    "id: got 7, want a string",
		`,"outputs":"y"`:                             "outputs: got a JSON string, want what the Open Inference Protocol has there",
		`,"outputs":[{"nam":"y"}]`:                   "outputs[0].name: got none, want the name of an output",
		`,"outputs":[{"name":"y"},{"name":"y"}]`:     `outputs[1].name: got "y", want each output once`,
		`,"parameters":{"binary_data_output":"yes"}`: "parameters.binary_data_output: got a JSON string",
		`,"outputs":[` + strings.Repeat(`{"name":"y"},`, maxOutputs) + `{"name":"y"}]`: "outputs: got 1001, want at most 1000",
	} {
		_, _, err := FromHTTP("application/json", []byte(request(more)))
		if field := (*FieldError)(nil); !errors.As(err, &field) || !strings.Contains(err.Error(), want) {
			t.Errorf("%.100s: %v, want %q", more, err, want)
		}
	}
}

func TestInferenceAnswers(t *testing.T) {
	y := Tensor{Name: "y", Datatype: "INT16", Shape: []int64{2}, Data: []byte{1, 0, 255, 255}}
	half := Tensor{Name: "half", Datatype: "FP16", Shape: []int64{1}, Data: []byte{0, 60}}
	both := Input{{Items: Activation{{Tensors: []Tensor{y, half}}}}}
	for name, tc := range map[string]struct {
		inf    Inference
		out    Input
		want   string
		header int
	}{
		"the id and the model": {Inference{ID: "7", Model: "m"}, Input{{Items: Activation{{Tensors: []Tensor{y}}}}}, `{"model_name":"m","id":"7","outputs":[{"name":"y","datatype":"INT16","shape":[2],"data":[1,-1]}]}`, 0},
		"one of two":           {Inference{Outputs: []Output{{Name: "y"}}}, both, `{"outputs":[{"name":"y","datatype":"INT16","shape":[2],"data":[1,-1]}]}`, 0},
		"binary data":          {Inference{Binary: true}, both, `{"outputs":[{"name":"y","datatype":"INT16","shape":[2],"parameters":{"binary_data_size":4}},{"name":"half","datatype":"FP16","shape":[1],"parameters":{"binary_data_size":2}}]}` + "\x01\x00\xff\xff\x00\x3c", 175},
		"some binary data, in the order that is wanted": {Inference{Outputs: []Output{{Name: "half", Binary: true}, {Name: "y"}}}, both, `{"outputs":[{"name":"half","datatype":"FP16","shape":[1],"parameters":{"binary_data_size":2}},{"name":"y","datatype":"INT16","shape":[2],"data":[1,-1]}]}` + "\x00\x3c", 153},
		"no tensors": {Inference{ID: "7"}, Input{{Items: Activation{{ContentType: "text/plain", Bytes: []byte("hi")}}}}, "hi", 0},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := tc.inf.Answer(tc.out)
			if err != nil || string(got.Body) != tc.want || got.Header != tc.header {
				t.Errorf("got %q with %d bytes of JSON, %v\nwant %q with %d", got.Body, got.Header, err, tc.want, tc.header)
			}
		})
	}
	for want, tc := range map[string]struct {
		inf Inference
		out Input
	}{
		`outputs[1].name: got "z", want one of "y", "half"`:                    {Inference{Outputs: []Output{{Name: "y"}, {Name: "z"}}}, both},
		`the answer of model "m": got something else than one item of tensors`: {Inference{Model: "m"}, Input{{Items: Activation{{}}}}},
		`outputs: got "y", want none: the answer is not one item of tensors`:   {Inference{Outputs: []Output{{Name: "y"}}}, Input{{Items: Activation{{}, {}}}}},
	} {
		_, err := tc.inf.Answer(tc.out)
		if field := (*FieldError)(nil); !errors.As(err, &field) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	if _, err := (&Inference{}).Answer(both); err == nil || errors.As(err, new(*FieldError)) || !strings.Contains(err.Error(), "FP16") {
		t.Errorf("FP16 in JSON: %v, want an error that is not the request's", err)
	}
}

func TestBinaryDataOfRequests(t *testing.T) {
	const head = `{"id":"7","inputs":[{"name":"h","datatype":"FP16","shape":[2],"parameters":{"binary_data_size":4}},` +
		`{"name":"i","datatype":"INT8","shape":[1],"data":[5]},{"name":"s","datatype":"BYTES","shape":[1],"parameters":{"binary_data_size":6}}]}`
	const data = "\x00\x3c\x00\x40\x02\x00\x00\x00hi"
	a, inf, err := InferenceFromHTTP("234", []byte(head+data))
	want := []Tensor{
		{Name: "h", Datatype: "FP16", Shape: []int64{2}, Data: []byte("\x00\x3c\x00\x40")},
		{Name: "i", Datatype: "INT8", Shape: []int64{1}, Data: []byte{5}},
		{Name: "s", Datatype: "BYTES", Shape: []int64{1}, Data: []byte("\x02\x00\x00\x00hi")},
	}
	if err != nil || len(a) != 1 || !reflect.DeepEqual(a[0].Tensors, want) || inf == nil || inf.ID != "7" {
		t.Fatalf("%d bytes of JSON: got %+v, %+v, %v", len(head), a, inf, err)
	}
	one := func(datatype, size, more string) string {
		return `{"inputs":[{"name":"x","datatype":"` + datatype + `","shape":[2],` + more + `"parameters":{"binary_data_size":` + size + `}}]}`
	}
	for _, tc := range []struct{ head, data, header, want string }{
		{one("FP16", "4", ""), "\x00\x00\x00\x00", "1000", `header Inference-Header-Content-Length: got "1000", want the length in bytes of the JSON that the body begins with; the body has`},
		{one("FP16", "4", ""), "", "x", `got "x"`},
		{one("FP16", "4", ""), "", "0", `got "0"`},
		{one("FP16", "4", ""), "", "", "inputs[0].parameters.binary_data_size: got 4, want at most the 0 bytes"},
		{one("FP16", "2", ""), "\x00\x00", "", "inputs[0].parameters.binary_data_size: got 2, want 4, for 2 elements of FP16 in shape [2]"},
		{one("FP16", "4", ""), "\x00\x00\x00\x00\x00", "", "inputs: got tensors with 4 bytes of binary data, want a binary_data_size for each of the 5 bytes"},
		{one("FP16", "4", `"data":[],`), "\x00\x00\x00\x00", "", "inputs[0].data: got data beside parameters.binary_data_size"},
		{one("BYTES", "4", ""), "\x09\x00\x00\x00", "", "inputs[0].parameters.binary_data_size: got 4 bytes"},
		{one("FP16", "-1", ""), "", "", "got -1"},
		{`{"a":1}`, "x", "", "body: got"},
		{`["a"]`, "x", "", "body: got"},
		{`{"inputs":[`, "", "", "body: got"},
	} {
		header := tc.header
		if header == "" {
			header = strconv.Itoa(len(tc.head))
		}
		a, _, err := InferenceFromHTTP(header, []byte(tc.head+tc.data))
		if field := (*FieldError)(nil); !errors.As(err, &field) || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s%q: %+v, %v, want %q", tc.head, tc.data, a, err, tc.want)
		}
	}
	if _, err := ItemsFromHTTP("application/json", []byte(one("FP16", "4", ""))); err == nil || !strings.Contains(err.Error(), "Inference-Header-Content-Length") {
		t.Errorf("binary data without the header: %v, want its name", err)
	}
}

func TestDocument(t *testing.T) {
	for body, want := range map[string]bool{"[1]": true, " \n[": true, `{"a":[1]}`: false, "": false, `"[]"`: false} {
		if got := IsArray("application/json; charset=utf-8", []byte(body)); got != want {
			t.Errorf("%q: %t, want %t", body, got, want)
		}
	}
	if IsArray("text/plain", []byte("[1]")) {
		t.Error("text is an array")
	}
	const body = ` [1,  "two"] `
	contentType, got, err := ToHTTP(Input{{Items: Document("application/json", []byte(body))}})
	if err != nil || contentType != "application/json" || string(got) != body {
		t.Errorf("out again: %s %q, %v", contentType, got, err)
	}
}
