package torch_test

import (
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/image/stack"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// TestStacksFormPipelinesOfEightStages reads the stack files as a deployment does. Each function is
// valid, and together they form a pipeline of eight stages.
func TestStacksFormPipelinesOfEightStages(t *testing.T) {
	for name, first := range map[string]string{"transformer": "transformer-1", "minilm": "minilm-torch-embed"} {
		file, err := stack.Read(name + "/stack.yml")
		if err != nil {
			t.Fatal(err)
		}
		var all []pipeline.Function
		for name, f := range file.Functions {
			parsed, err := pipeline.Parse(name, "openfaas-fn", f.Labels, f.Annotations)
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
			all = append(all, parsed)
			if f.Lang != "python3-stage" {
				continue
			}
			if f.Image != "stagecoach/"+name+":0.1.0" || f.Environment["STAGECOACH_RUNTIME"] != "python" || f.Environment["STAGECOACH_MODEL"] != "model.safetensors" {
				t.Errorf("%s: image %q, environment %v", name, f.Image, f.Environment)
			}
			if code, err := os.ReadFile("../../" + f.Handler + "/handler.py"); err != nil || !strings.Contains(string(code), "def infer(") {
				t.Errorf("%s: %v", name, err)
			}
			number := name[strings.LastIndexByte(name, '-')+1:]
			if to, err := os.Readlink("../../" + f.Handler + "/model.safetensors"); err != nil || !strings.HasSuffix(to, number+".safetensors") {
				t.Errorf("%s: its model is %q, %v", name, to, err)
			}
		}
		pipelines := pipeline.Assemble(all)
		if len(pipelines) != 1 || len(pipelines[0].Faults) > 0 || len(pipelines[0].Stages) != 8 || pipelines[0].Stages[0].Name != first {
			t.Errorf("%s: pipelines %+v, want one, without faults, of eight stages from %s on", name, pipelines, first)
		}
		var numbers []int
		for _, s := range pipelines[0].Stages {
			if n, err := strconv.Atoi(s.Name[strings.LastIndexByte(s.Name, '-')+1:]); err == nil {
				numbers = append(numbers, n)
			}
		}
		if !slices.IsSorted(numbers) || numbers[0] != 1 {
			t.Errorf("%s: stages in the order %v", name, numbers)
		}
	}
}
