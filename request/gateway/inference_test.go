package gateway

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

const jsonType = "application/json"

// TestItemsHeaderDecidesWhatAnArrayIs checks that X-Items decides whether an array is a list of
// items. Without X-Items, the function decides.
func TestItemsHeaderDecidesWhatAnArrayIs(t *testing.T) {
	f := newFront(t, nil)
	const body = ` [1, "a"] `
	for _, tc := range []struct {
		target, header string
		items          int
		answer         string
	}{
		{"echo", "", 2, `[1,"a"]`},
		{"echo", "many", 2, `[1,"a"]`},
		{"echo", "one", 1, body},
		{"x.team-a", "", 1, body},
		{"x.team-a", "many", 2, `[1,"a"]`},
		{"x.team-a", "one", 1, body},
	} {
		header := []string{"Content-Type", jsonType}
		if tc.header != "" {
			header = append(header, "X-Items", tc.header)
		}
		w := f.do(http.MethodPost, "/function/"+tc.target, body, header...)
		r := f.invoker.last(t)
		if w.Code != http.StatusOK || len(r.Input) != tc.items || w.Body.String() != tc.answer || w.Header().Get("Content-Type") != jsonType {
			t.Errorf("%s, X-Items %q: status %d, %d items, answer %q, want %d and %q", tc.target, tc.header, w.Code, len(r.Input), w.Body, tc.items, tc.answer)
		}
		if len(header) > 2 && len(headerValue(r.Header, "X-Items")) > 0 {
			t.Error("the function gets X-Items")
		}
		if w := f.do(http.MethodPost, "/async-function/"+tc.target, body, header...); w.Code != http.StatusAccepted {
			t.Fatalf("async: %d %s", w.Code, w.Body)
		}
		var e Entry
		if err := e.UnmarshalBinary(f.journal.entries[len(f.journal.entries)-1]); err != nil || len(e.Request.Input) != tc.items {
			t.Errorf("async to %s, X-Items %q: %d items, %v, want %d", tc.target, tc.header, len(e.Request.Input), err, tc.items)
		}
	}
	r := httptest.NewRequest(http.MethodPost, "/function/echo", strings.NewReader(body))
	r.Header["X-Items"] = []string{"one", "many"}
	w := httptest.NewRecorder()
	if f.handler.ServeHTTP(w, r); w.Code != http.StatusBadRequest || !strings.Contains(w.Body.String(), `header X-Items: got "one, many", want many or one`) {
		t.Errorf("two headers: %d %s", w.Code, w.Body)
	}
}

// TestAsyncHTTPRequestKeepsItsBody checks that an async request to a function that speaks HTTP
// keeps its body and X-Items.
func TestAsyncHTTPRequestKeepsItsBody(t *testing.T) {
	f := newFront(t, func(c *Config) { c.HTTP = func(pipeline.Key) bool { return true } })
	for _, body := range []string{` ["a"] `, inferBody} {
		if w := f.do(http.MethodPost, "/async-function/echo", body, "Content-Type", jsonType, "X-Items", "mine", tensor.InferenceHeader, "9"); w.Code != http.StatusAccepted {
			t.Fatalf("%d %s", w.Code, w.Body)
		}
		var e Entry
		if err := e.UnmarshalBinary(f.journal.entries[len(f.journal.entries)-1]); err != nil || len(e.Request.Input) != 1 || string(e.Request.Input[0].Bytes) != body ||
			headerValue(e.Request.Header, "X-Items") != "mine" || headerValue(e.Request.Header, tensor.InferenceHeader) != "9" {
			t.Errorf("%s: kept as %+v, %v", body, e.Request, err)
		}
	}
}

const inferBody = `{"id":"42","inputs":[{"name":"x","shape":[2],"datatype":"FP32","data":[1,2]}]}`

