package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/image"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// TestArraysAreDocumentsOrItems checks what a JSON array in a sync or async request means. To a
// function alone, it is one document; to a pipeline, it is a list of items. The function's
// annotation and the request's header can change that. A function that speaks HTTP always gets the
// body unchanged.
func TestArraysAreDocumentsOrItems(t *testing.T) {
	t.Parallel()
	r, to := start(t), newReceiver(t)
	stage := func(name string, annotations map[string]string) fn { return fn{name, "noop", nil, annotations, nil} }
	web := httpFn("web", nil)
	web.annotations = map[string]string{"items": "many"} // which means nothing to it
	r.deployAll(
		stage("alone", nil),
		stage("list", map[string]string{"items": "many"}),
		stage("first", map[string]string{"pipeline": "both", "next": "second"}),
		stage("second", map[string]string{"pipeline": "both", "items": "one"}), // which is not the entry
		stage("head", map[string]string{"pipeline": "document", "next": "tail", "items": "one"}),
		stage("tail", map[string]string{"pipeline": "document"}),
		web,
	)
	const array, items, single, bare = ` [ {"a": 1},  "two" ] `, `[{"a":1},"two"]`, ` [ {"a": 1} ] `, `{"a": 1}`
	for _, tc := range []struct{ name, header, body, want string }{
		{"alone", "", array, array},
		{"alone", "", single, single},
		{"alone", "one", array, array},
		{"alone", "many", array, items},
		{"alone", "many", single, bare},
		{"list", "", array, items},
		{"list", "one", array, array},
		{"both", "", array, items},
		{"both", "", single, bare},
		{"both", "one", array, array},
		{"document", "", array, array},
		{"document", "many", array, items},
		{"web/echo", "", array, array},
		{"web/echo", "many", single, single},
	} {
		header := []string{"Content-Type", "application/json"}
		if tc.header != "" {
			header = append(header, "X-Items", tc.header)
		}
		a := r.must(http.StatusOK, http.MethodPost, "/function/"+tc.name, tc.body, header...)
		if string(a.Body) != tc.want || a.Header.Get("Content-Type") != "application/json" {
			t.Errorf("%s, X-Items %q: %s answered with %s (%s), want %s", tc.name, tc.header, tc.body, a.Body, a.Header.Get("Content-Type"), tc.want)
		}
		r.must(http.StatusAccepted, http.MethodPost, "/async-function/"+tc.name, tc.body, append(header, "X-Callback-Url", to.URL)...)
		if got := to.next(t); got.status != "200" || got.body != tc.want {
			t.Errorf("async to %s, X-Items %q: %s answered with %s %s, want %s", tc.name, tc.header, tc.body, got.status, got.body, tc.want)
		}
	}
	for _, way := range []string{"/function/", "/async-function/"} {
		a := r.must(http.StatusBadRequest, http.MethodPost, way+"alone", array, "Content-Type", "application/json", "X-Items", "all")
		if want := `header X-Items: got "all", want many or one`; !strings.Contains(string(a.Body), want) {
			t.Errorf("%s: %s, want %q", way, a.Body, want)
		}
	}
	a := r.must(http.StatusBadRequest, http.MethodPost, "/system/functions", `{"service":"x","image":"stagecoach/noop:0.1.0","annotations":{"stagecoach.dev/items":"all"}}`)
	if want := `annotations["stagecoach.dev/items"]: got "all", want many or one`; !strings.Contains(string(a.Body), want) {
		t.Errorf("deploy: %s, want %q", a.Body, want)
	}
	c := &operator{t, t.TempDir(), r.Base} // which only has to say it
	if out := c.run(`"two"`, array, "invoke", "list", "--header", "Content-Type=application/json", "--header", "X-Items=one"); strings.TrimSpace(out) != strings.TrimSpace(array) {
		t.Errorf("stagecoach invoke: %q, want %q", out, array)
	}
}

