package main

import (
	"encoding/binary"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/image"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// linearHandler fills a layer with the function's model.
const linearHandler = `import torch

import stagecoach as sc


def load(model):
    with model.empty():
        module = torch.nn.Linear(2, 1)
    return model.fill(module)


@sc.each
def infer(module, call):
    return {"y": module(call.input.torch("x"))}
`

const linearStack = `version: 1.0
provider: {name: openfaas, gateway: "http://127.0.0.1:8080"}
functions:
  linear:
    lang: python3-stage
    handler: ./linear
    image: example/linear:latest
    fprocess: %s ./stage
`

// parameters returns a safetensors file with a header and so many bytes of data.
func parameters(header string, data int) string {
	header += strings.Repeat(" ", -len(header)&7)
	return string(binary.LittleEndian.AppendUint64(nil, uint64(len(header)))) + header + strings.Repeat("\x00", data)
}

const (
	weightAt = `"weight":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}`
	biasAt   = `"bias":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}`
)

var goodParameters = parameters("{"+weightAt+","+biasAt+"}", 12)

// brokenModels are files that nothing can read, by the name of the case. A case has the files of
// the folder model, and the text that the error must have.
var brokenModels = map[string]struct {
	files map[string]string
	want  string
}{
	"truncated":    {map[string]string{"m.safetensors": goodParameters[:len(goodParameters)-1]}, `m.safetensors: .*tensor "bias": data_offsets \[8,12\], want a begin of 8.*an end of at most 11`},
	"half header":  {map[string]string{"m.safetensors": goodParameters[:40]}, `m.safetensors: .*a header of \d+ bytes, want .*no more than the file of 40 bytes has`},
	"overlapping":  {map[string]string{"m.safetensors": parameters("{"+weightAt+`,"bias":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}`, 8)}, `m.safetensors: .*tensor "bias": data_offsets \[4,8\], want a begin of 8`},
	"out of range": {map[string]string{"m.safetensors": parameters("{"+weightAt+`,"bias":{"dtype":"F32","shape":[1],"data_offsets":[8,999]}}`, 12)}, `m.safetensors: .*tensor "bias": data_offsets \[8,999\], .*an end of at most 12`},
	"large header": {map[string]string{"m.safetensors": "\x01\xe1\xf5\x05\x00\x00\x00\x00{}"}, `m.safetensors: .*a header of 100000001 bytes, want at most 100000000`},
	"datatype":     {map[string]string{"m.safetensors": parameters(`{"weight":{"dtype":"F99","shape":[1,2],"data_offsets":[0,8]}}`, 8)}, `m.safetensors: .*tensor "weight": dtype "F99", want one of`},
	"few bytes":    {map[string]string{"m.safetensors": parameters(`{"weight":{"dtype":"F32","shape":[1,3],"data_offsets":[0,8]}}`, 8)}, `m.safetensors: .*tensor "weight": F32 of shape \[1 3\], want one that fits into the 8 bytes`},
	"lost shard": {map[string]string{
		"m-1.safetensors": parameters("{"+weightAt+"}", 8), "m.safetensors.index.json": `{"weight_map":{"weight":"m-1.safetensors","bias":"m-2.safetensors"}}`,
	}, `there is no m-2.safetensors, want each file that its index names`},
	"other shard": {map[string]string{
		"m-1.safetensors": parameters("{"+weightAt+"}", 8), "m.safetensors.index.json": `{"weight_map":{"weight":"m-1.safetensors","bias":"m-1.safetensors"}}`,
	}, `tensor "bias": the index has it in m-1.safetensors`},
}

// replace removes all files of a folder and writes the given ones.
func replace(t *testing.T, folder string, files map[string]string) {
	t.Helper()
	if err := os.RemoveAll(folder); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// TestModelsThatNobodyCanRead checks that the build refuses broken parameters. The deploy refuses
// them, too, if an image has them.
func TestModelsThatNobodyCanRead(t *testing.T) {
	t.Parallel()
	py := proctest.Python(t)
	images := t.TempDir()
	r := start(t, "--images", images, "--ort", "")
	c := &operator{t, t.TempDir(), r.Base}
	c.write("stack.yml", fmt.Sprintf(linearStack, py))
	handler, made := filepath.Join(c.dir, "linear"), filepath.Join(images, "example/linear/latest")
	replace(t, handler, map[string]string{"handler.py": linearHandler})
	replace(t, filepath.Join(handler, "model"), map[string]string{"m.safetensors": goodParameters})
	c.run("linear", "", "build", "--images", images, "--folder", "--check-imports=false")
	store, err := image.OpenStore(image.Folder(images))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(store.Close)
	const deploy = `{"service":"linear","image":%q,"envProcess":"%s ./stage","envVars":{%s}}`
	for name, tc := range brokenModels {
		replace(t, filepath.Join(handler, "model"), tc.files)
		c.refuse(`(?s)functions\.linear: model linear/model: .*`+tc.want, "", "build", "--images", images, "--folder", "--check-imports=false")

		replace(t, filepath.Join(made, "model"), tc.files)
		img, err := image.Pack(made, image.Config{
			Entrypoint: []string{"/stage"}, Labels: map[string]string{image.ProtocolLabel: image.ProtocolVersion},
			Env: []string{"STAGECOACH_RUNTIME=python", "STAGECOACH_MODEL=model"},
		})
		if err == nil {
			_, err = store.Add(t.Context(), img, "example/packed:1")
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, of := range []struct{ image, env, field string }{
			{"example/linear:latest", `"STAGECOACH_RUNTIME":"python","STAGECOACH_MODEL":"model"`, `envVars\.STAGECOACH_MODEL: got \\"model\\"|envVars\.STAGECOACH_MODEL: got "model"`},
			{"example/packed:1", "", `image: got \\"example/packed:1\\"|image: got "example/packed:1"`},
		} {
			a := r.send(http.MethodPost, "/system/functions", fmt.Sprintf(deploy, of.image, py, of.env), "Content-Type", "application/json")
			text := strings.ReplaceAll(string(a.Body), `\"`, `"`)
			if a.Status != http.StatusBadRequest || !regexp.MustCompile("(?s)"+of.field).MatchString(text) || !regexp.MustCompile("(?s)"+tc.want).MatchString(text) {
				t.Errorf("%s, %s: status %d %s, want 400 and %q", name, of.image, a.Status, text, tc.want)
			}
		}
	}
	r.must(http.StatusBadRequest, http.MethodPost, "/system/functions", fmt.Sprintf(deploy, "example/packed:1", py, `"STAGECOACH_MODEL":"none.safetensors"`), "Content-Type", "application/json")
}

// TestModelsThatDoNotFit releases parameters that do not fit the handler's module. deploy --wait
// must name each tensor that differs, and the earlier revision must continue to serve.
func TestModelsThatDoNotFit(t *testing.T) {
	t.Parallel()
	py := proctest.Torch(t)
	images := t.TempDir()
	r := start(t, "--images", images, "--ort", "")
	c := &operator{t, t.TempDir(), r.Base}
	c.write("stack.yml", fmt.Sprintf(linearStack, py))
	handler := filepath.Join(c.dir, "linear")
	release := func(file string) {
		t.Helper()
		replace(t, handler, map[string]string{"handler.py": linearHandler, "model.safetensors": file})
		c.run("linear", "", "build", "--images", images, "--check-imports=false")
	}
	serves := func() {
		t.Helper()
		a := r.send(http.MethodPost, "/function/linear", `{"inputs":[{"name":"x","datatype":"FP32","shape":[1,2],"data":[1,2]}]}`, "Content-Type", "application/json")
		if a.Status != http.StatusOK || !strings.Contains(string(a.Body), `"data":[0]`) {
			t.Errorf("status %d %.300s, want 0", a.Status, a.Body)
		}
	}
	release(goodParameters)
	c.run("linear: ready with 1 replicas", "", "deploy", "--wait")
	serves()
	for _, bad := range []struct{ file, want string }{
		{parameters(`{"weight":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},`+biasAt+"}", 12), `model\.safetensors: tensor 'weight': got F32 \[2, 1\], want F32 \[1, 2\]`},
		{parameters(`{"weight":{"dtype":"F16","shape":[1,2],"data_offsets":[0,4]},"bias":{"dtype":"F16","shape":[1],"data_offsets":[4,6]}}`, 6), `model\.safetensors: tensor 'weight': got F16 \[1, 2\], want F32 \[1, 2\].*tensor 'bias': got F16.*make the module in that one`},
		{parameters("{"+weightAt+`,"bais":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}}`, 12), `model\.safetensors: tensor 'bais': got F32 \[1\], want no tensor of that name; tensor 'bias': got none, want F32 \[1\]`},
	} {
		release(bad.file)
		c.fails(`linear: failing: (?s:.*)it does not fit Linear, which is unchanged; `+bad.want, "deploy", "--wait")
		serves()
	}
	release(goodParameters)
	c.run("linear: ready with 1 replicas", "", "deploy", "--wait")
	serves()
}