// doubler answers each tensor with two tensors: the same one, and one named half in FP16.
func doubler(_ context.Context, r task.Request) (*task.Response, *task.Error) {
	in := r.Input[0].Tensors[0]
	in.Name = "y"
	half := tensor.Tensor{Name: "half", Datatype: "FP16", Shape: []int64{1}, Data: []byte{0, 60}}
	return &task.Response{Output: tensor.Input{{Items: tensor.Activation{{Tensors: []tensor.Tensor{in, half}}}}}}, nil
}

func TestInferenceSelectsOutputs(t *testing.T) {
	f := newFront(t, nil)
	f.invoker.f = doubler
	const y = `{"name":"y","datatype":"FP32","shape":[2],"data":[1,2]}`
	for _, tc := range []struct {
		path, more, header string
		status             int
		want               string
	}{
		{"/function/echo", `,"outputs":[{"name":"y"}]`, "", 200, `{"id":"42","outputs":[` + y + `]}`},
		{"/v2/models/echo/infer", `,"outputs":[{"name":"y"}]`, "", 200, `{"model_name":"echo","id":"42","outputs":[` + y + `]}`},
		{"/v2/models/x.team-a/infer", `,"outputs":[{"name":"y"}]`, "", 200, `{"model_name":"x.team-a","id":"42","outputs":[` + y + `]}`},
		{"/function/echo", `,"outputs":[{"name":"z"}]`, "", 400, `outputs[0].name: got "z", want one of "y", "half"` + "\n"},
		{"/v2/models/echo/infer", `,"outputs":[{"name":"z"}]`, "", 400, `{"error":"outputs[0].name: got \"z\", want one of \"y\", \"half\""}`},
		{"/v2/models/echo/infer", ``, "", 500, `{"error":"output: tensor \"half\": FP16, which has no JSON form: return FP32"}`},
		{"/v2/models/nobody/infer", ``, "", 404, `{"error":"no function or pipeline \"nobody\"; it is found as soon as it is deployed"}`},
		{"/v2/models/echo.nowhere/infer", ``, "", 404, `{"error":"no namespace \"nowhere\", which \"echo.nowhere\" names after its last dot; the deploy of a function creates it"}`},
		{"/v2/models/echo/infer", ``, "7", 400, `{"error":"body: got`},
		{"/v2/models/echo/infer", ``, "1000", 400, `{"error":"header Inference-Header-Content-Length: got \"1000\"`},
	} {
		header := []string{"Content-Type", jsonType}
		if tc.header != "" {
			header = append(header, tensor.InferenceHeader, tc.header)
		}
		w := f.do(http.MethodPost, tc.path, strings.TrimSuffix(inferBody, "}")+tc.more+"}", header...)
		got := w.Body.String()
		if w.Code != tc.status || got != tc.want && !(strings.HasSuffix(tc.want, `"`) || strings.HasSuffix(tc.want, "got")) || !strings.HasPrefix(got, tc.want) {
			t.Errorf("%s %s: %d %s, want %d %s", tc.path, tc.more, w.Code, got, tc.status, tc.want)
		}
		if w.Header().Get("Content-Length") != strconv.Itoa(len(got)) || w.Header().Get("X-Call-Id") == "" {
			t.Errorf("%s: header %v of %q", tc.path, w.Header(), got)
		}
	}
	if w := f.do(http.MethodPost, "/v2/models/echo/infer", `{"text":"a"}`); w.Code != http.StatusBadRequest || !strings.Contains(w.Body.String(), "a request of the Open Inference Protocol") {
		t.Errorf("a document: %d %s", w.Code, w.Body)
	}
	if err := json.Unmarshal(f.do(http.MethodPost, "/v2/models/echo/infer", "").Body.Bytes(), new(map[string]string)); err != nil {
		t.Errorf("no body: %v", err)
	}
}