// withDouble makes a folder of images with the built images and example/double:0.1.0, a stage with
// the ONNX model y = 2x + 1.
func withDouble(t *testing.T) string {
	t.Helper()
	images := t.TempDir()
	double := filepath.Join(images, "example", "double", "0.1.0")
	if err := os.MkdirAll(filepath.Join(double, "model"), 0o755); err != nil {
		t.Fatal(err)
	}
	for to, from := range map[string]string{
		"stage": proctest.Built(t, "images", "stagecoach", "onnx", "0.1.0", "stage"), "model/model.onnx": "../../templates/onnx-stage/function/model/model.onnx",
	} {
		b, err := os.ReadFile(from)
		if err == nil {
			err = os.WriteFile(filepath.Join(double, to), b, 0o755)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(proctest.Built(t, "images", "stagecoach"), filepath.Join(images, "stagecoach")); err != nil {
		t.Fatal(err)
	}
	return images
}

// TestInferenceProtocol sends what clients of the Open Inference Protocol send, to a stage of an
// ONNX model.
func TestInferenceProtocol(t *testing.T) {
	t.Parallel()
	r, to := start(t, "--images", withDouble(t)), newReceiver(t)
	r.deployAll(fn{"double", "example/double:0.1.0", nil, nil, map[string]string{"STAGECOACH_MODEL": "model/model.onnx"}}, fn{"echo", "noop", nil, nil, nil})
	post := func(path, body string) client.Answer {
		return r.send(http.MethodPost, path, body, "Content-Type", "application/json")
	}
	const inputs = `"inputs":[{"name":"x","shape":[3],"datatype":"FP32","data":[1,2,3],"parameters":{"content_type":"np"}}]`
	const y = `{"name":"y","datatype":"FP32","shape":[3],"data":[3,5,7]}`
	for _, tc := range []struct {
		path, body string
		status     int
		want       string
	}{
		{"/function/double", `{` + inputs + `}`, 200, `{"outputs":[` + y + `]}`},
		{"/function/double", `{"id":"42",` + inputs + `,"outputs":[{"name":"y"}],"parameters":{"any":1}}`, 200, `{"id":"42","outputs":[` + y + `]}`},
		{"/v2/models/double/infer", `{"id":"42","model_name":"double",` + inputs + `}`, 200, `{"model_name":"double","id":"42","outputs":[` + y + `]}`},
		{"/function/double", `{` + inputs + `,"outputs":[{"name":"z"}]}`, 400, `outputs[0].name: got "z", want one of "y"` + "\n"},
		{"/v2/models/double/infer", `{` + inputs + `,"outputs":[{"name":"z"}]}`, 400, `{"error":"outputs[0].name: got \"z\", want one of \"y\""}`},
		{"/function/double", `{"inputs":[{"name":"x","shape":[2,3],"datatype":"FP32","data":[1,2,3,4,5]}]}`, 400, "inputs[0].data: got 5 numbers, want 6 of shape [2 3]\n"},
		{"/function/double", `{"inputs":[{"name":"w","shape":[1],"datatype":"FP32","data":[1]}]}`, 400, `stage "double": item 0: model model/model.onnx: input "w" is unknown, want x FP32 [-1]` + "\n"},
		{"/v2/models/echo/infer", `{"inputs":"mine"}`, 400, `{"error":"body: got \"{\\\"inputs\\\":\\\"mine\\\"}\", want a request of the Open Inference Protocol`},
		{"/function/echo", `{"inputs":"mine"}`, 200, `{"inputs":"mine"}`},
		{"/function/echo", `{"inputs":[{"name":"x","datatype":"a word"}]}`, 200, `{"inputs":[{"name":"x","datatype":"a word"}]}`},
		{"/v2/models/nobody/infer", `{` + inputs + `}`, 404, `{"error":"no function or pipeline \"nobody\"`},
		{"/v2/models/double.nowhere/infer", `{` + inputs + `}`, 404, `{"error":"no namespace \"nowhere\"`},
	} {
		if a := post(tc.path, tc.body); a.Status != tc.status || !strings.HasPrefix(string(a.Body), tc.want) {
			t.Errorf("%s %s: %d %s, want %d %s", tc.path, tc.body, a.Status, a.Body, tc.status, tc.want)
		}
	}
	for datatype, data := range map[string]string{
		"BOOL": "true,false,true,true", "INT8": "-128,0,1,127", "INT16": "-32768,0,1,32767", "INT32": "-2147483648,0,1,2147483647", "INT64": "-9223372036854775808,0,1,9223372036854775807",
		"UINT8": "0,1,2,255", "UINT16": "0,1,2,65535", "UINT32": "0,1,2,4294967295", "UINT64": "0,1,2,18446744073709551615",
		"FP32": "-1.5,0,1,2.5", "FP64": "-1.5,0,1,1e+300", "BYTES": `"a","","é","]\""`,
	} {
		v := strings.Split(data, ",")
		for _, nested := range []string{"[" + data + "]", "[[" + v[0] + "," + v[1] + "],[" + v[2] + "," + v[3] + "]]"} {
			a := post("/function/echo", `{"inputs":[{"name":"t","datatype":"`+datatype+`","shape":[2,2],"data":`+nested+`},{"name":"u","datatype":"INT8","shape":[0],"data":[]}],"outputs":[{"name":"t"}]}`)
			if want := `{"outputs":[{"name":"t","datatype":"` + datatype + `","shape":[2,2],"data":[` + data + `]}]}`; string(a.Body) != want {
				t.Errorf("%s as %s: %s, want %s", datatype, nested, a.Body, want)
			}
		}
	}
	r.must(http.StatusAccepted, http.MethodPost, "/async-function/double", `{"id":"42",`+inputs+`,"outputs":[{"name":"y"}]}`, "Content-Type", "application/json", "X-Callback-Url", to.URL)
	if got, want := to.next(t), `{"id":"42","outputs":[`+y+`]}`; got.status != "200" || got.body != want {
		t.Errorf("async: %s %s, want %s", got.status, got.body, want)
	}
	for path, want := range map[string]string{"health/live": `{"live":true}`, "health/ready": `{"ready":true}`, "models/double/ready": `{"name":"double","ready":true}`} {
		if a := r.must(http.StatusOK, http.MethodGet, "/v2/"+path, ""); string(a.Body) != want {
			t.Errorf("/v2/%s: %s, want %s", path, a.Body, want)
		}
	}
	r.must(http.StatusNotFound, http.MethodGet, "/v2/models/nobody/ready", "")
}

// TestTritonClient sends recorded requests of Triton's client for Python, the usual client of the
// protocol.
func TestTritonClient(t *testing.T) {
	t.Parallel()
	r := start(t, "--images", withDouble(t))
	r.deployAll(fn{"double", "example/double:0.1.0", nil, nil, map[string]string{"STAGECOACH_MODEL": "model/model.onnx"}}, fn{"echo", "noop", nil, nil, nil})
	const binary = "\x00\x00\x40\x40\x00\x00\xa0\x40\x00\x00\xe0\x40" // 3, 5, 7
	for file, want := range map[string]string{
		"binary":          `{"model_name":"double","id":"42","outputs":[{"name":"y","datatype":"FP32","shape":[3],"parameters":{"binary_data_size":12}}]}` + binary,
		"binary-selected": `{"model_name":"double","id":"42","outputs":[{"name":"y","datatype":"FP32","shape":[3],"parameters":{"binary_data_size":12}}]}` + binary,
		"json":            `{"model_name":"double","id":"42","outputs":[{"name":"y","datatype":"FP32","shape":[3],"data":[3,5,7]}]}`,
		"half":            `{"model_name":"echo","id":"42","outputs":[{"name":"x","datatype":"FP16","shape":[3],"parameters":{"binary_data_size":6}}]}` + "\x00\x3c\x00\x40\x00\x42",
	} {
		b, err := os.ReadFile(filepath.Join("testdata", "tritonclient", file+".http"))
		if err != nil {
			t.Fatal(err)
		}
		req, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(b)))
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(req.Body)
		if err != nil {
			t.Fatal(err)
		}
		sent, err := http.NewRequest(req.Method, r.Base+req.URL.Path, bytes.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		sent.Header = req.Header // there is no content type among them
		resp, err := r.HTTP.Do(sent)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		length := ""
		if end := strings.LastIndexByte(want, '}') + 1; end < len(want) {
			length = strconv.Itoa(end)
		}
		if err != nil || resp.StatusCode != http.StatusOK || string(got) != want || resp.Header.Get("Inference-Header-Content-Length") != length {
			t.Errorf("%s: %d %q with %q bytes of JSON, %v, want %q with %q", file, resp.StatusCode, got, resp.Header.Get("Inference-Header-Content-Length"), err, want, length)
		}
	}
}

// TestUnknownNamespacesGet404 checks that the API, the CLI and invocations report a namespace that
// does not exist. A deploy creates it.
func TestUnknownNamespacesGet404(t *testing.T) {
	t.Parallel()
	r := start(t)
	const nowhere = `no namespace "team-z"`
	for _, q := range [][3]string{
		{"GET", "/system/functions?namespace=team-z", ""},
		{"GET", "/system/function/f.team-z", ""},
		{"DELETE", "/system/functions", `{"functionName":"f","namespace":"team-z"}`},
		{"POST", "/system/scale-function/f", `{"replicas":1,"namespace":"team-z"}`},
		{"GET", "/system/logs?name=f&namespace=team-z", ""},
		{"GET", "/system/secrets?namespace=team-z", ""},
		{"GET", "/system/timeline/f?namespace=team-z", ""},
		{"GET", "/system/pipelines?namespace=team-z", ""},
		{"GET", "/system/pipelines/f/explain?namespace=team-z", ""},
		{"GET", "/system/cache?function=f&namespace=team-z", ""},
		{"POST", "/function/f.team-z", "x"},
		{"POST", "/async-function/f.team-z", "x"},
		{"GET", "/v2/models/f.team-z", ""},
	} {
		a := r.must(http.StatusNotFound, q[0], q[1], q[2])
		if text := strings.ReplaceAll(string(a.Body), `\"`, `"`); !strings.Contains(text, nowhere) {
			t.Errorf("%s %s: %s, want %s", q[0], q[1], a.Body, nowhere)
		}
	}
	c := &operator{t, t.TempDir(), r.Base}
	for _, args := range []string{"list -n team-z", "describe f -n team-z", "remove f -n team-z", "logs f -n team-z", "scale f 1 -n team-z", "secret list -n team-z", "pipeline list -n team-z", "invoke f -n team-z"} {
		c.refuse("404: "+nowhere, "x", strings.Fields(args)...)
	}
	c.run("", "", "list") // the default one is there, without functions
	c.run("", "", "list", "-n", "openfaas-fn")
	c.write("stack.yml", "version: 1.0\nprovider: {name: openfaas}\nfunctions:\n  f: {image: \"stagecoach/noop:0.1.0\", skip_build: true, annotations: {stagecoach.dev/pipeline: p}}\n")
	c.run("f: created", "", "deploy", "-n", "team-z") // which looks at its pipelines first
	c.run("f +stagecoach/noop:0.1.0", "", "list", "-n", "team-z")
	c.run("^x$", "x", "invoke", "f", "-n", "team-z")
	c.refuse(`404: no function "g" in namespace "team-z"`, "", "describe", "g", "-n", "team-z")
}

// TestNamesOfDockerHub checks that a name with Docker Hub's host and the name without it mean one
// image, in a folder and in the store.
func TestNamesOfDockerHub(t *testing.T) {
	t.Parallel()
	images := withDouble(t)
	r := start(t, "--images", images)
	c := &operator{t, t.TempDir(), r.Base}
	forms := []string{"stagecoach/noop:0.1.0", "docker.io/stagecoach/noop:0.1.0", "index.docker.io/stagecoach/noop:0.1.0"}
	for i, name := range forms {
		service := fmt.Sprint("folder-", i)
		r.deployAll(fn{service, name, nil, nil, nil})
		if a := r.must(http.StatusOK, http.MethodPost, "/function/"+service, "x"); string(a.Body) != "x" {
			t.Errorf("%s answers %q", name, a.Body)
		}
		if got := r.shows(service).Image; got != name {
			t.Errorf("shown as %s, want it as it was deployed, %s", got, name)
		}
	}
	stage := filepath.Dir(proctest.Built(t, "images", "stagecoach", "noop", "0.1.0", "stage"))
	store, err := image.OpenStore(image.Folder(images))
	if err != nil {
		t.Fatal(err)
	}
	packed, err := image.Pack(stage, image.Config{Entrypoint: []string{"/" + sandbox.Executable}, Labels: map[string]string{image.ProtocolLabel: image.ProtocolVersion}})
	if err == nil {
		_, err = store.Add(t.Context(), packed, "docker.io/library/answers")
	}
	store.Close()
	if err != nil {
		t.Fatal(err)
	}
	c.run(`answers:latest +\d`, "", "image", "list", "--images", images)
	for i, name := range []string{"answers", "docker.io/answers", "docker.io/library/answers:latest", "index.docker.io/library/answers", "library/answers"} {
		service := fmt.Sprint("stored-", i)
		if err := r.Deploy(t.Context(), client.Deployment{Service: service, Image: name}); err != nil {
			t.Fatal(err)
		}
		if a := r.must(http.StatusOK, http.MethodPost, "/function/"+service, "x"); string(a.Body) != "x" {
			t.Errorf("%s answers %q", name, a.Body)
		}
	}
	a := r.must(http.StatusBadRequest, http.MethodPost, "/system/functions", `{"service":"x","image":"nosuch:1"}`, "Accept", "application/json")
	var said struct{ Error string }
	if err := json.Unmarshal(a.Body, &said); err != nil || !strings.Contains(said.Error, "REGISTRY/nosuch:1") {
		t.Errorf("a name without a registry: %s, %v", a.Body, err)
	}
	c.run("removed", "", "image", "remove", "docker.io/answers", "--images", images)
	c.refuse("no such image", "", "image", "remove", "answers", "--images", images)
}
