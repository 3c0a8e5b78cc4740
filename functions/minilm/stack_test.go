package minilm_test

import (
	"fmt"
	"os"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/image/stack"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// TestStacksFormTheirPipelines reads the stack files as a deployment does. Each function is valid
// and has an image that images.sh makes. The functions of a file form one pipeline, whose variants
// serve their stage.
func TestStacksFormTheirPipelines(t *testing.T) {
	script, err := os.ReadFile("../images.sh")
	if err != nil {
		t.Fatal(err)
	}
	for file, want := range map[string]string{
		"stack.yml":          "minilm: tokenize [tensor:input_ids:1] embed layer-1 layer-2 layer-3 layer-4 layer-5 layer-6 pool",
		"variants/stack.yml": "minilm-variants: variants-tokenize [tensor:input_ids:1] encode (encode-64 accuracy 1 max-length 64) (encode-first-16 accuracy 0.88 max-length 256) variants-pool",
	} {
		read, err := stack.Read(file)
		if err != nil {
			t.Fatal(err)
		}
		var all []pipeline.Function
		for name, f := range read.Functions {
			parsed, err := pipeline.Parse(name, "openfaas-fn", f.Labels, f.Annotations)
			if err != nil {
				t.Errorf("%s: %s: %v", file, name, err)
			}
			all = append(all, parsed)
			image := strings.TrimSuffix(strings.TrimPrefix(f.Image, "stagecoach/"), ":0.1.0")
			program := path.Base(f.Handler)
			if f.Lang == "onnx-stage" {
				image, program = "minilm-layer-$layer", "onnx"
			}
			model := strings.TrimPrefix(f.Environment["STAGECOACH_MODEL"], "model/")
			if f.Lang == "onnx-stage" {
				model = "layer-$layer.onnx"
			}
			if made := strings.TrimSpace("image " + image + " " + program + " " + model); !strings.Contains(string(script), made) {
				t.Errorf("%s: %s: images.sh does not make it: want %q", file, name, made)
			}
		}
		var got []string
		for _, p := range pipeline.Assemble(all) {
			if len(p.Faults)+len(p.Warnings) > 0 {
				t.Errorf("%s: faults %v, warnings %v", file, p.Faults, p.Warnings)
			}
			got = append(got, outline(p))
		}
		if !slices.Equal(got, []string{want}) {
			t.Errorf("%s: pipelines %q, want %q", file, got, want)
		}
	}
}

// outline returns a pipeline's name and its stages with their lengths and variants.
func outline(p pipeline.Pipeline) string {
	text := p.Name + ":"
	for _, s := range p.Stages {
		text += " " + strings.TrimPrefix(s.Name, "minilm-")
		if s.Length != "" {
			text += " [" + s.Length + "]"
		}
		for _, v := range s.Variants {
			text += fmt.Sprintf(" (%s accuracy %g max-length %d)", strings.TrimPrefix(v.Name, "minilm-"), v.Accuracy, v.MaxLength)
		}
	}
	return text
}
