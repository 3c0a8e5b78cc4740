package keysmanager

import (
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// TestFunctionsVariablesWinOverTheImages checks that the environment of an OCI image is used where
// the function does not set a variable, and only if the image speaks the stage protocol.
func TestFunctionsVariablesWinOverTheImages(t *testing.T) {
	image := sandbox.Image{Stage: true, Env: []string{"STAGECOACH_MODEL=model/model.onnx", "A=image", "PATH=/none", "bad"}}
	spec := node.Spec{Function: "f", Env: map[string]string{"A": "function"}}
	got := inImage(spec, image)
	if want := map[string]string{"STAGECOACH_MODEL": "model/model.onnx", "A": "function"}; !maps.Equal(got.Env, want) {
		t.Errorf("environment %v, want %v", got.Env, want)
	}
	if key := (&functions{pool: resources.NewPool(resources.Config{})}).key(got, onnxRuntime, image); len(spec.Env) != 1 || key.Model != "model/model.onnx" {
		t.Errorf("the function's own environment is %v now, the zygote's model %q", spec.Env, key.Model)
	}
	image.Stage = false
	if got := inImage(spec, image); !maps.Equal(got.Env, spec.Env) {
		t.Errorf("of another kind: environment %v", got.Env)
	}
}

// TestRecordsOfEarlierReleasesKeepTheirPhases reads the description of a replica as earlier
// releases wrote it, with phases that begin with capitals.
func TestRecordsOfEarlierReleasesKeepTheirPhases(t *testing.T) {
	t.Parallel()
	m, err := decode([]byte(`{"version":2,"replica":{"replica":"r","function":"f.ns","path":"fork","phases":[{"Name":"fork","Took":2500000}],"started":"2026-11-21T13:33:00Z"}}`))
	if want := []node.Phase{{Name: "fork", Took: 2500 * time.Microsecond}}; err != nil || !slices.Equal(m.Replica.Phases, want) {
		t.Errorf("got %+v and %v, want the phases %v", m.Replica, err, want)
	}
}