// TestInferenceCarriesBinaryData checks that requests may carry binary data, and that answers carry
// binary data if the request asks for it.
func TestInferenceCarriesBinaryData(t *testing.T) {
	f := newFront(t, nil)
	f.invoker.f = doubler
	const head = `{"id":"42","inputs":[{"name":"x","shape":[1],"datatype":"FP32","parameters":{"binary_data_size":4}}],"parameters":{"binary_data_output":true}}`
	const data = "\x00\x00\x80\x3f"
	for _, path := range []string{"/function/echo", "/v2/models/echo/infer"} {
		w := f.do(http.MethodPost, path, head+data, "Content-Type", "application/octet-stream", tensor.InferenceHeader, strconv.Itoa(len(head)))
		n, err := strconv.Atoi(w.Header().Get(tensor.InferenceHeader))
		if body := w.Body.String(); w.Code != http.StatusOK || err != nil || body[n:] != data+"\x00\x3c" || !json.Valid([]byte(body[:n])) || !strings.Contains(body[:n], `"id":"42"`) {
			t.Errorf("%s: %d %q with %d bytes of JSON, %v", path, w.Code, body, n, err)
		}
		if r := f.invoker.last(t); string(r.Input[0].Tensors[0].Data) != data || headerValue(r.Header, tensor.InferenceHeader) != "" {
			t.Errorf("%s: the function got %+v", path, r)
		}
	}
}

// TestAsyncInferenceAnswersInJSON checks that an async result has the request's id and only the
// selected outputs, in JSON.
func TestAsyncInferenceAnswersInJSON(t *testing.T) {
	f := newFront(t, nil)
	f.invoker.f = doubler
	body := strings.TrimSuffix(inferBody, "}") + `,"outputs":[{"name":"y","parameters":{"binary_data":true}}]}`
	if w := f.do(http.MethodPost, "/async-function/echo", body, "Content-Type", jsonType, "X-Callback-Url", "http://127.0.0.1/"); w.Code != http.StatusAccepted {
		t.Fatalf("%d %s", w.Code, w.Body)
	}
	var e Entry
	if err := e.UnmarshalBinary(f.journal.entries[0]); err != nil {
		t.Fatal(err)
	}
	end := f.Work(t.Context(), e, Try{Attempt: 1}, Retry{Attempts: 1})
	if want := `{"id":"42","outputs":[{"name":"y","datatype":"FP32","shape":[2],"data":[1,2]}]}`; end.Notice == nil || string(end.Notice.Result.Body) != want {
		t.Errorf("got %+v, want %s", end.Notice, want)
	}
}

func TestInferencePaths(t *testing.T) {
	f := newFront(t, nil)
	for _, tc := range []struct {
		method, path string
		status       int
		want         string
	}{
		{"GET", "/v2/health/live", 200, `{"live":true}`},
		{"GET", "/v2/health/ready", 200, `{"ready":true}`},
		{"POST", "/v2/health/ready", 405, `{"error":"method: got \"POST\", want GET"}`},
		{"GET", "/v2/models/echo", 200, `{"inputs":[],"name":"echo","outputs":[],"platform":"stagecoach","versions":[]}`},
		{"GET", "/v2/models/x.team-a/ready", 200, `{"name":"x.team-a","ready":true}`},
		{"GET", "/v2/models/nobody/ready", 404, `{"error":"no function or pipeline \"nobody\"; it is found as soon as it is deployed"}`},
		{"GET", "/v2/models/echo.nowhere", 404, `{"error":"no namespace \"nowhere\", which \"echo.nowhere\" names after its last dot; the deploy of a function creates it"}`},
		{"GET", "/v2/models/echo/infer", 405, `{"error":"method: got \"GET\", want POST"}`},
		{"POST", "/v2/models/echo/versions/1/infer", 404, `{"error":"path \"/v2/models/echo/versions/1/infer\": want /v2/health/live, /v2/health/ready, /v2/models/NAME, /v2/models/NAME/ready or /v2/models/NAME/infer; models have no versions"}`},
		{"GET", "/v2/", 404, `{"error":"path`},
	} {
		w := f.do(tc.method, tc.path, "")
		if w.Code != tc.status || !strings.HasPrefix(w.Body.String(), tc.want) || w.Header().Get("Content-Type") != jsonType {
			t.Errorf("%s %s: %d %s, want %d %s", tc.method, tc.path, w.Code, w.Body, tc.status, tc.want)
		}
	}
}
