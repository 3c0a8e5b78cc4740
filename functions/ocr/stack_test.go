package ocr_test

import (
	"os"
	"path"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// TestStackDeploysItsPipelines reads the repository's stack.yml as a deployment does. Each function
// is valid, and together they form the pipelines that the file names.
func TestStackDeploysItsPipelines(t *testing.T) {
	b, err := os.ReadFile("../../stack.yml")
	if err != nil {
		t.Fatal(err)
	}
	var stack struct {
		Functions map[string]struct {
			Lang, Handler, Image string
			Environment          map[string]string
			Labels, Annotations  map[string]string
		}
	}
	if err := yaml.Unmarshal(b, &stack); err != nil {
		t.Fatal(err)
	}
	script, err := os.ReadFile("../images.sh")
	if err != nil {
		t.Fatal(err)
	}
	var all []pipeline.Function
	for name, f := range stack.Functions {
		parsed, err := pipeline.Parse(name, "openfaas-fn", f.Labels, f.Annotations)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		all = append(all, parsed)
		if _, err := os.Stat("../../" + f.Handler + "/main.go"); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		made := "image " + name + " " + path.Base(f.Handler)
		if model, ok := f.Environment["STAGECOACH_MODEL"]; ok {
			made += " " + strings.TrimPrefix(model, "model/")
		}
		if f.Image != "stagecoach/"+name+":0.1.0" || !strings.Contains(string(script), made) {
			t.Errorf("%s: image %q, want stagecoach/%s:0.1.0, which images.sh makes: %q", name, f.Image, name, made)
		}
		if s := parsed.Scale; s.Min != 0 || s.Max != 8 || !s.Zero {
			t.Errorf("%s: scale %+v, want 0..8, down to zero", name, s)
		}
	}
	got := map[string][]string{}
	for _, p := range pipeline.Assemble(all) {
		if len(p.Faults) > 0 {
			t.Errorf("pipeline %s: %v", p.Name, p.Faults)
		}
		for _, s := range p.Stages {
			got[p.Name] = append(got[p.Name], s.Name)
		}
	}
	if !slices.Equal(got["ocr"], []string{"ocr-detect", "ocr-recognise", "ocr-text"}) || len(got) != 1 {
		t.Errorf("pipelines %v, want ocr alone, with its three stages in order", got)
	}
}
